"""Word problems in a row, whose results are needed again at the end. Unlimited and checkable.

The problems and their worked solutions are those of GSM-Symbolic, drawn with ``reasoning-gym``
(install ``zoomkv[data]``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zoomkv.data.traces import Segment, Trace

_ASIDE = " Give the result as your final answer. Do not include units."
_RESULT = re.compile(r"^So problem (\d+) gives (-?\d+)\.$", re.MULTILINE)
_ANSWER = re.compile(r"Answer:\s*(-?\d+)")
_ASKED = re.compile(r"the (sum|difference) of the results of problems (\d+) and (\d+)")


def word_problems(count: int, seed: int = 0, problems: tuple[int, int] = (3, 8)) -> Iterator[Trace]:
    """``count`` traces, numbered on from ``seed * 1_000_000`` so that seeds don't overlap.

    Args:
        count: How many traces.
        seed: The same seed and range give the same traces.
        problems: Fewest and most problems in one trace, at least 2.
    """
    low, high = problems
    if not 2 <= low <= high:
        raise ValueError(f"problems={problems}: choose 2 <= fewest <= most")
    for index in range(count):
        yield word_problem(seed * 1_000_000 + index, problems)


def word_problem(seed: int, problems: tuple[int, int] = (3, 8)) -> Trace:
    """Several problems in a row as one trace: a paragraph a problem, whose summary is its result.

    The last question asks for the sum or the difference of two of the results.
    """
    rng = random.Random(f"word problems {seed}")
    drawn = [_draw(rng) for _ in range(rng.randint(*problems))]
    first, second = sorted(rng.sample(range(1, len(drawn) + 1), 2))
    a, b = drawn[first - 1].result, drawn[second - 1].result
    asked = rng.choice(["sum", "difference"])
    larger, smaller = max(a, b), min(a, b)
    total = a + b if asked == "sum" else larger - smaller
    working = f"{a} + {b} = {total}" if asked == "sum" else f"{larger} - {smaller} = {total}"
    problem = "\n".join(
        [
            "Solve these problems one after the other.",
            *(f"{number}) {one.question}" for number, one in enumerate(drawn, start=1)),
            f"Last, what is the {asked} of the results of problems {first} and {second}?",
        ]
    )
    segments = tuple(
        Segment(
            text=f"Problem {number}\n{one.working}\nSo problem {number} gives {one.result}.",
            summary=f"problem {number}: {one.result}",
        )
        for number, one in enumerate(drawn, start=1)
    )
    solution = (
        f"Problem {first} gave {a} and problem {second} gave {b}.\n{working}\nAnswer: {total}"
    )
    return Trace(problem, segments, solution, answer=str(total), id=f"word-problems-{seed}")


@dataclass(frozen=True)
class WordProblemScore:
    """How an answer stands to its own working and to the truth."""

    recalled: bool
    """It is what the text's own results come to."""
    right: bool
    """It is the truth."""
    extracted: bool
    """The text has an answer that can be read."""


def score_word_problem(problem: str, answer: str, text: str) -> WordProblemScore:
    """Reads a generated text, delimiters and all, and marks its last answer.

    Args:
        problem: The trace's problem, whose last question names two of the results.
        answer: The true answer.
        text: The generated text, decoded without its special tokens.
    """
    asked = _ASKED.search(problem)
    assert asked is not None, "not a row of word problems"
    own = {int(number): int(result) for number, result in _RESULT.findall(text)}
    a, b = own.get(int(asked[2])), own.get(int(asked[3]))
    given = _ANSWER.findall(text)
    value = int(given[-1]) if given else None
    implied = None
    if a is not None and b is not None:
        implied = a + b if asked[1] == "sum" else abs(a - b)
    return WordProblemScore(
        recalled=value is not None and value == implied,
        right=value is not None and value == int(answer),
        extracted=value is not None,
    )


@dataclass(frozen=True)
class _Problem:
    question: str
    working: str
    result: int


def _draw(rng: random.Random) -> _Problem:
    import reasoning_gym  # takes a second to load

    while True:  # about one problem in fifty has no whole result and is drawn again
        seed = rng.getrandbits(32)
        drawn = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=seed)[0]
        if re.fullmatch(r"-?\d+", drawn["answer"]):
            break
    working, _, _ = drawn["metadata"]["answer_cot"].rpartition("####")
    return _Problem(
        question=" ".join(drawn["question"].removesuffix(_ASIDE).split()),
        working="\n".join(line.strip() for line in working.splitlines() if line.strip()),
        result=int(drawn["answer"]),
    )
