"""Scores of the policies that drop rows, against slow loops over what the model really computed.

Each run's queries, keys and evictions are recorded. The loops then say for every eviction what each
row was worth, and the rows that went must be the ones that were worth least.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import zoomkv
from zoomkv.caches.keydiff import KeyDiffLayer
from zoomkv.caches.registry import make_cache
from zoomkv.caches.slots import Slots
from zoomkv.ops import observed
from zoomkv.ops.observed import attention_received

LAYERS, HEADS, KV_HEADS, GROUP = 2, 4, 2, 2
LENGTHS = (40, 31)  # tokens of the two prompts
GENERATED = 60


@dataclass(frozen=True)
class Eviction:
    """What stood in a layer, for one batch row, when rows went, and what went, head by head."""

    layer: int
    row: int
    length: int  # tokens so far
    stored: tuple[frozenset[int], ...]
    dropped: tuple[frozenset[int], ...]


class Recorder:
    """Queries, keys and evictions of a cache at work, all by position."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.queries: dict[tuple[int, int, int], Tensor] = {}  # layer, row, position: [H, D]
        self.keys: dict[tuple[int, int, int], Tensor] = {}  # [Hkv, D]
        self.readable: dict[tuple[int, int, int], list[set[int]]] = {}  # by KV head, own row too
        self.evictions: list[Eviction] = []
        self._new: dict[int, list[Tensor]] = {}
        self._update, self._commit, self._watch = cache.update, cache.commit, cache.watch
        cache.update, cache.commit, cache.watch = self.update, self.commit, self.watch
        self._read, cache.read = cache.read, self.read
        for slots, layers in cache.groups:
            self._spy_on(slots, [layer.number for layer in layers])

    def update(self, k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        self._new[layer] = [k]
        return self._update(k, v, layer, *rest, **named)

    def watch(self, step: Any, layer: int, query: Tensor, key: Tensor) -> Any:
        self._new[layer].append(query)
        return self._watch(step, layer, query, key)

    def read(self, step: Any, layer: int, query: Tensor, *rest: Any) -> Tensor:
        self._new[layer].append(query)
        return self._read(step, layer, query, *rest)

    def commit(self, step: Any, hidden: Tensor) -> None:
        for row in range(step.ids.shape[0]):
            for column in range(step.size):
                if step.real is None or step.real[row, column]:
                    self._take(step, row, column)
        self._commit(step, hidden)

    def _take(self, step: Any, row: int, column: int) -> None:
        position = int(step.positions[row, column])
        for layer, (key, *query) in self._new.items():
            at = layer, row, position
            self.keys[at] = key[row, :, column].clone()
            if query:
                self.queries[at] = query[0][row, :, column].clone()
            slots = self.cache.layers[layer].slots
            before = slots.positions[row, :, : slots.count[row]].tolist() * (
                KV_HEADS // slots.heads
            )
            if step.in_prompt:
                self.readable[at] = [set(range(position + 1))] * KV_HEADS
            else:
                self.readable[at] = [{*head, position} for head in before]

    def _spy_on(self, slots: Any, layers: list[int]) -> None:
        change = slots.change

        def spy(keep: Tensor) -> Any:
            before = [slots.positions[row, :, :n].tolist() for row, n in enumerate(slots.count)]
            moves = change(keep)
            for row, old in enumerate(before):
                new = slots.positions[row, :, : slots.count[row]].tolist()
                gone = [frozenset(a) - frozenset(b) for a, b in zip(old, new, strict=True)]
                if any(gone):
                    stored = tuple(map(frozenset, old))
                    length = int(self.cache.lengths[row])
                    for layer in layers:
                        self.evictions.append(Eviction(layer, row, length, stored, tuple(gone)))
            return moves

        slots.change = spy


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


@pytest.fixture
def record(model: Any, tools: Any) -> Callable[..., Recorder]:
    """Runs a policy on two prompts of unequal length, and 60 tokens each."""

    def run(policy: str, **options: Any) -> Recorder:
        recorder = Recorder(make_cache(policy, model, **options))
        prompt, generated = tools.distinct_ids(2, 100).split((LENGTHS[0], GENERATED), dim=1)
        mask = torch.ones_like(prompt)
        mask[1, : LENGTHS[0] - LENGTHS[1]] = 0
        tools.run(model, recorder.cache, prompt, generated, mask)
        return recorder

    return run


EVERYTHING: dict[str, Any] = {"budget": 30, "recent": 5, "n_sink": 2, "count_prefix": True}
OUTPUT: dict[str, Any] = {"budget": 20, "recent": 5}
PROTOCOLS = pytest.mark.parametrize("protocol", [EVERYTHING, OUTPUT], ids=["everything", "output"])

Scores = dict[int, float]
"""What each stored row is worth, by position."""


def check(
    recorder: Recorder,
    protocol: dict[str, Any],
    score: Callable[[Eviction, int], Scores],
    recent: Callable[[Eviction], int] | None = None,
) -> None:
    """Of the rows that may go, those of least worth went, the oldest of equals; no others."""
    times: dict[tuple[int, int], int] = {}
    for eviction in recorder.evictions:
        row = eviction.row
        first = protocol["n_sink"] if protocol.get("count_prefix") else LENGTHS[row]
        newest = protocol["recent"] if recent is None else recent(eviction)
        for head, (stored, gone) in enumerate(zip(eviction.stored, eviction.dropped, strict=True)):
            worth = score(eviction, head)
            assert worth.keys() == stored
            free = {p for p in stored if first <= p < eviction.length - newest}
            assert gone <= free
            stay = free - gone
            # Sums in another order differ in the last bits.
            tolerance = 1e-6 * max(map(abs, worth.values()))
            most = max((worth[p], p) for p in gone)
            assert all((worth[p] + tolerance, p) > most for p in stay)
            assert any(worth[p] - tolerance > most[0] for p in stay), "they were all the same"
        times[eviction.layer, row] = times.get((eviction.layer, row), 0) + 1
    assert len(times) == LAYERS * len(LENGTHS) and min(times.values()) >= 4


def attention(
    recorder: Recorder, layer: int, row: int, head: int, query: int, rows: Iterable[int]
) -> Scores:
    """Softmax of one query head's scaled products with some rows' keys, in double precision."""
    q = recorder.queries[layer, row, query][head].tolist()
    logits = {}
    for j in rows:
        k = recorder.keys[layer, row, j][head // GROUP].tolist()
        logits[j] = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))
    highest = max(logits.values())
    powers = {j: math.exp(x - highest) for j, x in logits.items()}
    total = sum(powers.values())
    return {j: x / total for j, x in powers.items()}


# Attention that rows receive.


def slow_received(query: Tensor, key: Tensor, mask: Tensor, real: Tensor) -> Tensor:
    """The same as ``attention_received``, one query at a time."""
    batch, heads, count, width = query.shape
    sums = torch.zeros(key.shape[:3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(count):
                if not real[b, i]:
                    continue
                rows = mask[min(b, len(mask) - 1), 0, i].nonzero().squeeze(1)
                head = h // (heads // key.shape[1])
                logits = key[b, head, rows].double() @ query[b, h, i].double() / math.sqrt(width)
                sums[b, head, rows] += logits.softmax(0)
    return sums.float()


@pytest.mark.parametrize("chunk", [1, 80, 10**6])
@pytest.mark.parametrize("case", ["prompt", "chunk", "ragged", "step"])
def test_attention_received(monkeypatch: pytest.MonkeyPatch, case: str, chunk: int) -> None:
    monkeypatch.setattr(observed, "_CHUNK", chunk)
    torch.manual_seed(0)
    count, stored = {"prompt": (9, 0), "chunk": (4, 5), "ragged": (6, 5), "step": (1, 8)}[case]
    query, key = torch.randn(2, 4, count, 8), torch.randn(2, 2, stored + count, 8)
    mask = torch.ones(1, 1, count, stored + count, dtype=torch.bool).tril(stored)
    real = torch.ones(2, count, dtype=torch.bool)
    if case == "ragged":  # row 1 holds 2 rows, and 2 of its 6 columns are empty
        real[1] = torch.tensor([False, True, True, True, False, True])
        last = torch.tensor([5, 2])[:, None] + real.cumsum(1) - 1
        mask = (torch.arange(stored + count) <= last[..., None])[:, None]
    expected = slow_received(query, key, mask, real)
    given = mask if case in ("chunk", "ragged") else None
    got = attention_received(query, key, stored, given, real if case == "ragged" else None)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.isclose(got.sum(), 4 * real.sum().float())  # each query of each head gives 1


def test_attention_received_in_half_precision() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)
    exact = attention_received(query, key, 0)
    half = attention_received(query.bfloat16(), key.bfloat16(), 0)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=5e-2, rtol=5e-2)


# H2O.


class Ledger:
    """What each query of a run gave to each row that it could read, query by query."""

    def __init__(self, recorder: Recorder) -> None:
        self.given = {}
        for (layer, row, query), readable in recorder.readable.items():
            for head in range(KV_HEADS):
                sums = dict.fromkeys(readable[head], 0.0)
                for h in range(head * GROUP, (head + 1) * GROUP):
                    at = recorder, layer, row, h, query, readable[head]
                    for position, weight in attention(*at).items():
                        sums[position] += weight
                self.given[layer, row, query, head] = sums

    def so_far(self, eviction: Eviction, head: int) -> Scores:
        at = eviction.layer, eviction.row
        return {
            p: sum(self.given[*at, query, head][p] for query in range(p, eviction.length))
            for p in eviction.stored[head]
        }


@PROTOCOLS
@pytest.mark.parametrize("normalised", [False, True])
def test_h2o_drops_what_got_least_attention(
    record: Any, protocol: dict[str, Any], normalised: bool
) -> None:
    recorder = record("h2o", normalised=normalised, **protocol)
    ledger = Ledger(recorder)

    def score(eviction: Eviction, head: int) -> Scores:
        sums = ledger.so_far(eviction, head)
        if normalised:
            return {p: s / (eviction.length - p) for p, s in sums.items()}
        return sums

    check(recorder, protocol, score)


@PROTOCOLS
def test_h2o_splits_what_it_has_in_half(record: Any, protocol: dict[str, Any]) -> None:
    recorder = record("h2o", **{**protocol, "recent": None})

    def half(eviction: Eviction) -> int:
        # Rows go from a full layer, to make room for one more; only the prompt may exceed it.
        full = min(len(e.stored[0]) for e in recorder.evictions if e.row == eviction.row)
        always = protocol["n_sink"] if protocol.get("count_prefix") else LENGTHS[eviction.row]
        return (full - always) // 2

    check(recorder, protocol, Ledger(recorder).so_far, half)


def test_h2o_sums_are_where_their_rows_are(record: Any) -> None:
    recorder = record("h2o", **EVERYTHING)
    ledger, cache = Ledger(recorder), recorder.cache
    for layer in cache.layers:
        slots = layer.slots
        sums = cache.received.of(layer.number, slots.length)
        for row, count in enumerate(slots.count.tolist()):
            stored = slots.positions[row, :, :count].tolist()
            now = Eviction(
                layer.number, row, int(cache.lengths[row]), tuple(map(frozenset, stored)), ()
            )
            for head, positions in enumerate(stored):
                expected = ledger.so_far(now, head)
                got = sums[row, head, :count].tolist()
                assert got == pytest.approx([expected[p] for p in positions], rel=1e-4)
                assert not sums[row, head, count:].any()


# SnapKV and what is built on it.


def window_scores(
    recorder: Recorder, eviction: Eviction, head: int, window: int, kernel: int
) -> Scores:
    """Attention of the last queries to the rows before them, averaged, then over neighbours."""
    start = max(eviction.length - window, 0)
    stored = sorted(eviction.stored[head % len(eviction.stored)])
    sums = dict.fromkeys(stored, 0.0)
    for query in range(start, eviction.length):
        rows = [p for p in stored if p <= query]
        for h in range(head * GROUP, (head + 1) * GROUP):
            weights = attention(recorder, eviction.layer, eviction.row, h, query, rows)
            for position, weight in weights.items():
                sums[position] += weight / (GROUP * (eviction.length - start))
    candidates = [p for p in stored if p < start]
    pooled = {}
    for at, position in enumerate(candidates):
        near = candidates[max(at - kernel // 2, 0) : at + kernel // 2 + 1]
        pooled[position] = sum(sums[p] for p in near) / kernel
    return pooled


def with_window(eviction: Eviction, head: int, pooled: Scores) -> Scores:
    """The rows of the window are worth more than all others."""
    above = max(pooled.values(), default=0.0) + 1
    return {p: pooled.get(p, above) for p in eviction.stored[head]}


@PROTOCOLS
@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
@pytest.mark.parametrize(("window", "kernel"), [(6, 3), (9, 1)])
def test_snapkv_drops_what_the_window_does_not_look_at(
    record: Any, protocol: dict[str, Any], policy: str, window: int, kernel: int
) -> None:
    # Few rows are free in the last layer of a pyramid.
    steepness = {"beta": 1.3} if policy == "pyramidkv" else {}
    budget = protocol["budget"] + (20 if protocol.get("count_prefix") else 10)
    protocol = {**protocol, "budget": budget}
    recorder = record(policy, window=window, kernel=kernel, **steepness, **protocol)

    def score(eviction: Eviction, head: int) -> Scores:
        pooled = window_scores(recorder, eviction, head, window, kernel)
        return with_window(eviction, head, pooled)

    check(recorder, protocol, score)


@PROTOCOLS
def test_pyramidkv_budgets_fall_linearly_and_add_up(
    tiny_llama: Any, tools: Any, protocol: dict[str, Any]
) -> None:
    model = tiny_llama(num_hidden_layers=5)
    zoomkv.attach(model)
    protocol = {**protocol, "budget": 40}
    prompt, generated = tools.distinct_ids(1, 100).split((12, 88), dim=1)

    def full(policy: str, **options: Any) -> list[int]:
        """Rows behind the prompt, or all if they count, in each layer when it is full."""
        recorder = Recorder(make_cache(policy, model, window=4, **protocol, **options))
        tools.run(model, recorder.cache, prompt, generated)
        sizes = [
            {len(e.stored[0]) for e in recorder.evictions if e.layer == n and e.length > 12}
            for n in range(5)
        ]
        assert all(len(size) == 1 for size in sizes)
        counted = 0 if protocol.get("count_prefix") else 12
        found = [size.pop() - counted for size in sizes]
        rows = [int(layer.slots.count) - counted for layer in recorder.cache.layers]
        assert all(n <= most for n, most in zip(rows, found, strict=True))
        return found

    even = full("snapkv")
    mean = even[0]
    assert even == [mean] * 5
    least = protocol["recent"] + 1 + protocol.get("n_sink", 0) * ("count_prefix" in protocol)
    for beta in (1.0, 3.5, 1000):
        low = max(mean / beta, least)
        high = 2 * mean - low
        expected = [high - n * (high - low) / 4 for n in range(5)]
        found = full("pyramidkv", beta=beta)
        assert sum(found) == 5 * mean
        assert found == pytest.approx(expected, abs=0.5 + 1e-9)
        assert min(found) >= least


@PROTOCOLS
def test_chunkkv_drops_chunks_that_the_window_does_not_look_at(
    record: Any, protocol: dict[str, Any]
) -> None:
    window, kernel, length = 6, 3, 4
    recorder = record("chunkkv", window=window, kernel=kernel, chunk_length=length, **protocol)

    def score(eviction: Eviction, _: int) -> Scores:
        heads = [window_scores(recorder, eviction, h, window, kernel) for h in range(KV_HEADS)]
        above = max((s for head in heads for s in head.values()), default=0.0) + 1
        chunks: dict[int, list[float]] = {}
        for p in eviction.stored[0]:
            token = sum(head.get(p, above) for head in heads)
            chunks.setdefault(p // length, []).append(token)
        means = {chunk: sum(tokens) / len(tokens) for chunk, tokens in chunks.items()}
        return {p: means[p // length] for p in eviction.stored[0]}

    check(recorder, protocol, score)
    for eviction in recorder.evictions:
        (stored,), (gone,) = eviction.stored, eviction.dropped
        first = protocol["n_sink"] if protocol.get("count_prefix") else LENGTHS[eviction.row]
        free = {p for p in stored if first <= p < eviction.length - protocol["recent"]}
        split = {p // length for p in gone} & {p // length for p in free - gone}
        assert len(split) <= 1  # only the last chunk to go is cut, and loses its oldest rows
        for chunk in split:
            rest = {p for p in free - gone if p // length == chunk}
            assert max(p for p in gone if p // length == chunk) < min(rest)


# TOVA.


@PROTOCOLS
@pytest.mark.parametrize("refill", [0.875, 0.9999])
def test_tova_drops_what_the_last_query_does_not_look_at(
    record: Any, protocol: dict[str, Any], refill: float
) -> None:
    recorder = record("tova", **{**protocol, "recent": 1, "refill": refill})

    def score(eviction: Eviction, _: int) -> Scores:
        mean = dict.fromkeys(eviction.stored[0], 0.0)
        for head in range(HEADS):
            at = eviction.layer, eviction.row, head, eviction.length - 1
            for position, weight in attention(recorder, *at, mean).items():
                mean[position] += weight / HEADS
        return mean

    check(recorder, {**protocol, "recent": 1}, score)
    answers = [e for e in recorder.evictions if e.length > LENGTHS[e.row]]
    at_once = {len(e.dropped[0]) for e in answers}
    assert at_once == {1} if refill == 0.9999 else min(at_once) > 1


# KeyDiff.


@PROTOCOLS
def test_keydiff_drops_keys_like_the_mean(record: Any, protocol: dict[str, Any]) -> None:
    recorder = record("keydiff", **protocol)

    def score(eviction: Eviction, head: int) -> Scores:
        units = {}
        for p in eviction.stored[head]:
            key = recorder.keys[eviction.layer, eviction.row, p][head].double()
            units[p] = key / key.norm()
        anchor = sum(units.values()) / len(units)
        return {p: -float(unit @ anchor / anchor.norm()) for p, unit in units.items()}

    check(recorder, protocol, score)


def test_keydiff_ignores_what_lies_beyond_a_rows_end() -> None:
    torch.manual_seed(0)
    slots = Slots(2)
    layer = KeyDiffLayer(0, slots)
    keys, counts = torch.randn(2, 2, 8, 4), (8, 5)

    def score(keys: Tensor, *count: int) -> Tensor:
        slots.start(len(count), torch.device("cpu"))
        slots.count = torch.tensor(count)
        slots.positions = torch.arange(max(count), dtype=torch.int32).expand(len(count), 2, -1)
        return layer.score(keys[:, :, : max(count)], keys, slots.positions)

    together = score(keys, *counts)
    for row, count in enumerate(counts):
        alone = score(keys[row : row + 1], count)
        torch.testing.assert_close(together[row, :, :count], alone[0])


# StreamingLLM.


def test_streaming_llm_beside_a_prompt_that_does_not_count(model: Any, tools: Any) -> None:
    prompt, generated = tools.distinct_ids(2, 100).split((40, 60), dim=1)
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    cache = make_cache("streaming_llm", model, budget=10, count_prefix=False)
    _, reads = tools.run(model, cache, prompt, generated, mask)
    for number, read in enumerate(reads):
        for row, length in enumerate(LENGTHS):
            newest = range(max(length, length + number - 9), length + number)
            expected = {*range(length), *newest}
            assert set(read[0][row, 0].nonzero().flatten().tolist()) == expected
    assert cache.footprint().rows_max == 50


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("h2o", {"recent": -1}, "recent=-1: give a whole number of at least 0"),
        ("h2o", {"recent": 40, "budget": 40}, "budget=40: this policy needs at least 47 rows"),
        ("h2o", {"normalised": 2}, "normalised=2: give true or false"),
        ("h2o", {"refill": 1.5}, "refill=1.5"),
        ("tova", {"recent": 1.5}, "recent=1.5: give a whole number of at least 0"),
        ("keydiff", {"n_sink": -2}, "n_sink=-2"),
        ("chunkkv", {"chunk_length": 0}, "chunk_length=0: give a whole number of at least 1"),
        ("chunkkv", {"kernel": 4}, "kernel=4: give an odd number"),
        ("pyramidkv", {"beta": 0.5}, "beta=0.5: give a number of at least 1"),
        ("pyramidkv", {"beta": float("nan")}, "beta=nan"),
        ("pyramidkv", {"beta": "steep"}, "beta='steep'"),
        ("streaming_llm", {"budget": 0, "count_prefix": False}, "at least 1 rows"),
    ],
)
def test_options_out_of_range(
    model: Any, policy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_cache(policy, model, **options)
    assert "\n" not in str(caught.value)
