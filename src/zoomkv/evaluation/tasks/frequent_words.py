"""Finding the made-up words that come most often (RULER, arXiv 2404.06654, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable

from zoomkv.data.word_extraction import FrequentShape, frequent_words
from zoomkv.evaluation.tasks.base import Question
from zoomkv.evaluation.tasks.string_match import StringMatchTask


class FrequentWordsTask(StringMatchTask):
    """Names the three most frequent words of a text whose words are distributed as Zeta.

    Args:
        alpha: Of the distribution; the larger, the more the frequent words stand out.
        vocabulary: Different words; by default RULER's one for each 50 tokens of the length.
        letters: Of each word.

    Raises:
        ValueError: A number out of range.
    """

    name = "frequent_words"
    max_new_tokens = 50

    def __init__(self, alpha: float = 2.0, vocabulary: int | None = None, letters: int = 6) -> None:
        self.alpha, self.vocabulary, self.letters = alpha, vocabulary, letters
        self._shape(1)

    def question(
        self, place: int, number: int, length: int, count: Callable[[str], int]
    ) -> Question:
        """See ``StringMatchTask``."""
        made = frequent_words(number, self._shape(length), count)
        return self.asking(made, length, {"alpha": self.alpha})

    def _shape(self, length: int) -> FrequentShape:
        return FrequentShape(length, self.alpha, self.vocabulary, self.letters)
