"""Ledgers: long additions that need details of their own working again at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zoomkv.data.fitted import largest
from zoomkv.data.ledger import LedgerShape, ledger, score_ledger
from zoomkv.evaluation.tasks.base import Mark, Question
from zoomkv.evaluation.tasks.worked import worked_tokens

_STEPS = (3, 60)  # what a ledger can have


class LedgerTask:
    """Works a ledger and looks up what it came to on the way.

    With a length, a ledger has as many steps as fit. There are names for 60 at most, which is some
    800 tokens at four operations a step; a longer prompt needs more operations.

    Args:
        steps: Fewest and most steps, where no length is given.
        operations: In each step.
        asked: The operation whose total is asked for; never the last.
        max_new_tokens: Longest answer; by default half as long again as the working that a model is
            trained on.

    Raises:
        ValueError: A number out of range.
    """

    def __init__(
        self,
        steps: tuple[int, int] = (3, 24),
        operations: int = 4,
        asked: int = 3,
        max_new_tokens: int | None = None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self._shape = LedgerShape((steps[0], steps[1]), operations, asked)

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """See ``Task``. The ledgers are those of ``ledgers`` where no length is given.

        Raises:
            ValueError: The length is too short for three steps, or takes more than 60.
        """
        return [self._question(seed * 1_000_000 + at, length, count) for at in range(n)]

    def mark(self, question: Question, text: str) -> Mark:
        """Right, or not. ``recalled``: what the text's own working says, be that right or wrong."""
        score = score_ledger(question.prompt, question.reference, text)
        return Mark(
            score=float(score.right),
            right=score.right,
            extracted=score.extracted,
            about={"recalled": score.recalled, "arithmetic": score.arithmetic},
        )

    def _question(self, number: int, length: int | None, count: Callable[[str], int]) -> Question:
        shape = self._shape
        if length is not None:
            steps = largest(
                lambda steps: count(ledger(number, replace(shape, steps=(steps, steps))).problem),
                length,
                *_STEPS,
                "ledger",
            )
            if steps == _STEPS[1]:
                raise ValueError(
                    f"ledger length={length}: {steps} steps, the most there are, don't fill it; "
                    f"choose more operations than {shape.operations}"
                )
            shape = replace(shape, steps=(steps, steps))
        trace = ledger(number, shape)
        return Question(
            id=str(trace.id),
            prompt=trace.problem,
            reference=trace.answer,
            max_new_tokens=self.max_new_tokens or worked_tokens(trace, count),
            asked=trace.problem.rpartition("\n")[2],
            length=length,
            about={"steps": len(trace.segments), "needed": trace.needed},
        )
