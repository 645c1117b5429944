"""How near a policy stays to the full cache, token by token, along texts that are given."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from zoomkv.caches.base import PolicyCache
from zoomkv.data.fitted import largest
from zoomkv.data.needles import haystack
from zoomkv.evaluation.fidelity import fidelity, full_log_probs
from zoomkv.evaluation.tasks.base import Mark, Measure, Question, Task
from zoomkv.evaluation.tasks.registry import names, task
from zoomkv.generation import Generator


class FidelityTask:
    """KL(full || policy) and equal likeliest tokens along each answer.

    Two kinds of texts. Those of another task: its prompts as user turns, and what the full cache
    writes after them, greedily. And held-out text: windows of a haystack, as plain text without a
    chat template, whose beginning is the prompt and what follows the answer.

    Args:
        texts: The name of another task, with its default options; or ``book``, ``stdlib``, a text
            file or folder.
        tokens: Longest answer.
        width: Tokens that a point of the curve takes together.

    Raises:
        ValueError: No such task or text, or a number below 1.
    """

    def __init__(self, texts: str = "ledger", tokens: int = 256, width: int = 16) -> None:
        if min(tokens, width) < 1:
            raise ValueError(f"tokens={tokens}, width={width}: choose at least 1")
        if texts in ("fidelity", "noise", "needles"):
            raise ValueError(f"texts={texts!r}: choose another task, or a text")
        self.tokens, self.width = tokens, width
        self._said: tuple[
            Any, ...
        ] = ()  # by the full cache along the latest text, and what that is
        self._prompts: Task | None = None
        self._words: list[str] = []
        if texts in names():
            prompts = task(texts)
            if isinstance(prompts, Measure):
                raise ValueError(f"texts={texts!r}: that task has no prompts to answer")
            self._prompts = prompts
        else:
            self._words = " ".join(haystack(texts).sentences).split()

    def questions(
        self, n: int, length: int | None, seed: int, count: Callable[[str], int]
    ) -> list[Question]:
        """See ``Measure``. A held-out prompt is counted as a user's turn, though it is none.

        Raises:
            ValueError: A length that the texts can't have, or none where they need one.
        """
        if self._prompts is not None:
            asked = self._prompts.questions(n, length, seed, count)
            return [
                replace(each, id=f"fidelity-{each.id}", reference=None, opening="", asked="")
                for each in asked
            ]
        if length is None:
            raise ValueError("task 'fidelity' needs a length for held-out text: give one in tokens")
        return [self._window(seed * 1_000_000 + at, length, count) for at in range(n)]

    def prepared(self, question: Question, generator: Generator) -> Question:
        """See ``Measure``.

        Raises:
            ValueError: The generator is not of the full cache.
        """
        if self._prompts is None:
            ids, answer = self._cut(question, generator.tokenizer)
        elif generator.policy != "full":
            raise ValueError(
                f"fidelity: texts are written by policy 'full', not '{generator.policy}'"
            )
        else:
            ids = generator.tokenizer(
                generator.render(question.prompt), add_special_tokens=not generator.chat
            )["input_ids"]
            [written] = generator.generate(question.prompt, self.tokens)
            answer = written.ids
        return replace(
            question,
            reference={"prompt": list(ids), "answer": list(answer)},
            max_new_tokens=len(answer),
        )

    def measure(
        self,
        question: Question,
        model: Any,
        cache: PolicyCache,
        watch: Callable[[int, int], None] | None = None,
    ) -> Mark:
        """See ``Measure``. The score is the share of equal likeliest tokens.

        ``about`` holds ``kl`` (mean, in nats), ``top1`` and ``curve`` (see ``Fidelity.curve``).
        """
        prompts, answers = [question.reference["prompt"]], [question.reference["answer"]]
        reference = self._full(model, prompts, answers)
        # One text alone has no padding.
        found = fidelity(model, cache, prompts, answers, reference, 0, watch)
        means = found.summary()
        return Mark(
            score=means["top1"],
            right=means["top1"] == 1,
            extracted=True,
            about={
                "kl": means["kl"],
                "top1": means["top1"],
                "curve": found.curve(width=self.width),
            },
        )

    def _full(self, model: Any, prompts: list[Any], answers: list[Any]) -> list[Tensor]:
        """``full_log_probs``, once for all policies that read one text in turn."""
        about = (weakref.ref(model), prompts, answers)
        if self._said[:3] != about:
            self._said = (*about, full_log_probs(model, prompts, answers))
        return self._said[3]

    def _window(self, number: int, length: int, count: Callable[[str], int]) -> Question:
        # A word has a token at least, so prompt and answer have no more words than tokens.
        room = len(self._words) - length - self.tokens
        if room < 0:
            room = self._latest(length, count)
        start = random.Random(f"fidelity {number}").randint(0, room)

        def prompt(words: int) -> str:
            return " ".join(self._words[start : start + words])

        size = largest(lambda words: count(prompt(words)), length, 1, length, "fidelity")
        follows = self._words[start + size : start + size + self.tokens]
        return Question(
            id=f"fidelity-{number}",
            prompt=prompt(size),
            reference={"continuation": " ".join(follows)},
            max_new_tokens=self.tokens,
            length=length,
            about={"word": start},
        )

    def _latest(self, length: int, count: Callable[[str], int]) -> int:
        """The last word at which a prompt of a length may begin, if it takes most of the text."""
        end = len(self._words) - self.tokens  # where the answer begins, at the latest
        if end > 0:

            def before(words: int) -> int:
                return count(" ".join(self._words[end - words : end]))

            # One word more than fits, so that a prompt never reaches into the answer.
            room = end - largest(before, length, 1, end, "fidelity") - 1
            if room >= 0:
                return room
        raise ValueError(
            f"fidelity length={length}, tokens={self.tokens}: the text has only "
            f"{len(self._words)} words"
        )

    def _cut(self, question: Question, tokenizer: Any) -> tuple[list[int], list[int]]:
        """Prompt and answer; a token that is in both goes with the answer."""
        encoded = tokenizer(
            f"{question.prompt} {question.reference['continuation']}", return_offsets_mapping=True
        )
        ids, ends = encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]
        first = next(at for at, end in enumerate(ends) if end > len(question.prompt))
        return ids[:first], ids[first : first + self.tokens]
