"""Reasoning with summaries: the delimiters, and the plain parser that defines their meaning.

A model that reasons with summaries writes ``paragraph <begin> summary <end> paragraph ...``.
``parse`` cuts a list of generated ids into such segments. It is the reference for the streaming
``ThoughtTracker`` and good enough, as it stands, for evaluating what was generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zoomkv.spans.boundaries import blank_ids

BEGIN_OF_SUMMARY = "<|begin_of_summary|>"
END_OF_SUMMARY = "<|end_of_summary|>"

BEGIN_TEXT = "<summary>"
END_TEXT = "</summary>"

SUMMARY_INSTRUCTION = (
    "Think step by step, in paragraphs. Right after each paragraph write one short summary of it "
    f"on a line of its own, between {BEGIN_TEXT} and {END_TEXT}. Keep every result, name and "
    "number in the summary that later steps need. Then go on with the next paragraph. "
    "Put no summary into the final answer."
)
"""System prompt for a model that was not trained to summarise its thoughts."""

SUMMARY_CAP = 256
"""Longest summary, in tokens between its delimiters; a longer one is taken for plain text."""

# What an id sequence of a textual delimiter may merge with, on either side.
_NEIGHBOURS = ("", *"a1 \n.,:;!?)(][}{*`'\"<>$-/\\", "\n\n", " a", " <", ".\n", ".\n\n")
_ABORTING_TOKENS = ("</think>", "<|end_of_thought|>")


@dataclass(frozen=True)
class Delimiters:
    """Token-id sequences that begin and end a summary; text that merely looks alike is none.

    ``blank`` and ``abort`` may stay empty: then no token counts as white space, and only the
    summary cap gives up an unclosed summary.
    """

    begin: tuple[int, ...]
    """Ids of the opening delimiter: one special token, or the ids of a textual one."""
    end: tuple[int, ...]
    """Ids of the closing delimiter."""
    other_begins: tuple[tuple[int, ...], ...] = ()
    """Further spellings of ``begin``: BPE merges a textual delimiter with its neighbours."""
    other_ends: tuple[tuple[int, ...], ...] = ()
    """Further spellings of ``end``."""
    blank: tuple[int, ...] = ()
    """Ids of tokens that are only white space."""
    abort: tuple[int, ...] = ()
    """Ids that break off an unfinished summary: end of sequence, end of thought."""

    def __post_init__(self) -> None:
        if not all(self.begins) or not all(self.ends):
            raise ValueError("a summary delimiter needs at least one token id")
        if both := set(self.begins) & set(self.ends):
            raise ValueError(f"token ids {sorted(both)} would both begin and end a summary")

    @property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """All spellings of the opening delimiter."""
        return (self.begin, *self.other_begins)

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """All spellings of the closing delimiter."""
        return (self.end, *self.other_ends)

    @classmethod
    def special(cls, tokenizer: Any) -> "Delimiters":
        """Delimiters of a trained model: the two summary tokens of its vocabulary.

        Raises:
            ValueError: If the tokenizer lacks one of them.
        """
        vocabulary = tokenizer.get_vocab()
        for token in (BEGIN_OF_SUMMARY, END_OF_SUMMARY):
            if token not in vocabulary:
                raise ValueError(
                    f"the tokenizer has no token {token}: "
                    "load a checkpoint trained with summaries, or use textual delimiters"
                )
        return cls(
            begin=(vocabulary[BEGIN_OF_SUMMARY],),
            end=(vocabulary[END_OF_SUMMARY],),
            blank=blank_ids(tokenizer),
            abort=_aborting_ids(tokenizer),
        )

    @classmethod
    def textual(cls, tokenizer: Any, begin: str = BEGIN_TEXT, end: str = END_TEXT) -> "Delimiters":
        """Delimiters of a model that is only prompted to summarise (``SUMMARY_INSTRUCTION``).

        Args:
            tokenizer: A fast tokenizer (it must give offsets).
            begin: Text that opens a summary.
            end: Text that closes it.
        """
        begin_ids, *other_begins = _spellings(tokenizer, begin)
        end_ids, *other_ends = _spellings(tokenizer, end)
        return cls(
            begin=begin_ids,
            end=end_ids,
            other_begins=tuple(other_begins),
            other_ends=tuple(other_ends),
            blank=blank_ids(tokenizer),
            abort=_aborting_ids(tokenizer),
        )


@dataclass(frozen=True)
class Segment:
    """One paragraph and its summary, as half-open ranges of token positions.

    Segments tile the text: each starts where the one before ends. The last one may be open.
    """

    start: int
    """First token of the paragraph R_i, which ends at ``summary_start``."""
    summary_start: int
    """First token of the summary S_i, its opening delimiter included."""
    interior_start: int
    """First token between the delimiters."""
    interior_end: int
    """First token of the closing delimiter."""
    end: int
    """One past the closing delimiter."""
    closed: bool = True
    """False for the text after the last summary. Its ``summary_start`` is then where an
    unfinished summary begins, or ``end`` when none does."""


def parse(
    ids: Sequence[int], delimiters: Delimiters, summary_cap: int = SUMMARY_CAP
) -> list[Segment]:
    """Cuts generated token ids into paragraphs with their summaries (ZoomR, section 3.2).

    No malformed text raises or loses a token:

    * a second opening inside a summary, and a closing outside one, are plain text;
    * a summary that is broken off (an ``abort`` id, or more than ``summary_cap`` tokens) belongs
      to the paragraph that is being written;
    * so does a summary that says nothing, with both delimiters; the paragraph goes on;
    * a paragraph of white space only is empty, and its white space goes with its summary.

    Args:
        ids: Generated ids only; a prompt never delimits.
        delimiters: What begins and ends a summary.
        summary_cap: Longest summary, in tokens.

    Returns:
        Segments that tile ``[0, len(ids))``, in order; at most the last is not ``closed``.
    """
    segments: list[Segment] = []
    blank, abort = set(delimiters.blank), set(delimiters.abort)
    patience = summary_cap + max(map(len, delimiters.ends)) - 1
    start = 0  # of the open segment
    fence = 0  # no delimiter may begin before it: those ids have been used up
    opened: tuple[int, int] | None = None  # summary_start and interior_start, inside a summary

    for position, token in enumerate(ids):
        seen = ids[fence : position + 1]
        if opened is None:
            if length := _longest_suffix(seen, delimiters.begins):
                fence = position + 1
                opened = (fence - length, fence)
            continue
        summary_start, interior_start = opened
        if token in abort:
            opened, fence = None, position + 1
        elif length := _longest_suffix(seen, delimiters.ends):
            opened, fence = None, position + 1
            interior_end = fence - length
            if blank.issuperset(ids[interior_start:interior_end]):
                continue
            if blank.issuperset(ids[start:summary_start]):
                summary_start = start
            segments.append(Segment(start, summary_start, interior_start, interior_end, fence))
            start = fence
        elif position >= interior_start + patience:
            opened, fence = None, position + 1

    if start < (total := len(ids)):
        unfinished = opened[0] if opened else total
        segments.append(Segment(start, unfinished, total, total, total, closed=False))
    return segments


def _longest_suffix(seen: Sequence[int], spellings: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest spelling that ``seen`` ends with, or 0."""
    return max(
        (len(s) for s in spellings if len(s) <= len(seen) and tuple(seen[-len(s) :]) == s),
        default=0,
    )


def _spellings(tokenizer: Any, text: str) -> list[tuple[int, ...]]:
    """Every id sequence that covers ``text`` between common neighbours; the plain one first."""
    contexts = [(before, after) for before in _NEIGHBOURS for after in _NEIGHBOURS]
    encoded = tokenizer(
        [before + text + after for before, after in contexts],
        add_special_tokens=False,
        return_offsets_mapping=True,
    )
    found: dict[tuple[int, ...], None] = {}
    for (before, _), ids, offsets in zip(
        contexts, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        first, last = len(before), len(before) + len(text)
        covering = (i for i, (a, b) in zip(ids, offsets, strict=True) if a < last and b > first)
        found[tuple(covering)] = None
    return list(found)


def _aborting_ids(tokenizer: Any) -> tuple[int, ...]:
    vocabulary = tokenizer.get_vocab()
    ids = {vocabulary[token] for token in _ABORTING_TOKENS if token in vocabulary}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
