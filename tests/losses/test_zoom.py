"""Needed spans against a search through all sets; the loss against a plain loop."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.losses.zoom import coverage_target, zoom_bce

# Multiples of 1/64 and shares of 1/16 are exact in binary: ties are ties.
MASSES = st.lists(st.integers(0, 24), min_size=1, max_size=7)
SHARES = st.integers(1, 16).map(lambda n: n / 16)


def smallest_set(mass: list[float], outside: float, rho: float) -> list[bool]:
    """Of the smallest sets that suffice, the heaviest; of equals, the one that comes first."""
    wanted = rho * (outside + sum(mass))
    sets = itertools.product([True, False], repeat=len(mass))
    fit = [s for s in sets if outside + sum(itertools.compress(mass, s)) >= wanted]
    fewest = min(map(sum, fit))
    fit = [s for s in fit if sum(s) == fewest]
    return list(max(fit, key=lambda s: (sum(itertools.compress(mass, s)), s)))


@settings(max_examples=60, deadline=None)
@given(MASSES, st.integers(0, 64), SHARES)
def test_the_smallest_set_that_suffices(counts, beside, rho) -> None:
    mass, outside = [n / 64 for n in counts], beside / 64
    target = coverage_target(torch.tensor(mass), rho, outside=torch.tensor(outside))
    assert target.tolist() == smallest_set(mass, outside, rho)
    chosen = sum(itertools.compress(mass, target.tolist()))
    assert outside + chosen >= rho * (outside + sum(mass))
    assert not any(n == 0 and t for n, t in zip(counts, target.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(MASSES.filter(lambda x: sum(x) <= 64), SHARES)
def test_what_spans_lack_of_one_is_seen_anyway(counts, rho) -> None:
    mass = torch.tensor(counts) / 64
    explicit = coverage_target(mass, rho, outside=1 - mass.sum())
    assert torch.equal(coverage_target(mass, rho), explicit)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12, unique=True), SHARES, st.randoms())
def test_the_order_of_spans_changes_nothing(counts, rho, random) -> None:
    mass = torch.tensor(counts, dtype=torch.float64) / 8192
    order = list(range(len(counts)))
    random.shuffle(order)
    assert torch.equal(coverage_target(mass[order], rho), coverage_target(mass, rho)[order])


def test_a_query_that_looks_at_exact_tokens_needs_no_span() -> None:
    mass = torch.tensor([0.01, 0.03, 0.02])
    assert not coverage_target(mass).any()
    # The share of the spans alone, as in the paper, would ask for all of them.
    assert coverage_target(mass, outside=0.0).all()


def test_equal_masses_prefer_the_earlier_and_rows_are_independent() -> None:
    mass = torch.tensor([[[0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.0, 0.5]]])
    assert coverage_target(mass, 0.75).tolist() == [
        [[True, True, True, False], [False, True, False, True]]
    ]
    outside = torch.tensor([[0.0, 1.0]])
    assert coverage_target(mass, 0.5, outside=outside).tolist() == [
        [[True, True, False, False], [False] * 4]
    ]


def test_floor_and_nothing_at_all() -> None:
    mass = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert coverage_target(mass, 1.0, floor=0.125).tolist() == [True, True, False, False]
    assert not coverage_target(torch.zeros(2, 3), 1.0, outside=0.0).any()
    assert coverage_target(torch.zeros(2, 3, 0)).shape == (2, 3, 0)
    assert coverage_target(torch.zeros(2, 0), outside=torch.zeros(2)).shape == (2, 0)


@pytest.mark.parametrize("rho", [0.0, 1.5, math.nan])
def test_impossible_shares_are_refused(rho) -> None:
    with pytest.raises(ValueError, match="rho=.*give a share"):
        coverage_target(torch.ones(3), rho)
    with pytest.raises(ValueError, match="floor=-1"):
        coverage_target(torch.ones(3), floor=-1)
    with pytest.raises(ValueError, match="positive_weight=0"):
        zoom_bce(torch.ones(3), torch.ones(3) > 0, torch.ones(3) > 0, positive_weight=0)


def plain_bce(logits: Tensor, target: Tensor, valid: Tensor, weight: float) -> float:
    losses = []
    for x, wanted, counts in zip(
        logits.flatten().tolist(), target.flatten().tolist(), valid.flatten().tolist(), strict=True
    ):
        if counts:
            gate = 1 / (1 + math.exp(-x))
            losses.append(-weight * math.log(gate) if wanted else -math.log(1 - gate))
    return sum(losses) / len(losses)


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, 3, 4, 5, dtype=torch.float64)
    valid = torch.rand(2, 1, 4, 5) < 0.7
    return logits.masked_fill(~valid, -torch.inf), torch.rand(2, 3, 4, 5) < 0.4, valid


@pytest.mark.parametrize("weight", [1.0, 10.0])
def test_bce_equals_a_plain_loop(case, weight) -> None:
    logits, target, valid = case
    loss = zoom_bce(logits, target, valid, weight)
    expected = plain_bce(logits, target, valid.expand_as(logits), weight)
    assert loss.shape == () and float(loss) == pytest.approx(expected, rel=1e-12)


def test_bce_gradient_and_none_for_invalid_entries(case) -> None:
    logits, target, valid = case
    logits = logits.clone().requires_grad_()
    loss = zoom_bce(logits, target, valid)
    loss.backward()
    grad = logits.grad
    assert grad is not None and grad.isfinite().all()
    assert torch.equal(grad != 0, valid.expand_as(grad))
    finite = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target, valid = torch.rand(3, 5) < 0.5, torch.rand(3, 5) < 0.7
    assert torch.autograd.gradcheck(lambda x: zoom_bce(x, target, valid), finite)


def test_bce_of_nothing_and_of_extremes() -> None:
    logits = torch.full((2, 3), -torch.inf, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    loss = zoom_bce(logits, nothing, nothing)
    loss.backward()
    assert not loss.detach().any() and logits.grad is not None and not logits.grad.any()
    wrong = zoom_bce(torch.tensor([-200.0, 200.0]), torch.tensor([True, False]), ~nothing[0, :2])
    assert float(wrong) == pytest.approx((10 * 200 + 200) / 2)


def test_bce_in_half_precision_and_under_autocast(case) -> None:
    logits, target, valid = case[0].bfloat16(), *case[1:]
    loss = zoom_bce(logits, target, valid)
    assert loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(zoom_bce(logits, target, valid), loss)
    assert torch.equal(zoom_bce(logits.float(), target, valid), loss)
