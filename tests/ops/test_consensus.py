"""Votes and choices against plain loops, and the paper's memory arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.ops.consensus import agreeability, choose, memory_saving, vote


def vote_loops(queries, mean_keys, count, k, vote_heads) -> torch.Tensor:
    layers, batch, kv_heads, group, _ = queries.shape
    votes = torch.zeros(batch, mean_keys.shape[3], dtype=torch.int32)
    for layer in range(layers):
        for b in range(batch):
            for h in range(kv_heads):
                voters = list(queries[layer, b, h].double())
                if vote_heads == "kv_mean":
                    voters = [queries[layer, b, h].double().mean(0)]
                for query in voters:
                    scores = [
                        (float(query @ mean_keys[layer, b, h, i].double()), i)
                        for i in range(int(count[b]))
                    ]
                    for _, i in sorted(scores, reverse=True)[:k]:
                        votes[b, i] += 1
    return votes


def choose_loops(votes: list[int], c: int) -> tuple[set[int], set[int]]:
    voted = sorted(((v, i) for i, v in enumerate(votes) if v > 0), reverse=True)
    return {i for _, i in voted[:c]}, {i for _, i in voted[c:]}


@st.composite
def elections(draw: st.DrawFn):
    """Small integers, so that products are exact in every precision and ties are common."""
    layers, batch, kv_heads, group = (draw(st.integers(1, 3)) for _ in range(4))
    size = draw(st.integers(0, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def small(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    queries = small(layers, batch, kv_heads, group, 3)
    mean_keys = small(layers, batch, kv_heads, size, 3)
    count = torch.randint(0, size + 1, (batch,), generator=generator)
    return queries, mean_keys, count


vote_heads = st.sampled_from(["query", "kv_mean"])


@given(elections(), st.integers(1, 4), vote_heads)
def test_votes(election, k, vote_heads) -> None:
    queries, mean_keys, count = election
    votes = vote(queries, mean_keys, count, k, vote_heads)
    if vote_heads == "kv_mean":  # a mean of three need not be exact: compare the sums alone
        queries = queries[..., :1, :]
        votes = vote(queries, mean_keys, count, k, vote_heads)
    assert votes.dtype == torch.int32
    assert torch.equal(votes, vote_loops(queries, mean_keys, count, k, vote_heads))
    voters = queries.shape[0] * queries.shape[2] * queries.shape[3]
    assert torch.equal(votes.sum(1), voters * count.clamp(max=k))


def test_mean_of_a_group_votes_once() -> None:
    torch.manual_seed(0)
    queries, mean_keys = torch.randn(3, 2, 2, 4, 8), torch.randn(3, 2, 2, 6, 8)
    count = torch.tensor([6, 4])
    votes = vote(queries, mean_keys, count, 2, "kv_mean")
    assert torch.equal(votes, vote_loops(queries, mean_keys, count, 2, "kv_mean"))
    assert votes.sum(1).tolist() == [3 * 2 * 2] * 2


def test_equal_scores_prefer_the_recent() -> None:
    queries = torch.tensor([1.0, 0.0]).view(1, 1, 1, 1, 2)
    keys = torch.tensor([[0.0, 1.0], [-0.0, 5.0], [0.0, 0.0], [-1.0, 0.0]]).view(1, 1, 1, 4, 2)
    assert vote(queries, keys, torch.tensor([4]), 2).tolist() == [[0, 1, 1, 0]]
    assert vote(-queries, keys, torch.tensor([3]), 1).tolist() == [[0, 0, 1, 0]]


def test_garbage_behind_the_count_is_never_read() -> None:
    queries, keys = torch.ones(2, 1, 1, 2, 4), torch.ones(2, 1, 1, 5, 4)
    keys[:, :, :, 3:] = float("nan")
    keys[:, :, :, 2] = float("inf")
    votes = vote(queries, keys, torch.tensor([2]), 3)
    assert votes.tolist() == [[4, 4, 0, 0, 0]]


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 2, 2, 3, 64), torch.randn(4, 2, 2, 40, 64)
    count = torch.tensor([40, 17])
    expected = vote(queries, keys, count, 2)
    assert torch.equal(expected, vote_loops(queries, keys, count, 2, "query"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vote(queries, keys, count, 2), expected)
    low = vote(queries.bfloat16(), keys.bfloat16(), count, 2)
    exact = vote_loops(queries.bfloat16().float(), keys.bfloat16().float(), count, 2, "query")
    assert torch.equal(low, exact)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3),
    st.integers(0, 7),
)
def test_choice(rows: list[list[int]], c: int) -> None:
    votes = torch.tensor(rows, dtype=torch.int32)
    count = torch.full((len(rows),), 6)
    zoomed, summarised = choose(votes, count, c)
    for row, *got in zip(rows, zoomed, summarised, strict=True):
        assert tuple(set(g.nonzero().flatten().tolist()) for g in got) == choose_loops(row, c)
    share = agreeability(votes, zoomed)
    for row, value in zip(rows, share.tolist(), strict=True):
        if not any(row):
            assert value != value
        else:
            winners = choose_loops(row, c)[0]
            assert value == pytest.approx(sum(row[i] for i in winners) / sum(row))


def test_choice_keeps_to_the_count() -> None:
    zoomed, summarised = choose(torch.ones(1, 4, dtype=torch.int32), torch.tensor([2]), 1)
    assert zoomed.tolist() == [[False, True, False, False]]
    assert summarised.tolist() == [[True, False, False, False]]


def test_large_counts_do_not_overflow() -> None:
    votes = torch.full((1, 3000), 2**20, dtype=torch.int32)
    zoomed, _ = choose(votes, torch.tensor([3000]), 1)
    assert zoomed.nonzero().tolist() == [[0, 2999]]


@given(elections(), st.integers(1, 4), st.integers(1, 4))
def test_agreeability_bounds(election, k, c) -> None:
    """Winners hold no more than one vote of each head each, and no less than an even share."""
    queries, mean_keys, count = election
    votes = vote(queries, mean_keys, count, k)
    share = agreeability(votes, choose(votes, count, c)[0])
    for value, n in zip(share.tolist(), count.tolist(), strict=True):
        if n == 0:
            assert value != value
        elif n <= c:
            assert value == 1
        else:
            assert c / n - 1e-6 <= value <= min(c, k) / min(k, n) + 1e-6


@pytest.mark.parametrize(
    ("generated", "voted", "saving"), [(16384, 80, 5.479), (32768, 160, 7.105)]
)
def test_memory_saving_of_the_paper(generated: int, voted: int, saving: float) -> None:
    got = memory_saving(512, generated, 2, 250, 20, voted, 512)
    assert got == pytest.approx(saving, abs=5e-4)
