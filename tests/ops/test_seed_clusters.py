"""Greedy clustering around seeds against the loops that it replaces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.ops.seed_clusters import _HALVINGS, _SPREAD, _TIE, _banded, seed_clusters


def greedy(
    cosine: Tensor, free: list[bool], chunk: list[int], threshold: float, reach: int
) -> list[int]:
    """One head, one pass over its rows: the seed of each."""
    into: list[int | None] = [None] * len(free)
    for i in range(len(free)):
        if into[i] is not None:
            continue
        into[i] = i
        for j in range(i + 1, min(i + reach + 1, len(free))):
            alike = free[i] and free[j] and chunk[i] == chunk[j] and cosine[i, j] > threshold
            if alike and into[j] is None:
                into[j] = i
    return into  # type: ignore[return-value]


def taken(into: list[int]) -> list[int]:
    return [row for row, seed in enumerate(into) if seed != row]


def slow_clusters(
    keys: Tensor, free: list[bool], chunk: list[int], over: int, wanted: int, reach: int
) -> list[int]:
    """One head ``[R, D]``, of which ``wanted`` rows should go, and ``over`` can."""
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    cosine = unit @ unit.T
    nearest = [-1.01] * len(free)
    for j in range(len(free)):
        for i in range(max(0, j - reach), j):
            if free[i] and free[j] and chunk[i] == chunk[j]:
                nearest[j] = max(nearest[j], float(cosine[i, j]))
    nearest.sort(reverse=True)
    low, high = (nearest[min(max(n * wanted, 1), len(free)) - 1] - _TIE for n in (_SPREAD, 1))
    if len(taken(greedy(cosine, free, chunk, low, reach))) < wanted:
        low = -1.01
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if len(taken(greedy(cosine, free, chunk, middle, reach))) >= over:
            low = middle
        else:
            high = middle
    into = greedy(cosine, free, chunk, low, reach)
    gone = sorted(taken(into), key=lambda row: (round(float(cosine[row, into[row]]) / _TIE), row))
    for row in gone[: len(gone) - over]:
        into[row] = row
    return into


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    counts=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    wanted=st.lists(st.integers(0, 24), min_size=3, max_size=3),
    reach=st.sampled_from([1, 2, 5, 64]),
    chunks=st.integers(1, 6),
)
def test_clusters_equal_loops(
    seed: int, counts: list[int], heads: int, wanted: list[int], reach: int, chunks: int
) -> None:
    """Every head saves as many rows as asked for, or as the one that can save least."""
    generator = torch.Generator().manual_seed(seed)
    batch, size = len(counts), max(counts)
    keys = torch.randn(batch, heads, size, 4, generator=generator)
    free = torch.rand(batch, heads, size, generator=generator) > 0.2
    chunk = torch.randint(0, chunks, (batch, heads, size), generator=generator).sort(-1).values
    count, target = torch.tensor(counts), torch.tensor(wanted[:batch])
    into, remain = seed_clusters(keys, free, chunk, count, target, reach)
    for row in range(batch):
        own = range(counts[row])
        arguments = [
            (keys[row, h, own], free[row, h, own].tolist(), chunk[row, h, own].tolist())
            for h in range(heads)
        ]
        most = min(
            len(taken(greedy(torch.ones(size, size), f, c, 0.0, reach))) for _, f, c in arguments
        )
        over = min(max(0, counts[row] - wanted[row]), most)
        assert int(remain[row]) == counts[row] - over
        for head, given_ in enumerate(arguments):
            want = slow_clusters(*given_, over, max(0, counts[row] - wanted[row]), reach)
            assert into[row, head].tolist() == want + list(range(counts[row], size))


@pytest.mark.parametrize("reach", [1, 3, 7, 12])
def test_products_in_bands(reach: int) -> None:
    rows = torch.randn(2, 3, 10, 4)
    band = _banded(rows, reach)
    full = rows @ rows.transpose(-1, -2)
    for row in range(10):
        for column in range(reach):
            other = row - (reach - column)
            want = full[:, :, row, other] if other >= 0 else torch.zeros(2, 3)
            torch.testing.assert_close(band[:, :, row, column], want)


def test_nothing_is_merged_above_the_target_and_like_keys_first() -> None:
    keys = torch.eye(8)[[0, 1, 2, 2, 3, 2, 4, 5]][None, None]
    free, chunk = torch.ones(1, 1, 8, dtype=torch.bool), torch.zeros(1, 1, 8, dtype=torch.int64)
    for target, want in ((8, [0, 1, 2, 3, 4, 5, 6, 7]), (6, [0, 1, 2, 2, 4, 2, 6, 7])):
        into, remain = seed_clusters(
            keys, free, chunk, torch.tensor([8]), torch.tensor([target]), 8
        )
        assert into[0, 0].tolist() == want and remain.tolist() == [target]
