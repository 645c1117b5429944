"""Rank gates: which component belongs to which number, what is none, and what is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zoomkv.modules.rank_gate import RankGate, kept


@pytest.fixture
def gate() -> RankGate:
    return RankGate(6, rank=5, hidden=7, generator=torch.Generator().manual_seed(0))


def spectra(*shape: int, rank: list[int] | None = None) -> Tensor:
    torch.manual_seed(1)
    sigma = (0.1 + 3 * torch.rand(*shape)).sort(-1, descending=True).values
    if rank is not None:
        sigma *= torch.arange(shape[-1]) < torch.tensor(rank)[:, None]
    return sigma


def plain(gate: RankGate, sigma: Tensor, context: Tensor) -> Tensor:
    """One span, in fp64, number by number."""

    def apply(layer: torch.nn.Linear, x: list[float]) -> list[float]:
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        return [sum(a * b for a, b in zip(row, x, strict=True)) + bias for row, bias in rows]

    def gelu(x: list[float]) -> list[float]:
        return [a * (1 + math.erf(a / 2**0.5)) / 2 for a in x]

    s = sigma.tolist() + [0.0] * (gate.rank - len(sigma))
    x = [a / s[0] if s[0] else 0.0 for a in s]
    norm = math.sqrt(sum(a * a for a in context.tolist()))
    x += [a / norm if norm else 0.0 for a in context.tolist()]
    x = apply(gate.last, gelu(apply(gate.second, gelu(apply(gate.first, x)))))
    m = [1 / (1 + math.exp(-a)) if b > 0 else 0.0 for a, b in zip(x, s, strict=True)]
    return torch.tensor(m[: len(sigma)])


@pytest.mark.parametrize("count", [5, 3, 1])
def test_equals_plain_loops(gate, count) -> None:
    with torch.no_grad():  # trained ones, whose gates differ
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.manual_seed(3)))
    sigma, context = spectra(4, count, rank=[5, 2, 0, 1]), torch.randn(4, 6)
    context[3] = 0
    gates = gate(sigma, context)
    assert gates.shape == sigma.shape and gates.dtype == torch.float32
    expected = torch.stack([plain(gate, *span) for span in zip(sigma, context, strict=True)])
    torch.testing.assert_close(gates, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(gates > 0, sigma > 0)


def test_scale_does_not_matter_and_contexts_broadcast(gate) -> None:
    keys, values = spectra(2, 3, 4, 5).unbind()
    context = torch.randn(3, 4, 6)
    both = gate(torch.stack([keys, values]), context)
    assert torch.equal(both[0], gate(keys, context))
    torch.testing.assert_close(both[1], gate(1e3 * values, 1e-3 * context))


def test_new_gates_are_open() -> None:
    gate = RankGate(128, generator=torch.Generator().manual_seed(0))
    gates = gate(spectra(500, 32), torch.randn(500, 128)).detach()
    assert float(gates.min()) > 0.9 and float(gates.max()) < 1


def test_gradients_reach_every_parameter_and_are_finite(gate) -> None:
    sigma, context = spectra(3, 5, rank=[5, 2, 0]), torch.randn(3, 6)
    context[1] = 0
    gate(sigma, context).square().sum().backward()
    for parameter in gate.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()
        assert parameter.grad.any()


def test_no_component_is_taken_for_none(gate) -> None:
    with torch.no_grad():
        gate.last.bias.fill_(-1e4)
    sigma = spectra(2, 5, rank=[3, 0])
    assert torch.equal(gate(sigma, torch.randn(2, 6)) > 0, sigma > 0)


def test_fp32_whatever_autocast_and_casts(gate) -> None:
    sigma, context = spectra(3, 5).bfloat16(), torch.randn(3, 6).bfloat16()
    expected = gate(sigma.float(), context.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(sigma, context), expected)
    assert gate.bfloat16()(sigma, context).dtype == torch.float32


def test_weights_come_from_the_generator() -> None:
    one, same, other = (
        RankGate(4, generator=torch.Generator().manual_seed(seed)).state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["first.weight"], other["first.weight"])


def test_bad_sizes_are_refused(gate) -> None:
    with pytest.raises(ValueError, match="rank=0"):
        RankGate(4, rank=0)
    with pytest.raises(ValueError, match="up to 6 components and the rank gate knows 5"):
        gate(torch.ones(2, 6), torch.ones(2, 6))


def test_kept_drops_weak_ones_wherever_they_stand() -> None:
    gates = torch.tensor(
        [
            [0.9, 0.04, 0.05, 0.01],  # a hole; the limit itself stays
            [0.01, 0.9, 0.0, 0.0],
            [0.01, 0.04, 0.03, 0.0],  # all too weak: the strongest stays
            [0.0, 0.0, 0.0, 0.0],  # no component
        ]
    )
    assert kept(gates).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(kept(gates, least=0.0), gates > 0)
    assert torch.equal(kept(gates[:, None], 0.04)[:, 0], kept(gates, 0.04))
    assert kept(torch.zeros(2, 0)).shape == (2, 0)
