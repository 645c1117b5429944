"""Both ways to cut a prompt into spans, against loops over tokens in exact arithmetic."""

from __future__ import annotations

import math
import random
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zoomkv.spans.surprisal import (
    SINKS,
    Spans,
    by_position,
    fine_spans,
    paper_spans,
    smallest_alpha,
    span_sums,
    span_weights,
)


def drawn(size: int, top: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(top), k=size)


# Quarters of a nat: few values, so that they repeat; sums of them are exact.
QUARTERS = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=90),
    st.builds(drawn, st.integers(1, 100), st.sampled_from([2, 3, 40]), st.integers(0, 999)),
)
BATCH = st.lists(QUARTERS, min_size=1, max_size=3)
ALPHA = st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(1), Fraction(7, 4), Fraction(3)])

Parts = tuple[list[int], list[int], list[list[int]]]
"""Positions of anchors, of exact tokens, and of each span's tokens."""


def batch_of(rows: list[list[int]], garbage: float = torch.nan) -> tuple[Tensor, Tensor]:
    """Surprisals by position, with garbage behind each row, and lengths."""
    length = torch.tensor([len(row) for row in rows])
    out = torch.full((len(rows), int(length.max()) + 2), garbage)
    for values, row in zip(out, rows, strict=True):
        values[: len(row)] = torch.tensor(row) / 4
    return out, length


def parts_of(spans: Spans, row: int) -> Parts:
    """What a row was cut into; fails if the tensors contradict each other or overlap."""
    length, count = int(spans.length[row]), int(spans.count[row])
    kinds = [spans.anchor[row].int(), spans.exact[row].int(), (spans.number[row] >= 0).int()]
    exists = torch.arange(spans.anchor.shape[1]) < length
    assert torch.equal(sum(kinds), exists.int()), "each token is in exactly one of three"
    assert spans.rows(1.5)[row] == int((kinds[0] + kinds[1]).sum()) + 1.5 * count
    sizes, starts, ends = (x[row].tolist() for x in (spans.size, spans.start, spans.end))
    members = [
        positions[:size]
        for positions, size in zip(spans.positions[row].tolist(), sizes, strict=True)
    ]
    for number in range(spans.start.shape[1]):
        own = (spans.number[row] == number).nonzero().flatten().tolist()
        assert members[number] == own and bool(own) == (number < count)
        assert (starts[number], ends[number]) == ((own[0], own[-1] + 1) if own else (0, 0))
    assert starts[:count] == sorted(starts[:count])
    anchor, exact, _ = (kind.nonzero().flatten().tolist() for kind in kinds)
    return anchor, exact, members[:count]


def sort_ranges(ranges: list[range], anchors: set[int], shortest: int) -> Parts:
    exact: list[int] = []
    spans = []
    for part in ranges:
        left = [t for t in part if t not in anchors]
        if len(part) < shortest:
            exact += left
        elif left:
            spans.append(left)
    return sorted(anchors), exact, spans


def paper_loop(row: list[int], alpha: Fraction, shortest: int, longest: int | None) -> Parts:
    """Run by run; rejects examples in which a token stands exactly at the threshold."""
    total = len(row)
    mean = Fraction(sum(row), total)
    variance = sum((h - mean) ** 2 for h in row) / total
    anchors = set(range(min(SINKS, total)))
    for t, h in enumerate(row):
        assume(h == mean or (h - mean) ** 2 != alpha**2 * variance)
        if h > mean and (h - mean) ** 2 > alpha**2 * variance:
            anchors.add(t)
    ranges, t = [], 0
    while t < total:
        end = t
        while end < total and end not in anchors:
            end += 1
        size = end - t
        pieces = 1 if longest is None else math.ceil(size / longest)
        bounds = [t + math.ceil(Fraction(i * size, pieces)) for i in range(pieces)] + [end]
        ranges += [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        t = end + 1
    return sort_ranges(ranges, anchors, shortest)


def fine_loop(row: list[int], shortest: int, longest: int, share: float) -> Parts:
    total = len(row)
    body = sorted(range(SINKS, total), key=lambda t: (-row[t], t))
    anchors = set(range(min(SINKS, total))) | set(body[: math.floor(len(body) * share)])
    ranges, cut = [], SINKS
    while cut < total:
        end = total
        if total - cut > longest:
            last = max(cut + shortest, min(cut + longest, total - shortest))
            end = max(range(cut + shortest, last + 1), key=lambda t: (row[t], -t))
        ranges.append(range(cut, end))
        cut = end
    return sort_ranges(ranges, anchors, shortest)


# -- the paper's scheme ----------------------------------------------------------------------------


@settings(max_examples=80)
@given(BATCH, ALPHA, st.integers(1, 9), st.integers(0, 20) | st.none())
def test_paper_scheme_is_the_loop(rows, alpha, shortest, more) -> None:
    longest = None if more is None else 2 * shortest - 1 + more
    got = paper_spans(*batch_of(rows), float(alpha), shortest, longest)
    for number, row in enumerate(rows):
        anchors, exact, spans = parts_of(got, number)
        assert (anchors, exact, spans) == paper_loop(row, alpha, shortest, longest)
        for span in spans:
            assert shortest <= len(span) <= (longest or len(row))
            assert span == list(range(span[0], span[-1] + 1))


def test_threshold_is_strict_and_counts_the_first_token() -> None:
    row = [0] * 4 + [80] * 40 + [93] * 3 + [80] * 40
    with_first = statistics.mean(row) + statistics.pstdev(row)
    without = statistics.mean(row[1:]) + statistics.pstdev(row[1:])
    values, length = batch_of([row])
    assert without < 93 < with_first
    assert parts_of(paper_spans(values, length), 0)[0] == [0, 1, 2, 3]
    assert parts_of(paper_spans(values[:, 1:], length - 1), 0)[0] == [0, 1, 2, 3, 43, 44, 45]
    # Half of the tokens at 0 and half at h: mean and deviation are h / 2, the threshold is h.
    row = [0] * 30 + [28] * 30
    assert parts_of(paper_spans(*batch_of([row]), alpha=1.0), 0)[0] == [0, 1, 2, 3]
    assert len(parts_of(paper_spans(*batch_of([row]), alpha=0.999), 0)[0]) == 34


def test_runs_are_cut_into_as_few_even_pieces_as_fit() -> None:
    for size, sizes in [(12, [12]), (13, [7, 6]), (24, [12, 12]), (25, [9, 8, 8]), (6, [6])]:
        got = paper_spans(*batch_of([[1] * (4 + size)]), min_span=6, max_span=12)
        assert [len(span) for span in parts_of(got, 0)[2]] == sizes


@pytest.mark.parametrize("value", [0, 1, 7, 40])
@pytest.mark.parametrize("size", [1, 4, 5, 19, 20, 90, 3001])
def test_constant_surprisal_is_one_span_behind_the_sinks(value, size) -> None:
    got = paper_spans(*batch_of([[value] * size]), max_span=None)
    body = list(range(4, size))
    parts = (list(range(min(4, size))), body if size < 20 else [], [body] if size >= 20 else [])
    assert parts_of(got, 0) == parts


def test_alpha_may_differ_between_rows() -> None:
    row = [0] * 20 + [8] + [0] * 20 + [16] + [0] * 20
    values, length = batch_of([row] * 3)
    got = paper_spans(values, length, torch.tensor([1.0, 5.0, torch.inf]))
    assert [parts_of(got, n)[0][4:] for n in range(3)] == [[20, 41], [41], []]
    assert got.count.tolist() == [3, 2, 1]


# -- alpha from a number of rows -------------------------------------------------------------------


@settings(max_examples=12)
@given(BATCH, st.floats(0.1, 1), st.sampled_from([0.5, 2.0, 3.25]), st.sampled_from([None, 12]))
def test_smallest_alpha_is_the_first_that_fits(rows, share, coarse, longest) -> None:
    values, length = batch_of(rows)
    room = (share * length).round()
    got = smallest_alpha(values, length, room, coarse, 4, longest)
    steps = [1 + n / 8 for n in range(73)]
    for number, row in enumerate(rows):
        tried = paper_spans(*batch_of([row] * len(steps)), torch.tensor(steps), 4, longest)
        taken = zip(steps, tried.rows(coarse).tolist(), strict=True)
        fits = [alpha for alpha, needed in taken if needed <= room[number]]
        assert got[number] == min(fits, default=math.inf)


def test_smallest_alpha_falls_back_to_the_sinks() -> None:
    values, length = batch_of([[0] + [2, 30] * 50, [1]])
    got = smallest_alpha(values, length, rows=0.5, coarse=2.0)
    assert got.tolist() == [torch.inf] * 2
    spans = paper_spans(values, length, got)
    assert spans.rows(2.0).tolist() == [4 + 2.0, 1.0]


# -- the fine scheme -------------------------------------------------------------------------------


@settings(max_examples=80)
@given(BATCH, st.integers(1, 9), st.integers(0, 12), st.sampled_from([0.0, 0.015, 0.2, 0.5, 1.0]))
def test_fine_scheme_is_the_loop(rows, shortest, more, share) -> None:
    got = fine_spans(*batch_of(rows), shortest, shortest + more, share)
    for number, row in enumerate(rows):
        parts = parts_of(got, number)
        assert parts == fine_loop(row, shortest, shortest + more, share)
        if share == 0 and more >= shortest - 1 and len(row) >= SINKS + shortest:
            assert not parts[1] and all(shortest <= len(s) <= shortest + more for s in parts[2])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 15, 16, 36, 37, 700])
def test_fine_scheme_at_its_defaults(size) -> None:
    torch.manual_seed(size)
    row = torch.randint(0, 60, (size,)).tolist()
    parts = parts_of(fine_spans(*batch_of([row])), 0)
    assert parts == fine_loop(row, 12, 32, 0.015)
    assert len(parts[0]) == min(size, 4) + int(0.015 * max(size - 4, 0))
    assert bool(parts[1]) == (4 < size < 16), "a body that is too short for a span stays exact"


def test_last_cut_leaves_just_enough() -> None:
    row = [0] * (4 + 33)
    row[-12] = row[-11] = 9
    _, exact, spans = parts_of(fine_spans(*batch_of([row]), anchor_share=0.0), 0)
    assert [len(span) for span in spans] == [21, 12] and not exact


def test_equal_bounds_are_chunks() -> None:
    row = list(range(4 + 8 * 5 + 3))
    _, exact, spans = parts_of(fine_spans(*batch_of([row]), 8, 8, 0.0), 0)
    assert spans == [list(range(4 + 8 * n, 12 + 8 * n)) for n in range(5)] and exact == row[-3:]


def test_cut_begins_the_range_and_the_anchor_leaves_it() -> None:
    row = [0] * 80
    row[20], row[30], row[33] = 9, 5, 40
    anchors, exact, spans = parts_of(fine_spans(*batch_of([row]), anchor_share=0.015), 0)
    assert anchors == [0, 1, 2, 3, 33] and not exact
    # 33 surprises more than 20: it is where the first range ends, and is missing in the second.
    assert [(s[0], s[-1]) for s in spans][:2] == [(4, 32), (34, 44)]


# -- both ------------------------------------------------------------------------------------------

SCHEMES = pytest.mark.parametrize("cut", [paper_spans, fine_spans])


@SCHEMES
@settings(max_examples=25)
@given(BATCH, st.integers(0, 999))
def test_pads_and_other_rows_change_nothing(cut, rows, seed) -> None:
    draw = random.Random(seed)
    columns = max(map(len, rows)) + draw.randint(0, 9)
    values, real = torch.full((len(rows), columns), 77.0), torch.zeros(len(rows), columns).bool()
    for number, row in enumerate(rows):
        where = sorted(draw.sample(range(columns), len(row)))
        real[number, where] = True
        values[number, where] = torch.tensor(row) / 4
    aligned, length = by_position(values, real)
    assert aligned.shape == (len(rows), max(map(len, rows)))
    assert aligned.tolist() == [
        [h / 4 for h in row] + [0.0] * (aligned.shape[1] - len(row)) for row in rows
    ]
    together = cut(aligned, length)
    for number, row in enumerate(rows):
        assert parts_of(together, number) == parts_of(cut(*batch_of([row], 3.0)), 0)


@SCHEMES
def test_rounding_moves_no_cut(cut) -> None:
    """Repetitive text: what fp32 leaves of nothing must not decide."""
    noise = torch.rand(2, 400) * 6e-6
    length = torch.tensor([400, 400])
    got, plain = cut(noise, length), cut(torch.zeros(2, 400), length)
    assert torch.equal(got.number, plain.number) and torch.equal(got.anchor, plain.anchor)


@SCHEMES
def test_steps_grow_with_the_logarithm_of_a_prompt(cut) -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    calls = []
    for size in (128, 4096):
        with Count() as counted:
            cut(torch.rand(2, size), torch.tensor([size, size - 50]))
        calls.append(counted.calls)
    assert calls[1] - calls[0] <= 5 * 6 and calls[0] < 150


@SCHEMES
def test_surprise_without_limit_is_an_anchor(cut) -> None:
    row = torch.zeros(1, 100)
    row[0, [50, 60]] = torch.inf
    spans = cut(row, torch.tensor([100]))
    assert spans.anchor[0, 50] and span_weights(row, spans).isfinite().all()


def test_same_in_inference_and_half_precision() -> None:
    values, length = batch_of([[n * 7 % 31 for n in range(90)]])
    for cut in (paper_spans, fine_spans):
        with torch.inference_mode():
            inside = cut(values.bfloat16(), length)
        assert parts_of(inside, 0) == parts_of(cut(values, length), 0)


def test_bad_input() -> None:
    values, length = batch_of([[1] * 9])
    with pytest.raises(ValueError, match="spans of 0 to None tokens; give min_span >= 1"):
        paper_spans(values, length, min_span=0, max_span=None)
    with pytest.raises(
        ValueError, match=r"spans of 16 to 30 tokens; give .* max_span >= 2 \* min_span - 1"
    ):
        paper_spans(values, length, max_span=30)
    with pytest.raises(ValueError, match="spans of 9 to 8 tokens; give 1 <= min <= max"):
        fine_spans(values, length, 9, 8)
    with pytest.raises(ValueError, match="anchor_share is 1.5; give a share from 0 to 1"):
        fine_spans(values, length, anchor_share=1.5)


# -- weights and sums ------------------------------------------------------------------------------


@settings(max_examples=30)
@given(BATCH, st.booleans())
def test_weights_and_means_are_the_loop(rows, fine) -> None:
    values, length = batch_of(rows)
    spans = fine_spans(values, length, 3, 7, 0.1) if fine else paper_spans(values, length, 1, 4, 9)
    weights = span_weights(values, spans)
    x = torch.randn(len(rows), 2, values.shape[1], 3, generator=torch.Generator().manual_seed(0))
    x[:, :, -2:] = torch.nan  # behind every row
    means = span_sums(x.bfloat16(), weights, spans)
    assert means.shape == (len(rows), 2, spans.size.shape[1], 3) and means.dtype == torch.float32
    assert means.untyped_storage().nbytes() == means.nbytes
    expected, sums = torch.zeros_like(weights), torch.zeros_like(means)
    for number, row in enumerate(rows):
        for index, span in enumerate(parts_of(spans, number)[2]):
            total = sum(row[t] for t in span)
            for t in span:
                share = row[t] / total if total else 1 / len(span)
                expected[number, t] = share
                sums[number, :, index] += share * x[number, :, t].bfloat16().float()
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(means, sums)
    inside = (
        torch.zeros(spans.size.shape).scatter_add_(1, spans.number.clamp(min=0), weights)
        if spans.size.shape[1]
        else torch.zeros_like(spans.size).float()
    )
    torch.testing.assert_close(inside, (spans.size > 0).float())
