"""Each scheme against its rule, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.spans.splitter import Splitter
from zoomkv.spans.surprisal import fine_spans


def nats(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(lengths), max(lengths), generator=generator)
    return -draws.clamp(min=1e-6).log(), torch.tensor(lengths)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    longest=st.integers(1, 9),
)
def test_fixed_pieces_are_as_even_as_can_be(lengths: list[int], longest: int) -> None:
    splitter = Splitter("fixed", 1, longest)
    spans = splitter.cut(*nats(*lengths))
    for row, length in enumerate(lengths):
        count = int(spans.count[row])
        sizes = spans.size[row, :count].tolist()
        assert count == math.ceil(length / longest) and sum(sizes) == length
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= min(splitter.shortest, length)
        assert (spans.number[row, :length] >= 0).all()


@pytest.mark.parametrize("alpha", [0.5, 1.5])
def test_paper_anchors_and_runs(alpha: float) -> None:
    """The first token begins a run like any other."""
    surprisal, length = nats(90, 41, seed=3)
    spans = Splitter("paper", 3, 6, alpha).cut(surprisal, length)
    for row, total in enumerate(length.tolist()):
        own = surprisal[row, :total].double()
        limit = float(own.mean() + alpha * own.std(unbiased=False))
        anchors = [bool(x > limit) for x in own.tolist()]
        assert spans.anchor[row, :total].tolist() == anchors
        expected, number, at = [], 0, 0
        while at < total:
            end = at
            while end < total and not anchors[end]:
                end += 1
            size = end - at
            if size < 3:
                expected += [-1] * size
            else:
                pieces = math.ceil(size / 6)
                expected += [number + i * pieces // size for i in range(size)]
                number += pieces
            expected += [-1] * (end < total)
            at = end + 1
        assert spans.number[row, :total].tolist() == expected


def test_alpha_is_the_least_that_fits() -> None:
    surprisal, length = nats(200, 120, seed=1)
    rows = torch.tensor([40.0, 20.0])
    found = Splitter("paper", 3, 8, 1.0, auto=True).cut(surprisal, length, rows, 0.5)
    for row in range(2):
        one = surprisal[row : row + 1], length[row : row + 1]
        taken = []
        for step in range(73):
            spans = Splitter("paper", 3, 8, 1.0 + step / 8).cut(*one)
            taken.append(float(spans.rows(0.5)))
            if taken[-1] <= rows[row]:
                break
        assert float(found.rows(0.5)[row]) == taken[-1] <= rows[row]
        assert len(taken) > 1  # the first would not do


def test_fine_is_the_function_without_sinks() -> None:
    surprisal, length = nats(80, 50)
    mine = Splitter("fine", 4, 9, anchor_share=0.1).cut(surprisal, length)
    theirs = fine_spans(surprisal, length, 4, 9, 0.1, sinks=0)
    assert torch.equal(mine.number, theirs.number) and torch.equal(mine.anchor, theirs.anchor)
