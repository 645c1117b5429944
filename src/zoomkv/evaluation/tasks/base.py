"""What a task is: questions, and how an answer is marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Question:
    """One prompt, and what its answer is marked by."""

    id: str
    """The same for the same task, seed and place in the list."""
    prompt: str
    """The user's turn."""
    reference: Any
    """What ``mark`` compares with, as JSON can hold it."""
    max_new_tokens: int
    """Longest answer."""
    opening: str = ""
    """Begins the answer, in the model's place."""
    asked: str = ""
    """The prompt's last line, where the prompt is a text and then a question about it. Such a
    prompt can be compressed before the question comes (protocol ``unknown``)."""
    length: int | None = None
    """Tokens that were aimed at."""
    depth: float | None = None
    """Where what is asked for stands: 0 at the beginning, 1 at the end."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a report may sort by, as JSON can hold it."""


@dataclass(frozen=True)
class Mark:
    """What an answer is worth."""

    score: float
    """From 0 to 1; the task's own measure."""
    right: bool
    """Wholly right."""
    extracted: bool
    """An answer could be read out of the text."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further figures by name, such as ``recalled``."""


class Task(Protocol):
    """A source of questions. Options are arguments of its ``__init__``, with defaults."""

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """``n`` questions; the same arguments give the same ones.

        Args:
            n: How many.
            length: Tokens of each rendered prompt, at most; ``None`` where the task has no length.
            seed: Of the choice.
            count: Tokens of a user's turn, rendered as the model gets it.

        Raises:
            ValueError: The length is too short for the task.
        """
        ...

    def mark(self, question: Question, text: str) -> Mark:
        """Marks what was generated; the opening is not in it."""
        ...


@runtime_checkable
class Measure(Protocol):
    """A source of questions whose answers are known, to be fed through a policy's cache.

    Nothing is generated under the policy, so there is no text to mark. Whoever runs one asks for
    ``questions``, has each ``prepared`` once, and then measures every policy on what came out.
    """

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """As ``Task.questions``."""
        ...

    def prepared(self, question: Question, generator: Any) -> Question:
        """The same question, whose ``reference`` holds token ids by name: ``prompt``, ``answer``.

        Args:
            question: One of ``questions``.
            generator: A ``Generator`` of policy ``full``.
        """
        ...

    def measure(
        self,
        question: Question,
        model: Any,
        cache: Any,
        watch: Callable[[int, int], None] | None = None,
    ) -> Mark:
        """What comes of feeding the answer, token by token, through a cache.

        Args:
            question: Prepared.
            model: Attached.
            cache: A policy's, new and empty; its footprint may be read in ``watch`` and afterwards.
            watch: Called after each step with the number of steps done and of all.
        """
        ...
