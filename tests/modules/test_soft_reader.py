"""Reading at two resolutions against plain loops, and its derivatives against differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.modules.reader import Part, read
from zoomkv.modules.soft_reader import soft_read
from zoomkv.spans.surprisal import Spans, paper_spans

HEADS, KV_HEADS, ROWS, DIM = 4, 2, 3, 4
LENGTH = torch.tensor([22, 15])
SCALING = 0.7


def cut() -> Spans:
    """Spans of 4 to 6 tokens, four in one row and two in the other, anchors, and an exact run."""
    surprisal = torch.zeros(2, 22)
    surprisal[:, [7, 9, 14]] = 9
    return paper_spans(surprisal, LENGTH, min_span=3, max_span=6, sinks=1)


class Case:
    """Everything that is read; of it only ``z`` may change between calls."""

    def __init__(self, size: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0):
        self.spans = cut()
        amount = self.spans.size.shape[1]
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)

        self.query = size * draw(HEADS, ROWS, DIM)
        self.tokens = draw(KV_HEADS, 22, DIM), draw(KV_HEADS, 22, DIM)
        self.coarse = draw(KV_HEADS, amount, DIM), draw(KV_HEADS, amount, DIM)
        self.own = draw(KV_HEADS, ROWS, DIM), draw(KV_HEADS, ROWS, DIM)
        self.z = (draw(HEADS, ROWS, amount) > 0).to(dtype)
        self.upstream = draw(HEADS, ROWS, DIM)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.query, *self.tokens, *self.coarse, *self.own)

    def read(self, z: Tensor | None = None, **options: float) -> Tensor:
        z = self.z if z is None else z
        return soft_read(
            self.query, self.tokens, self.coarse, self.own, self.spans, z, SCALING, **options
        )

    def entries(self, b: int, h: int, i: int, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, logits and values of all that a query might read: tokens, spans, itself."""
        group, length, count = h * KV_HEADS // HEADS, int(LENGTH[b]), int(self.spans.count[b])
        weights = []
        for number in self.spans.number[b, :length].tolist():
            weights.append(torch.ones_like(z[b, h, i, 0]) if number < 0 else z[b, h, i, number])
        for s in range(count):
            weights.append((1 - z[b, h, i, s]) * float(self.spans.size[b, s]))
        weights += [torch.ones_like(z[b, h, i, 0])] * (i + 1)
        keys, values = (
            torch.cat([t[b, group, :length], c[b, group, :count], o[b, group, : i + 1]])
            for t, c, o in zip(self.tokens, self.coarse, self.own, strict=True)
        )
        return torch.stack(weights), keys @ self.query[b, h, i] * SCALING, values


def one(case: Case, b: int, h: int, i: int, z: Tensor) -> Tensor:  # [D]
    """The mixture as it is written down; z may lie anywhere."""
    weights, logits, values = case.entries(b, h, i, z)
    shares = weights * (logits - logits.detach().max()).exp()
    return shares @ values / shares.sum()


def slow(case: Case, z: Tensor) -> Tensor:
    where = itertools.product(range(2), range(HEADS), range(ROWS))
    rows = [one(case, *at, z) for at in where]
    return torch.stack(rows).view(2, HEADS, ROWS, DIM)


def test_the_case_has_everything() -> None:
    spans = cut()
    assert spans.count.tolist() == [4, 2] and spans.exact.any() and spans.anchor.sum() > 4
    assert (spans.size[0] != spans.size[0, 0]).any()
    z = Case().z
    assert 0 < z.mean() < 1


@pytest.mark.parametrize("size", [1.0, 8.0])
def test_hard_decisions_equal_a_loop(size) -> None:
    case = Case(size)
    found = case.read()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, slow(case, case.z), atol=1e-12, rtol=1e-12)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_mixtures_equal_a_loop(seed: int) -> None:
    case = Case(2.0, seed=seed)
    z = torch.rand(case.z.shape, generator=torch.Generator().manual_seed(seed)).double()
    torch.testing.assert_close(case.read(z), slow(case, z), atol=1e-12, rtol=1e-12)


def test_what_is_closed_has_no_weight_at_all() -> None:
    """Rows of closed spans and entries of open ones may hold anything, bit for bit."""
    case = Case(dtype=torch.float32)
    for zoomed in (0.0, 1.0):
        case.z.fill_(zoomed)
        before = case.read()
        if zoomed:
            case.coarse = (case.coarse[0] * 30, case.coarse[1] * 1e30)
        else:
            inside = (case.spans.number >= 0)[:, None, :, None]
            keys, values = case.tokens
            case.tokens = keys.where(~inside, keys * 30), values.where(~inside, values * 1e30)
        assert torch.equal(case.read(), before)
        case = Case(dtype=torch.float32)
    # Nor has what comes after a row, or is no token.
    before = case.read()
    keys, values = (x.clone() for x in case.tokens)
    keys[1, :, 15:], values[1, :, 15:] = 9, 1e30
    own = [x.clone() for x in case.own]
    own[0][:, :, -1], own[1][:, :, -1] = 9, 1e30
    case.tokens, case.own = (keys, values), (own[0], own[1])
    assert torch.equal(case.read()[:, :, :-1], before[:, :, :-1])


def test_agrees_with_the_reader_of_the_cache() -> None:
    case = Case(2.0, torch.float32)
    spans, group = case.spans, HEADS // KV_HEADS
    scaled = (case.query * SCALING).unflatten(1, (KV_HEADS, group))
    z = case.z.unflatten(1, (KV_HEADS, group)) > 0  # [B, Hkv, G, Q, S]
    there = torch.arange(22) < LENGTH[:, None]
    number = spans.number[:, None, None, None].clamp(min=0).expand(*z.shape[:-1], -1)
    fine = z.gather(-1, number) | (spans.number < 0)[:, None, None, None]
    bias = spans.size.float().log()[:, None, None, None].masked_fill(z, -torch.inf)
    parts = [
        Part(*case.tokens, fine & there[:, None, None, None]),
        Part(*case.coarse, bias),
        Part(*case.own, torch.ones(1, 1, 1, ROWS, ROWS, dtype=torch.bool).tril()),
    ]
    expected = read(scaled, parts, 1.0).flatten(1, 2)
    torch.testing.assert_close(case.read(), expected, atol=1e-6, rtol=1e-5)


def test_derivatives_of_mixtures_are_exact() -> None:
    case = Case()
    z = torch.rand(case.z.shape, generator=torch.Generator().manual_seed(1)).double()
    free = [x.clone().requires_grad_() for x in (*case.parts(), 0.1 + 0.8 * z)]

    def read(query, k, v, ck, cv, ok, ov, z):
        return soft_read(query, (k, v), (ck, cv), (ok, ov), case.spans, z, SCALING, math.inf)

    assert torch.autograd.gradcheck(read, free, fast_mode=True)


@pytest.mark.parametrize("size", [1.0, 2.0])
def test_derivatives_at_hard_decisions_are_those_of_the_mixture(size) -> None:
    """In z by differences that step across 0 and 1; in all else by the loop's own autograd."""
    case = Case(size)
    parts = [x.requires_grad_() for x in case.parts()]
    z = case.z.clone().requires_grad_()
    found = torch.autograd.grad((case.read(z, ceiling=math.inf) * case.upstream).sum(), [*parts, z])
    expected = torch.autograd.grad((slow(case, z) * case.upstream).sum(), [*parts, z])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    step = 1e-7
    with torch.no_grad():
        for at in itertools.product(range(2), range(HEADS), range(ROWS), range(4)):
            lower, upper = case.z.clone(), case.z.clone()
            lower[at] -= step
            upper[at] += step
            rise = one(case, *at[:3], upper) - one(case, *at[:3], lower)
            rise = rise @ case.upstream[at[:3]] / (2 * step)
            assert float(found[-1][at]) == pytest.approx(float(rise), rel=1e-4, abs=1e-7)


def test_both_resolutions_teach_whichever_is_read() -> None:
    """Neither side of a decision is dead, open or closed."""
    for zoomed in (0.0, 1.0):
        for fine in (True, False):
            case = Case()
            case.z.fill_(zoomed)
            z = case.z.clone().requires_grad_()
            (before,) = torch.autograd.grad((case.read(z) * case.upstream).sum(), z)
            changed = case.tokens if fine else case.coarse
            changed[1].add_(1.0 if fine else -1.0)
            (after,) = torch.autograd.grad((case.read(z) * case.upstream).sum(), z)
            real = (case.spans.size > 0)[:, None, None].expand_as(z)
            assert (before[real] != after[real]).all() and not before[~real].any()


def test_the_ceiling_bounds_the_derivative_and_nothing_else() -> None:
    case = Case(12.0)
    z = case.z.clone().requires_grad_()
    query = case.query.requires_grad_()

    def grads(ceiling: float) -> tuple[Tensor, Tensor]:
        out = case.read(z, ceiling=ceiling)
        assert torch.equal(out, case.read(z, ceiling=math.inf))
        return torch.autograd.grad((out * case.upstream).sum(), [z, query])

    exact, low, high = grads(math.inf), grads(0.0), grads(3.0)
    assert torch.equal(exact[1], low[1]) and torch.equal(exact[1], high[1])
    sizes = [float(g[0].abs().max()) for g in (low, high, exact)]
    assert sizes[0] < sizes[1] < sizes[2] and sizes[2] > 100 * sizes[0]

    # Entry by entry: a share of what is read, or the ceiling.
    with torch.no_grad():
        outs = case.read(z)
        for b, h, i in itertools.product(range(2), range(HEADS), range(ROWS)):
            weights, logits, values = case.entries(b, h, i, z)
            shares = (logits - torch.logsumexp(logits + weights.log(), 0)).clamp(max=0).exp()
            changes = shares * ((values - outs[b, h, i]) @ case.upstream[b, h, i])
            length = int(LENGTH[b])
            for s in range(int(case.spans.count[b])):
                change = changes[:length][case.spans.number[b, :length] == s].sum()
                change -= changes[length + s] * case.spans.size[b, s]
                assert float(low[0][b, h, i, s]) == pytest.approx(float(change), 1e-6, 1e-9)


def test_nothing_overflows() -> None:
    case = Case(3000.0, torch.float32)
    z = case.z.clone().requires_grad_()
    query = case.query.requires_grad_()
    for ceiling in (0.0, math.inf):
        out = case.read(z, ceiling=ceiling)
        assert out.isfinite().all()
        for gradient in torch.autograd.grad((out * case.upstream).sum(), [z, query]):
            assert gradient.isfinite().all()


def test_rows_of_the_batch_are_independent() -> None:
    case = Case(2.0)
    whole = case.read()
    keys = case.tokens[0].clone()
    keys[0] += 1
    case.tokens = keys, case.tokens[1]
    again = case.read()
    assert torch.equal(again[1], whole[1]) and not torch.equal(again[0], whole[0])


def test_a_context_without_spans_is_plain_attention() -> None:
    case = Case(dtype=torch.float32)
    case.spans = paper_spans(torch.zeros(2, 22), LENGTH, min_span=50, max_span=None)
    case.coarse = (torch.zeros(2, KV_HEADS, 0, DIM),) * 2
    case.z = torch.zeros(2, HEADS, ROWS, 0, requires_grad=True)
    query = case.query.requires_grad_()
    case.read().sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()
    past = (torch.arange(22) < LENGTH[:, None])[:, None].expand(-1, ROWS, -1)
    local = torch.ones(ROWS, ROWS, dtype=torch.bool).tril().expand(2, -1, -1)
    keys, values = (
        torch.cat(x, 2).repeat_interleave(2, 1) for x in zip(case.tokens, case.own, strict=True)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, torch.cat([past, local], 2)[:, None], scale=SCALING
    )
    torch.testing.assert_close(case.read(), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_fp32_whatever_comes_in(autocast) -> None:
    case = Case(dtype=torch.bfloat16)
    exact = Case(dtype=torch.bfloat16)
    exact.query = exact.query.float()
    want = exact.z.float().requires_grad_()
    (expected,) = torch.autograd.grad((exact.read(want) * exact.upstream).sum(), want)
    z = case.z.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = case.read(z)
        (found,) = torch.autograd.grad((out * case.upstream).sum(), z)
    assert out.dtype == torch.float32
    assert torch.equal(out, exact.read(want)) and torch.equal(found, expected)


def test_opens_of_another_shape_are_refused() -> None:
    case = Case()
    with pytest.raises(ValueError, match="opens of .* give one for each head, row and span"):
        case.read(case.z[:, :2])
