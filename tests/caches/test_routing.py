"""Each routing's scores against loops over tokens; what a sketch keeps of a growing context."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zoomkv.caches.context_rows import ContextRows
from zoomkv.caches.routing import TRAINING_FREE, Context, Routing, SketchRouting, View, of_span
from zoomkv.caches.tiers import Traffic, make_row_codec, storage_bytes
from zoomkv.modules.reader import Entries
from zoomkv.modules.sketch import Codes, Sketch, encode, fit, image_of, logits

B, KV, G, Q, D, T = 2, 2, 3, 4, 8, 20
TIES = 256e-5  # what may come off the score of a span's later tokens
SIZES = ((6, 7, 5), (4, 11))  # of the spans of each batch row; the last tokens are in none


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def spans() -> tuple[Tensor, Tensor]:
    span, log_size = torch.full((B, T), -1), torch.full((B, 3), -torch.inf)
    for row, sizes in enumerate(SIZES):
        numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
        span[row, 1 : 1 + len(numbers)] = torch.tensor(numbers)  # the first one is in none either
        log_size[row, : len(sizes)] = torch.tensor(sizes, dtype=torch.float32).log()
    return span, log_size


def make_view(dtype: torch.dtype | None = torch.float32) -> tuple[View, Tensor, Tensor]:
    """A context, its keys ``[B, Hkv, T, D]`` and queries ``[B, Hkv, G, Q, D]``."""
    keys = torch.randn(B, KV, T, D)
    span, log_size = spans()
    rows = ContextRows(keys, keys, make_row_codec("auto", keys, keys), Traffic())
    batch, position = torch.ones(B, T).nonzero(as_tuple=True)
    rows.put(batch, position, *[keys.transpose(1, 2).flatten(0, 1)] * 2)
    entries = Entries.of(*torch.randn(2, B, KV, 3, D), dtype)
    context = Context(span, log_size, torch.zeros(B))
    return View(context, entries, rows), keys, 2 * torch.randn(B, KV, G, Q, D)


def view_of(span: Tensor) -> View:
    """Spans alone."""
    context = Context(span, torch.zeros(len(span), 15), torch.zeros(len(span)))
    return View(context, None, None)  # type: ignore[arg-type]


def each(query: Tensor) -> Any:
    for b in range(B):
        for h in range(KV):
            for g in range(G):
                for q in range(Q):
                    yield (b, h, g, q), query[b, h, g, q].double()


def check_spans(got: Tensor, of: dict[tuple[int, ...], list[float]], view: View) -> None:
    """Tokens have their span's score, less a little: the first of a span come first."""
    assert got.shape == (B, KV, G, Q, T)
    for (b, *rest), scores in of.items():
        tokens = got[b, *rest]
        assert (tokens[view.context.span[b] < 0] < -1e29).all()
        for number, score in enumerate(scores):
            own = tokens[view.context.span[b] == number]
            assert ((own <= score + 1e-4) & (own >= score - TIES - 1e-4)).all()
            assert (own[1:] <= own[:-1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_mean_keys(dtype: torch.dtype | None) -> None:
    view, _, query = make_view(dtype)
    assert view.entries is not None
    means = view.entries.plain()[0].double()
    expected = {
        (b, *rest): [float(q @ means[b, rest[0], n]) + math.log(s) for n, s in enumerate(SIZES[b])]
        for (b, *rest), q in each(query)
    }
    check_spans(TRAINING_FREE["mean-key"](0).scores(query, view), expected, view)


def test_span_oracle_is_the_true_mass_of_a_span() -> None:
    view, keys, query = make_view()
    query[0] *= 30  # far beyond what exp takes
    expected = {}
    for (b, h, g, q), vector in each(query):
        every = (keys[b, h].double() @ vector).tolist()
        masses = []
        for number in range(len(SIZES[b])):
            own = [every[t] for t in range(T) if view.context.span[b, t] == number]
            masses.append(max(own) + math.log(sum(math.exp(x - max(own)) for x in own)))
        expected[b, h, g, q] = masses
    got = TRAINING_FREE["span-oracle"](0).scores(query, view)
    for key, masses in expected.items():  # what is e**-80 of the largest may be nothing
        floor = float((keys[key[0], key[1]] @ query[key].float()).max()) - 80
        expected[key] = [m if m > floor else -math.inf for m in masses]
        got[key] = got[key].masked_fill(got[key] < floor, -torch.inf)
    check_spans(got, expected, view)


def test_oracle_is_the_logit() -> None:
    view, keys, query = make_view()
    got = TRAINING_FREE["oracle"](0).scores(query, view)
    for (b, h, g, q), vector in each(query):
        expected = keys[b, h].double() @ vector + view.context.outside[b].double()
        torch.testing.assert_close(got[b, h, g, q].double(), expected, atol=1e-5, rtol=1e-5)


def test_oracles_cost_no_traffic() -> None:
    view, _, query = make_view()
    before = view.rows._traffic.to_device
    for name in ("oracle", "span-oracle"):
        TRAINING_FREE[name](0).scores(query, view)
    assert view.rows._traffic.to_device == before


def test_closed_asks_for_nothing() -> None:
    view, _, query = make_view()
    got = TRAINING_FREE["closed"](0).scores(query, view)
    assert got.shape == (B, KV, G, Q, T) and (got < -1e29).all()


def test_random_is_the_same_whenever_it_is_asked() -> None:
    view, _, query = make_view()
    routing = TRAINING_FREE["random"](1)
    first = routing.scores(query, view)
    assert first.shape == (B, KV, G, Q, T)
    assert torch.equal(routing.scores(-query, view), first)
    assert torch.equal(TRAINING_FREE["random"](1).scores(query, view), first)
    assert not torch.equal(TRAINING_FREE["random"](2).scores(query, view), first)
    # For all queries and batch rows, but not for all heads; many values, evenly spread.
    assert torch.equal(first, first[:, :, :1, :1].expand_as(first))
    assert not torch.equal(first[0, 0], first[0, 1])
    many = routing.scores(query, view_of(torch.zeros(B, 3000, dtype=torch.int64)))
    inside = (view.context.span >= 0)[:, None, None, None].expand_as(first)
    # A context that grows asks for the same of before.
    assert torch.equal(many[..., :T][inside], first[inside])
    assert many[0, 0, 0, 0].unique().numel() > 2900
    assert abs(float(many[0, :, 0, 0].mean()) - 0.5) < 0.03


def test_of_span_gives_tokens_their_spans_score() -> None:
    view, _, _ = make_view()
    score = torch.randn(B, KV, G, Q, 3)
    expected = {
        (b, *rest): score[b, *rest, : len(SIZES[b])].tolist() for (b, *rest), _ in each(score)
    }
    check_spans(of_span(score, view.context), expected, view)


def test_first_tokens_of_a_span_come_first_wherever_it_stands() -> None:
    span = torch.arange(600)[None] // 40
    score = of_span(torch.randn(1, 1, 1, 1, 15), view_of(span).context)[0, 0, 0, 0]
    for number in range(15):
        assert (score[span[0] == number].diff() <= 0).all()


def test_a_routing_of_its_own_keeps_nothing() -> None:
    view, keys, _ = make_view()
    for name, make in TRAINING_FREE.items():
        routing = make(3)
        routing.observe(torch.ones(B, KV, D, D))
        start, present = torch.full((B,), 4), torch.ones(B, T, dtype=torch.bool)
        routing.extend(keys, start, present, torch.ones(B, dtype=torch.bool))
        routing.select(torch.tensor([1]))
        assert routing.layer == 3, name
        assert not list(routing.device_tensors()) and not list(routing.host_tensors())
        assert routing.bytes_per_token() == routing.fixed_bytes() == 0
    with pytest.raises(NotImplementedError):
        Routing(0).scores(torch.zeros(B, KV, G, Q, D), view)


# Sketches.

WIDTH, START = 4, 4
STEPS: list[tuple[int, ...]] = [(9, 5), (0, 6), (7, 3)]  # tokens that join, by batch row


class Growing:
    """A context that grows step by step under a routing, and what was fed."""

    def __init__(self, routing: SketchRouting, steps: list[tuple[int, ...]] = STEPS) -> None:
        self.routing = routing
        self.keys = [torch.zeros(KV, 0, D) for _ in steps[0]]
        self.start = torch.full((len(steps[0]),), START)
        for step in steps:
            self.extend(step)

    def extend(self, step: tuple[int, ...]) -> None:
        count = torch.tensor(step)
        keys = torch.randn(len(step), KV, max(step), D) + 2
        present = torch.arange(max(step)) < count[:, None]
        first = (self.start == START) & (count > 0)
        self.routing.extend(keys, self.start, present, first)
        self.start = self.start + count
        self.keys = [
            torch.cat([had, new[:, :n]], 1)
            for had, new, n in zip(self.keys, keys, step, strict=True)
        ]

    def view(self) -> View:
        length = int(self.start.max())
        span = torch.zeros(len(self.keys), length, dtype=torch.int64)
        return view_of(span)


def spread(rows: Tensor) -> Tensor:
    """Second moments ``[Hkv, D, D]`` of keys about their mean."""
    centred = rows - rows.mean(1, keepdim=True)
    return centred.mT @ centred


def expected_scores(
    keys: Tensor, joined: int, key_map: Tensor, query_map: Tensor, query: Tensor
) -> Tensor:
    """Of one batch row alone: levels from what joined first, then all the others.

    Args:
        keys: ``[Hkv, T, D]``.
        joined: How many of them came first.
        key_map: ``[Hkv, D, W]``.
        query_map: ``[Hkv, 1 or G, D, W]``.
        query: ``[Hkv, G, Q, D]``.
    """
    every = torch.ones(1, keys.shape[1], dtype=torch.bool)
    first: Codes = encode(keys[None, :, :joined], key_map, every[:, :joined])
    codes = encode(keys[None], key_map, every, first)
    image, bias = image_of(query[None], query_map[None]), torch.zeros(1, keys.shape[1])
    return logits(query[None], image, codes, bias)[0]


def test_a_fitted_sketch_is_that_of_each_row_alone() -> None:
    routing = SketchRouting(0, WIDTH, None)
    some = torch.randn(B, KV, 30, D)
    routing.observe(some[:, :, :10].mT @ some[:, :, :10])
    routing.observe(some[:, :, 10:].mT @ some[:, :, 10:])  # a prompt in two pieces
    context = Growing(routing)
    query = torch.randn(B, KV, G, Q, D)
    got = routing.scores(query, context.view())
    assert got.shape == (B, KV, G, Q, int(context.start.max()))
    for row, joined in enumerate(STEPS[0]):
        keys = context.keys[row]
        maps = fit(spread(keys[:, :joined]), some[row].mT @ some[row], WIDTH)
        expected = expected_scores(keys, joined, maps.key, maps.query[:, None], query[row])
        mine = got[row, ..., START : START + keys.shape[1]]
        torch.testing.assert_close(mine, expected, atol=2e-2, rtol=1e-3)


def test_a_trained_sketch_needs_no_prompt() -> None:
    sketch = Sketch(layers=2, heads=KV * G, kv_heads=KV, head_dim=D, width=6)
    for parameter in sketch.parameters():
        torch.nn.init.normal_(parameter)
    routing = SketchRouting(1, 16, sketch)
    routing.observe(torch.ones(B, KV, D, D))
    context = Growing(routing)
    query = torch.randn(B, KV, G, Q, D)
    got = routing.scores(query, context.view())
    assert routing.bytes_per_token() == 3
    for row, joined in enumerate(STEPS[0]):
        keys, maps = context.keys[row], sketch.of(1)
        expected = expected_scores(keys, joined, maps.key, maps.query, query[row])
        mine = got[row, ..., START : START + keys.shape[1]]
        torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-4)
    stored = {id(x) for x in (*routing.device_tensors(), *routing.host_tensors())}
    assert not stored & {id(x) for x in sketch.parameters()}  # the sketch is the user's


@pytest.mark.parametrize("trained", [False, True])
def test_a_row_may_join_later_than_another(trained: bool) -> None:
    """The second row has no context at first; each is as it is alone."""
    sketch = None
    if trained:
        sketch = Sketch(layers=1, heads=KV * G, kv_heads=KV, head_dim=D, width=WIDTH)
        for parameter in sketch.parameters():
            torch.nn.init.normal_(parameter)
    some = torch.randn(B, KV, 30, D)
    routing = SketchRouting(0, WIDTH, sketch)
    routing.observe(some.mT @ some)
    context = Growing(routing, [(9, 0), (3, 8), (0, 2)])
    query = torch.randn(B, KV, G, Q, D)
    got = routing.scores(query, context.view())
    for row, joined in enumerate((9, 8)):
        keys = context.keys[row]
        if sketch is None:
            key, asked = fit(spread(keys[:, :joined]), some[row].mT @ some[row], WIDTH)[::-1]
            asked = asked[:, None]
        else:
            asked, key = sketch.of(0)
        expected = expected_scores(keys, joined, key, asked, query[row])
        mine = got[row, ..., START : START + keys.shape[1]]
        torch.testing.assert_close(mine, expected, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("chosen", [[1], [1, 0], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_batch_rows_can_be_selected(chosen: list[int], when: str) -> None:
    some, more = torch.randn(B, KV, 30, D), torch.randn(B, KV, 5, D)
    moments, query = some.mT @ some, torch.randn(B, KV, G, Q, D)
    selected, both = SketchRouting(0, WIDTH, None), SketchRouting(0, WIDTH, None)
    for routing in (selected, both):
        routing.observe(moments)
    keys, start = torch.randn(B, KV, 9, D), torch.full((B,), START)
    present, first = torch.ones(B, 9, dtype=torch.bool), torch.ones(B, dtype=torch.bool)
    if when == "before":
        selected.select(torch.tensor(chosen))
        selected.extend(keys[chosen], start[chosen], present[chosen], first[chosen])
    else:
        selected.extend(keys, start, present, first)
        selected.select(torch.tensor(chosen))
    both.extend(keys, start, present, first)
    later = present[:, :5], first & False
    selected.extend(more[chosen], start[chosen] + 9, *(x[chosen] for x in later))
    both.extend(more, start + 9, *later)
    span = torch.zeros(B, 18, dtype=torch.int64)
    expected = both.scores(query, view_of(span))[chosen]
    got = selected.scores(query[chosen], view_of(span[chosen]))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def device_bytes(routing: Routing) -> int:
    return storage_bytes(routing.device_tensors())


@pytest.mark.parametrize("trained", [False, True])
def test_device_bytes_are_what_it_says(trained: bool) -> None:
    sketch = Sketch(1, KV * G, KV, D, WIDTH) if trained else None
    routing = SketchRouting(0, WIDTH, sketch)
    routing.observe(torch.randn(B, KV, D, D))
    context = Growing(routing, [(9, 9), (4, 4)])
    tokens = int(context.start.max())
    each = routing.bytes_per_token() * tokens + routing.fixed_bytes()
    assert device_bytes(routing) == each * B * KV


def test_moments_go_once_every_row_has_its_own_maps() -> None:
    routing = SketchRouting(0, WIDTH, None)
    routing.observe(torch.randn(B, KV, D, D))
    context = Growing(routing, [(9, 0), (0, 9)])
    each = routing.bytes_per_token() * int(context.start.max()) + routing.fixed_bytes()
    assert device_bytes(routing) == each * B * KV


def test_a_sketch_is_fitted_in_fp32_under_autocast() -> None:
    """A forward under autocast commits under autocast."""
    some, routings = torch.randn(B, KV, 30, D), []
    for autocast in (False, True):
        torch.manual_seed(1)
        routing = SketchRouting(0, WIDTH, None)
        routing.observe(some.mT @ some)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            Growing(routing)
        routings.append(routing)
    plain, inside = (list(routing.device_tensors()) for routing in routings)
    assert all(map(torch.equal, plain, inside))
