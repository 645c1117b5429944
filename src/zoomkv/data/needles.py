"""Needles in a haystack: facts hidden in a long text, and a question about them.

The formats are those of RULER (arXiv 2404.06654, section 3.1): a single needle, several keys of
which one is asked for, several values of one key, several keys that are all asked for.
"""

from __future__ import annotations

import random
import re
import sys
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import islice, product
from typing import Any, Literal, get_args

from zoomkv.data.fitted import largest
from zoomkv.data.ledger import NAMES
from zoomkv.data.long_text import (
    CountTokens,
    Document,
    Part,
    StdlibText,
    TextFiles,
    TextSource,
    book,
)
from zoomkv.data.segment import estimate_tokens

Kind = Literal["single", "multi-key", "multi-value", "multi-query"]
Form = Literal["words", "numbers", "uuids"]

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+")
_FEWEST_TOKENS = 10  # of a needle's sentence, however it is counted: it has as many words
_CUTS_TRIED = 24
_AROUND = 200  # characters before a cut that are counted with it
_FAR = 8  # a change of more than such a part of the sentences is counted with all of them
_ROUNDING = 2  # tokens by which parts of a text may count otherwise than the whole

# fmt: off
ADJECTIVES = (
    "amber", "ample", "azure", "bold", "brave", "brief", "bright", "brisk", "broad", "calm",
    "civil", "clean", "clear", "clever", "cool", "coral", "crisp", "curly", "deep", "dense",
    "dusty", "eager", "early", "fair", "famous", "fancy", "fierce", "firm", "fond", "fresh",
    "gentle", "giant", "glad", "golden", "grand", "grave", "great", "green", "happy", "hardy",
    "hollow", "honest", "humble", "jolly", "keen", "kind", "large", "level", "light", "lively",
    "local", "lofty", "loud", "loyal", "lucky", "mellow", "merry", "mild", "misty", "modest",
    "narrow", "neat", "noble", "odd", "olive", "pale", "patient", "plain", "polite", "prime",
    "proud", "pure", "quick", "quiet", "rapid", "rare", "regal", "rough", "round", "royal",
    "rustic", "scarlet", "serene", "sharp", "shiny", "silent", "simple", "sleek", "slim", "smooth",
    "solid", "steady", "stout", "sturdy", "subtle", "sunny", "swift", "tall", "tame", "tender",
    "tidy", "tiny", "urban", "vast", "velvet", "vivid", "warm", "wide", "wild", "wise", "witty",
    "young", "zesty",
)
# fmt: on
NOUNS = tuple(name for name in NAMES if name != "wind")  # "window" begins with it
"""With adjectives they make keys such as ``brave-fox``, none of which is a part of another."""


@dataclass(frozen=True)
class Haystack:
    """What needles are hidden among; it repeats where it is shorter than asked for."""

    sentences: tuple[str, ...]
    """Needles stand between them. None at all: the haystack is made of other needles."""
    joint: str = " "
    """What stands between sentences."""

    @cached_property
    def text(self) -> str:
        """All sentences, to look in for names that are taken."""
        return "\n".join(self.sentences)


NOISE = Haystack(
    ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",),
    "\n",
)
"""RULER's repeated noise, one line a sentence."""
NEEDLES = Haystack((), "\n")
"""Nothing but needles with other keys, as in RULER's hardest multi-key tasks."""


def haystack(source: str, part: Part = "evaluation") -> Haystack:
    """A haystack by name.

    Args:
        source: ``noise``, ``needles``, ``book`` and ``stdlib`` (see ``long_text``), or a text file
            or folder, whose files are strung together.
        part: Which part of the book.

    Raises:
        ValueError: No such file, one that is no text, or no book.
    """
    if source in ("noise", "needles"):
        return NOISE if source == "noise" else NEEDLES
    if source == "book":
        texts = [book(part)]
    elif source == "stdlib":
        documents = StdlibText().documents(estimate_tokens)
        # By paragraphs: tables and listings have no sentences to cut them at.
        texts = [each for document in documents for each in document["text"].split("\n\n")]
    else:
        texts = [document["text"] for document in TextFiles(source).documents(estimate_tokens)]
    # As RULER has it: line ends count as spaces.
    sentences = [" ".join(piece.split()) for text in texts for piece in _SENTENCE_END.split(text)]
    return Haystack(tuple(filter(None, sentences)))


@dataclass(frozen=True)
class NeedleShape:
    """What a needle in a haystack looks like."""

    length: int
    """Tokens of the whole prompt, context and question, met exactly."""
    kind: Kind = "single"
    count: int = 4
    """Needles that are hidden, where the kind has several."""
    keys: Form = "words"
    values: Form = "numbers"
    depths: tuple[float, ...] | None = None
    """Where the needles that are asked for stand, each in percent of the haystack's sentences; None
    draws them. Those that are not asked for stand anywhere."""

    def __post_init__(self) -> None:
        for name, known in (("kind", Kind), ("keys", Form), ("values", Form)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"needle {name}={getattr(self, name)!r}: choose one of "
                    f"{', '.join(get_args(known))}"
                )
        if not 2 <= self.count <= 100:
            raise ValueError(f"needle count={self.count}: choose from 2 to 100")
        if self.depths is not None and (
            len(self.depths) != self.asked or not all(0 <= depth <= 100 for depth in self.depths)
        ):
            raise ValueError(
                f"needle depths={self.depths}: give {self.asked} from 0 to 100, one for each "
                "needle that is asked for"
            )

    @property
    def hidden(self) -> int:
        """Needles in the text."""
        return 1 if self.kind == "single" else self.count

    @property
    def asked(self) -> int:
        """Needles that the question asks for."""
        return self.count if self.kind in ("multi-value", "multi-query") else 1


@dataclass(frozen=True)
class Needle:
    """A prompt in two parts, so that a question need not be known when the context is read."""

    context: str
    question: str
    opening: str
    """How RULER begins the answer in the model's place."""
    answers: tuple[str, ...]
    depths: tuple[float, ...]
    """Of the needles that are asked for, in percent, in the order of ``answers``."""
    kind: Kind
    length: int
    """Tokens of ``prompt``."""
    id: str

    @property
    def prompt(self) -> str:
        """Both parts as one text."""
        return f"{self.context}\n{self.question}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def needle(
    seed: int,
    shape: NeedleShape,
    haystack: Haystack = NOISE,
    count_tokens: CountTokens = estimate_tokens,
) -> Needle:
    """One prompt whose answers stand in its context, each once.

    Args:
        seed: The same seed, shape, haystack and counting give the same prompt.
        shape: Length, kind and depths.
        haystack: The text is taken from a drawn sentence on; the last one is cut to meet the
            length.
        count_tokens: Tokens of a text. Count the text inside a chat template to have the template
            within ``shape.length``.

    Raises:
        ValueError: The length can't be met: too short for needles and question, longer than there
            are different needles for, or between two lengths that the tokenizer can give.
    """
    rng = random.Random(f"needle {seed}")
    of_form = {form: names(rng, form, haystack) for form in get_args(Form)}
    different = 1 if shape.kind == "multi-value" else shape.hidden
    keys = _take(of_form[shape.keys], different, shape)
    values = _take(of_form[shape.values], shape.hidden, shape)
    task, question, opening = wording(keys[: shape.asked], shape.values, shape.asked)
    depths = tuple(map(float, shape.depths or rng.sample(range(101), shape.asked)))
    others = map(float, rng.sample(range(101), shape.hidden - shape.asked))
    of_values = keys * (shape.hidden // len(keys))
    facts = [fact(key, value, shape.values) for key, value in zip(of_values, values, strict=True)]
    sentences: Sequence[str] = haystack.sentences
    filler = ""
    if not sentences:
        filler = " ".join(NOISE.sentences * 8)  # a needle that is cut would be no needle
        enough = shape.length // _FEWEST_TOKENS + 8
        more = zip(
            _take(of_form[shape.keys], enough, shape),
            _take(of_form[shape.values], enough, shape),
            strict=True,
        )
        sentences = [fact(key, value, shape.values) for key, value in more]
    start = rng.randrange(len(sentences))
    layout = _Layout(
        (*sentences[start:], *sentences[:start]),
        haystack.joint,
        sorted(zip((*depths, *others), facts, strict=True), key=lambda placed: placed[0]),
        task,
        question,
        filler,
        count_tokens,
    )
    return Needle(
        context=layout.fitted(shape.length),
        question=question,
        opening=opening,
        answers=tuple(values[: shape.asked]),
        depths=depths,
        kind=shape.kind,
        length=shape.length,
        id=f"needle-{seed}",
    )


def needles(
    count: int,
    shape: NeedleShape,
    haystack: Haystack = NOISE,
    count_tokens: CountTokens = estimate_tokens,
    seed: int = 0,
) -> Iterator[Needle]:
    """``count`` prompts, numbered on from ``seed * 1_000_000`` so that seeds don't overlap."""
    for index in range(count):
        yield needle(seed * 1_000_000 + index, shape, haystack, count_tokens)


class NeedleText(TextSource):
    """Needle prompts with their answers, as documents to train on; see also ``asked``.

    Args:
        count: How many.
        length: Tokens of each prompt; the answer comes on top.
        seed: Sources with different seeds never share a prompt.
        kind: See ``NeedleShape``.
        needles: Needles that are hidden, where the kind has several.
        haystack: ``noise``, ``needles``, a file or folder, or ``book``, whose part for training is
            taken.
    """

    def __init__(
        self,
        count: int,
        length: int,
        seed: int = 0,
        kind: Kind = "single",
        needles: int = 4,
        haystack: str = "noise",
    ) -> None:
        self.count, self.seed, self.haystack = count, seed, haystack
        self.shape = NeedleShape(length, kind, needles)

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``."""
        among = haystack(self.haystack, "train")
        for one in needles(self.count, self.shape, among, count_tokens, self.seed):
            answer = f"{one.opening} {listed(one.answers)}."
            yield Document(text=f"{one.prompt} {answer}", id=one.id)


@dataclass(frozen=True)
class _Layout:
    """Where everything stands, up to the length."""

    sentences: Sequence[str]
    joint: str
    placed: Sequence[tuple[float, str]]
    """Depth and text of each needle, by depth."""
    task: str
    question: str
    filler: str
    """What to make up the length with; empty: the sentences that follow."""
    count_tokens: CountTokens

    def fitted(self, length: int) -> str:
        """The context that makes the prompt ``length`` tokens long."""
        tokens = self._number_tokens(length)
        whole = largest(tokens, length, 0, sys.maxsize, "needle")
        if tokens(whole) == length:
            return self._context(self._first(whole))
        # Where one more piece can't make up the difference, a longer last one may.
        for kept in range(whole, max(whole - 3, -1), -1):
            if last := self._cut(kept, length):
                return self._context([*self._first(kept), last])
        raise ValueError(
            f"needle length={length}: with this tokenizer no text comes out at that length; "
            "choose one more or less"
        )

    # Counting a long text anew for each size that is tried takes seconds. What stands far from the
    # change counts alike, so sizes are told from a count that is known and one of the change alone;
    # all of the text is counted where that could decide whether the length is met.

    def _number_tokens(self, length: int) -> Callable[[int], int]:
        """Tokens of the prompt with so many sentences."""
        none = self._tokens([])
        at, there = 0, none

        @cache
        def tokens(number: int) -> int:
            nonlocal at, there
            low, high = sorted((at, number))
            if _FAR * (high - low) <= low:
                change = self._tokens(self._first(high)[low:]) - none
                told = there + (change if number == high else -change)
                if abs(told - length) > _ROUNDING:
                    return told
            at, there = number, self._tokens(self._first(number))
            return there

        return tokens

    def _cut(self, kept: int, length: int) -> str:
        """The beginning of what follows ``kept`` sentences that meets the length, or nothing."""
        follows = self.filler or " ".join(self._first(kept + 4)[kept:])
        tokens = self._cut_tokens(kept, follows, length)
        near = bisect_right(range(1, len(follows) + 1), length, key=tokens)
        for step in range(_CUTS_TRIED):
            for size in {near - step, near + step + 1}:
                if 0 < size <= len(follows) and tokens(size) == length:
                    return follows[:size]
        return ""

    def _cut_tokens(self, kept: int, follows: str, length: int) -> Callable[[int], int]:
        """Tokens of the prompt that ends with so many characters of ``follows``."""
        after = [fact for depth, fact in self.placed if int((kept + 1) * depth / 100) > kept]
        tail = "".join(self.joint + fact for fact in after) + f"\n{self.question}"
        text = f"{self._context([*self._first(kept), ''])}\n{self.question}"
        head = text[: len(text) - len(tail)]
        around = head[max(head.rfind(self.joint, 0, max(len(head) - _AROUND, 0)), 0) :]
        cut = follows[:1] + tail
        far = self.count_tokens(head + cut) - self.count_tokens(around + cut)

        @cache
        def tokens(size: int) -> int:
            cut = follows[:size] + tail
            told = far + self.count_tokens(around + cut)
            return told if abs(told - length) > _ROUNDING else self.count_tokens(head + cut)

        return tokens

    def _first(self, number: int) -> list[str]:
        return [self.sentences[n % len(self.sentences)] for n in range(number)]

    def _tokens(self, sentences: list[str]) -> int:
        return self.count_tokens(f"{self._context(sentences)}\n{self.question}")

    def _context(self, sentences: list[str]) -> str:
        pieces, begin = [], 0
        for depth, fact in self.placed:
            end = int(len(sentences) * depth / 100)
            pieces += [*sentences[begin:end], fact]
            begin = end
        return self.task + self.joint.join([*pieces, *sentences[begin:]])


def names(rng: random.Random, form: Form, haystack: Haystack) -> Iterator[str]:
    """Keys or values, all different, that the haystack does not have; words may run out."""
    text, given = haystack.text, set()
    pairs = list(product(ADJECTIVES, NOUNS)) if form == "words" else []
    rng.shuffle(pairs)
    while form != "words" or pairs:
        if form == "words":
            name = "-".join(pairs.pop())
        elif form == "numbers":
            name = str(rng.randrange(10**6, 10**7))
        else:
            name = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if name not in given and name not in text:
            given.add(name)
            yield name


def _take(names: Iterator[str], number: int, shape: NeedleShape) -> list[str]:
    taken = list(islice(names, number))
    if len(taken) < number:
        raise ValueError(
            f"needle length={shape.length}: there are not so many different words for a haystack "
            "of needles; choose uuids"
        )
    return taken


def fact(key: str, value: str, values: Form) -> str:
    """A needle."""
    return f"One of the special magic {values} for {key} is: {value}."


def wording(queries: Sequence[str], values: Form, asked: int) -> tuple[str, str, str]:
    """RULER's task, question and opening, in the singular where one value is asked for.

    Args:
        queries: The keys that are asked for.
        values: What they have.
        asked: How many values the question asks for.
    """
    if asked == 1:
        form, some, verb, which = values.removesuffix("s"), "A", "is", "is"
    else:
        form, some, verb, which = values, "Some", "are", "are all"
    subject = f"special magic {form} for {listed(queries)} mentioned in the provided text"
    task = (
        f"{some} special magic {form} {verb} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {form} afterwards.\n"
    )
    return task, f"What {which} the {subject}?", f"The {subject} {verb}"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: ``a``, or ``a, b, and c``."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])}, and {names[-1]}"
