"""Words of which some come more often: RULER's aggregation (arXiv 2404.06654, section 3.3).

Common words: a numbered list in which ten words come more often than all others. Frequent words: a
text of made-up words whose numbers fall off as a Zeta distribution's, the first being dots.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from zoomkv.data.fitted import FittedPrompt, largest
from zoomkv.data.long_text import CountTokens
from zoomkv.data.needles import haystack
from zoomkv.data.plain_words import WORDS
from zoomkv.data.segment import estimate_tokens

_COMMON_TASK = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_COMMON_QUESTION = "Question: What are the {count} most common words in the above list?"
_COMMON_OPENING = "Answer: The top {count} words that appear most often in the list are:"
_FREQUENT_TASK = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
)
# Four dots here and three in the text are RULER's.
_FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
_FREQUENT_OPENING = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
_NOISE = "..."
_LONG = 4096  # from here on RULER repeats words more often

# Lower case throughout: neither names nor what is a part of an identifier or of a path.
_WORD = re.compile(r"(?<![\w.'/-])[a-z]{3,12}(?![\w'(/=-])")


@cache
def words(source: str = "plain") -> tuple[str, ...]:
    """Different words, sorted, none of which is a part of another.

    RULER takes the nouns, adjectives and verbs of the package ``wonderwords``.

    Args:
        source: ``plain``, 2,300 words that stand in this package; or any that ``haystack`` reads,
            whose words of three to twelve lower-case letters are taken.

    Raises:
        ValueError: No such file, one that is no text, no book, or noise.
    """
    if source == "plain":
        return WORDS
    if source in ("noise", "needles"):
        raise ValueError(f"words={source!r}: that has no words to choose from; name a text")
    found = sorted(set(_WORD.findall(haystack(source).text)))
    joined = " ".join(found)
    return tuple(word for word in found if joined.count(word) == 1)


@dataclass(frozen=True)
class CommonShape:
    """What a list with common words looks like."""

    length: int
    """Tokens of the whole prompt, at most."""
    answers: int = 10
    """Common words."""
    repeats: tuple[int, int] | None = None
    """How often a common and any other word comes; by default RULER's 30 and 3, or 6 and 1 in
    prompts below 4,096 tokens."""
    example: bool = True
    """A list with its answer stands before the task, as in RULER: 190 entries, or 40 in prompts
    below 4,096 tokens."""

    def __post_init__(self) -> None:
        if self.answers < 1:
            raise ValueError(f"common words answers={self.answers}: choose at least 1")
        common, other = self.often
        if not common > other >= 1:
            raise ValueError(
                f"common words repeats={self.repeats}: common words must come more often than the "
                "others, and those once at least"
            )

    @property
    def often(self) -> tuple[int, int]:
        """``repeats``, settled."""
        return self.repeats or ((30, 3) if self.length >= _LONG else (6, 1))


def common_words(
    seed: int,
    shape: CommonShape,
    among: Sequence[str] = WORDS,
    count_tokens: CountTokens = estimate_tokens,
) -> FittedPrompt:
    """One numbered list; its answers are the words that come most often.

    Args:
        seed: The same seed, shape, words and counting give the same prompt.
        shape: Length and numbers.
        among: What the words are drawn from; see ``words``.
        count_tokens: Tokens of a text. Count the text inside a chat template to have the template
            within ``shape.length``.

    Raises:
        ValueError: The length is too short, or there are too few words to fill it.
    """
    rng = random.Random(f"common words {seed}")
    question = _COMMON_QUESTION.format(count=shape.answers)
    opening = _COMMON_OPENING.format(count=shape.answers)
    # RULER's example: 10 common words and 30 others, or 10 others in a short prompt.
    others, often = (30, (10, 3)) if shape.length >= _LONG else (10, (3, 1))
    if len(among) < shape.answers + others:
        raise ValueError(f"common words: {len(among)} different words are too few to draw from")
    example = ""
    if shape.example:
        shown = rng.sample(among, shape.answers + others)
        answer = _numbered(shown[: shape.answers])
        entries = _numbered(_repeated(shown, shape.answers, often, seed))
        example = f"{_COMMON_TASK}{entries}\n{question} {opening} {answer}\n"
    drawn = rng.sample(among, len(among))

    def context(size: int) -> str:
        entries = _repeated(drawn[:size], shape.answers, shape.often, seed)
        return f"{example}{_COMMON_TASK}{_numbered(entries)}"

    def tokens(size: int) -> int:
        return count_tokens(f"{context(size)}\n{question}")

    size = largest(tokens, shape.length, shape.answers + 1, len(drawn), "common words")
    if size == len(drawn):
        raise ValueError(
            f"common words length={shape.length}: all {len(drawn)} words together fill "
            f"{tokens(size)} tokens; name a text with more of them"
        )
    return FittedPrompt(
        context=context(size),
        question=question,
        opening=opening,
        answers=tuple(drawn[: shape.answers]),
        length=tokens(size),
        id=f"common-words-{seed}",
    )


def common_word_prompts(
    count: int,
    shape: CommonShape,
    among: Sequence[str] = WORDS,
    count_tokens: CountTokens = estimate_tokens,
    seed: int = 0,
) -> Iterator[FittedPrompt]:
    """``count`` prompts, numbered on from ``seed * 1_000_000`` so that seeds don't overlap."""
    for index in range(count):
        yield common_words(seed * 1_000_000 + index, shape, among, count_tokens)


@dataclass(frozen=True)
class FrequentShape:
    """What a text of made-up words looks like."""

    length: int
    """Tokens of the whole prompt, at most."""
    alpha: float = 2.0
    """Of the Zeta distribution; the larger, the more the frequent words stand out."""
    vocabulary: int | None = None
    """Different words, dots included; by default RULER's one for each 50 tokens of the length."""
    letters: int = 6
    """Of each word."""

    def __post_init__(self) -> None:
        if not 1.1 <= self.alpha <= 5:
            raise ValueError(f"frequent words alpha={self.alpha}: choose from 1.1 to 5")
        if self.vocabulary is not None and self.vocabulary < 5:
            raise ValueError(f"frequent words vocabulary={self.vocabulary}: choose at least 5")
        if not 4 <= self.letters <= 20:
            raise ValueError(f"frequent words letters={self.letters}: choose from 4 to 20")


def frequent_words(
    seed: int, shape: FrequentShape, count_tokens: CountTokens = estimate_tokens
) -> FittedPrompt:
    """One text; its answers are the three words that come most often, after the dots.

    Of ``n`` draws word ``k`` comes ``floor(n * k**-alpha / zeta(alpha))`` times, the number that
    is expected, as in RULER's code. Prompts are never so short that the third and fourth tie.

    Args:
        seed: The same seed, shape and counting give the same prompt.
        shape: Length and distribution.
        count_tokens: Tokens of a text. Count the text inside a chat template to have the template
            within ``shape.length``.

    Raises:
        ValueError: The length is too short to tell the third word from the fourth.
    """
    rng = random.Random(f"frequent words {seed}")
    size = shape.vocabulary or max(5, shape.length // 50)
    coded: dict[str, None] = {}
    while len(coded) < size - 1:
        coded["".join(rng.choices(string.ascii_lowercase, k=shape.letters))] = None
    vocabulary = [_NOISE, *coded]
    zeta = float(torch.special.zeta(torch.tensor(shape.alpha, dtype=torch.float64), 1.0))
    share = torch.arange(1, size + 1, dtype=torch.float64) ** -shape.alpha / zeta  # [vocabulary]

    def context(draws: int) -> str:
        counts = (draws * share).long().tolist()
        text = [word for word, n in zip(vocabulary, counts, strict=True) for _ in range(n)]
        random.Random(f"frequent words {seed}").shuffle(text)
        return _FREQUENT_TASK + " ".join(text)

    def tokens(draws: int) -> int:
        return count_tokens(f"{context(draws)}\n{_FREQUENT_QUESTION}")

    # From here on the expected numbers of the third word and of the fourth are 1 apart.
    least = math.ceil(1 / float(share[3] - share[4]))
    # Dots alone are 1 / zeta of the draws.
    most = max(least, math.ceil(shape.length * zeta))
    draws = largest(tokens, shape.length, least, most, "frequent words")
    return FittedPrompt(
        context=context(draws),
        question=_FREQUENT_QUESTION,
        opening=_FREQUENT_OPENING,
        answers=tuple(vocabulary[1:4]),
        length=tokens(draws),
        id=f"frequent-words-{seed}",
    )


def frequent_word_prompts(
    count: int, shape: FrequentShape, count_tokens: CountTokens = estimate_tokens, seed: int = 0
) -> Iterator[FittedPrompt]:
    """``count`` prompts, numbered on from ``seed * 1_000_000`` so that seeds don't overlap."""
    for index in range(count):
        yield frequent_words(seed * 1_000_000 + index, shape, count_tokens)


def _repeated(drawn: Sequence[str], common: int, often: tuple[int, int], seed: int) -> list[str]:
    """The first ``common`` words and the others, as often as they come, shuffled."""
    entries = [*list(drawn[:common]) * often[0], *list(drawn[common:]) * often[1]]
    random.Random(f"shuffled {seed}").shuffle(entries)
    return entries


def _numbered(entries: Sequence[str]) -> str:
    return " ".join(f"{number}. {entry}" for number, entry in enumerate(entries, start=1))
