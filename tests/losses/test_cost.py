"""Shares of open spans and of retained rank, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.losses.cost import cost, rank_cost, zoom_cost


def test_equal_plain_loops() -> None:
    torch.manual_seed(0)
    opens = (torch.rand(2, 3, 4, 5) < 0.5).float()
    valid = torch.rand(2, 1, 4, 5) < 0.6
    opened = possible = 0
    for batch in range(2):
        for query in range(4):
            for span in range(5):
                for head in range(3):
                    if valid[batch, 0, query, span]:
                        possible += 1
                        opened += int(opens[batch, head, query, span])
    assert float(zoom_cost(opens, valid)) == pytest.approx(opened / possible)

    gates, rank = torch.rand(3, 6), torch.tensor([6, 2, 0])
    available = torch.arange(6) < rank[:, None]
    retained = sum(float(gates[n, :own].sum()) for n, own in enumerate(rank.tolist()))
    assert float(rank_cost(gates, available)) == pytest.approx(retained / 8)

    both = cost(opens, valid, gates, available, beta=0.25)
    assert float(both) == pytest.approx(opened / possible + 0.25 * retained / 8)


def test_gradients() -> None:
    torch.manual_seed(0)
    opens = torch.rand(2, 3, 5, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    valid, available = torch.rand(2, 1, 5) < 0.7, torch.rand(2, 4) < 0.7
    assert torch.autograd.gradcheck(lambda z, m: cost(z, valid, m, available), (opens, gates))
    cost(opens, valid, gates, available).backward()
    assert opens.grad is not None and torch.equal(opens.grad > 0, valid.expand_as(opens))
    assert gates.grad is not None and torch.equal(gates.grad > 0, available)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_more_of_the_same_and_another_order_cost_the_same(seed, times) -> None:
    generator = torch.Generator().manual_seed(seed)
    opens = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    valid = torch.rand(3, 5, generator=generator) < 0.7
    share, order = zoom_cost(opens, valid), torch.randperm(5, generator=generator)
    assert 0 <= float(share) <= 1
    torch.testing.assert_close(zoom_cost(opens[:, order], valid[:, order]), share)
    torch.testing.assert_close(zoom_cost(opens.repeat(times, 1), valid.repeat(times, 1)), share)
    padded = torch.cat([opens, torch.full((3, 2), torch.nan)], -1)
    wide = torch.cat([valid, torch.zeros(3, 2, dtype=torch.bool)], -1)
    torch.testing.assert_close(zoom_cost(padded, wide), share)


def test_bounds_nothing_and_half_precision() -> None:
    everything = torch.ones(2, 3, dtype=torch.bool)
    assert float(zoom_cost(torch.ones(2, 3), everything)) == 1
    assert float(zoom_cost(torch.ones(2, 3), ~everything)) == 0
    assert float(rank_cost(torch.zeros(0, 4), torch.zeros(0, 4) > 0)) == 0
    many = torch.ones(1, 5000).bfloat16()
    share = zoom_cost(many, many > 0)
    assert share.dtype == torch.float32 and float(share) == 1
