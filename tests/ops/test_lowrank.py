"""Factors against the optimum in float64: what is lost is the tail's energy, and no more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.ops.lowrank import break_even_rank, factorise, rebuild

EXACT = pytest.mark.parametrize("method", ["gram", "svd"])
ALL = pytest.mark.parametrize("method", ["gram", "svd", "randomised"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def spans(length: list[int], size: int, dim: int, garbage: float = torch.nan) -> Tensor:
    """Matrices like the keys of spans: a common direction, decaying others, garbage behind."""
    torch.manual_seed(0)
    decay = torch.arange(1, dim + 1) ** -1.0
    rows = torch.randn(len(length), size, dim) * decay @ torch.linalg.qr(torch.randn(dim, dim)).Q
    rows = rows + 3 * torch.randn(len(length), 1, dim) / dim**0.5
    for matrix, own in zip(rows, length, strict=True):
        matrix[own:] = garbage
    return rows


def spectrum(matrix: Tensor) -> Tensor:  # fp64
    return torch.linalg.svdvals(matrix.double())


def check(rows: Tensor, length: list[int], rank: list[int], factors: tuple[Tensor, ...]) -> None:
    """Each matrix alone: shapes, zeros, orthogonality, and the optimum."""
    a, v, sigma = factors
    kept = min(max(rank), *rows.shape[1:])
    assert a.shape == (len(rows), rows.shape[1], kept) and a.dtype == torch.float32
    assert v.shape == (len(rows), rows.shape[2], kept) and sigma.shape == (len(rows), kept)
    for n, (own, wanted) in enumerate(zip(length, rank, strict=True)):
        r = min(own, wanted, rows.shape[2])
        x, energy = rows[n, :own].double(), spectrum(rows[n, :own].float())
        largest = float(energy[0]) if own else 0.0
        assert not a[n, own:].any() and not a[n, :, r:].any()
        assert not v[n, :, r:].any() and not sigma[n, r:].any()
        torch.testing.assert_close(sigma[n, :r].double(), energy[:r], atol=1e-5 * largest, rtol=0)
        torch.testing.assert_close(
            (a[n].mT @ a[n])[:r, :r], torch.diag(sigma[n, :r] ** 2), atol=1e-5 * largest**2, rtol=0
        )
        # V's columns are as orthogonal as their share of the matrix matters.
        cross = (a[n].norm(dim=0)[:, None] * (v[n].mT @ v[n]) * sigma[n])[:r, :r]
        torch.testing.assert_close(
            cross, torch.diag(sigma[n, :r] ** 2), atol=1e-5 * largest**2, rtol=0
        )
        lost = (x - rebuild(a[n].double(), v[n].double())[:own]).square().sum()
        torch.testing.assert_close(lost, energy[r:].square().sum(), atol=1e-5 * largest**2, rtol=0)


@EXACT
@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 21), min_size=1, max_size=5),
    st.integers(0, 4),
    st.sampled_from([3, 8, 24]),
    st.data(),
)
def test_optimal_for_every_length_and_rank(method, length, spare, dim, data) -> None:
    rank = data.draw(st.lists(st.integers(0, 30), min_size=len(length), max_size=len(length)))
    rows = spans(length, max(length) + spare, dim)
    factors = factorise(rows, torch.tensor(length), torch.tensor(rank), method)
    check(rows, length, rank, factors)


@ALL
@pytest.mark.parametrize("size, dim", [(32, 64), (40, 16)])
def test_everything_is_kept_at_full_rank(method, size, dim) -> None:
    rows = spans([size, size - 3], size, dim, garbage=0)
    a, v, _ = factorise(rows, torch.tensor([size, size - 3]), 999, method)
    torch.testing.assert_close(rebuild(a, v), rows, atol=2e-5, rtol=0)


@ALL
def test_padding_and_neighbours_change_nothing(method) -> None:
    length = [5, 12, 8, 9, 30]
    rows = spans(length, 30, 16)
    a, v, sigma = factorise(rows, torch.tensor(length), 4, method)
    wider = torch.cat([rows, torch.full((5, 7, 16), torch.inf)], dim=1)
    wide_a, wide_v, wide_sigma = factorise(wider, torch.tensor(length), 4, method)
    torch.testing.assert_close(wide_sigma, sigma)
    torch.testing.assert_close(rebuild(wide_a, wide_v)[:, :30], rebuild(a, v))
    for n, own in enumerate(length):
        alone = factorise(rows[n : n + 1, :own], torch.tensor([own]), 4, method)
        torch.testing.assert_close(alone[2][0], sigma[n])
        torch.testing.assert_close(rebuild(*alone[:2])[0], rebuild(a, v)[n, :own])


@EXACT
def test_degenerate_matrices(method) -> None:
    """Zero, of rank 1, of rank 3, with equal singular values, and one row that repeats."""
    rows = torch.zeros(6, 16, 24)
    rows[1] = torch.outer(torch.randn(16), torch.randn(24))
    rows[2] = torch.randn(16, 3) @ torch.randn(3, 24)
    rows[3] = 2 * torch.linalg.qr(torch.randn(24, 24)).Q[:16]
    rows[4] = rows[3] * torch.tensor([5.0] * 3 + [1.0] * 13)[:, None]
    rows[5] = torch.randn(24)
    length = torch.full((6,), 16)
    for rank in (1, 3, 5, 16):
        a, v, sigma = factorise(rows, length, rank, method)
        assert all(x.isfinite().all() for x in (a, v, sigma)) and not a[0].any()
        for n in range(1, 6):
            energy = spectrum(rows[n])
            lost = (rows[n].double() - rebuild(a[n].double(), v[n].double())).square().sum()
            tolerance = 1e-5 * float(energy[0]) ** 2
            torch.testing.assert_close(lost, energy[rank:].square().sum(), atol=tolerance, rtol=0)
            torch.testing.assert_close(
                sigma[n].double(), energy[:rank], atol=1e-5 * float(energy[0]), rtol=0
            )


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_gram_loses_nothing_to_squares(shape) -> None:
    """Singular values from 1e3 to 1e-4: fp32 can't hold the squares of both."""
    u, v = (torch.linalg.qr(torch.randn(n, n).double()).Q[:, :16] for n in shape)
    energy = torch.logspace(3, -4, 16, dtype=torch.float64)
    rows = ((u * energy) @ v.mT).float()[None]
    for rank in (2, 8, 16):
        a, b, _ = factorise(rows, torch.tensor([shape[0]]), rank)
        lost = (rows[0].double() - rebuild(a[0].double(), b[0].double())).square().sum()
        assert float(lost) <= float(energy[rank:].square().sum()) + 1e-6 * float(energy[0]) ** 2
    # No component is missing: at full rank the error is that of storing the rows.
    assert float((rows[0] - rebuild(a, b)[0]).abs().max()) < 1e-5 * float(energy[0])


def test_randomised_is_near_the_optimum_and_repeats_itself() -> None:
    length = [40, 33, 48]
    rows, count = spans(length, 48, 56), torch.tensor(length)
    factors = factorise(rows, count, 4, "randomised")
    assert all(map(torch.equal, factors, factorise(rows, count, 4, "randomised")))
    lost = [
        (rows[n, :own].double() - rebuild(factors[0], factors[1])[n, :own]).square().sum()
        for n, own in enumerate(length)
    ]
    for n, own in enumerate(length):
        tail = float(spectrum(rows[n, :own])[4:].square().sum())
        assert tail * (1 - 1e-4) <= float(lost[n]) <= 1.02 * tail
        torch.testing.assert_close(
            factors[2][n].double(), spectrum(rows[n, :own])[:4], rtol=0.02, atol=0
        )


@ALL
def test_same_under_autocast_and_inference_and_input_untouched(method) -> None:
    rows = spans([20, 7], 20, 24, garbage=1).bfloat16()
    kept, length = rows.clone(), torch.tensor([20, 7])
    expected = factorise(rows.float(), length, 3, method)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        factors = factorise(rows, length, 3, method)
        assert all(map(torch.equal, factors, expected))
        rebuilt = rebuild(*factors[:2])
    assert torch.equal(rebuilt, expected[0] @ expected[1].mT)
    assert torch.equal(rows, kept)


@ALL
def test_nothing_to_factorise(method) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    shapes = [x.shape for x in factorise(torch.zeros(0, 5, 4), empty, 3, method)]
    assert [tuple(shape) for shape in shapes] == [(0, 5, 0), (0, 4, 0), (0, 0)]
    a, v, sigma = factorise(torch.full((2, 5, 4), torch.nan), torch.tensor([0, 0]), 3, method)
    assert sigma.shape == (2, 3) and not any(x.any() for x in (a, v, sigma))


def test_break_even_rank() -> None:
    # 7.5, 14.1, 25.4, 42.4 and 63.8 components of width 128.
    lengths = torch.tensor([8, 16, 32, 64, 128])
    assert break_even_rank(lengths, 128).tolist() == [7, 14, 25, 42, 63]
    assert break_even_rank(lengths, 128, rho=0.5).tolist() == [3, 7, 12, 21, 31]
    lengths = torch.arange(1, 600)
    for dim in (1, 3, 64, 128):
        for rho in (0.25, 0.5, 1.0, 1.5):
            rank = break_even_rank(lengths, dim, rho)
            each, room = lengths + dim + 1, rho * dim * lengths
            assert (rank * each <= room).all() and ((rank + 1) * each > room).all()
    assert break_even_rank(torch.tensor([1]), 64).tolist() == [0]
    with pytest.raises(ValueError, match="rho is 0.0; give the share"):
        break_even_rank(lengths, 64, rho=0.0)
