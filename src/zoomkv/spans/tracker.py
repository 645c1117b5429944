"""Streaming form of ``thoughts.parse`` for a batch: one call for each decode step.

Nothing here loops over rows or tokens. Almost every token is plain text, and for it a step costs
a table look-up and a handful of operations on ``[B]`` integers; only a step in which something may
end takes the longer way.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zoomkv.spans.table import SegmentTable
from zoomkv.spans.thoughts import SUMMARY_CAP, Delimiters

_NEVER = torch.iinfo(torch.int64).max // 2

# What a token id can be: bits of one table over the vocabulary. Above _TEXT they are events, from
# _ABORT on they concern summaries.
_TEXT, _BOUNDARY, _ABORT, _BEGIN, _END = 1, 2, 4, 8, 16

_ROW_STATE = (
    "position",
    "_fence",
    "_deadline",
    "_first_text",
    "_summary_start",
    "_blank_paragraph",
    "_recent",
    "_due",
    "_given",
    "_updates",
)


class Events(NamedTuple):
    """What the token of one step brought about, by row (bool ``[B]``, CPU)."""

    closed: Tensor
    """A summary was closed: it is the last entry of the row's table."""
    boundary: Tensor
    """What is read should be chosen anew: end of a sentence, of a summary, or a long wait."""


class ThoughtTracker:
    """Follows every row of a batch through paragraphs and summaries (ZoomR, section 3.2).

    The meaning of well-formed and malformed text is that of ``thoughts.parse``. Positions count
    each row's own tokens, prompt included, pads not.

    Args:
        delimiters: What begins and ends a summary.
        boundary: Mask ``[V]`` of the tokens that end a sentence or paragraph.
        max_interval: Steps after which a boundary is reported at the latest.
        summary_cap: Longest summary, in tokens.

    Attributes:
        table: The segments found so far.
        position: The position that each row's next token gets, ``[B]``.

    Raises:
        ValueError: If ``max_interval`` or ``summary_cap`` is below 1, or a delimiter holds an id
            outside the vocabulary.
    """

    table: SegmentTable
    position: Tensor

    def __init__(
        self,
        delimiters: Delimiters,
        boundary: Tensor,  # bool [V]
        max_interval: int = 128,
        summary_cap: int = SUMMARY_CAP,
    ) -> None:
        if max_interval < 1 or summary_cap < 1:
            raise ValueError(
                "max_interval and summary_cap must be at least 1, "
                f"got {max_interval} and {summary_cap}"
            )
        self._max_interval = max_interval
        self._kind = _kinds(delimiters, boundary)
        width = max(map(len, delimiters.begins + delimiters.ends))
        self._begins = _Spellings(delimiters.begins, width)
        self._ends = _Spellings(delimiters.ends, width)
        self._width = width
        self._patience = summary_cap + max(map(len, delimiters.ends)) - 1
        self.start(torch.zeros(0, dtype=torch.int64))

    def start(self, prompt_lengths: Tensor) -> None:  # [B]
        """Begins anew behind prompts of the given lengths; the first paragraph starts there."""
        batch = len(prompt_lengths)
        self.table = SegmentTable(batch)
        self.position = prompt_lengths.to(device="cpu", dtype=torch.int64, copy=True)
        self.table.open_start = self.position
        zeros, never = torch.zeros_like(self.position), torch.full_like(self.position, _NEVER)
        self._given = self.position  # tokens of prompts, not generated
        self._fence = self.position  # no delimiter may begin before it
        self._deadline = never  # where an open summary is given up; _NEVER outside one
        self._first_text = never  # first token of the current part that is not white space
        self._summary_start = zeros
        self._blank_paragraph = zeros.bool()
        self._recent = torch.full((batch, self._width), -1)  # last ids, newest last
        self._due = self.position + self._max_interval - 1  # latest place of the next boundary
        self._updates = zeros  # boundaries so far

    def advance(self, ids: Tensor, active: Tensor) -> Events:  # int [B], bool [B]
        """Takes the token that this decode step processes, for each active row.

        Args:
            ids: Token ids, on the CPU.
            active: False for rows that are finished: nothing of theirs changes.
        """
        kind = self._kind[ids] * active
        position = self.position
        self.position = position + active
        if self._width > 1:
            shifted = torch.cat([self._recent[:, 1:], ids[:, None]], dim=1)
            self._recent = torch.where(active[:, None], shifted, self._recent)
        text = (kind & _TEXT).bool()
        self._first_text = torch.where(text, self._first_text.minimum(position), self._first_text)

        closed = torch.zeros_like(active)
        late = active & (position >= self._due.minimum(self._deadline))
        if not bool((late | (kind > _TEXT)).any()):
            return Events(closed, boundary=closed)
        if bool((late | (kind >= _ABORT)).any()):
            closed = self._delimit(ids, kind, position, active)
        boundary = active & (closed | (kind & _BOUNDARY).bool() | (position >= self._due))
        self._due = torch.where(boundary, position + self._max_interval, self._due)
        self._updates = self._updates + boundary
        return Events(closed, boundary)

    def extend(self, lengths: Tensor) -> None:  # [B]
        """Appends the prompt of a later turn to each row: plain text that never delimits.

        It lies in the open paragraph (an unfinished summary is given up) and stays readable, as
        the first prompt does, also when that paragraph is summarised. Rows may have length 0.
        """
        lengths = lengths.to(device="cpu", dtype=torch.int64)
        grown = lengths > 0
        start, end = self.position, self.position + lengths
        self.table.pin(start, end)
        self.position = end
        self._given = self._given + lengths
        self._leave_summary(grown, closed=torch.zeros_like(grown), end=end)

    def mean_interval(self) -> float:
        """Mean number of steps between boundaries, over all rows; NaN before the first."""
        updates = int(self._updates.sum())
        generated = int((self.position - self._given).sum())
        return generated / updates if updates else float("nan")

    def index_select(self, rows: Tensor) -> None:  # [B']
        """Keeps the given rows, in the given order; a row may come twice."""
        rows = rows.to("cpu")
        self.table.index_select(rows)
        for name in _ROW_STATE:
            setattr(self, name, getattr(self, name)[rows])

    def repeat_interleave(self, repeats: int) -> None:
        """Repeats each row, as for beams or several returned sequences."""
        self.index_select(torch.arange(len(self.position)).repeat_interleave(repeats))

    def _delimit(
        self,
        ids: Tensor,  # [B]
        kind: Tensor,  # [B]
        position: Tensor,  # [B]
        active: Tensor,  # bool [B]
    ) -> Tensor:  # bool [B]
        """Opens, closes and gives up summaries; returns the rows that closed one."""
        recent = self._recent if self._width > 1 else ids[:, None]
        room = position + 1 - self._fence  # ids that a delimiter may still use
        inside = self._deadline < _NEVER
        aborted = (kind & _ABORT).bool()

        end_length = self._ends.match(recent, room)
        ending = active & inside & ~aborted & (end_length > 0)
        broken = active & inside & ~ending & (aborted | (position >= self._deadline))
        interior_end = position + 1 - end_length
        closed = ending & (self._first_text < interior_end)  # a summary that says something
        if bool(closed.any()):
            start = torch.where(self._blank_paragraph, self.table.open_start, self._summary_start)
            self.table.append(closed, start, self._fence, interior_end, position + 1)
        self._leave_summary(ending | broken, closed, position + 1)

        begin_length = self._begins.match(recent, room)
        opening = active & ~inside & (begin_length > 0)
        summary_start = position + 1 - begin_length
        self._summary_start = torch.where(opening, summary_start, self._summary_start)
        self._blank_paragraph = torch.where(
            opening, self._first_text >= summary_start, self._blank_paragraph
        )
        self._first_text = self._first_text.masked_fill(opening, _NEVER)
        self._fence = torch.where(opening, position + 1, self._fence)
        self._deadline = torch.where(opening, position + 1 + self._patience, self._deadline)
        return closed

    def _leave_summary(self, rows: Tensor, closed: Tensor, end: Tensor) -> None:
        """Back to regular text at ``end``: in a new paragraph if ``closed``, else in the old."""
        # What is given back to the old paragraph holds delimiters, so that is not blank.
        reset = torch.where(closed, _NEVER, self.table.open_start)
        self._first_text = torch.where(rows, reset, self._first_text)
        self._deadline = self._deadline.masked_fill(rows, _NEVER)
        self._fence = torch.where(rows, end, self._fence)


class _Spellings:
    """All spellings of one delimiter, as rows of a table that is compared with the last ids."""

    def __init__(self, spellings: tuple[tuple[int, ...], ...], width: int) -> None:
        padded = [(-1,) * (width - len(ids)) + ids for ids in spellings]
        self._ids = torch.tensor(padded)  # [A, width]
        self._any = self._ids < 0
        self._length = torch.tensor([len(ids) for ids in spellings])  # [A]

    def match(self, recent: Tensor, room: Tensor) -> Tensor:  # [B, width], [B] -> [B]
        """Length of the longest spelling that ends here within ``room`` ids, or 0."""
        same = ((recent[:, None] == self._ids) | self._any).all(-1)
        return ((same & (self._length <= room[:, None])) * self._length).amax(1)


def _kinds(delimiters: Delimiters, boundary: Tensor) -> Tensor:  # bool [V] -> uint8 [V]
    spelled = delimiters.begins + delimiters.ends
    if (largest := max(map(max, spelled))) >= len(boundary):
        raise ValueError(
            f"summary delimiter id {largest} lies outside the vocabulary of {len(boundary)} tokens"
        )
    kind = torch.full((len(boundary),), _TEXT, dtype=torch.uint8)
    kind[boundary.cpu()] |= _BOUNDARY
    kind[list(delimiters.blank)] &= ~_TEXT & 0xFF
    kind[list(delimiters.abort)] |= _ABORT
    kind[[ids[-1] for ids in delimiters.begins]] |= _BEGIN
    kind[[ids[-1] for ids in delimiters.ends]] |= _END
    return kind
