"""BeaconKV and Initial+Recent against a plain loop over what the model itself computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import zoomkv
from zoomkv.caches import beacons as beacons_module
from zoomkv.caches.registry import make_cache
from zoomkv.ops.farthest_point import nearest_to_centroids

PADS, LENGTH, GENERATED = (0, 19), 24, 110  # prompts of 24 and 5 tokens
WORDS = 512
Choice = Callable[[Tensor, int], list[int]]
Observed = tuple[list[int], list[int]]  # positions of the beacons, of the recent queries

DEFAULTS: dict[str, Any] = {
    "beacons": 16,
    "recent_queries": 16,
    "budget": 64,
    "recent": 8,
    "refill": 0.6875,  # 20 rows go: four queries are collected and sixteen are recent
}
FEW: dict[str, Any] = {"beacons": 4, "recent_queries": 3, "budget": 20, "recent": 4, "refill": 0.5}


# -- what happened ------------------------------------------------------------------------------


@dataclass
class Eviction:
    """One eviction of one batch row, as the cache saw it before it merged its queries."""

    last: int
    """Position of the newest token."""
    kept: list[list[set[int]]]
    """By layer and KV head."""
    observers: list[tuple[Tensor, Tensor]]
    """By layer, vectors ``[H, N, D]`` and positions ``[H, N]``."""


@dataclass
class Recorded:
    """What one batch row computed, by layer ``[heads, T, D]``, and what was evicted."""

    rotate: Callable[[Tensor, Tensor], Tensor]
    prompt: int
    before_rope: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Rows stored after each token of the answer."""
    capacity: int = 0


class Recorder:
    """Feeds rows with the pads of ``PADS``, and writes down what happens."""

    def __init__(self, model: Any, cache: Any, ids: Tensor, idle: tuple[int, ...] = ()) -> None:
        self.model, self.cache, self.ids = model, cache, ids
        self.real = torch.ones(ids.shape, dtype=torch.bool)
        for row, pad in enumerate(PADS[: len(ids)]):
            self.real[row, :pad] = False
        self.real[-1, [LENGTH + step for step in idle]] = False
        self.rows = [Recorded(self.rotate, LENGTH - pad) for pad in PADS[: len(ids)]]
        self.now = slice(0, 0)
        self._update, self._evicted = cache.update, cache.queries.evicted

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # [H, n, D], [n]
        """As the model does."""
        cos, sin = self.model.get_decoder().rotary_emb(x, positions[None])
        return apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]

    def add(self, field_name: str, layer: int, new: Tensor) -> None:  # [B, H, Q, D]
        for row, recorded in enumerate(self.rows):
            parts = getattr(recorded, field_name)
            if layer == len(parts):
                parts.append(new[row, :, :0])
            mine = new[row][:, self.real[row, self.now]]
            parts[layer] = torch.cat([parts[layer], mine], 1)

    def query_hook(self, layer: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            width = self.now.stop - self.now.start
            heads = output.view(len(self.ids), width, -1, self.cache.shape.head_dim)
            self.add("before_rope", layer, heads.transpose(1, 2))

        return hook

    def update(self, k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        self.add("keys", layer, k)
        return self._update(k, v, layer, *rest, **named)

    def evicted(self, gone: Tensor, free: Tensor) -> None:
        layers = range(len(self.cache))
        readable = [self.cache.readable(layer) for layer in layers]
        observers = [self.cache.queries.of(layer) for layer in layers]
        for row in gone.nonzero().squeeze(1).tolist():
            kept = [[set(h.nonzero().squeeze(1).tolist()) for h in m[row]] for m in readable]
            seen = [(vectors[row].clone(), when[row].clone()) for vectors, when in observers]
            last = int(self.cache.lengths[row]) - 1
            self.rows[row].evictions.append(Eviction(last, kept, seen))
        self._evicted(gone, free)

    @torch.no_grad()
    def run(self, chunk: int) -> list[Recorded]:
        cache, width = self.cache, self.ids.shape[1]
        cache.update, cache.queries.evicted = self.update, self.evicted
        handles = []
        for number, layer in enumerate(self.model.get_decoder().layers):
            module = getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj)
            handles.append(module.register_forward_hook(self.query_hook(number)))
        cache.expect_prompt(LENGTH)
        starts = [*range(0, LENGTH, chunk), *range(LENGTH, width)]
        for start, stop in zip(starts, [*starts[1:], width], strict=True):
            self.now = slice(start, stop)
            mask = self.real[:, :stop].long()
            self.model(self.ids[:, self.now], attention_mask=mask, cache=cache)
            for row, recorded in enumerate(self.rows):
                if start >= LENGTH and self.real[row, start]:
                    recorded.counts.append(int(cache.layers[0].slots.count[row]))
        for handle in handles:
            handle.remove()
        del cache.update, cache.queries.evicted
        capacity = cache._capacity(cache.layers[0].slots, cache.layers[0])
        for recorded, rows in zip(self.rows, capacity.tolist(), strict=True):
            recorded.capacity = rows
        return self.rows


def record(
    model: Any, cache: Any, ids: Tensor, *, idle: tuple[int, ...] = (), chunk: int = LENGTH
) -> list[Recorded]:
    """Runs a prompt and an answer; the last row stands still in the ``idle`` steps."""
    return Recorder(model, cache, ids, idle).run(chunk)


# -- what should have happened ------------------------------------------------------------------


def farthest(x: Tensor, count: int) -> list[int]:
    """The appendix's loop with the whole N x N matrix; near ties count as ties."""
    if len(x) <= count:
        return list(range(len(x)))
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    mean = (unit @ unit.T).mean(1).mul(2**16).round().tolist()
    cosine = (unit @ unit.T).mul(2**16).round().tolist()
    chosen = [min(range(len(x)), key=lambda i: (mean[i], i))]
    while len(chosen) < count:
        left = [i for i in range(len(x)) if i not in chosen]
        chosen.append(min(left, key=lambda i: (max(cosine[i][j] for j in chosen), i)))
    return sorted(chosen)


def centroids(x: Tensor, count: int) -> list[int]:
    return nearest_to_centroids(x, count).tolist()


def oldest(x: Tensor, count: int) -> list[int]:
    return list(range(min(len(x), count)))


def score(
    run: Recorded,
    layer: int,
    group: int,
    stored: list[int],
    observed: list[Observed],
    last: int,
    *,
    aggregate: str = "max",
    align: bool = True,
    readable: list[int] | None = None,
) -> dict[int, float]:
    """Equations (9) and (10), query by query, in float64."""
    heads = len(run.before_rope[layer]) // len(run.keys[layer])
    weights: list[list[float]] = []
    for head in range(group * heads, (group + 1) * heads):
        beacons, recent = observed[head]
        for number, position in enumerate([*beacons, *recent]):
            at = last if number < len(beacons) and align else position
            query = run.before_rope[layer][head : head + 1, [position]]
            query = run.rotate(query, torch.tensor([at]))[0, 0].double()
            own = []
            for j in stored:
                product = float(query @ run.keys[layer][group, j].double()) / len(query) ** 0.5
                visible = j <= at and (readable is None or j in readable)
                own.append(math.exp(product) if visible else 0.0)
            total = sum(own)
            weights.append([w / total if total else 0.0 for w in own])
    columns = [[query[j] for query in weights] for j in range(len(stored))]
    if aggregate == "mean":
        return {p: sum(c) / len(c) for p, c in zip(stored, columns, strict=True)}
    return {p: max(c, default=0.0) for p, c in zip(stored, columns, strict=True)}


@dataclass
class Expected:
    last: int
    kept: list[list[set[int]]]
    observed: list[list[Observed]]
    """By layer and query head."""


@dataclass
class Simulation:
    """Section "Algorithm 2" for one batch row, every head by itself."""

    run: Recorded
    beacons: int
    recent_queries: int
    budget: int
    recent: int
    refill: float
    choose: Choice = farthest
    history: bool = False
    aggregate: str = "max"
    score_domain: str = "all"
    align: bool = True
    skip_prompt: bool = False
    prefix: int | None = None
    """Rows that stay where the prompt counts; else it stays as a whole."""

    def __post_init__(self) -> None:
        run = self.run
        layers, heads, self.groups = len(run.keys), len(run.before_rope[0]), len(run.keys[0])
        self.heads = [(layer, head) for layer in range(layers) for head in range(heads)]
        self.stored = {
            (layer, group): list(range(run.prompt))
            for layer in range(layers)
            for group in range(self.groups)
        }
        self.fixed_rows = run.prompt if self.prefix is None else self.prefix
        self.buffer = {h: self.select(h, list(range(run.prompt))) for h in self.heads}
        self.collecting = self.free() > self.recent_queries
        tail = list(range(run.prompt))[-self.recent_queries :]
        self.late: list[int] = [] if self.collecting else tail
        self.events: list[Expected] = []

    def free(self) -> int:
        return self.run.capacity - len(self.stored[0, 0])

    def select(self, head: tuple[int, int], positions: list[int]) -> list[int]:
        allowed = [p for p in positions if not self.skip_prompt or p >= self.run.prompt]
        if not self.beacons or not allowed:
            return []
        picked = self.choose(self.run.before_rope[head[0]][head[1], allowed], self.beacons)
        return [allowed[i] for i in picked]

    def evict(self, last: int, drop: int) -> None:
        if self.history:
            self.late = list(range(last + 1))[-self.recent_queries :]
            self.buffer = {h: self.select(h, list(range(self.late[0]))) for h in self.heads}
        observed: list[list[Observed]] = [[] for _ in self.run.keys]
        for layer, head in self.heads:
            observed[layer].append((self.buffer[layer, head], self.late))
        for (layer, group), rows in self.stored.items():
            candidates = [p for p in rows if self.fixed_rows <= p <= last - self.recent]
            worth = score(
                self.run,
                layer,
                group,
                rows,
                observed[layer],
                last,
                aggregate=self.aggregate,
                align=self.align,
                readable=None if self.score_domain == "all" else candidates,
            )
            gone = sorted(candidates, key=lambda p: (worth[p], p))[:drop]
            self.stored[layer, group] = [p for p in rows if p not in gone]
        kept = [
            [set(self.stored[layer, group]) for group in range(self.groups)]
            for layer in range(len(self.run.keys))
        ]
        self.events.append(Expected(last, kept, observed))
        for h in self.heads:
            self.buffer[h] = self.select(h, sorted({*self.buffer[h], *self.late}))
        self.late = []
        self.collecting = self.free() > self.recent_queries

    def collect(self, position: int) -> None:
        if not self.collecting:
            self.late = [*self.late, position][-self.recent_queries :]
            return
        self.collecting = self.free() > self.recent_queries
        for h in self.heads:
            self.buffer[h].append(position)
            full = len(self.buffer[h]) == self.beacons + self.recent_queries
            if full or not self.collecting:
                self.buffer[h] = self.select(h, self.buffer[h])

    def play(self) -> list[Expected]:
        run = self.run
        counted = run.capacity - (run.prompt if self.prefix is None else 0)
        if self.free() < 0:
            self.evict(run.prompt - 1, -self.free())
        for position in range(run.prompt, run.keys[0].shape[1]):
            if self.free() == 0:
                self.evict(position - 1, math.ceil((1 - self.refill) * counted))
            for rows in self.stored.values():
                rows.append(position)
            self.collect(position)
        return self.events


def simulate(run: Recorded, **settings: Any) -> list[Expected]:
    return Simulation(run, **settings).play()


def compare(run: Recorded, expected: list[Expected], align: bool = True) -> None:
    assert [e.last for e in run.evictions] == [e.last for e in expected]
    for got, want in zip(run.evictions, expected, strict=True):
        for layer, (vectors, when) in enumerate(got.observers):
            for head, (beacons, recent) in enumerate(want.observed[layer]):
                own = torch.tensor([*beacons, *recent], dtype=torch.int64)
                at = torch.tensor([want.last if align else p for p in beacons] + recent)
                there = (when[head] >= 0).nonzero().squeeze(1)
                first, others = there.split((len(beacons), len(there) - len(beacons)))
                there = torch.cat([first, others[when[head][others].argsort()]])
                assert when[head][there].tolist() == at.tolist()
                native = run.before_rope[layer][head : head + 1, own]
                native = run.rotate(native, at)[0]
                torch.testing.assert_close(vectors[head][there], native, atol=2e-4, rtol=1e-4)
        assert got.kept == want.kept


@pytest.fixture
def words() -> Tensor:
    """No token comes twice, so no two queries are the same."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randperm(WORDS - 20, generator=generator) for _ in PADS]
    return 20 + torch.stack(rows)[:, : LENGTH + GENERATED]


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama(vocab_size=WORDS)
    zoomkv.attach(model)
    return model


def check(model: Any, words: Tensor, options: dict[str, Any], **expected: Any) -> list[Recorded]:
    """Records two rows that drift apart and compares every eviction."""
    policy = expected.pop("policy", "beacon_kv")
    idle = expected.pop("idle", (31, 60, 61, 90))
    chunk = expected.pop("chunk", LENGTH)
    runs = record(model, make_cache(policy, model, **options), words, idle=idle, chunk=chunk)
    settings = {k: v for k, v in options.items() if k in DEFAULTS} | expected
    if "initial" in options:
        settings["beacons"] = options["initial"]
    for run in runs:
        compare(run, simulate(run, **settings), settings.get("align", True))
    return runs


# -- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_every_eviction_equals_a_plain_loop(model: Any, words: Tensor, aggregate: str) -> None:
    runs = check(model, words, {**DEFAULTS, "aggregate": aggregate}, aggregate=aggregate)
    for run in runs:
        assert len(run.evictions) >= 3
        for eviction in run.evictions:
            for vectors, when in eviction.observers:
                assert vectors.shape[1] == 32 and (when >= 0).all()  # 16 beacons, 16 recent
                assert (when[:, :16] == eviction.last).all()
                assert when[0, 16:].tolist() == list(range(eviction.last - 15, eviction.last + 1))
        # Between B_min and B_max rows of output, whatever the prompt, what indexes them included.
        largest = run.capacity - run.prompt
        smallest = largest - math.ceil(largest * (1 - DEFAULTS["refill"]))
        assert max(run.counts) == run.capacity and largest <= 64
        assert min(run.counts[largest:]) == run.prompt + smallest + 1


@pytest.mark.parametrize(
    "change",
    [
        {"refill": 0.875},  # an eighth is less than the recent queries: they start at once
        {"refill": 0.25, "recent": 0},  # buffers fill up several times between evictions
        {"score_domain": "candidates"},
        {"beacons": 0, "recent_queries": 7},
        {"beacons": 1, "recent_queries": 6},
        {"beacons": 6, "recent_queries": 1},
    ],
    ids=str,
)
def test_other_settings(model: Any, words: Tensor, change: dict[str, Any]) -> None:
    options = {**FEW, **change}
    domain = {k: v for k, v in change.items() if k == "score_domain"}
    runs = check(model, words, options, **domain)
    assert all(len(run.evictions) >= 6 for run in runs)


@pytest.mark.parametrize("split", [(0, 32), (1, 31), (4, 28), (16, 16), (28, 4), (31, 1)])
def test_the_papers_splits_keep_32_queries(model: Any, words: Tensor, split: Any) -> None:
    options = {**DEFAULTS, "beacons": split[0], "recent_queries": split[1]}
    cache = make_cache("beacon_kv", model, **options)
    runs = record(model, cache, words[:1])
    compare(runs[0], simulate(runs[0], **options))
    vectors, when = runs[0].evictions[0].observers[0]
    assert vectors.shape[1] == 32 and (when >= 0).all()
    assert cache.queries._queries.shape[3] == 32


@pytest.mark.parametrize(("sampling", "choose"), [("naive", farthest), ("kmeans", centroids)])
def test_sampling_from_the_whole_history(
    model: Any, words: Tensor, sampling: str, choose: Choice
) -> None:
    runs = check(model, words, {**FEW, "sampling": sampling}, choose=choose, history=True)
    assert all(len(run.evictions) >= 6 for run in runs)


def test_samplings_differ(model: Any, words: Tensor) -> None:
    kept = {}
    for policy, option in (
        ("beacon_kv", {"sampling": "continual"}),
        ("beacon_kv", {"sampling": "naive"}),
        ("beacon_kv", {"sampling": "kmeans"}),
        ("initial_recent", {}),
    ):
        few = FEW if policy == "beacon_kv" else {k: v for k, v in FEW.items() if k != "beacons"}
        cache = make_cache(policy, model, **few, **option)
        kept[policy, *option.values()] = [e.kept for e in record(model, cache, words)[0].evictions]
    assert all(kept[a] != kept[b] for a in kept for b in kept if a != b)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "llama3"), ("llama", "yarn"), ("qwen3", "default")]
)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_other_rotations_and_groups(
    tiny: Any, words: Tensor, family: str, kind: str, kv_heads: int
) -> None:
    scaling = {
        "default": {},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    }[kind]
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **scaling}
    model = tiny(family, vocab_size=WORDS, kv_heads=kv_heads, rope_parameters=parameters)
    zoomkv.attach(model)
    check(model, words[:, : LENGTH + 60], FEW, idle=(20,))


def test_beacons_at_their_own_position_are_native_queries(model: Any, words: Tensor) -> None:
    """Where the last token is a beacon's own, moving it there changes nothing."""
    cache = make_cache("beacon_kv", model, **FEW)
    run = record(model, cache, words[:1])[0]
    positions = torch.arange(60)
    for before in run.before_rope:
        native = run.rotate(before[:, :60], positions)
        for last in (0, 17, 59):
            cache.queries.length = torch.tensor([last + 1])
            moved, when = cache.queries.aligned(native[None, :, [last]], torch.tensor([[[last]]]))
            torch.testing.assert_close(moved[0], native[:, [last]], atol=1e-5, rtol=1e-5)
            assert when.item() == last


# A prompt that counts.


@pytest.mark.parametrize("budget", [26, 36, 44, 60])
def test_prompts_within_the_budget(model: Any, words: Tensor, budget: int) -> None:
    """A prompt may exceed the budget, leave less than the recent queries need, or fit."""
    options = {**FEW, "budget": budget, "refill": 0.75, "count_prefix": True, "n_sink": 2}
    runs = check(model, words, options, prefix=2)
    assert all(run.evictions for run in runs)
    assert (runs[0].evictions[0].last == LENGTH - 1) is (budget == 26)


# Prompts in parts.


def test_a_long_prompt_in_parts_is_chosen_from_as_it_comes(
    model: Any, words: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part that is too much to keep joins what was chosen and the last queries before it."""
    monkeypatch.setattr(beacons_module, "_PENDING", 10)
    cache = make_cache("beacon_kv", model, **FEW)
    run = record(model, cache, words[:1, :LENGTH], chunk=5)[0]
    # Parts end at 5, 10, 15, 20 and 24; two are kept, the third is too much, and so on.
    for layer, before in enumerate(run.before_rope):
        for head, queries in enumerate(before):
            buffer: list[int] = []
            for start, stop in ((0, 15), (15, 24)):
                known = sorted({*buffer, *range(max(start - 3, 0), stop)})
                buffer = [known[i] for i in farthest(queries[known], 4)]
            assert cache.queries._positions[layer, 0, head].tolist() == [*buffer, -1, -1, -1]


def test_a_long_prompt_at_once_is_chosen_from_as_a_whole(
    model: Any, words: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = record(model, make_cache("beacon_kv", model, **FEW), words)
    monkeypatch.setattr(beacons_module, "_PENDING", 0)
    for got, want in zip(
        record(model, make_cache("beacon_kv", model, **FEW), words), expected, strict=True
    ):
        assert [e.kept for e in got.evictions] == [e.kept for e in want.evictions]


# Initial+Recent.


@pytest.mark.parametrize("source", ["decode", "prompt"])
@pytest.mark.parametrize("align", [True, False])
def test_initial_and_recent_queries(model: Any, words: Tensor, source: str, align: bool) -> None:
    few = {k: v for k, v in FEW.items() if k != "beacons"}
    options = {**few, "initial": 4, "source": source, "align": align}
    skip = source == "decode"
    runs = check(
        model, words, options, policy="initial_recent", choose=oldest, skip_prompt=skip, align=align
    )
    for run in runs:
        assert len(run.evictions) >= 6
        first = run.prompt if skip else 0
        own = run.before_rope[0][:, first : first + 4]
        for eviction in run.evictions:
            at = torch.full((4,), eviction.last) if align else torch.arange(first, first + 4)
            vectors, when = eviction.observers[0]
            assert when[0, :4].tolist() == at.tolist()
            torch.testing.assert_close(vectors[:, :4], run.rotate(own, at), atol=2e-4, rtol=1e-4)


def test_initial_queries_of_the_answer_are_never_the_prompts(model: Any, words: Tensor) -> None:
    """Not even where the prompt fills the budget, so that its last queries serve as recent."""
    few = {k: v for k, v in FEW.items() if k != "beacons"}
    options = {**few, "initial": 4, "budget": 26, "refill": 0.75, "count_prefix": True}
    runs = check(
        model,
        words,
        {**options, "n_sink": 2},
        policy="initial_recent",
        choose=oldest,
        skip_prompt=True,
        prefix=2,
    )
    assert runs[0].evictions[0].last == LENGTH - 1


# What a cache holds.


def test_queries_count_and_move_with_their_rows(model: Any, words: Tensor) -> None:
    cache = make_cache("beacon_kv", model, **FEW)
    record(model, cache, words)
    shape = cache.shape
    one = shape.layers * shape.heads * 7 * (shape.head_dim + 1) * 4  # fp32, and a position
    assert cache.overhead(4) == one
    assert 2 * one == sum(t.numel() * t.element_size() for t in cache.queries.device_tensors())
    pointers = {t.data_ptr() for t in cache.device_tensors()}
    assert {cache.queries._queries.data_ptr(), cache.queries._positions.data_ptr()} <= pointers
    before = [t[1].clone() for t in cache.queries.of(0)]
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    for mine, theirs in zip(cache.queries.of(0), before, strict=True):
        assert torch.equal(mine[0], theirs) and torch.equal(mine[1], theirs)


def test_a_history_is_counted_as_it_grows(model: Any, words: Tensor) -> None:
    cache = make_cache("beacon_kv", model, **FEW, sampling="naive")
    record(model, cache, words[:1])
    shape = cache.shape
    token = shape.layers * shape.heads * shape.head_dim * 4
    history = sum(t.numel() * t.element_size() for t in cache.queries.device_tensors())
    assert (LENGTH + GENERATED) * token <= history == 256 * token
    device = cache.footprint().device_bytes
    rows = sum(t.numel() * 4 for layer in cache.layers for t in layer.device_tensors())
    index = sum(layer.slots.positions.numel() * 4 for layer in cache.layers)
    assert device == rows + index + history


# Options.


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("beacon_kv", {"beacons": -1}, "beacons=-1: give a whole number of at least 0"),
        ("beacon_kv", {"recent_queries": 0}, "recent_queries=0: give a whole number of at least 1"),
        ("beacon_kv", {"aggregate": "sum"}, "aggregate='sum': choose one of max, mean"),
        ("beacon_kv", {"sampling": "fps"}, "sampling='fps': choose one of continual, naive, kmea"),
        ("beacon_kv", {"score_domain": "x"}, "score_domain='x': choose one of all, candidates"),
        ("beacon_kv", {"budget": 32, "recent": 4}, r"at least 33 rows: it must exceed .* 16 \+ 16"),
        # 38 rows, of which 5 go, and an index of a sixteenth of a row each.
        ("beacon_kv", {"budget": 40}, "at least 41 rows: what an eviction leaves must exceed"),
        # 43 rows, and 32 queries of two heads, with their positions.
        ("beacon_kv", {"budget": 81, "count_prefix": True}, "at least 82 rows.* exceed the 36"),
        ("beacon_kv", {"refill": 1.0}, "refill=1.0: give the share that stays"),
        (
            "beacon_kv",
            {"sampling": "naive", "count_prefix": True},
            "sampling='naive' keeps every query, so no budget",
        ),
        ("initial_recent", {"source": "x"}, "source='x': choose one of decode, prompt"),
        ("initial_recent", {"initial": -1}, "initial=-1"),
        ("initial_recent", {"budget": 30}, r"budget=30: (this policy|it must exceed)"),
        ("initial_recent", {"beacons": 4}, "no option 'beacons'"),
    ],
)
def test_options_that_contradict_each_other(
    model: Any, policy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_cache(policy, model, **options)
    assert "\n" not in str(caught.value)


def test_the_smallest_budget_works(model: Any, words: Tensor) -> None:
    options = {"budget": 41, "recent": 32, "refill": 0.875}
    cache = make_cache("beacon_kv", model, **options)
    runs = record(model, cache, words[:1, : LENGTH + 60])
    compare(runs[0], simulate(runs[0], beacons=16, recent_queries=16, **options))
    assert len(runs[0].evictions) >= 5


def test_rotations_that_cannot_be_undone_are_refused(tiny_llama: Any) -> None:
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for policy in ("beacon_kv", "initial_recent"):
        with pytest.raises(ValueError, match="rope type 'dynamic' is not supported"):
            make_cache(policy, model)


def test_choosing_layer_by_layer_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Any, tools: Any
) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    found = []
    for workspace in (1 << 24, 1):
        monkeypatch.setattr("zoomkv.caches.beacons.WORKSPACE", workspace)
        options = {"budget": 20, "recent": 4, "beacons": 4, "recent_queries": 4}
        cache = make_cache("beacon_kv", model, **options)
        tools.run(model, cache, tools.prompt_ids(2, 9), tools.distinct_ids(2, 80))
        found.append([cache.readable(layer) for layer in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not found[0][0].all()
