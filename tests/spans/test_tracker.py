"""The streaming tracker against the plain parser, token by token, in ragged batches."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.spans.thoughts import Delimiters, parse
from zoomkv.spans.tracker import Events, ThoughtTracker

VOCABULARY = 10
BREAK = 6
STOPS = {3, 7}
CAP, MAX_INTERVAL = 3, 5
BOUNDARY = torch.tensor([i in STOPS for i in range(VOCABULARY)])
KINDS = {
    "special": Delimiters((8,), (9,), blank=(7,), abort=(BREAK,)),
    "special, bare": Delimiters((8,), (9,)),
    "textual": Delimiters((1, 2), (2, 3), blank=(7,), abort=(BREAK,)),
    "repeating": Delimiters((1, 1), (1, 2, 1)),
    "spellings": Delimiters((1, 2), (2, 1), ((7, 1, 2), (8,)), ((9,), (0, 2, 1)), blank=(7,)),
}
kinds = st.sampled_from(sorted(KINDS))


def streams(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids in which the delimiters of a kind, whole and in pieces, come often and in every order."""
    delimiters = KINDS[kind]
    whole = [(*begin, 0, *end) for begin in delimiters.begins for end in delimiters.ends]
    singles = [(i,) for i in (0, 1, 2, 3, BREAK, 7, 8, 9)]
    pieces = [*delimiters.begins, *delimiters.ends, *whole, *singles]
    return st.lists(st.sampled_from(pieces), max_size=20).map(
        lambda p: [i for ids in p for i in ids]
    )


class Alone:
    """What one row should give, by parsing everything again after every token."""

    def __init__(self, delimiters: Delimiters, prompt: int) -> None:
        self.delimiters, self.prompt = delimiters, prompt
        self.ids: list[int] = []
        self.since = self.updates = 0
        self.given = 0  # of the ids, those of a later prompt

    def segments(self) -> list[tuple[int, ...]]:
        found = (s for s in parse(self.ids, self.delimiters, CAP) if s.closed)
        fields = ("start", "summary_start", "interior_start", "interior_end", "end")
        return [tuple(getattr(s, f) + self.prompt for f in fields) for s in found]

    def open_start(self) -> int:
        return ([(self.prompt,)] + self.segments())[-1][-1]

    def advance(self, token: int) -> tuple[bool, bool]:
        before = len(self.segments())
        self.ids.append(token)
        self.since += 1
        closed = len(self.segments()) > before
        boundary = closed or token in STOPS or self.since >= MAX_INTERVAL
        if boundary:
            self.since, self.updates = 0, self.updates + 1
        return closed, boundary


def tracker_of(delimiters: Delimiters, prompts: list[int]) -> ThoughtTracker:
    tracker = ThoughtTracker(delimiters, BOUNDARY, max_interval=MAX_INTERVAL, summary_cap=CAP)
    tracker.start(torch.tensor(prompts))
    return tracker


def step(tracker: ThoughtTracker, column: list[int | None]) -> Events:
    ids = torch.tensor([8 if token is None else token for token in column])
    return tracker.advance(ids, torch.tensor([token is not None for token in column]))


def segments_of(tracker: ThoughtTracker, row: int) -> list[tuple[int, ...]]:
    table = tracker.table
    columns = (
        table.regular_start, table.regular_end, table.interior_start, table.interior_end,
        table.summary_end,
    )  # fmt: skip
    return [tuple(int(c[row, i]) for c in columns) for i in range(int(table.count[row]))]


def check(tracker: ThoughtTracker, row: int, alone: Alone) -> None:
    assert segments_of(tracker, row) == alone.segments()
    assert int(tracker.table.open_start[row]) == alone.open_start()
    assert int(tracker.position[row]) == alone.prompt + len(alone.ids)


def check_interval(tracker: ThoughtTracker, rows: list[Alone]) -> None:
    updates = sum(row.updates for row in rows)
    tokens = sum(len(row.ids) - row.given for row in rows)
    if updates:
        assert tracker.mean_interval() == pytest.approx(tokens / updates)
    else:
        assert math.isnan(tracker.mean_interval())


def tensors(tracker: ThoughtTracker) -> dict[str, torch.Tensor]:
    everything = vars(tracker) | vars(tracker.table)
    return {name: x for name, x in everything.items() if isinstance(x, torch.Tensor)}


def column_of(batch: list[list[int]], at: int) -> list[int | None]:
    return [ids[at] if at < len(ids) else None for ids in batch]


def drive(tracker: ThoughtTracker, rows: list[Alone], batch: list[list[int]]) -> None:
    """Feeds ragged streams column by column; a row whose stream has ended is finished."""
    for at in range(max(map(len, batch))):
        column = column_of(batch, at)
        events = step(tracker, column)
        for row, token in enumerate(column):
            wanted = (False, False) if token is None else rows[row].advance(token)
            assert (bool(events.closed[row]), bool(events.boundary[row])) == wanted
            check(tracker, row, rows[row])


@given(kinds, st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_equals_the_parser(kind: str, prompts: list[int], data: st.DataObject) -> None:
    ids = [data.draw(streams(kind)) for _ in prompts]
    rows = [Alone(KINDS[kind], p) for p in prompts]
    tracker = tracker_of(KINDS[kind], prompts)
    drive(tracker, rows, ids)
    check_interval(tracker, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_paragraphs_of_white_space(kind: str) -> None:
    """Rare in random streams: blank paragraphs, at the start and between two summaries."""
    whole = [*KINDS[kind].begin, 0, *KINDS[kind].end]
    ids = [7, *whole, 7, 7, *whole, *whole, 7, 0, *whole]
    drive(tracker_of(KINDS[kind], [2]), [Alone(KINDS[kind], 2)], [ids])


@given(kinds, st.lists(st.integers(0, 4), min_size=2, max_size=3), st.data())
def test_rows_move_with_all_they_have(kind: str, prompts: list[int], data: st.DataObject) -> None:
    delimiters = KINDS[kind]
    rows = [Alone(delimiters, prompt) for prompt in prompts]
    tracker = tracker_of(delimiters, prompts)
    drive(tracker, rows, [data.draw(streams(kind)) for _ in prompts])
    untouched, original = copy.deepcopy(tracker), copy.deepcopy(rows)
    order = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=3))
    tracker.index_select(torch.tensor(order))
    tracker.repeat_interleave(2)
    moved = [copy.deepcopy(rows[i]) for i in order for _ in range(2)]
    drive(tracker, moved, [data.draw(streams(kind)) for _ in moved])
    check_interval(tracker, moved)
    for row, alone in enumerate(original):
        check(untouched, row, alone)


@given(st.sampled_from(["special", "textual"]), st.integers(0, 7), st.data())
def test_later_prompt_is_text(kind: str, prompt: int, data: st.DataObject) -> None:
    """It counts as so many tokens that delimit nothing and break off an unfinished summary."""
    first, then = data.draw(streams(kind)), data.draw(streams(kind))
    rows = [Alone(KINDS[kind], 3), Alone(KINDS[kind], 3)]
    tracker = tracker_of(KINDS[kind], [3, 3])
    drive(tracker, rows, [first, first])
    tracker.extend(torch.tensor([prompt, 0]))
    rows[0].ids += [BREAK] * prompt
    rows[0].since += prompt
    rows[0].given += prompt
    drive(tracker, rows, [then, then])
    check_interval(tracker, rows)

    none = torch.zeros(2, int(tracker.table.count.max()), dtype=torch.bool)
    start = torch.tensor([3, 3])
    mask = tracker.table.readable(none, none, tracker.position, start, window=0)
    assert mask[0, 3 + len(first) : 3 + len(first) + prompt].all()


def test_later_prompt_stays_readable_in_a_summarised_paragraph() -> None:
    tracker = tracker_of(KINDS["special"], [1])
    step(tracker, [0])
    tracker.extend(torch.tensor([2]))
    for token in (8, 1, 9):
        step(tracker, [token])
    unread = torch.zeros(1, 1, dtype=torch.bool)
    assert segments_of(tracker, 0) == [(1, 4, 5, 6, 7)]
    mask = tracker.table.readable(unread, unread, tracker.position, torch.tensor([1]), window=0)
    assert mask.nonzero()[:, 1].tolist() == [0, 2, 3]


def test_late_boundary_is_forced_after_a_long_prompt() -> None:
    tracker = tracker_of(KINDS["special"], [1])
    assert not step(tracker, [0]).boundary[0]
    tracker.extend(torch.tensor([MAX_INTERVAL]))
    assert step(tracker, [0]).boundary[0]


def test_finished_row_is_frozen_inside_a_summary() -> None:
    """The unfinished summary stays in the open paragraph, which is always readable."""
    tracker = tracker_of(KINDS["special"], [2])
    for token in (0, 8):
        step(tracker, [token])
    before = copy.deepcopy(tensors(tracker))
    for token in (9, 9, 8, 3, 9):
        events = tracker.advance(torch.tensor([token]), torch.tensor([False]))
        assert not events.closed.any() and not events.boundary.any()
    assert all(torch.equal(before[name], now) for name, now in tensors(tracker).items())
    none = torch.zeros(1, 0, dtype=torch.bool)
    mask = tracker.table.readable(none, none, tracker.position, torch.tensor([2]), window=0)
    assert mask.all() and mask.shape == (1, 4)


def test_made_in_inference_mode_used_outside() -> None:
    with torch.inference_mode():
        tracker = tracker_of(KINDS["textual"], [0])
        for token in (0, 1, 2, 5):
            step(tracker, [token])
    for token in (2, 3):
        events = step(tracker, [token])
    assert events.closed[0] and segments_of(tracker, 0) == [(0, 1, 3, 4, 6)]


def test_start_forgets() -> None:
    tracker = tracker_of(KINDS["special"], [2])
    for token in (0, 8, 1, 9, 8):
        step(tracker, [token])
    tracker.start(torch.tensor([4, 1]))
    drive(tracker, [Alone(KINDS["special"], p) for p in (4, 1)], [[0, 9, 8, 1, 9], [8, 1, 9]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_interval": 0}, "at least 1"),
        ({"summary_cap": 0}, "at least 1"),
        ({"delimiters": Delimiters((8,), (VOCABULARY,))}, "outside the vocabulary"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThoughtTracker(**{"delimiters": KINDS["special"], "boundary": BOUNDARY, **arguments})
