"""The share of energy that gates lose: a plain loop, and what the gated matrices really lose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.losses.spectrum import spectral_loss


def test_equals_a_plain_loop() -> None:
    torch.manual_seed(0)
    gates, sigma = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(2, 3, 4)
    sigma[0, 1, 2:] = 0
    sigma[1, 0] = 0
    losses = []
    for m, s in zip(gates.view(-1, 4).tolist(), sigma.view(-1, 4).tolist(), strict=True):
        if any(s):
            lost = sum((1 - a) ** 2 * b**2 for a, b in zip(m, s, strict=True))
            losses.append(lost / sum(b**2 for b in s))
    assert len(losses) == 5
    assert float(spectral_loss(gates, sigma)) == pytest.approx(sum(losses) / 5, rel=1e-12)


def test_is_what_a_gated_matrix_loses() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(9, 6, dtype=torch.float64)
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    gates = torch.rand(6, dtype=torch.float64)
    lost = (matrix - (u * gates * sigma) @ vh).square().sum() / matrix.square().sum()
    torch.testing.assert_close(spectral_loss(gates, sigma), lost)


def test_gradient() -> None:
    torch.manual_seed(0)
    gates = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    sigma = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        sigma[1] = 0
    assert torch.autograd.gradcheck(lambda m: spectral_loss(m, sigma.detach()), gates)
    spectral_loss(gates, sigma).backward()
    assert sigma.grad is None
    assert gates.grad is not None and not gates.grad[1].any() and gates.grad[[0, 2]].all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6))
def test_scale_and_order_of_spans_and_spans_without_energy_change_nothing(seed, scale) -> None:
    generator = torch.Generator().manual_seed(seed)
    gates, sigma = torch.rand(2, 6, 4, generator=generator, dtype=torch.float64)
    loss = spectral_loss(gates, sigma)
    assert 0 <= float(loss) <= 1
    order = torch.randperm(6, generator=generator)
    torch.testing.assert_close(spectral_loss(gates[order], scale * sigma[order]), loss)
    more = torch.cat([sigma, torch.zeros(3, 4)])
    torch.testing.assert_close(spectral_loss(torch.cat([gates, gates[:3]]), more), loss)


def test_bounds_nothing_and_half_precision() -> None:
    sigma = torch.tensor([[300.0, 20.0], [5.0, 0.0]]).half()
    assert float(spectral_loss(torch.ones(2, 2), sigma)) == 0
    # Squares of half-precision numbers are taken in fp32.
    none = spectral_loss(torch.zeros(2, 2).half(), sigma)
    assert float(none) == 1 and none.dtype == torch.float32
    assert float(spectral_loss(torch.rand(2, 3), torch.zeros(2, 3))) == 0
    assert float(spectral_loss(torch.rand(2, 0), torch.zeros(2, 0))) == 0
