"""SeKV as the paper has it, whole spans from factors, against attention written out in fp64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.caches.test_sekv import Sizes, entry, feed, nats_of
from torch import Tensor

import zoomkv
from zoomkv.backbone.rotary import rotary_of
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import make_cache
from zoomkv.caches.tiers import storage_bytes
from zoomkv.modules.router import Router
from zoomkv.modules.soft_reader import soft_read
from zoomkv.spans.splitter import Splitter
from zoomkv.spans.surprisal import SINKS, Spans

WINDOW, SLACK = 5, 6
SMALL = {"window": WINDOW, "slack": SLACK, "coarse_precision": "auto"}
PAPER = {**SMALL, "spans": "paper", "alpha": 1.5, "min_span": 3, "max_span": 6}
OPEN = 1e-30  # a gate that every span passes


def make_router(model: Any, rank: int = 8, threshold: float = 0.85, **more: Any) -> Router:
    """Random, so that some heads open some spans; no two thresholds are the same."""
    shape = ModelShape.of(model)
    generator = torch.Generator().manual_seed(5)
    sizes = shape.layers, shape.heads, shape.kv_heads, shape.head_dim
    router = Router(*sizes, width=4, rank=rank, threshold=threshold, generator=generator, **more)
    with torch.no_grad():
        router.threshold_logit += torch.randn(router.threshold_logit.shape, generator=generator)
        # Gates on both sides of what is dropped.
        router.rank_gate.last.weight.mul_(12)
        router.rank_gate.last.bias.fill_(-3.0)
    return router


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


def make(model: Any, **options: Any) -> Any:
    return make_cache(
        "sekv", model, **{"router": make_router(model), "budget": 64, **PAPER, **options}
    )


# Everything, written out.


@dataclass
class Read:
    """What one layer read in one call."""

    layer: int
    query: Tensor  # [B, H, Q, D]
    output: Tensor
    opened: list[Tensor]  # bool [B, Hkv, G, Q, S]
    lengths: list[int]
    span: Tensor
    slots: Tensor


@dataclass
class Recorder:
    """Keys and values of a run by layer, row and position; what queries chose and got."""

    cache: Any
    pads: tuple[int, ...]
    reads: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts: list[list[list[tuple[Tensor, Tensor]]]] = [
            [[] for _ in self.pads] for _ in self.cache.layers
        ]
        self._update, self._read = self.cache.update, self.cache.read
        self.cache.update, self.cache.read = self.update, self.read

    def update(self, k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        for row, pads in enumerate(self.pads):
            first = pads if self.cache.seen == 0 else 0
            self.parts[layer][row].append((k[row, :, first:].clone(), v[row, :, first:].clone()))
        return self._update(k, v, layer, *rest, **named)

    def read(self, step: Any, layer: int, query: Tensor, *rest: Any) -> Tensor:
        routing, opened = self.cache.layers[layer].routing, []
        choose = routing.choose

        def spy(*args: Any) -> Any:
            choice = choose(*args)
            opened.append(choice.opened.clone())
            return choice

        routing.choose = spy
        try:
            output = self._read(step, layer, query, *rest)
        finally:
            del routing.choose
        cache = self.cache
        now = cache.lengths.tolist(), cache.spans.of.clone(), cache._slots.clone()
        self.reads.append(Read(layer, query.clone(), output.clone(), opened, *now))
        return output

    def rows(self, layer: int, row: int) -> tuple[Tensor, Tensor]:  # fp64 [Hkv, n, D]
        keys, values = zip(*self.parts[layer][row], strict=True)
        return torch.cat(keys, 1).double(), torch.cat(values, 1).double()


def cuts(
    splitter: Splitter, nats: Tensor, prompt: int, total: int
) -> tuple[list[list[int]], set[int]]:
    """The spans of a row as they joined, and which of its tokens that joined are in none."""
    ranges, covered = [], SINKS
    if prompt - WINDOW - covered >= splitter.shortest:
        ranges.append((covered, prompt - WINDOW))
        covered = prompt - WINDOW
    for length in range(prompt, total):
        size = length - WINDOW - covered
        if size >= SLACK:
            ranges.append((covered, length - WINDOW))
            covered = length - WINDOW
    spans, whole = [], set()
    for start, end in ranges:
        own = splitter.cut(nats[start:end].float()[None], torch.tensor([end - start]))
        number = own.number[0].tolist()
        whole |= {start + i for i, n in enumerate(number) if n < 0}
        for which in range(int(own.count)):
            spans.append([start + i for i, n in enumerate(number) if n == which])
    return spans, whole


def turned(x: Tensor, position: int, rotary: Any, sign: int) -> Tensor:  # [D]
    """A vector rotated as the model does, or back, coordinate by coordinate."""
    out, half = x.clone(), len(rotary.inv_freq)
    for i in range(half):
        angle = sign * float(torch.tensor(float(position)) * rotary.inv_freq[i])
        a, b = float(x[i]), float(x[half + i])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[half + i] = b * math.cos(angle) + a * math.sin(angle)
    return out


def from_factors(rows: Tensor, mean: Tensor, router: Router | None, rank: int) -> Tensor:
    """One span's rows ``[S, D]`` as a product of low rank, by fp64 SVD and the router's gates."""
    size, dim = rows.shape
    u, sigma, vh = torch.linalg.svd(rows, full_matrices=False)
    most = max(1, min(rank, size * dim // (size + dim + 1)))
    sigma[most:] = 0
    gates = (sigma > 0).double()
    if router is not None:
        with torch.no_grad():
            gates = router.rank_gate(sigma.float()[: router.rank_gate.rank], mean.float()).double()
        gates = torch.cat([gates, gates.new_zeros(len(sigma) - len(gates))])
        near = (gates - 0.05).abs().min()
        assert near > 1e-5, "a gate on the edge says nothing"
        stays = gates >= 0.05
        stays[0] |= not stays.any()
        gates = gates.where(stays, 0)
    return u @ torch.diag(gates * sigma) @ vh


class WrittenOut:
    """What one row should get, as the paper says it, in fp64."""

    def __init__(
        self, recorder: Recorder, model: Any, row: int, nats: Tensor, found: tuple[Any, Any]
    ) -> None:
        self.row, self.nats, (self.spans, self.whole) = row, nats, found
        cache = recorder.cache
        self.router, self.threshold = cache._router, cache._threshold
        self.rows = [recorder.rows(layer, row) for layer in range(len(recorder.parts))]
        self.weights = torch.ones_like(nats) if cache._coarse_weights == "mean" else nats
        factoriser = cache.layers[0]._factoriser
        self.lowrank = factoriser is not None
        self.rotary = rotary_of(model) if self.lowrank and factoriser.rotary is not None else None
        self.rebuilt: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.ranks: set[int] = set()

    def span_rows(self, layer: int, kv: int, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one span as they joined, as they come back."""
        span = self.spans[number]
        keys, values = (x[kv, span] for x in self.rows[layer])
        if not self.lowrank:
            return keys, values
        if (key := (layer, kv, number)) not in self.rebuilt:
            mean = entry(self.rows[layer][0], self.weights, [span])[kv]
            if self.rotary is not None:
                pairs = zip(keys, span, strict=True)
                keys = torch.stack([turned(x, p, self.rotary, -1) for x, p in pairs])
            keys, values = (from_factors(x, mean, self.router, 8) for x in (keys, values))
            self.ranks |= {int(torch.linalg.matrix_rank(x, rtol=1e-6)) for x in (keys, values)}
            if self.rotary is not None:
                pairs = zip(keys, span, strict=True)
                keys = torch.stack([turned(x, p, self.rotary, 1) for x, p in pairs])
            self.rebuilt[key] = keys, values
        return self.rebuilt[key]

    def decided(self, read: Read, kv: int, merged: dict[int, list[int]]) -> list[set[int]]:
        """By the query heads of a KV head, the spans that open, after the cap."""
        router, layer, groups = self.router, read.layer, read.query.shape[1] // len(self.rows[0][0])
        size = {n: sum(len(self.spans[i]) for i in own) for n, own in merged.items()}
        gates: dict[int, list[float]] = {n: [] for n in merged}
        passed: list[set[int]] = []
        for head in range(kv * groups, (kv + 1) * groups):
            w = router.projection[layer, head].detach().double()
            limit = float(router.threshold_logit[layer, head].detach())
            if self.threshold is not None:
                limit = math.log(self.threshold / (1 - self.threshold))
            passed.append(set())
            for n, own in merged.items():
                mean = entry(self.rows[layer][0], self.weights, [self.spans[i] for i in own])[kv]
                summary = w @ mean
                if router.shape.normalise:
                    summary = summary / summary.norm()
                asked = w @ read.query[self.row, head, 0].double()
                gate = float(asked @ summary) / router.shape.width**0.5 + math.log(size[n])
                gates[n].append(gate)
                assert abs(gate - limit) > 1e-4, "a gate on the edge says nothing"
                if gate > limit:
                    passed[-1].add(n)
        room = int(read.slots[self.row])
        union = [n for n in set().union(*passed) if size[n] <= room]
        union.sort(key=lambda n: -max(gates[n]))
        while sum(size[n] for n in union) > room:
            union.pop()  # from the least gate on
        self.closed = sum(len(p - set(union)) for p in passed)
        return [p & set(union) for p in passed]

    def output(self, read: Read) -> tuple[Tensor, set[str]]:
        """Output ``[H, D]`` of a decode step, and what took part."""
        keys, values = self.rows[read.layer]
        now, heads = read.lengths[self.row], read.query.shape[1]
        of = read.span[self.row].tolist() + [-1] * (now + 1 - read.span.shape[1])
        alone = [p for p in range(now + 1) if of[p] < 0]
        merged: dict[int, list[int]] = {}
        for i, span in enumerate(self.spans):
            if span[0] < len(of) and of[span[0]] >= 0:
                assert {of[p] for p in span} == {of[span[0]]}
                merged.setdefault(of[span[0]], []).append(i)
        assert sorted(p for own in merged.values() for i in own for p in self.spans[i]) == [
            p for p in range(now) if of[p] >= 0
        ]
        out, kinds = torch.zeros(heads, keys.shape[-1], dtype=torch.float64), {"exact"}
        groups = heads // len(keys)
        for kv in range(len(keys)):
            decided = self.decided(read, kv, merged)
            kinds |= {"closed"} if self.closed else set()
            for g, opened in enumerate(decided):
                told = read.opened[0][self.row, kv, g, 0].nonzero().flatten().tolist()
                assert set(told) == opened
                parts = [(keys[kv, alone], values[kv, alone], 0.0)]
                for n, own in merged.items():
                    spans = [self.spans[i] for i in own]
                    if n in opened:
                        kinds.add("opened")
                        parts += [(*self.span_rows(read.layer, kv, i), 0.0) for i in own]
                        continue
                    kinds.add("merged" if len(own) > 1 else "coarse")
                    pair = [entry(x, self.weights, spans)[kv][None] for x in (keys, values)]
                    parts.append((*pair, math.log(sum(map(len, spans)))))
                kinds |= {"apart"} if opened != decided[0] else set()
                head = kv * groups + g
                query = read.query[self.row, head, 0].double() / keys.shape[-1] ** 0.5
                logits = torch.cat([k @ query + bias for k, _, bias in parts])
                out[head] = logits.softmax(0) @ torch.cat([v for _, v, _ in parts])
        return out, kinds


def check_outputs(
    model: Any,
    tools: Any,
    length: int = 40,
    more: int = 30,
    tolerance: float = 2e-4,
    **options: Any,
) -> tuple[Any, set[str], set[int]]:
    """A run of two rows, one with pads, where every output is as written out."""
    cache, pads = make(model, **options), (0, 7)
    recorder = Recorder(cache, pads)
    prompt, generated = tools.prompt_ids(2, length), tools.prompt_ids(2, more, seed=8)
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    logits = feed(model, cache, prompt, generated, mask)
    assert len(recorder.reads) == 2 * more
    ids, kinds, ranks = torch.cat([prompt, generated], 1), set(), set()
    for row, first in enumerate(pads):
        nats = nats_of(logits[row, first:], ids[row, first:])
        found = cuts(cache._splitter, nats, length - first, length + more - first)
        expected = WrittenOut(recorder, model, row, nats, found)
        for read in recorder.reads:
            output, seen = expected.output(read)
            got = read.output[row, :, 0].double()
            torch.testing.assert_close(got, output, atol=tolerance, rtol=tolerance)
            kinds |= seen
        ranks |= expected.ranks
        kinds |= {"whole"} if expected.whole else set()
    return cache, kinds, ranks


EVERYTHING = {"exact", "whole", "coarse", "opened", "apart"}


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, EVERYTHING | {"closed"}),
        ({"rope": "pre"}, EVERYTHING),
        ({"recovery": "exact", "budget": 90}, EVERYTHING),
        (
            {"spans": "fixed", "alpha": None, "max_span": 5, "threshold": 0.6},
            {"coarse", "opened", "closed"},
        ),
        ({"coarse_weights": "mean", "residency": "streamed"}, EVERYTHING),
        ({"coarse_share": 0.2}, EVERYTHING | {"merged"}),
    ],
    ids=["as it is", "pre", "exact", "fixed", "mean, streamed", "merged"],
)
def test_attention_is_as_written_out(
    model: Any, tools: Any, options: dict[str, Any], kinds: set[str]
) -> None:
    cache, seen, ranks = check_outputs(model, tools, **options)
    assert seen >= kinds
    if options.get("recovery") != "exact":
        assert {1, 2} <= ranks  # each span has a rank of its own
    assert not cache.overflow.any()


def test_fine_spans_of_another_family_are_as_written_out(tiny: Any, tools: Any) -> None:
    model = tiny("qwen3", kv_heads=1)
    zoomkv.attach(model)
    options = {"spans": "fine", "alpha": None, "anchor_share": 0.1}
    router = make_router(model, normalise=False)
    _, kinds, _ = check_outputs(model, tools, router=router, **options)
    assert kinds >= EVERYTHING


# When nothing is lost.


def test_all_open_and_exact_is_the_full_cache(model: Any, tools: Any) -> None:
    ids = tools.prompt_ids(2, 90)
    cache = make(model, budget=1.0, threshold=OPEN, recovery="exact")
    mine = feed(model, cache, ids[:, :50], ids[:, 50:])
    theirs = feed(model, make_cache("full", model), ids[:, :50], ids[:, 50:])
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    told = cache.trace()
    assert all(rate == 1.0 for entry in told for rate in entry["zoom_rate"])
    assert all(rate > 0.8 for entry in told for rate in entry["hit_rate"])


@pytest.mark.parametrize("router", ["oracle", "mean-key"])
@pytest.mark.parametrize("rope", ["post", "pre"])
def test_factors_of_full_rank_are_the_rows(model: Any, tools: Any, router: str, rope: str) -> None:
    """Before RoPE or after it; also where tokens are read one by one."""
    ids, options = tools.prompt_ids(2, 80), {"router": router, "spans": "fine", "alpha": None}
    options |= {"width": 8, "budget": 48}
    whole = {"recovery": "lowrank", "rope": rope, "rho": 100.0, "energy": 1.0}
    mine, theirs = (make(model, **options, **more) for more in (whole, {"recovery": "exact"}))
    got, wanted = (feed(model, x, ids[:, :50], ids[:, 50:]) for x in (mine, theirs))
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
    assert mine.trace()[0]["asked"] == theirs.trace()[0]["asked"]


def test_a_lower_rank_moves_and_says_less(model: Any, tools: Any) -> None:
    ids = tools.prompt_ids(1, 90)
    full = feed(model, make_cache("full", model), ids[:, :70], ids[:, 70:])
    lost, moved = [], []
    for rank in (1, 2, 8):
        options = {"router": "mean-key", "width": 8, "budget": 1.0, "recovery": "lowrank"}
        cache = make(model, **options, rank=rank, rho=100.0, energy=1.0)
        got = feed(model, cache, ids[:, :70], ids[:, 70:])
        lost.append(float((got - full)[:, 70:].abs().mean()))
        moved.append(cache.footprint().bytes_to_device)
    assert lost == sorted(lost, reverse=True) and lost[-1] < 1e-3 < lost[0]
    assert moved == sorted(moved)


# Together and one by one.


def test_a_turn_reads_as_the_router_was_trained(model: Any, tools: Any) -> None:
    """What the soft reader gives for decisions of 0 and 1, each query for itself."""
    router = make_router(model)
    cache = make(model, router=router, budget=1.0)
    prompt, question = tools.prompt_ids(2, 60), tools.prompt_ids(2, 9, seed=5)
    recorder = Recorder(cache, (0, 0))
    feed(model, cache, prompt, prompt[:, :0])
    entries = [copy.deepcopy(layer.entries).plain() for layer in cache.layers]
    feed(model, cache, question, question[:, :0])  # and joins the context afterwards
    assert len(recorder.reads) == 2
    for read in recorder.reads:
        layer = cache.layers[read.layer]
        assert layer.context is not None
        now = read.lengths[0]
        number = torch.nn.functional.pad(read.span, (0, now - read.span.shape[1]), value=-1)
        rows = [
            torch.stack(x)
            for x in zip(*(recorder.rows(read.layer, r) for r in (0, 1)), strict=True)
        ]
        inside = (number >= 0)[:, None, :, None]
        batch, head, at = (number >= 0)[:, None].expand(-1, 2, -1).nonzero(as_tuple=True)
        tokens = [x[:, :, :now].float() for x in rows]
        for x, back in zip(tokens, layer.context._rows(batch, head, at, moves=False), strict=True):
            x[batch, head, at] = back
        size = torch.stack([(number == n).sum(1) for n in range(int(number.max()) + 1)], 1)
        assert inside.any() and read.query.shape[2] == 9
        count = torch.full((2,), size.shape[1])
        spans = Spans(count * 0 + now, number < 0, number, size, size, size, count)
        keys, values = entries[read.layer]
        summaries = router.summaries(read.layer, keys)
        logits = router.logits(read.layer, read.query, summaries, size)
        opens = router.opens(read.layer, logits).detach()
        assert 0.05 < float(opens.mean()) < 0.95
        own = [x[:, :, now : now + 9].float() for x in rows]
        scaling = keys.shape[-1] ** -0.5
        expected = soft_read(read.query, tokens, (keys, values), own, spans, opens, scaling)
        torch.testing.assert_close(read.output, expected, atol=1e-4, rtol=1e-4)


def test_a_question_token_by_token_is_read_like_one_at_once(model: Any, tools: Any) -> None:
    """Under a budget that closes spans, each query having all of it."""
    outputs, opened = [], []
    for chunk in (None, 1):
        cache = make(model)
        prompt, question = tools.prompt_ids(2, 60), tools.prompt_ids(2, 40, seed=5)
        mask = torch.ones_like(prompt)
        mask[1, :7] = 0
        feed(model, cache, prompt, prompt[:, :0], mask)
        recorder = Recorder(cache, (0, 0))
        mask = torch.cat([mask, torch.ones_like(question)], 1)
        outputs.append(feed(model, cache, question, question[:, :0], mask, chunk))
        of_layer = [part for read in recorder.reads if read.layer == 1 for part in read.opened]
        opened.append(torch.cat(of_layer, 3))
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    assert torch.equal(*opened) and opened[0].any()


# The budget.


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        (140, {}),
        (110, {"coarse_precision": "int8", "rope": "pre"}),
        (0.5, {"alpha": "auto"}),
        (100, {"recovery": "exact", "residency": "streamed"}),
        (120, {"threshold": OPEN, "spans": "fixed", "alpha": None}),
    ],
    ids=str,
)
def test_the_budget_holds_at_every_step(
    model: Any, tools: Any, budget: float, changes: dict[str, Any]
) -> None:
    cache = make(model, budget=budget, **changes)
    sizes = Sizes(cache)
    feed(model, cache, tools.prompt_ids(1, 120), tools.prompt_ids(1, 100, seed=4))
    assert not cache.overflow.any() and int(cache._slots) > 0
    sizes.check()
    routes = [x for layer in cache.layers for x in layer.routing.device_tensors()]
    assert storage_bytes(iter(routes)) > 0


def test_what_does_not_fit_is_told_and_nothing_opens(model: Any, tools: Any) -> None:
    cache = make(model, budget=20, alpha=0.0, threshold=OPEN)
    sizes = Sizes(cache)
    with pytest.warns(UserWarning, match="exceeds the budget by"):
        logits = feed(model, cache, tools.prompt_ids(1, 150), tools.prompt_ids(1, 30, seed=4))
    have, allowed = sizes.found[-1]
    assert logits.isfinite().all() and 0 < have - allowed <= int(cache.overflow)
    assert all(not any(entry["zoomed"]) and all(entry["passed"]) for entry in cache.trace())


def test_alpha_rises_until_what_stays_fits(model: Any, tools: Any) -> None:
    """Anchors, runs that are too short and entries keep within their share, if any alpha does."""
    ids, stays = tools.prompt_ids(1, 300), []
    for alpha in (1.0, "auto"):
        cache = make(model, budget=100, alpha=alpha, persistent_share=0.5, coarse_share=0.9)
        feed(model, cache, ids, ids[:, :0])
        inside = int((cache.spans.of >= 0).sum())
        whole = int(cache._covered) - SINKS - inside
        of_entry = (cache._entry_bytes() + cache._summary_bytes()) / cache._row_bytes()
        stays.append(whole + int(cache.spans.count) * of_entry)
    assert stays[0] > 50 >= stays[1] or stays[1] < stays[0]


# What is told.


def test_the_trace_counts_decisions_and_bytes(model: Any, tools: Any) -> None:
    cache = make(model)
    recorder = Recorder(cache, (0, 0))
    feed(model, cache, tools.prompt_ids(2, 50), tools.prompt_ids(2, 30, seed=4))
    shape = (2, 2, 4)
    zoomed, offered = torch.zeros(shape), torch.zeros(2, 2)
    for read in recorder.reads:
        zoomed[:, read.layer] += read.opened[0].sum((3, 4)).flatten(1)
        offered[:, read.layer] += torch.tensor([len(set(row) - {-1}) for row in read.span.tolist()])
    told = cache.trace()
    for one in told:
        row, layer = one["row"], one["layer"]
        assert one["zoomed"] == zoomed[row, layer].tolist()
        assert one["offered"] == offered[row, layer]
        rates = (zoomed[row, layer] / offered[row, layer]).tolist()
        assert one["zoom_rate"] == pytest.approx(rates)
        hits = [1 - f / a for f, a in zip(one["fetched"], one["asked"], strict=True)]
        assert one["hit_rate"] == pytest.approx(hits)
        assert all(p >= z for p, z in zip(one["passed"], one["zoomed"], strict=True))
    assert sum(one["bytes"] for one in told) == cache.footprint().bytes_to_device > 0


def test_copies_share_the_router_and_go_their_own_way(model: Any, tools: Any) -> None:
    cache = make(model, rope="pre")
    feed(model, cache, tools.prompt_ids(1, 50), tools.prompt_ids(1, 10, seed=4))
    mine = copy.deepcopy(cache)
    assert mine._router is cache._router
    assert mine.layers[0].routing._router is cache._router
    assert mine.layers[0].context._factoriser is cache.layers[0].context._factoriser
    more = tools.prompt_ids(1, 30, seed=6)
    one, two = (feed(model, x, more[:, :0], more) for x in (cache, mine))
    assert torch.equal(one, two)


def test_rows_that_are_selected_go_on_as_alone(model: Any, tools: Any) -> None:
    prompt, first = tools.prompt_ids(2, 60), tools.prompt_ids(2, 20, seed=4)
    more, mask = tools.prompt_ids(1, 40, seed=6), torch.ones_like(prompt)
    mask[1, :35] = 0
    both, alone = make(model), make(model)
    feed(model, both, prompt, first, mask)
    both.batch_select_indices(torch.tensor([1]))
    feed(model, alone, prompt[1:, 35:], first[1:])
    padded = torch.cat([mask[1:], mask.new_ones(1, 20)], 1)
    mine = feed(model, both, prompt[:1, :0], more, padded)
    theirs = feed(model, alone, prompt[:1, :0], more)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


# Options.


SPLITTER = {"scheme": "paper", "alpha": 1.25, "min_span": 3, "max_span": 6, "sinks": SINKS}


def test_a_router_brings_what_it_was_trained_with(model: Any) -> None:
    router = make_router(model)
    router.trained_with = {
        "splitter": {**SPLITTER, "anchor_share": 0.015},
        "memory": {"rope": "pre", "recovery": "lowrank", "rho": 0.5, "method": "randomised"},
    }
    zoomkv.attach(model, router=router)
    for name in (None, "paper"):
        cache = make_cache("sekv", model, router=name)
        assert cache._router is router
        assert cache._splitter == Splitter("paper", 3, 6, 1.25)
        factoriser = cache.layers[0]._factoriser
        assert (factoriser.rank, factoriser.rho) == (8, 0.5) and factoriser.rotary is not None
        assert factoriser.rank_gate is router.rank_gate
    assert make_cache("sekv", model, alpha="auto")._splitter == Splitter("paper", 3, 6, 1.25, True)
    assert make_cache("sekv", model, alpha=1.25, min_span=3)._splitter.alpha == 1.25
    assert make_cache("sekv", model, recovery="exact").layers[0]._factoriser is None
    for options, message in (
        ({"spans": "fine"}, "spans='fine': the router was trained with spans='paper'"),
        ({"alpha": 1.0}, "alpha=1.0: the router was trained with alpha=1.25"),
        ({"min_span": 4}, "min_span=4: the router was trained with min_span=3"),
        ({"max_span": 7}, "max_span=7: the router was trained with max_span=6"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            make_cache("sekv", model, **options)
        assert "\n" not in str(caught.value)
    router.trained_with["splitter"]["sinks"] = 2
    with pytest.raises(ValueError, match="trained with 2 sinks, this version has 4"):
        make_cache("sekv", model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "paper"}, "router='paper': the model was loaded without a router"),
        ({"spans": "even"}, "spans='even': choose one of fine, paper, fixed"),
        ({"spans": "fine"}, "alpha=1.5 goes with spans='paper', not with 'fine'"),
        ({"anchor_share": 0.1}, "anchor_share=0.1 goes with spans='fine'"),
        ({"alpha": "most"}, "alpha='most': give a number, or auto"),
        ({"max_span": 4}, "give max_span of at least 2 "),
        ({"threshold": 1.0}, "threshold=1.0: give a gate in"),
        ({"threshold": 0.5, "router": "oracle", "width": 8}, "threshold=0.5 goes with"),
        ({"rank": 9}, "rank=9: the router's gates know 8"),
        ({"rank": 0}, "rank=0: give a whole number"),
        ({"rho": 0}, "rho=0: give a share above 0"),
        ({"energy": 1.5}, "energy=1.5: give a share of at most 1"),
        ({"rope": "none"}, "rope='none': choose one of post, pre"),
        ({"recovery": "some"}, "recovery='some': choose one of lowrank, exact"),
        ({"host_precision": "int8"}, "host_precision='int8' goes with recovery='exact'"),
        ({"coarse_share": 0.0}, "router='paper' reads coarse entries"),
        ({"coarse_weights": "max"}, "coarse_weights='max': choose surprisal or mean"),
        ({"persistent_share": 1.0}, "persistent_share=1.0"),
    ],
    ids=str,
)
def test_options_out_of_range(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make(model, **options)
    assert "\n" not in str(caught.value)


def test_a_router_for_another_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="router: made for layers=3, this model has 2"):
        make(model, router=Router(3, 4, 2, 8))
