"""Farthest points against a greedy loop in exact arithmetic; k-means against a loop in float64."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.ops.farthest_point import farthest_points, nearest_to_centroids

BOTH = pytest.mark.parametrize("choose", [farthest_points, nearest_to_centroids])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def exact_vectors(rows: list[tuple[int, int, int, bool]]) -> Tensor:  # fp32 [N, 16]
    """Vectors whose cosines are multiples of 1/16, without rounding, even in bf16.

    Each has 1, 4 or 16 equal entries up to sign: ``(kind, seed, scale, valid)``.
    """
    made = []
    for kind, seed, scale, _ in rows:
        generator = torch.Generator().manual_seed(seed)
        vector = torch.zeros(16)
        places = torch.randperm(16, generator=generator)[: (1, 4, 16)[kind]]
        vector[places] = torch.randint(0, 2, places.shape, generator=generator) * 2.0 - 1
        made.append(vector * scale)
    return torch.stack(made)


def greedy(x: Tensor, count: int, valid: list[bool]) -> list[int]:
    """The paper's loop over exact vectors, with the whole N x N matrix, in fractions."""
    signs = x.sign().long()
    entries = signs.abs().sum(-1)
    size = [{1: 4, 4: 2, 16: 1}[int(n)] for n in entries]  # 4 / sqrt(entries)
    cosine = [
        [Fraction(int(signs[i] @ signs[j]) * size[i] * size[j], 16) for j in range(len(x))]
        for i in range(len(x))
    ]
    exist = [i for i in range(len(x)) if valid[i]]
    chosen: list[int] = []
    while len(chosen) < min(count, len(exist)):
        against = chosen or exist
        score = {}
        for i in exist:
            if i not in chosen:
                own = [cosine[i][j] for j in against]
                score[i] = max(own) if chosen else sum(own) / len(own)
        chosen.append(min(score, key=lambda i: (score[i], i)))
    return [-1] * (min(count, len(x)) - len(chosen)) + sorted(chosen)


# Few seeds, so that vectors repeat.
ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from([1, 2, 3, 7]), st.booleans()),
    min_size=1,
    max_size=20,
)


@settings(max_examples=300)
@given(ROWS, st.integers(1, 22), st.booleans(), st.booleans())
def test_equal_to_the_greedy_loop(rows, count, whole, half) -> None:
    x = exact_vectors(rows)
    valid = [whole or row[-1] for row in rows]
    got = farthest_points(
        x.bfloat16() if half else x, count, None if whole else torch.tensor(valid)
    )
    assert got.tolist() == greedy(x, count, valid)


@settings(max_examples=100)
@given(st.integers(0, 2**30), st.integers(2, 40), st.integers(1, 24), st.integers(2, 70))
def test_equal_to_the_greedy_loop_on_normal_vectors(seed, size, count, width) -> None:
    count = min(count, size - 1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, width, generator=generator) + torch.randn(width, generator=generator)
    unit = x.double() / x.double().norm(dim=-1, keepdim=True)
    cosine = unit @ unit.T
    score, chosen = cosine.mean(0), []
    while len(chosen) < count:
        score[chosen] = torch.inf
        best, second = score.topk(2, largest=False).values
        assume(second - best > 1e-4)  # else either is right
        chosen.append(int(score.argmin()))
        score = cosine[chosen].max(0).values
    assert farthest_points(x, count).tolist() == sorted(chosen)


def test_first_is_least_like_the_mean_of_the_matrix() -> None:
    x = torch.randn(50, 7, 33, 24) + torch.randn(24)
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    mean = (unit @ unit.mT).mean(-1)
    got = mean.gather(-1, farthest_points(x, 1))[..., 0]
    torch.testing.assert_close(got, mean.amin(-1), atol=2e-5, rtol=0)


@BOTH
@pytest.mark.parametrize("size", [33, 16, 9])
def test_leading_dims_agree_with_slices(choose, size) -> None:
    x = torch.randn(3, 2, 4, size, 12)
    x[1] = x[1, :, :, :1]  # all equal
    x[2, :, :, ::3] = x[2, :, :, :1]
    valid = torch.rand(2, 1, size) < 0.7
    valid[1] &= torch.arange(size) < 5
    got = choose(x, 16, valid)
    assert got.shape == (3, 2, 4, min(16, size)) and got.dtype == torch.int64
    for layer in range(3):
        for row in range(2):
            for head in range(4):
                alone = choose(x[layer, row, head].clone(), 16, valid[row, 0])
                assert torch.equal(got[layer, row, head], alone)


@BOTH
def test_left_padding_changes_nothing(choose) -> None:
    x = torch.randn(2, 32, 40, 12)
    x[..., 5:20, :] = x[..., 20:35, :]  # ties
    for pads in (1, 7, 3000):
        padded = torch.cat((torch.full((2, 32, pads, 12), torch.nan), x), dim=2)
        got = choose(padded, 16, torch.arange(pads + 40) >= pads)
        assert torch.equal(got, choose(x, 16) + pads)


@BOTH
def test_one_of_each_cluster(choose) -> None:
    centres = torch.linalg.qr(torch.randn(16, 16)).Q[:6] * torch.rand(6, 1).add(0.1) * 100
    cluster = torch.randint(0, 6, (3, 30))
    cluster[:, :6] = torch.arange(6)
    x = centres[cluster] * (1 + 0.02 * torch.randn(3, 30, 16))
    got = cluster.gather(-1, choose(x, 6))
    assert torch.equal(got.sort(-1).values, torch.arange(6).expand(3, 6))


@BOTH
@pytest.mark.parametrize("distinct", [1, 5])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_repeated_vectors(choose, distinct, scale) -> None:
    """Every direction is there before any is repeated; copies are distinct indices."""
    which = torch.arange(32) * 7 % distinct
    x = torch.randn(2, 3, distinct, 128)[:, :, which] * scale
    got = choose(x, 16)
    assert (got.diff(dim=-1) > 0).all() and got.min() >= 0 and got.max() < 32
    for pick in got.flatten(0, 1):
        assert set(which[pick].tolist()) == set(range(distinct))


def test_copies_tie_whatever_the_rounding() -> None:
    # Lengths that don't divide evenly into a processor's registers round row by row.
    for size, width in [(33, 16), (17, 64), (31, 100)]:
        x = torch.randn(1, width).expand(size, width) * torch.rand(size, 1).add(0.5)
        assert farthest_points(x, 5).tolist() == [0, 1, 2, 3, 4]


@BOTH
def test_too_few_valid(choose) -> None:
    x = torch.randn(3, 20, 8)
    valid = torch.zeros(3, 20, dtype=torch.bool)
    valid[1, [2, 11, 19]] = True
    valid[2, [0, 7, 8, 9, 10]] = True
    x[~valid] = torch.nan
    assert choose(x, 4, valid)[:2].tolist() == [[-1] * 4, [-1, 2, 11, 19]]
    assert choose(x, 20, valid)[2].tolist() == [-1] * 15 + [0, 7, 8, 9, 10]
    assert choose(x, 50, valid).shape == (3, 20)


@BOTH
def test_no_more_than_wanted(choose) -> None:
    x = torch.randn(2, 9, 4)
    for count in (9, 16):
        assert torch.equal(choose(x, count), torch.arange(9).expand(2, 9))
    assert choose(x[:, :0], 16).shape == (2, 0)
    assert choose(x[:0], 4).shape == (0, 4)


@BOTH
def test_zero_vectors_are_at_no_angle(choose) -> None:
    x = torch.zeros(2, 12, 4)
    x[:, 5] = torch.tensor([-1.0, 0, 0, 0])
    x[:, 8:10] = torch.tensor([1.0, 0, 0, 0])
    got = choose(x, 3)
    assert (got.diff(dim=-1) > 0).all() and got.min() >= 0
    assert farthest_points(x, 2).tolist() == [[5, 8]] * 2


@BOTH
def test_same_under_autocast_and_inference(choose) -> None:
    x = (torch.randn(4, 32, 64) + 3 * torch.randn(64)).bfloat16()
    expected = choose(x.float(), 16)
    kept = x.clone()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(choose(x, 16), expected)
    assert torch.equal(x, kept)


def kmeans(x: Tensor, count: int, iterations: int) -> list[int]:
    unit = x.double() / x.double().norm(dim=-1, keepdim=True)
    centroids = [unit[i] for i in farthest_points(x, count).tolist()]
    for _ in range(iterations):
        groups: list[list[Tensor]] = [[] for _ in range(count)]
        for vector in unit:
            nearest = max(range(count), key=lambda c: float(vector @ centroids[c]))
            groups[nearest].append(vector)
        for number, group in enumerate(groups):
            if group:
                total = torch.stack(group).sum(0)
                centroids[number] = total / total.norm()
    chosen: list[int] = []
    for centroid in centroids:
        free = [i for i in range(len(x)) if i not in chosen]
        chosen.append(max(free, key=lambda i: float(unit[i] @ centroid)))
    return sorted(chosen)


@pytest.mark.parametrize("iterations", [0, 1, 10])
def test_kmeans_equal_to_a_loop(iterations) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 30, 6, generator=generator)
    got = nearest_to_centroids(x, 5, iterations=iterations)
    assert got.tolist() == [kmeans(row, 5, iterations) for row in x]
    if iterations == 0:
        assert torch.equal(got, farthest_points(x, 5))


def test_no_square_matrix() -> None:
    """32K vectors would need 4 GiB for every pair of them; the largest tensor is the copy."""
    x = torch.randn(1, 32768, 16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        got = farthest_points(x, 16)
        nearest_to_centroids(x, 16, iterations=2)
    assert got.shape == (1, 16) and largest == x.numel()


def test_bad_input() -> None:
    x = torch.randn(4, 8, 2)
    for choose in (farthest_points, nearest_to_centroids):
        with pytest.raises(ValueError, match="count is 0; at least one vector"):
            choose(x, 0)
        with pytest.raises(ValueError, match="valid is torch.int64; give a bool mask"):
            choose(x, 2, torch.ones(8, dtype=torch.int64))
    with pytest.raises(ValueError, match="iterations is -1; give 0 or more"):
        nearest_to_centroids(x, 2, iterations=-1)
