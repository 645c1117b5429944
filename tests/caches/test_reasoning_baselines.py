"""RPC, R-KV and random rows: scores against loops over what the model itself computed."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zoomkv
from zoomkv.caches import r_kv
from zoomkv.caches.r_kv import redundancy
from zoomkv.caches.registry import make_cache

PADS, LENGTH, GENERATED, GROUP = (0, 5), 12, 50, 2


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


@dataclass
class Scored:
    """One call of a layer's ``score``."""

    layer: int
    seen: list[int]  # tokens of each row by then
    count: list[int]
    positions: Tensor
    scores: Tensor


@dataclass
class Recorded:
    """Queries and keys of every layer and row by position, ``[heads, T, D]``, and all scores."""

    queries: list[list[Tensor]]
    keys: list[list[Tensor]]
    calls: list[Scored]
    prompt: list[int]

    def of(self, call: Scored, row: int, head: int) -> tuple[list[int], list[float]]:
        """Positions that were stored, and their scores."""
        slots = slice(0, call.count[row])
        head = min(head, call.positions.shape[1] - 1)
        return call.positions[row, head, slots].tolist(), call.scores[row, head, slots].tolist()


def recorded(model: Any, tools: Any, policy: str, **options: Any) -> Recorded:
    """Runs two rows, one with pads, and writes down what a policy's scores are made of."""
    cache = make_cache(policy, model, **options)
    rows = len(PADS)
    queries, keys = tools.record_rows(cache, PADS)
    calls: list[Scored] = []
    for layer in cache.layers:

        def spy_score(k: Tensor, v: Tensor, p: Tensor, layer: Any = layer) -> Tensor:
            out = type(layer).score(layer, k, v, p)
            slots = layer.slots
            seen, count = cache.lengths.tolist(), slots.count.tolist()
            calls.append(Scored(layer.number, seen, count, p.clone(), out.clone()))
            return out

        layer.score = spy_score
    prompt = tools.prompt_ids(rows, LENGTH)
    mask = torch.ones_like(prompt)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = 0
    tools.run(model, cache, prompt, tools.distinct_ids(rows, GENERATED), mask)
    assert len(calls) >= 4 * len(cache)
    return Recorded(
        [[torch.cat(parts, 1) for parts in layer] for layer in queries],
        [[torch.cat(parts, 1) for parts in layer] for layer in keys],
        calls,
        [LENGTH - pads for pads in PADS],
    )


def softmax(logits: list[float]) -> list[float]:
    high = max(logits)
    weights = [math.exp(value - high) for value in logits]
    return [weight / sum(weights) for weight in weights]


def dot(one: Tensor, two: Tensor) -> float:
    return float(one.double() @ two.double())


def smoothed(values: list[float], kernel: int, kind: str) -> list[float]:
    half, out = kernel // 2, []
    for at in range(len(values)):
        near = values[max(0, at - half) : at + half + 1]
        out.append(max(near) if kind == "max" else sum(near) / kernel)
    return out


def check(data: Recorded, row: int, head: int, call: Scored, want: dict[int, float]) -> None:
    """Candidates score as wanted, in that order; whatever else may be dropped comes after them."""
    positions, scores = data.of(call, row, head)
    got = dict(zip(positions, scores, strict=True))
    assert want.keys() <= got.keys()
    for position, score in want.items():
        assert math.isclose(got[position], score, rel_tol=1e-4, abs_tol=1e-6)


@pytest.mark.parametrize("aggregation", ["all", "group"])
@pytest.mark.parametrize("counted", [False, True])
def test_rpc_scores(model: Any, tools: Any, aggregation: str, counted: bool) -> None:
    window, kernel, sinks = 4, 3, 2
    options = {"budget": 24, "recent": 5, "count_prefix": True, "n_sink": sinks}
    data = recorded(
        model,
        tools,
        "rpc",
        window=window,
        kernel=kernel,
        aggregation=aggregation,
        **(options if counted else {"budget": 16, "recent": 5}),
    )
    for call in data.calls:
        assert call.scores.shape[1] == (1 if aggregation == "all" else 2)
        for row in range(2):
            query, key = data.queries[call.layer][row], data.keys[call.layer][row]
            seen = call.seen[row]
            first = sinks if counted else data.prompt[row]
            for kv_head in range(call.scores.shape[1]):
                stored = data.of(call, row, kv_head)[0]
                rows = sorted(p for p in stored if first <= p < seen - window)
                heads = range(4) if aggregation == "all" else (2 * kv_head, 2 * kv_head + 1)
                total = [0.0] * len(rows)
                for head in heads:
                    for when in range(seen - window, seen):
                        logits = [
                            dot(query[head, when], key[head // GROUP, p]) / math.sqrt(8)
                            for p in rows
                        ]
                        for number, weight in enumerate(softmax(logits)):
                            total[number] += weight / len(heads)
                want = dict(zip(rows, smoothed(total, kernel, "avg"), strict=True))
                check(data, row, kv_head, call, want)


def slow_redundancy(keys: Tensor, positions: list[int], threshold: float) -> list[float]:
    """Of one head; keys ``[T, D]``, in any order."""
    count = len(positions)
    cosine = [
        [
            0.0 if i == j else dot(keys[i], keys[j]) / float(keys[i].norm() * keys[j].norm())
            for j in range(count)
        ]
        for i in range(count)
    ]
    for row in cosine:
        alike = [j for j in range(count) if row[j] > threshold]
        if alike:
            row[max(alike, key=lambda j: positions[j])] = 0.0
    return softmax([sum(row[j] for row in cosine) / count for j in range(count)])


@pytest.mark.parametrize("counted", [False, True])
def test_r_kv_scores(model: Any, tools: Any, counted: bool) -> None:
    window, kernel, mix, threshold = 4, 5, 0.3, 0.4
    data = recorded(
        model,
        tools,
        "r_kv",
        window=window,
        kernel=kernel,
        mix=mix,
        threshold=threshold,
        recent=3,
        **({"budget": 24, "count_prefix": True} if counted else {"budget": 16}),
    )
    for call in data.calls:
        for row in range(2):
            query, key = data.queries[call.layer][row], data.keys[call.layer][row]
            seen = call.seen[row]
            for head in range(2):
                stored, scores = data.of(call, row, head)
                rows = sorted(p for p in stored if p < seen - window)
                important = [0.0] * len(rows)
                for when in range(seen - window, seen):
                    logits = [
                        max(dot(query[h, when], key[head, p]) for h in (2 * head, 2 * head + 1))
                        / math.sqrt(8)
                        for p in rows
                    ]
                    for number, weight in enumerate(softmax(logits)):
                        important[number] += weight / window
                important = smoothed(important, kernel, "max")
                redundant = slow_redundancy(key[head, stored], stored, threshold)
                of = dict(zip(stored, redundant, strict=True))
                want = {
                    p: mix * i - (1 - mix) * of[p] for p, i in zip(rows, important, strict=True)
                }
                check(data, row, head, call, want)
                # The window is worth more than any candidate, where it is not protected.
                others = [s for p, s in zip(stored, scores, strict=True) if p not in want]
                assert min(others) > max(want.values())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    counts=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.5, 0.9]),
    chunk=st.sampled_from([1, 3, 256]),
)
def test_redundancy_equals_a_loop(
    seed: int, counts: list[int], heads: int, threshold: float, chunk: int
) -> None:
    """Rows in any order, of unequal number, with keys that come twice; whatever the chunks."""
    generator = torch.Generator().manual_seed(seed)
    size, batch = max(counts), len(counts)
    keys = torch.randn(batch, heads, size, 4, generator=generator)
    twice = torch.randint(0, size, (2,), generator=generator)
    keys[:, :, twice[0]] = keys[:, :, twice[1]] * 2
    positions = torch.stack(
        [torch.randperm(40, generator=generator)[:size] for _ in range(batch * heads)]
    ).view(batch, heads, size)
    valid = (torch.arange(size) < torch.tensor(counts)[:, None])[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r_kv, "_ROWS", chunk)
        got = redundancy(keys, positions, valid, threshold)
    for row, count in enumerate(counts):
        for head in range(heads):
            own = positions[row, head, :count].tolist()
            want = slow_redundancy(keys[row, head, :count], own, threshold)
            torch.testing.assert_close(
                got[row, head], torch.tensor(want + [0.0] * (size - count)), atol=1e-5, rtol=1e-4
            )


def test_the_last_of_like_keys_is_spared_and_none_by_default() -> None:
    """Three like keys among orthogonal ones: the first two are redundant, no row falls to 0."""
    keys = torch.eye(6)[[0, 1, 2, 2, 2, 3]][None, None]
    valid = torch.ones(1, 1, 6, dtype=torch.bool)
    scores = redundancy(keys, torch.arange(6)[None, None], valid, 0.5)[0, 0]
    # Among 2, 3, 4 the last is the one that the others are alike; its own lookalike is 3.
    want = torch.tensor([0.0, 0.0, 2.0, 1.0, 0.0, 0.0]) / 6
    torch.testing.assert_close(scores, want.softmax(0))


def test_lots_are_uniform_and_unrelated(model: Any) -> None:
    """Between positions, heads, layers and seeds; also those that sum to the same."""
    positions = torch.arange(4096, dtype=torch.int32).expand(1, 2, -1)
    lots = torch.stack(
        [
            layer.score(torch.zeros(0), torch.zeros(0), positions)[0]
            for seed in (0, 1, 2)
            for layer in make_cache("random", model, seed=seed).layers
        ]
    ).flatten(0, 1)  # [seeds, layers, heads, positions]
    shares = lots.double() / (1 << 30)
    assert float(shares.min()) >= 0 and float(shares.max()) < 1
    counts = torch.stack([torch.histc(row, 16, 0, 1) for row in shares])
    assert float(((counts - 256) ** 2 / 256).sum(-1).max()) < 45  # chi squared, 15 degrees
    assert float((torch.corrcoef(shares) - torch.eye(12)).abs().max()) < 0.06
    following = torch.corrcoef(torch.stack([shares[:, 1:].flatten(), shares[:, :-1].flatten()]))
    assert abs(float(following[0, 1])) < 0.02


def test_random_keeps_old_and_new_rows_alike(model: Any, tools: Any) -> None:
    kept = torch.zeros(2, 2, 96)
    prompt, generated = tools.prompt_ids(1, 4), tools.prompt_ids(1, 100)
    for seed in range(8):
        cache = make_cache("random", model, seed=seed, budget=20, recent=4)
        tools.run(model, cache, prompt, generated)
        for layer in range(2):
            kept[layer] += cache.readable(layer)[0, :, 4:100]
    old, new = kept[..., :48].mean() / 8, kept[..., 48:].mean() / 8
    assert abs(float(old - new)) < 0.04  # one deviation is 0.012
    assert not torch.equal(kept[0, 0], kept[0, 1]) and not torch.equal(kept[0], kept[1])


def test_random_is_the_same_after_reset_and_copy_and_for_a_row_alone(
    model: Any, tools: Any
) -> None:
    prompt, generated = tools.prompt_ids(2, 6), tools.prompt_ids(2, 60)

    def kept(cache: Any, rows: slice = slice(None)) -> list[Tensor]:
        tools.run(model, cache, prompt[rows], generated[rows])
        return [cache.readable(layer) for layer in range(2)]

    cache = make_cache("random", model, budget=20, recent=4)
    copied = copy.deepcopy(cache)
    first = kept(cache)
    cache.reset()
    again = kept(cache)
    for one, two, three, alone in zip(
        first,
        again,
        kept(copied),
        kept(make_cache("random", model, budget=20, recent=4), slice(1, 2)),
        strict=True,
    ):
        assert torch.equal(one, two) and torch.equal(one, three)
        assert torch.equal(one[1:], alone) and torch.equal(one[0], one[1])
    other = kept(make_cache("random", model, seed=1, budget=20, recent=4))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("rpc", {"window": 0}, "window=0: give a whole number of at least 1"),
        ("rpc", {"kernel": 4}, "kernel=4: give an odd number"),
        ("rpc", {"aggregation": "none"}, "aggregation='none': choose one of all, group"),
        ("rpc", {"budget": 32}, "at least 33 rows.* must exceed the queries that score, window=32"),
        ("r_kv", {"mix": 1.5}, "mix=1.5: give the weight"),
        ("r_kv", {"mix": True}, "mix=True"),
        ("r_kv", {"mix": float("nan")}, "mix=nan"),
        ("r_kv", {"threshold": 1.0}, "threshold=1.0: give a cosine"),
        ("r_kv", {"threshold": "x"}, "threshold='x'"),
        ("r_kv", {"window": 2.0}, "window=2.0"),
        ("r_kv", {"budget": 8}, "at least 10 rows.* must exceed the queries that score, window=8"),
        ("random", {"seed": -1}, "seed=-1"),
        ("random", {"seed": 2**31}, "give at most 2147483647"),
        ("random", {"seed": None}, "seed=None"),
    ],
)
def test_options_out_of_range(
    model: Any, policy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_cache(policy, model, **options)
