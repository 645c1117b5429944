"""Word problems in a row, of which two results are needed again at the end."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from zoomkv.data.fitted import largest
from zoomkv.data.word_problems import score_word_problem, word_problem
from zoomkv.evaluation.tasks.base import Mark, Question
from zoomkv.evaluation.tasks.worked import worked_tokens

_MOST = 500  # problems that are tried to fill a length


class WordProblemsTask:
    """Solves GSM-Symbolic's problems one after the other, then adds or subtracts two results.

    Args:
        problems: Fewest and most problems in a row, where no length is given; with one there are as
            many as fit.
        max_new_tokens: Longest answer; by default half as long again as the working that a model is
            trained on.

    Raises:
        ValueError: ``reasoning-gym``, which draws the problems, is not installed, or a number is
            out of range.
    """

    def __init__(
        self, problems: tuple[int, int] = (3, 8), max_new_tokens: int | None = None
    ) -> None:
        if find_spec("reasoning_gym") is None:
            raise ValueError("the word problems come from reasoning-gym: install zoomkv[data]")
        low, high = problems
        if not 2 <= low <= high:
            raise ValueError(f"problems={problems}: choose 2 <= fewest <= most")
        self.problems, self.max_new_tokens = (low, high), max_new_tokens

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """See ``Task``. They are those of ``data.word_problems`` where no length is given.

        Raises:
            ValueError: The length is too short for two problems, or takes more than 500.
        """
        return [self._question(seed * 1_000_000 + at, length, count) for at in range(n)]

    def mark(self, question: Question, text: str) -> Mark:
        """Right, or not. ``recalled``: what the text's own working says, be that right or wrong."""
        score = score_word_problem(question.prompt, question.reference, text)
        return Mark(
            score=float(score.right),
            right=score.right,
            extracted=score.extracted,
            about={"recalled": score.recalled},
        )

    def _question(self, number: int, length: int | None, count: Callable[[str], int]) -> Question:
        problems = self.problems
        if length is not None:
            size = largest(
                lambda size: count(word_problem(number, (size, size)).problem),
                length,
                2,
                _MOST,
                "word problems",
            )
            if size == _MOST:
                raise ValueError(
                    f"word problems length={length}: {_MOST} problems, the most that are tried, "
                    "don't fill it"
                )
            problems = (size, size)
        trace = word_problem(number, problems)
        return Question(
            id=str(trace.id),
            prompt=trace.problem,
            reference=trace.answer,
            max_new_tokens=self.max_new_tokens or worked_tokens(trace, count),
            asked=trace.problem.rpartition("\n")[2],
            length=length,
            about={"problems": len(trace.segments)},
        )
