"""Coarse entries, factors and rebuilt rows against loops over spans in fp64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.modules.memory import KEYS, VALUES, SpanMemory
from zoomkv.modules.rank_gate import RankGate
from zoomkv.ops.lowrank import break_even_rank
from zoomkv.ops.rope import Rotary
from zoomkv.spans.surprisal import Spans, fine_spans, paper_spans, span_weights

B, HEADS, T, D = 2, 3, 60, 8
LENGTH = torch.tensor([60, 41])
ROTARY = Rotary(10000.0 ** -(torch.arange(D // 2) / (D / 2)))


class Case:
    """A context; its spans have anchors inside, unlike sizes, and the rows unlike numbers."""

    def __init__(self, kind: str = "fine", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys, self.values = (
            torch.randn(B, HEADS, T, D, generator=generator) for _ in range(2)
        )
        surprisal = torch.rand(B, T, generator=generator) * 5
        if kind == "fine":
            self.spans = fine_spans(surprisal, LENGTH, 5, 11, anchor_share=0.1)
        else:
            self.spans = paper_spans(surprisal, LENGTH, 1.0, min_span=3)
        self.weights = span_weights(surprisal, self.spans)

    def memory(self, **options) -> SpanMemory:
        return SpanMemory.build(self.keys, self.values, self.spans, self.weights, **options)

    def each(self):
        """All spans: batch row, number, and the positions of their tokens."""
        for b, s in itertools.product(range(B), range(self.spans.size.shape[1])):
            if s < int(self.spans.count[b]):
                yield b, s, (self.spans.number[b] == s).nonzero().squeeze(1)


def best(rows: Tensor, rank: int, factor: Tensor | None = None) -> Tensor:
    """The best approximation of a rank, in fp64, its components multiplied by a factor."""
    u, sigma, v = torch.linalg.svd(rows.double(), full_matrices=False)
    factor = torch.ones(rank) if factor is None else factor
    return (u[:, :rank] * sigma[:rank] * factor.double()) @ v[:rank]


def ranks(case: Case, rank: int, rho: float) -> Tensor:
    return break_even_rank(case.spans.size, D, rho).clamp(1, rank)


@pytest.mark.parametrize("kind", ["fine", "paper"])
def test_coarse_entries_are_weighted_means(kind) -> None:
    case = Case(kind)
    memory = case.memory()
    for b, s, at in case.each():
        weight = case.weights[b, at].double()
        assert float(weight.sum()) == pytest.approx(1, abs=1e-6)
        for mean, x in ((memory.coarse_keys, case.keys), (memory.coarse_values, case.values)):
            expected = (weight[:, None] * x[b, :, at].double()).sum(1)
            torch.testing.assert_close(mean[b, :, s].double(), expected, atol=1e-5, rtol=1e-5)
    empty = case.spans.size == 0
    assert empty.any() and not memory.coarse_keys.mT.masked_select(empty[:, None, None]).any()


@pytest.mark.parametrize(("rank", "rho"), [(32, 1.0), (2, 1.0), (8, 0.4), (8, 0.01)])
@pytest.mark.parametrize("method", ["gram", "svd", "randomised"])
@pytest.mark.parametrize("kind", ["fine", "paper"])
def test_rows_of_spans_come_back_at_their_rank(kind, method, rank, rho) -> None:
    case = Case(kind)
    memory = case.memory(rank=rank, rho=rho, method=method)
    rows = memory.rows()
    wanted = ranks(case, rank, rho)
    outside = (case.spans.number < 0)[:, None, :, None].expand_as(case.keys)
    assert memory.factors is not None
    for number, (found, exact) in enumerate(zip(rows, (case.keys, case.values), strict=True)):
        assert torch.equal(found[outside], exact[outside])
        for b, s, at in case.each():
            r = int(wanted[b, s])
            for h in range(HEADS):
                expected = best(exact[b, h, at], r).float()
                torch.testing.assert_close(found[b, h, at], expected, atol=2e-4, rtol=1e-3)
                sigma = torch.linalg.svdvals(exact[b, h, at].double())[:r].float()
                stored = memory.factors.sigma[number, b, h, s]
                torch.testing.assert_close(stored[: len(sigma)], sigma, atol=1e-3, rtol=1e-3)
                assert not stored[r:].any()


def test_gates_scale_components_of_keys_and_values_apart() -> None:
    case = Case()
    memory = case.memory(rank=4, method="svd")
    generator = torch.Generator().manual_seed(1)
    gates = torch.rand(memory.gates().shape, generator=generator)
    found = memory.rows(gates)
    for number, x in ((KEYS, case.keys), (VALUES, case.values)):
        for b, s, at in case.each():
            r = int(ranks(case, 4, 1.0)[b, s])
            for h in range(HEADS):
                expected = best(x[b, h, at], r, gates[number, b, h, s, :r]).float()
                torch.testing.assert_close(found[number][b, h, at], expected, atol=1e-4, rtol=1e-3)


def test_gates_are_those_of_each_spectrum_and_the_mean_key() -> None:
    case = Case()
    memory = case.memory(rank=5)
    gate = RankGate(D, 6, generator=torch.Generator().manual_seed(0))
    found = memory.gates(gate)
    assert memory.factors is not None and found.shape == memory.factors.sigma.shape
    for number, (b, s, _), h in itertools.product(range(2), case.each(), range(HEADS)):
        sigma = memory.factors.sigma[number, b, h, s]
        expected = gate(sigma, memory.coarse_keys[b, h, s])
        torch.testing.assert_close(found[number, b, h, s], expected)
    assert not torch.equal(found[KEYS], found[VALUES])
    assert torch.equal(found > 0, memory.factors.sigma > 0)
    assert torch.equal(memory.gates(), (memory.factors.sigma > 0).float())


@pytest.mark.parametrize("rotary", [None, ROTARY])
def test_gradients_of_gates_agree_with_the_loss_written_out(rotary) -> None:
    """A linear loss of the rows: its derivative by a gate is the loss of that component alone."""
    case = Case()
    memory = case.memory(rank=3, rotary=rotary)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(case.keys.shape, generator=generator) for _ in range(2)]
    gates = torch.rand(memory.gates().shape, generator=generator, requires_grad=True)
    loss = sum((u * x).sum() for u, x in zip(upstream, memory.rows(gates), strict=True))
    (found,) = torch.autograd.grad(loss, gates)  # type: ignore[arg-type]
    factors = memory.factors
    assert factors is not None
    for number, (b, s, at), h in itertools.product(range(2), case.each(), range(HEADS)):
        for r in range(3):
            a, v = factors.a[number, b, h, s, : len(at), r], factors.v[number, b, h, s, :, r]
            part = a[:, None] * v
            if rotary is not None and number == KEYS:
                part = rotary.rotate(part, at)
            expected = (part * upstream[number][b, h, at]).sum()
            torch.testing.assert_close(found[number, b, h, s, r], expected, atol=1e-4, rtol=1e-4)
    assert not found[:, 1, :, int(case.spans.count[1]) :].any()


def test_before_rope_a_long_span_has_the_rank_of_its_content() -> None:
    """Keys that all say the same are one component before RoPE, and many after it."""
    case = Case()
    content = torch.randn(1, 1, 1, D, generator=torch.Generator().manual_seed(3))
    position = torch.arange(T)
    case.keys = ROTARY.rotate(content.expand(B, HEADS, T, D), position)
    before, after = case.memory(rank=1, rotary=ROTARY), case.memory(rank=1)
    torch.testing.assert_close(before.rows()[0], case.keys, atol=1e-4, rtol=1e-4)
    error = after.error(after.rows())[KEYS]
    assert (error[:, :, 0] > 0.1).all()
    # Values are the same either way.
    assert torch.equal(before.rows()[1], after.rows()[1])


def test_exact_recovery_gives_everything_back() -> None:
    case = Case()
    memory = case.memory(recovery="exact")
    assert torch.equal(memory.rows()[0], case.keys) and torch.equal(memory.rows()[1], case.values)
    assert torch.equal(memory.coarse_keys, case.memory().coarse_keys)
    for call in (memory.gates, lambda: memory.deploy(torch.ones(1))):
        with pytest.raises(ValueError, match="tokens come back exactly: there are no factors"):
            call()


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from(["fine", "paper"]), st.booleans())
def test_deployment_drops_what_is_negligible(seed: int, kind: str, rotated: bool) -> None:
    case = Case(kind, seed)
    memory = case.memory(rank=5, rotary=ROTARY if rotated else None)
    assert memory.factors is not None
    generator = torch.Generator().manual_seed(seed)
    gates = torch.rand(memory.gates().shape, generator=generator).square()
    gates = (gates * memory.gates()).clone()
    gates[0, 0, 0, 0] *= 0.04  # all are negligible: the first one stays
    found = memory.deploy(gates)
    stays = (gates >= 0.05) & (gates > 0)
    stays[..., 0] |= ~stays.any(-1) & (gates[..., 0] > 0)
    assert torch.equal(found.rank, stays.sum(-1))
    assert int(found.rank[0, 0, 0, 0]) == 1 and found.a.shape[-1] == int(found.rank.max())
    rows = memory.rows(gates * stays)
    for number, (b, s, at), h in itertools.product(range(2), case.each(), range(HEADS)):
        r = int(found.rank[number, b, h, s])
        a, v = found.a[number, b, h, s], found.v[number, b, h, s]
        assert not a[:, r:].any() and not v[:, r:].any()
        rebuilt = a[: len(at), :r] @ v[:, :r].T
        if rotated and number == KEYS:
            rebuilt = ROTARY.rotate(rebuilt, at)
        torch.testing.assert_close(rebuilt, rows[number][b, h, at], atol=1e-5, rtol=1e-4)
        true = (case.keys, case.values)[number][b, h, at]
        error = (rebuilt - true).norm() / true.norm()
        assert float(found.error[number, b, h, s]) == pytest.approx(float(error), rel=1e-3)
        assert int(found.bytes[number, b, h, s]) == r * (len(at) + D) * 4
    absent = (case.spans.size == 0)[:, None].expand(B, HEADS, -1)
    for told in (found.rank, found.error, found.bytes):
        assert not told[:, absent].any()


def test_full_rank_is_exact_and_deployed_in_the_dtype_of_the_keys() -> None:
    case = Case()
    case.keys, case.values = case.keys.bfloat16(), case.values.bfloat16()
    memory = case.memory(rank=D, rho=9.0)
    for found, exact in zip(memory.rows(), (case.keys, case.values), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact.float(), atol=1e-4, rtol=1e-4)
    stored = memory.deploy(memory.gates())
    assert stored.a.dtype == stored.v.dtype == torch.bfloat16
    assert 0 < float(stored.error.max()) < 0.02  # that of rounding
    wide = memory.deploy(memory.gates(), dtype=torch.float32)
    assert float(wide.error.max()) < 1e-5
    assert torch.equal(wide.bytes, stored.bytes * 2)


def test_rows_of_zeros_have_no_component_and_no_nan() -> None:
    case = Case()
    case.values = torch.zeros_like(case.values)
    memory = case.memory()
    gates = memory.gates(RankGate(D, 32)).detach().requires_grad_()
    assert not gates[VALUES].any() and memory.rows(gates)[1].count_nonzero() == 0
    sum(x.sum() for x in memory.rows(gates)).backward()  # type: ignore[union-attr]
    assert gates.grad is not None and gates.grad.isfinite().all()
    stored = memory.deploy(gates)
    assert not stored.rank[VALUES].any() and not stored.error[VALUES].any()


@pytest.mark.parametrize("rotary", [None, ROTARY])
def test_a_context_without_spans(rotary) -> None:
    case = Case()
    case.spans = paper_spans(torch.zeros(B, T), LENGTH, min_span=90, max_span=None)
    memory = case.memory(rotary=rotary)
    gates = memory.gates(RankGate(D, 32))
    assert gates.shape[:4] == (2, B, HEADS, 0) and memory.coarse_keys.shape[2] == 0
    assert all(map(torch.equal, memory.rows(gates), (case.keys, case.values)))
    stored = memory.deploy(gates)
    assert stored.rank.numel() == stored.error.numel() == stored.bytes.numel() == 0


def test_rows_of_the_batch_are_independent() -> None:
    case = Case()
    memory, other = case.memory(), Case()
    other.keys[0] += 1
    again = other.memory()
    assert torch.equal(memory.coarse_keys[1], again.coarse_keys[1])
    torch.testing.assert_close(memory.rows()[0][1], again.rows()[0][1])
    alone = Case()
    spans: Spans = alone.spans
    alone.spans = replace(spans, **{n: getattr(spans, n)[:1] for n in spans.__dataclass_fields__})
    one = SpanMemory.build(alone.keys[:1], alone.values[:1], alone.spans, alone.weights[:1])
    torch.testing.assert_close(one.rows()[0][0], memory.rows()[0][0], atol=1e-5, rtol=1e-4)


def test_autocast_changes_nothing() -> None:
    case = Case()
    case.keys, case.values = case.keys.bfloat16(), case.values.bfloat16()
    plain = case.memory(rank=3, rotary=ROTARY)
    gate = RankGate(D, 4, generator=torch.Generator().manual_seed(0))
    rows = plain.rows(plain.gates(gate))
    with torch.autocast("cpu", torch.bfloat16):
        memory = case.memory(rank=3, rotary=ROTARY)
        again = memory.rows(memory.gates(gate))
    assert all(map(torch.equal, rows, again))
    assert torch.equal(plain.coarse_keys, memory.coarse_keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(B, HEADS, T - 1, D)}, "give those of one context"),
        ({"values": torch.zeros(B, HEADS, T, D + 1)}, "give those of one context"),
        ({"rank": 0}, "rank=0, recovery='lowrank': give at least 1"),
        ({"recovery": "lossless"}, "recovery='lossless': give at least 1, and lowrank or exact"),
        ({"rho": 0.0}, "rho is 0.0"),
    ],
)
def test_bad_input(change, message) -> None:
    case = Case()
    given = {"keys": case.keys, "values": case.values} | change
    keys, values = given.pop("keys"), given.pop("values")
    with pytest.raises(ValueError, match=message):
        SpanMemory.build(keys, values, case.spans, case.weights, **given)
