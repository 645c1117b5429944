"""Documents with questions about them, built to any length: for training on unknown questions.

Whoever compresses a context must serve questions that were not known then, so a question is never a
part of its document. Each document carries several, which makes the most of reading it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import get_args

from zoomkv.data.ledger import LedgerShape, ledger
from zoomkv.data.needles import (
    NOISE,
    Form,
    Haystack,
    Kind,
    fact,
    haystack,
    listed,
    names,
    wording,
)

CountAll = Callable[[list[str]], list[int]]
"""Tokens of each of several texts."""

_COUNTED_AT_ONCE = 32
_SPARE = 64  # tokens of running text beyond the length, should pieces join to fewer than counted
_TOGETHER = (2, 4)  # values that one question asks for, where it asks for several


@dataclass(frozen=True)
class Asked:
    """A text, and questions that it answers."""

    text: str
    """Ends with running text."""
    solid: int
    """Characters of ``text`` that must stay; what follows them may be cut anywhere."""
    turns: tuple[tuple[str, str], ...]
    """Questions and their answers, in the order in which they are asked."""
    id: str


class AskedText(ABC):
    """Has a document for every number and length, and the same one each time."""

    @abstractmethod
    def asked(self, number: int, length: int, count_tokens: CountAll) -> Asked:
        """One document.

        Args:
            number: Which one.
            length: Tokens. As far as can be told by counting sentences one by one, what must stay
                has no more, and the whole text has some to spare.
            count_tokens: Tokens of each of several texts.

        Raises:
            ValueError: The length leaves no room for anything to ask about.
        """


class NeedleQuestions(AskedText):
    """Needles hidden in a haystack (RULER, arXiv 2404.06654), all of which are asked for.

    Each document draws one of the haystacks, one of the kinds, how many needles are hidden, and
    where: every gap between two sentences is equally likely. ``single`` hides one needle and asks
    for it; ``multi-key`` asks for one key after the other; a question of ``multi-value`` asks for
    the two to four values of one key, and one of ``multi-query`` for as many keys.

    Args:
        seed: Sources with different seeds never share a document.
        kinds: Of RULER's needles.
        haystacks: Each ``noise``, ``needles``, ``book`` (its part for training), ``stdlib``, or a
            file or folder.
        needles: Fewest and most that are hidden, where the kind has several. They never take more
            than half of the length, so short documents may have fewer.
        keys: What keys look like.
        values: What values look like.

    Raises:
        ValueError: No kind or haystack, an unknown one, or counts out of range.
    """

    def __init__(
        self,
        seed: int = 0,
        kinds: Sequence[Kind] = ("single", "multi-key", "multi-value", "multi-query"),
        haystacks: Sequence[str] = ("noise", "needles", "book", "stdlib"),
        needles: tuple[int, int] = (4, 16),
        keys: Form = "words",
        values: Form = "numbers",
    ) -> None:
        for name, given, known in (
            ("kinds", kinds, get_args(Kind)),
            ("keys", [keys], get_args(Form)),
            ("values", [values], get_args(Form)),
        ):
            if not given or (unknown := [one for one in given if one not in known]):
                raise ValueError(
                    f"needle {name}={unknown[0] if given else '[]'}: choose from {', '.join(known)}"
                )
        if not haystacks:
            raise ValueError("needle haystacks: name at least one")
        if not 2 <= needles[0] <= needles[1] <= 100:
            raise ValueError(f"needles={tuple(needles)}: choose 2 <= fewest <= most <= 100")
        self.seed, self.kinds, self.haystacks = seed, tuple(kinds), tuple(haystacks)
        self.needles, self.keys, self.values = (needles[0], needles[1]), keys, values
        self._read: dict[str, Haystack] = {}

    def asked(self, number: int, length: int, count_tokens: CountAll) -> Asked:
        """See ``AskedText``."""
        rng = random.Random(f"needle questions {self.seed} {number}")
        among, kind = self._haystack(rng.choice(self.haystacks)), rng.choice(self.kinds)
        unused = {form: names(rng, form, among) for form in get_args(Form)}
        groups = [self._group(kind, size, unused) for size in self._sizes(kind, rng)]
        task, *_ = wording(groups[0][0][:1], self.values, len(groups[0]))
        facts = [among.joint.join(fact(*pair, self.values) for pair in group) for group in groups]
        before, head, *sizes = count_tokens(
            [".", task, *(f".{among.joint}{text}" for text in facts)]
        )
        sizes = [size - before for size in sizes]
        while len(groups) > 1 and sum(sizes) > length // 2:
            del groups[-1], sizes[-1]
        room = length - head - sum(sizes)
        if room < 0:
            raise ValueError(
                f"a context of {length} tokens leaves no room for needles, which take "
                f"{length - room}: choose a longer one"
            )
        # A needle that is cut would be no needle.
        filler = None if among.sentences else cycle(NOISE.sentences)
        sentences = self._sentences(among, rng, unused)
        whole, rest = _filled(sentences, among.joint, room, count_tokens, filler)
        pairs = [pair for group in groups for pair in group]
        rng.shuffle(pairs)
        pieces, begin = [], 0
        gaps = sorted(rng.choices(range(len(whole) + 1), k=len(pairs)))
        for gap, pair in zip(gaps, pairs, strict=True):
            pieces += [*whole[begin:gap], fact(*pair, self.values)]
            begin = gap
        text = task + among.joint.join([*pieces, *whole[begin:]])
        return Asked(
            text=among.joint.join([text, *rest]),
            solid=len(text),
            turns=tuple(self._turn(kind, group, pairs) for group in groups),
            id=f"needles-{self.seed}-{number}",
        )

    def _haystack(self, name: str) -> Haystack:
        if name not in self._read:
            self._read[name] = haystack(name, "train")
        return self._read[name]

    def _sizes(self, kind: Kind, rng: random.Random) -> list[int]:
        """How many values each question asks for."""
        if kind == "single":
            return [1]
        left = rng.randint(*self.needles)
        if kind == "multi-key":
            return [1] * left
        sizes = []
        while left >= _TOGETHER[0]:
            sizes.append(rng.randint(_TOGETHER[0], min(_TOGETHER[1], left)))
            left -= sizes[-1]
        return sizes

    def _group(self, kind: Kind, size: int, unused: dict[Form, Iterator[str]]) -> list[_Pair]:
        keys = list(islice(unused[self.keys], 1 if kind == "multi-value" else size))
        return list(zip(cycle(keys), islice(unused[self.values], size), strict=False))

    def _sentences(
        self, among: Haystack, rng: random.Random, unused: dict[Form, Iterator[str]]
    ) -> Iterator[str]:
        """The haystack from a drawn sentence on, over and over."""
        if among.sentences:
            start = rng.randrange(len(among.sentences))
            return islice(cycle(among.sentences), start, None)
        pairs = zip(unused[self.keys], unused[self.values], strict=False)
        return (fact(*pair, self.values) for pair in pairs)

    def _turn(self, kind: Kind, group: list[_Pair], pairs: list[_Pair]) -> tuple[str, str]:
        """Question and answer; several values of one key come as they stand in the text."""
        group = sorted(group, key=pairs.index) if kind == "multi-value" else group
        keys = list(dict.fromkeys(key for key, _ in group))
        _, question, opening = wording(keys, self.values, len(group))
        return question, f"{opening} {listed([value for _, value in group])}."


class LedgerQuestions(AskedText):
    """Ledgers that have been worked out (see ``ledger``), and questions about single totals.

    Args:
        seed: Sources with different seeds never share a document.
        steps: Fewest and most steps of a ledger, 3 to 60; a document has as many ledgers as it has
            room for.
        operations: Operations in each step.
        questions: Most questions about a document, each about another total.

    Raises:
        ValueError: Counts out of range.
    """

    def __init__(
        self,
        seed: int = 0,
        steps: tuple[int, int] = (3, 24),
        operations: int = 4,
        questions: int = 16,
    ) -> None:
        if operations < 2 or questions < 1:
            raise ValueError(
                f"ledger operations={operations}, questions={questions}: choose at least 2 and 1"
            )
        self.shape = LedgerShape((steps[0], steps[1]), operations, asked=1)
        self.seed, self.questions = seed, questions

    def asked(self, number: int, length: int, count_tokens: CountAll) -> Asked:
        """See ``AskedText``."""
        rng = random.Random(f"ledger questions {self.seed} {number}")
        steps: list[_Step] = []
        task = "Each ledger has steps, and each line of a step ends with the total so far.\n\n"
        [head] = count_tokens([task])
        texts = self._texts(rng, steps)
        whole, rest = _filled(texts, "\n\n", length - head, count_tokens)
        if not whole:
            raise ValueError(
                f"a context of {length} tokens leaves no room for a step of a ledger: choose a "
                "longer one"
            )
        totals = [(step, at) for step in steps[: len(whole)] for at in range(len(step.totals))]
        text = task + "\n\n".join(whole)
        return Asked(
            text="\n\n".join([text, *rest]),
            solid=len(text),
            turns=tuple(
                step.turn(at) for step, at in rng.sample(totals, min(self.questions, len(totals)))
            ),
            id=f"ledgers-{self.seed}-{number}",
        )

    def _texts(self, rng: random.Random, steps: list[_Step]) -> Iterator[str]:
        """Paragraphs of one ledger after the other, each noted down in ``steps``."""
        for key in names(rng, "words", NOISE):
            heading = f"Ledger {key}\n\n"
            for segment in ledger(rng.getrandbits(63), self.shape).segments:
                first, *lines = segment.text.split("\n")
                totals = [line.partition("=")[2] for line in lines]
                steps.append(_Step(key, first.removeprefix("Step "), totals))
                yield heading + segment.text
                heading = ""


@dataclass(frozen=True)
class _Step:
    """A step of a ledger."""

    ledger: str
    name: str
    totals: list[str]
    """After each operation."""

    def turn(self, at: int) -> tuple[str, str]:
        subject = f"the total after operation {at + 1} of step {self.name} in ledger {self.ledger}"
        return f"What is {subject}?", f"T{subject[1:]} is {self.totals[at]}."


_Pair = tuple[str, str]  # key and value


def _filled(
    pieces: Iterator[str],
    joint: str,
    room: int,
    count_tokens: CountAll,
    filler: Iterator[str] | None = None,
) -> tuple[list[str], list[str]]:
    """As many pieces as take at most ``room`` tokens, and more that take it beyond.

    Args:
        pieces: Those that are to be whole.
        joint: What stands before each.
        room: Tokens.
        count_tokens: Tokens of each of several texts.
        filler: Endless; by default what follows in ``pieces``, which then must be.
    """
    whole: list[str] = []
    counted = _counted(pieces, joint, count_tokens)
    follows = counted
    for piece, tokens in counted:
        if tokens > room:
            follows = chain([(piece, tokens)], counted)
            break
        whole.append(piece)
        room -= tokens
    if filler is not None:
        follows = _counted(filler, joint, count_tokens)
    room += _SPARE
    rest: list[str] = []
    while room > 0:
        piece, tokens = next(follows)
        rest.append(piece)
        room -= tokens
    return whole, rest


def _counted(
    pieces: Iterator[str], joint: str, count_tokens: CountAll
) -> Iterator[tuple[str, int]]:
    """Each piece with its tokens where it stands after the end of a sentence."""
    while some := list(islice(pieces, _COUNTED_AT_ONCE)):
        [before, *sizes] = count_tokens([".", *(f".{joint}{piece}" for piece in some)])
        yield from zip(some, (size - before for size in sizes), strict=True)
