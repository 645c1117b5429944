"""Finding the words of a list that come most often (RULER, arXiv 2404.06654, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable

from zoomkv.data.word_extraction import CommonShape, common_words
from zoomkv.data.word_extraction import words as word_list
from zoomkv.evaluation.tasks.base import Question
from zoomkv.evaluation.tasks.string_match import StringMatchTask


class CommonWordsTask(StringMatchTask):
    """Names the common words of a numbered list; the longer the list, the more others there are.

    Args:
        answers: Common words.
        repeats: How often a common and any other word comes; by default RULER's 30 and 3, or 6 and
            1 below 4,096 tokens.
        example: Put RULER's example before the task.
        words: What they are drawn from: ``plain``, 2,300 words that are enough for about 30,000
            tokens, or a haystack such as ``stdlib`` or a text file.

    Raises:
        ValueError: A number out of range, or no such text.
    """

    name = "common_words"
    max_new_tokens = 120

    def __init__(
        self,
        answers: int = 10,
        repeats: tuple[int, int] | None = None,
        example: bool = True,
        words: str = "plain",
    ) -> None:
        self.answers, self.example = answers, example
        self.repeats = None if repeats is None else (repeats[0], repeats[1])
        self._shape(1)
        self._words = word_list(words)

    def question(
        self, place: int, number: int, length: int, count: Callable[[str], int]
    ) -> Question:
        """See ``StringMatchTask``."""
        shape = self._shape(length)
        made = common_words(number, shape, self._words, count)
        return self.asking(made, length, {"repeats": list(shape.often)})

    def _shape(self, length: int) -> CommonShape:
        return CommonShape(length, self.answers, self.repeats, self.example)
