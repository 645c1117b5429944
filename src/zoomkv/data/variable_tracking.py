"""Chains of variables, hidden in noise: RULER's multi-hop tracing (arXiv 2404.06654, 3.2).

A chain begins with a number, ``VAR AAAAA = 12345``, and goes on ``VAR BBBBB = VAR AAAAA``. The
question names the first chain's number and asks for all variables that have it. Each assignment
stands behind the one that it refers to, on a line of its own; RULER's released code has it on the
line of the noise that follows.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

from zoomkv.data.fitted import FittedPrompt, largest
from zoomkv.data.long_text import CountTokens
from zoomkv.data.needles import NOISE
from zoomkv.data.segment import estimate_tokens

_TASK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
# "assgined" is RULER's.
_OPENING = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assgined the value {value}, they are:"
)
_SENTENCES = tuple(f"{sentence}." for sentence in NOISE.sentences[0].rstrip(".").split(". "))
_EXAMPLE_LINES = 10  # so many come out of RULER's fitting to 500 tokens
_LETTERS, _EXAMPLE_LETTERS = 5, 3
_EXAMPLE_HOPS = 10  # at most


@dataclass(frozen=True)
class VariableShape:
    """What chains of variables look like."""

    length: int
    """Tokens of the whole prompt, at most."""
    chains: int = 1
    """The first is asked for."""
    hops: int = 4
    """Assignments of each chain after its first."""
    example: bool = True
    """An example with its answer stands before the task, as in RULER; about 400 tokens."""

    def __post_init__(self) -> None:
        if not 1 <= self.chains <= 100 or not 1 <= self.hops <= 100:
            raise ValueError(
                f"variable tracking chains={self.chains}, hops={self.hops}: choose both from 1 to "
                "100"
            )


def variables(
    seed: int, shape: VariableShape, count_tokens: CountTokens = estimate_tokens
) -> FittedPrompt:
    """One prompt whose answers are the variables of its first chain, in the chain's order.

    Args:
        seed: The same seed, shape and counting give the same prompt.
        shape: Length and chains.
        count_tokens: Tokens of a text. Count the text inside a chat template to have the template
            within ``shape.length``.

    Raises:
        ValueError: The length is too short for the chains.
    """
    rng = random.Random(f"variables {seed}")
    example = ""
    if shape.example:
        hops = min(shape.hops, _EXAMPLE_HOPS)
        shown = _Chains.drawn(rng, shape.chains, hops, _EXAMPLE_LETTERS)
        text = shown.text(_EXAMPLE_LINES * len(_SENTENCES))
        example = f"{text}\n{shown.question} {shown.opening} {' '.join(shown.asked)}\n\n"
    chains = _Chains.drawn(rng, shape.chains, shape.hops, _LETTERS)

    def context(sentences: int) -> str:
        return example + chains.text(sentences)

    def tokens(sentences: int) -> int:
        return count_tokens(f"{context(sentences)}\n{chains.question}")

    # A sentence has a token at least.
    size = largest(tokens, shape.length, 0, shape.length, "variable tracking")
    return FittedPrompt(
        context=context(size),
        question=chains.question,
        opening=chains.opening,
        answers=chains.asked,
        length=tokens(size),
        id=f"variables-{seed}",
    )


def variable_prompts(
    count: int,
    shape: VariableShape,
    count_tokens: CountTokens = estimate_tokens,
    seed: int = 0,
) -> Iterator[FittedPrompt]:
    """``count`` prompts, numbered on from ``seed * 1_000_000`` so that seeds don't overlap."""
    for index in range(count):
        yield variables(seed * 1_000_000 + index, shape, count_tokens)


@dataclass(frozen=True)
class _Chains:
    """Assignments, and where they stand in a text of any size."""

    asked: tuple[str, ...]
    """Variables of the first chain."""
    value: str
    """Of the first chain."""
    placed: tuple[tuple[float, str], ...]
    """Depth from 0 to 1, and assignment, by depth."""

    @classmethod
    def drawn(cls, rng: random.Random, chains: int, hops: int, letters: int) -> _Chains:
        """Names and numbers are all different, and no name is a part of what is written anyway."""
        written = (_TASK + _QUESTION + _OPENING + " ".join(_SENTENCES)).upper()
        names: dict[str, None] = {}
        while len(names) < chains * (hops + 1):
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if name not in written:
                names[name] = None
        values = rng.sample(range(10_000, 100_000), chains)
        in_order, placed = list(names), []
        for number, value in enumerate(values):
            chain = in_order[number * (hops + 1) : (number + 1) * (hops + 1)]
            sources = [str(value), *(f"VAR {name}" for name in chain[:-1])]
            depths = sorted(rng.random() for _ in chain)
            placed += [
                (depth, f"VAR {name} = {source}")
                for depth, name, source in zip(depths, chain, sources, strict=True)
            ]
        placed.sort(key=lambda one: one[0])
        return cls(tuple(in_order[: hops + 1]), str(values[0]), tuple(placed))

    @property
    def question(self) -> str:
        return _QUESTION.format(value=self.value)

    @property
    def opening(self) -> str:
        return _OPENING.format(count=len(self.asked), value=self.value)

    def text(self, sentences: int) -> str:
        """Task and context, with so many sentences of noise, five a line."""
        lines, rest = divmod(sentences, len(_SENTENCES))
        noise = [NOISE.sentences[0]] * lines
        if rest:
            noise.append(" ".join(_SENTENCES[:rest]))
        pieces: list[str] = []
        begin = 0
        for depth, assignment in self.placed:
            end = int((len(noise) + 1) * depth)
            pieces += [*noise[begin:end], assignment]
            begin = end
        return _TASK + "\n".join([*pieces, *noise[begin:]])
