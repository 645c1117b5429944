"""Where training traces come from: procedures and files behind one small interface."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from zoomkv.data.ledger import LedgerShape, ledgers, score_ledger
from zoomkv.data.traces import ReadReport, Trace, read_traces
from zoomkv.data.word_problems import score_word_problem, word_problems


class TraceSource(ABC):
    """Gives the same traces, in the same order, each time that it is asked."""

    @abstractmethod
    def traces(self, count_tokens: Callable[[str], int]) -> Iterator[Trace]:
        """The traces; ``count_tokens`` measures paragraphs where a thought must still be cut."""

    def is_right(self, trace: Trace, text: str) -> bool | None:
        """Whether a generated text gives the trace's answer; ``None`` if it has none to compare.

        Looked at is the line after the last ``Answer:``, or else the last ``\\boxed{...}``.
        """
        if trace.answer is None:
            return None
        _, mark, given = text.rpartition("Answer:")
        if not mark:
            _, mark, given = text.rpartition("\\boxed{")
            given = given.partition("}")[0]
        lines = given.strip().splitlines() if mark else []
        return bool(lines) and lines[0].strip().rstrip(".") == trace.answer.strip()


class LedgerSource(TraceSource):
    """Ledgers: see ``zoomkv.data.ledger``.

    Args:
        count: How many.
        seed: Sources with different seeds never share a ledger.
        steps: Fewest and most steps, 3 to 60.
        operations: Operations in each step.
        asked: The operation whose total is asked for.
        max_operand: Largest number added or subtracted.
        totals: Smallest and largest running total.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        steps: tuple[int, int] = (3, 24),
        operations: int = 4,
        asked: int = 3,
        max_operand: int = 9,
        totals: tuple[int, int] = (10, 99),
    ) -> None:
        self.count, self.seed = count, seed
        self.shape = LedgerShape(steps, operations, asked, max_operand, totals)

    def traces(self, count_tokens: Callable[[str], int]) -> Iterator[Trace]:
        return ledgers(self.count, self.seed, self.shape)

    def is_right(self, trace: Trace, text: str) -> bool:
        """See ``TraceSource``; the answer's two numbers count, not how they are spaced."""
        assert trace.answer is not None
        return score_ledger(trace.problem, trace.answer, text).right


class WordProblemSource(TraceSource):
    """Word problems in a row: see ``zoomkv.data.word_problems``.

    Args:
        count: How many traces.
        seed: Sources with different seeds never share a trace.
        problems: Fewest and most problems in one trace.
    """

    def __init__(self, count: int, seed: int = 0, problems: tuple[int, int] = (3, 8)) -> None:
        self.count, self.seed, self.problems = count, seed, (problems[0], problems[1])

    def traces(self, count_tokens: Callable[[str], int]) -> Iterator[Trace]:
        return word_problems(self.count, self.seed, self.problems)

    def is_right(self, trace: Trace, text: str) -> bool:
        """See ``TraceSource``; the last number after an ``Answer:`` counts."""
        assert trace.answer is not None
        return score_word_problem(trace.problem, trace.answer, text).right


class FileSource(TraceSource):
    """Traces from JSONL or Parquet files, a folder of them, or a data set on the hub.

    Args:
        path: File, folder or hub id; our own layout or that of Bespoke-Stratos.
        skip_bad: Leave out (and count) rows that are no trace, instead of stopping at the first.
        first: Where to begin, counted from 0: validation may take what training leaves out.
        limit: At most so many traces.
    """

    def __init__(
        self, path: str, skip_bad: bool = False, first: int = 0, limit: int | None = None
    ) -> None:
        self.path, self.skip_bad, self.first, self.limit = path, skip_bad, first, limit

    def traces(self, count_tokens: Callable[[str], int]) -> Iterator[Trace]:
        report = ReadReport()
        on_bad: Literal["skip", "error"] = "skip" if self.skip_bad else "error"
        found = read_traces(self.path, on_bad, report=report, count_tokens=count_tokens)
        yield from islice(
            found, self.first, None if self.limit is None else self.first + self.limit
        )
        if report.dropped:
            print(f"{self.path}: {report}", file=sys.stderr)
