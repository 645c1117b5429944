"""Ledgers, redone by a plain interpreter of their own question."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.data.ledger import LedgerShape, ledger, ledgers, score_ledger

LISTED = re.compile(r"^Step (\w+) (.*)$", re.MULTILINE)


def work(problem: str, asked: int) -> tuple[list[list[int]], int]:
    """Totals of every step, from the question's text alone, and the asked step."""
    total = int(re.search(r"starts at (-?\d+)", problem)[1])
    steps, names = [], []
    for name, line in LISTED.findall(problem):
        names.append(name)
        totals = []
        for change in line.split():
            total += int(change)
            totals.append(total)
        steps.append(totals)
    operation, step = re.search(r"operation (\d+) of step (\w+)", problem).groups()
    assert int(operation) == asked and len(set(names)) == len(names)
    return steps, names.index(step)


shapes = st.builds(
    lambda low, more, operations, asked, operand, room: LedgerShape(
        (low, min(60, low + more)),
        operations,
        min(asked, operations - 1),
        operand,
        (-5, -5 + 2 * operand + room),
    ),
    st.integers(3, 60),
    st.integers(0, 5),
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(1, 99),
    st.integers(0, 50),
)


@given(st.integers(0, 10**9), shapes)
def test_a_ledger_is_right_and_keeps_its_shape(seed, shape):
    trace = ledger(seed, shape)
    steps, step = work(trace.problem, shape.asked)
    assert shape.steps[0] <= len(steps) <= shape.steps[1]
    assert {len(totals) for totals in steps} == {shape.operations}
    low, high = shape.totals
    assert all(low <= total <= high for totals in steps for total in totals)
    assert trace.answer == f"{steps[step][shape.asked - 1]}, {steps[-1][-1]}"
    assert trace.needed == step
    names = [name for name, _ in LISTED.findall(trace.problem)]
    for name, segment, totals in zip(names, trace.segments, steps, strict=True):
        heading, *lines = segment.text.splitlines()
        assert heading == f"Step {name}"
        assert [int(line.rpartition("=")[2]) for line in lines] == totals
        assert segment.summary == f"step {name}:{totals[-1]}"
    listing = LISTED.findall(trace.problem)
    changes = [abs(int(change)) for _, line in listing for change in line.split()]
    assert max(changes) <= shape.max_operand and min(changes) >= 1


def test_same_seed_same_ledger_and_seeds_do_not_meet():
    assert list(ledgers(3, 1)) == list(ledgers(3, 1))
    problems = {trace.problem for seed in range(3) for trace in ledgers(20, seed)}
    assert len(problems) == 60


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": (2, 9)}, "steps"),
        ({"steps": (9, 3)}, "steps"),
        ({"steps": (3, 61)}, "steps"),
        ({"asked": 0}, "asked"),
        ({"asked": 4}, "asked"),
        ({"max_operand": 0}, "max_operand"),
        ({"max_operand": 50}, "max_operand"),
    ],
)
def test_a_shape_out_of_range_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        LedgerShape(**settings)


def written(trace, change=lambda text: text):
    parts = [f"{part.text}\n\n{part.summary}\n\n" for part in trace.segments]
    return change("".join(parts) + trace.solution)


@given(st.integers(0, 10**6))
def test_the_true_text_scores_full_marks(seed):
    trace = ledger(seed)
    score = score_ledger(trace.problem, trace.answer, written(trace))
    assert (score.recalled, score.right, score.extracted, score.arithmetic) == (True, True, True, 1)


def test_marks_are_told_apart():
    trace = ledger(5)

    def score(change):
        return score_ledger(trace.problem, trace.answer, written(trace, change))

    wrong = score(lambda text: re.sub(r"Answer: .*", "Answer: 1000, 1000", text))
    assert (wrong.recalled, wrong.right, wrong.extracted) == (False, False, True)
    silent = score(lambda text: text.partition("Answer")[0])
    assert (silent.recalled, silent.right, silent.extracted) == (False, False, False)
    # A slip in the last sum, faithfully reported, is recalled but not right.
    last = trace.segments[-1].text.splitlines()[-1]
    slipped = last.rpartition("=")[0] + "=777"
    first = trace.answer.partition(",")[0]
    slip = score(
        lambda text: re.sub(r"Answer: .*", f"Answer: {first}, 777", text.replace(last, slipped))
    )
    assert slip.recalled == (first != "777") and not slip.right and slip.arithmetic < 1
    nothing = score_ledger(trace.problem, trace.answer, "")
    assert nothing.arithmetic == 0 and not nothing.recalled
