"""Tasks that are marked by what an answer contains: RULER's (arXiv 2404.06654)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from zoomkv.data.fitted import FittedPrompt
from zoomkv.evaluation.needle import string_match
from zoomkv.evaluation.tasks.base import Mark, Question


class StringMatchTask(ABC):
    """A question about a long text; the score is the share of its answers that the text holds."""

    name: ClassVar[str]
    max_new_tokens: ClassVar[int]
    """As many as RULER generates."""

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """See ``Task``. Numbered on from ``seed * 1_000_000`` so that seeds don't overlap.

        Raises:
            ValueError: No length, or one that is too short for the task.
        """
        if length is None:
            raise ValueError(f"task '{self.name}' needs a length: give one in tokens")
        return [self.question(at, seed * 1_000_000 + at, length, count) for at in range(n)]

    @abstractmethod
    def question(
        self, place: int, number: int, length: int, count: Callable[[str], int]
    ) -> Question:
        """One question.

        Args:
            place: In the list, from 0.
            number: Seeds it.
            length: As for ``questions``.
            count: As for ``questions``.
        """

    def mark(self, question: Question, text: str) -> Mark:
        """RULER's score: the share of the answers that stand in the text, whatever their case."""
        found = string_match(text, question.reference)
        return Mark(score=found, right=found == 1, extracted=bool(text.strip()))

    def asking(self, prompt: FittedPrompt, length: int, about: Mapping[str, Any]) -> Question:
        """A prompt as a question."""
        return Question(
            id=prompt.id,
            prompt=prompt.prompt,
            reference=list(prompt.answers),
            max_new_tokens=self.max_new_tokens,
            opening=prompt.opening,
            asked=prompt.question,
            length=length,
            about=about,
        )
