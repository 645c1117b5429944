"""Ledgers: long additions whose details are needed again at the end. Unlimited and checkable."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zoomkv.data.traces import Segment, Trace

_LINE = re.compile(r"(-?\d+)([+-])(\d+)=(-?\d+)")
_HEADING = re.compile(r"^Step ([a-z]+)$")
_ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*,\s*(-?\d+)")
_ASKED = re.compile(r"operation (\d+) of step ([a-z]+)")

# fmt: off
NAMES = (
    "fox", "owl", "bear", "wolf", "deer", "crow", "hawk", "lion", "tiger", "horse", "sheep",
    "goat", "duck", "frog", "snake", "whale", "shark", "crab", "bee", "ant", "mouse", "rabbit",
    "cat", "dog", "pig", "cow", "apple", "lemon", "orange", "grape", "peach", "plum", "cherry",
    "berry", "corn", "rice", "wheat", "oak", "pine", "maple", "rose", "lily", "river", "lake",
    "ocean", "island", "valley", "desert", "forest", "mountain", "cloud", "storm", "rain", "snow",
    "wind", "star", "moon", "sun", "earth", "stone", "iron", "gold", "silver", "copper", "glass",
    "paper", "wood", "bread", "honey", "salt", "sugar", "coffee", "tea", "milk", "table", "chair",
    "lamp", "door", "window", "garden", "bridge", "tower", "castle", "harbor", "village", "piano",
    "violin", "drum", "flute", "guitar",
)
# fmt: on
"""What steps are called. Names, not numbers: a digit of a step would look like one of a total."""


@dataclass(frozen=True)
class LedgerShape:
    """What a ledger may look like."""

    steps: tuple[int, int] = (3, 24)
    """Fewest and most steps (3 to 60)."""
    operations: int = 4
    """Operations in each step."""
    asked: int = 3
    """The operation whose total is asked for; never the last, or a summary would answer it."""
    max_operand: int = 9
    """Largest number added or subtracted."""
    totals: tuple[int, int] = (10, 99)
    """Smallest and largest running total; signs are chosen so that it stays within."""

    def __post_init__(self) -> None:
        low, high = self.steps
        if not 3 <= low <= high <= 60:
            raise ValueError(f"ledger steps {self.steps}: choose 3 <= fewest <= most <= 60")
        if not 1 <= self.asked < self.operations:
            raise ValueError(
                f"ledger asked={self.asked}: choose from 1 to operations - 1 = "
                f"{self.operations - 1}"
            )
        if self.max_operand < 1 or self.totals[1] - self.totals[0] < 2 * self.max_operand:
            raise ValueError(
                f"ledger max_operand={self.max_operand}, totals={self.totals}: the range of "
                "totals must span at least twice the largest operand"
            )


def ledger(seed: int, shape: LedgerShape | None = None) -> Trace:
    """One ledger as a trace: a paragraph a step, whose summary keeps only the step's last total.

    The question asks for the total after operation ``shape.asked`` of one named step, and for the
    final one. From prompt and summaries the first needs that many operations in the head; from the
    step's paragraph it is one look.

    Args:
        seed: The same seed and shape give the same ledger.
        shape: Sizes; the default has 3 to 24 steps of four operations.
    """
    shape = shape or LedgerShape()
    rng = random.Random(f"ledger {seed}")
    count = rng.randint(*shape.steps)
    total = start = rng.randint(*shape.totals)
    listing, segments, totals = [], [], []
    names = rng.sample(NAMES, count)
    for name in names:
        operations, lines = [], [f"Step {name}"]
        for _ in range(shape.operations):
            change = _change(rng, total, shape)
            operations.append(f"{change:+d}")
            lines.append(f"{total}{change:+d}={total + change}")
            total += change
            totals.append(total)
        listing.append(f"Step {name} {' '.join(operations)}")
        segments.append(Segment(text="\n".join(lines), summary=f"step {name}:{total}"))
    step = rng.randrange(count)
    first = totals[step * shape.operations + shape.asked - 1]
    after = totals[(step + 1) * shape.operations - 1]
    problem = "\n".join(
        [
            f"A ledger starts at {start}. Each step applies its operations in order.",
            *listing,
            f"What is the total after operation {shape.asked} of step {names[step]}, "
            "and what is the final total?",
        ]
    )
    solution = (
        f"step {names[step]}:{after}, and after its operation {shape.asked} it was {first}.\n"
        f"Answer: {first}, {total}"
    )
    return Trace(
        problem=problem,
        segments=tuple(segments),
        solution=solution,
        answer=f"{first}, {total}",
        id=f"ledger-{seed}",
        needed=step,
    )


def ledgers(count: int, seed: int = 0, shape: LedgerShape | None = None) -> Iterator[Trace]:
    """``count`` ledgers, numbered on from ``seed * 1_000_000`` so that seeds don't overlap."""
    for index in range(count):
        yield ledger(seed * 1_000_000 + index, shape)


@dataclass(frozen=True)
class LedgerScore:
    """How an answer to a ledger stands to its own working and to the truth."""

    recalled: bool
    """Both asked values equal what the text's own steps say."""
    right: bool
    """Both asked values equal the truth."""
    extracted: bool
    """The text has an answer that can be read."""
    arithmetic: float
    """Share of the written lines whose sum is right."""


def score_ledger(problem: str, answer: str, text: str) -> LedgerScore:
    """Reads a generated ledger text, delimiters and all, and marks it.

    Args:
        problem: The ledger's question, which names the asked step and operation.
        answer: The true answer, ``"47, 61"``.
        text: The generated text, decoded without its special tokens.
    """
    asked = _ASKED.search(problem)
    assert asked is not None, "not a ledger problem"
    operation, step = int(asked[1]), asked[2]
    written: dict[str, list[tuple[str, str, str, str]]] = {}
    current = ""
    for line in text.splitlines():
        if heading := _HEADING.match(line.strip()):
            current = heading[1]
            written[current] = []
        elif current and (found := _LINE.fullmatch(line.strip())):
            written[current].append((found[1], found[2], found[3], found[4]))
    given = _ANSWER.search(text)
    values = (given[1], given[2]) if given else None
    own = None
    if len(written.get(step, ())) >= operation and written[current]:
        own = (written[step][operation - 1][3], written[current][-1][3])
    lines = [line for of_step in written.values() for line in of_step]
    sums = [int(a) + int(sign + b) == int(c) for a, sign, b, c in lines]
    return LedgerScore(
        recalled=values is not None and values == own,
        right=values is not None and ", ".join(values) == answer,
        extracted=values is not None,
        arithmetic=sum(sums) / len(sums) if sums else 0.0,
    )


def _change(rng: random.Random, total: int, shape: LedgerShape) -> int:
    change = rng.randint(1, shape.max_operand) * rng.choice((-1, 1))
    low, high = shape.totals
    return change if low <= total + change <= high else -change
