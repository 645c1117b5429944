"""A task and answers that need no model, for tests of what goes on around them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from zoomkv.caches.full import FullCache
from zoomkv.caches.streaming_llm import StreamingLLMCache
from zoomkv.evaluation.answering import Reply
from zoomkv.evaluation.tasks.base import Mark, Question


class EchoTask:
    """Short questions; every third answer is right, and some can't be read.

    Args:
        words: Longest answer.
    """

    def __init__(self, words: int = 4) -> None:
        self.words = words

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """See ``Task``."""
        return [
            Question(
                id=f"echo-{seed}-{length}-{at}",
                prompt="Begin in order. " * (1 + (at * 7 + seed) % 5) + "\nWhat is the total?",
                reference=at,
                max_new_tokens=self.words,
                asked="What is the total?",
                length=length,
                depth=at / n,
            )
            for at in range(n)
        ]

    def mark(self, question: Question, text: str) -> Mark:
        """See ``Task``."""
        right = len(text) % 3 == 0
        return Mark(float(right), right, "e" in text, {"letters": len(text)})


def fake_answer(
    generator: Any,
    parts: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: Any,
    recording: Any = None,
) -> list[Reply]:
    """Replies that depend on policy, options, prompts and who else is in the batch."""
    replies = []
    for row in range(len(parts[0])):
        prompt = [list(part[row]) for part in parts]
        seed = repr((generator.policy, generator.options, prompt, len(parts[0])))
        drawn = random.Random(seed)
        text = "".join(drawn.choices("abcdeé \n", k=drawn.randint(0, 9)))
        held = drawn.random() * 1000
        replies.append(
            Reply(
                text=text,
                ids=list(range(1 + len(text))),
                finished=drawn.random() < 0.5,
                prompt_tokens=sum(map(len, prompt)),
                device_bytes_mean=held / 3,
                device_bytes_peak=held,
                host_bytes=held / 7,
                bytes_to_device=0.0,
                bytes_to_host=0.0,
                full_bytes=1000.0,
                agreeability=None,
                seconds=0.5,
            )
        )
    return replies


class IdleCache(FullCache):
    """Has a budget and never looks at it."""

    name = "idle"

    def __init__(self, model: Any, budget: int | float = 0.1) -> None:
        super().__init__(model)


class GreedyCache(StreamingLLMCache):
    """Never keeps more than a few rows, whatever its budget."""

    name = "greedy"

    def __init__(self, model: Any, budget: int | float = 0.1) -> None:
        super().__init__(model, budget=16)


class NeedyCache(FullCache):
    """Has an option without a default."""

    name = "needy"

    def __init__(self, model: Any, width: int) -> None:
        super().__init__(model)
