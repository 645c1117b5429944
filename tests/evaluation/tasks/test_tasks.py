"""What every task keeps: lengths, seeds, ids, the question's line; and marks made by hand."""

import json
import re
from dataclasses import asdict
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.ledger import ledgers
from zoomkv.data.needles import NOISE
from zoomkv.evaluation.tasks import word_problems as word_problems_task
from zoomkv.evaluation.tasks.base import Question
from zoomkv.evaluation.tasks.registry import task


def count(text: str) -> int:
    """Words, and a template's twelve."""
    return len(text.split()) + 12


needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="no reasoning-gym")
# Task, options, a length, and how many tokens a prompt may fall short of it.
CASES = {
    "needle": ({}, 400, 0),
    "needle-kinds": ({"kinds": ["single", "multi-key", "multi-value", "multi-query"]}, 400, 0),
    "needle-needles": ({"haystack": "needles", "keys": "uuids"}, 700, 0),
    "variable_tracking": ({}, 700, 4),
    "variable_tracking-chains": ({"chains": 3, "hops": 2, "example": False}, 300, 4),
    "common_words": ({}, 700, 2),
    "frequent_words": ({}, 600, 30),
    "ledger": ({}, 200, 6),
    "ledger-operations": ({"operations": 12, "asked": 7}, 600, 14),
    "word_problems": ({}, 400, 100),
    "fidelity": ({}, 200, 6),
}
MARKED = [name for name in CASES if name != "fidelity"]


def questions(case: str, n: int = 4, length: int | None = -1, seed: int = 0) -> list[Question]:
    options, aimed, _ = CASES[case]
    made = task(case.partition("-")[0], **options)
    return made.questions(n, aimed if length == -1 else length, seed, count)


def case_params(cases):
    return [pytest.param(name, marks=[needs_gym] * (name == "word_problems")) for name in cases]


@pytest.mark.parametrize("case", case_params(CASES))
def test_as_long_as_may_be_and_no_longer(case):
    _, length, short = CASES[case]
    for one in questions(case):
        assert length - short <= count(one.prompt) <= length == one.length


@pytest.mark.parametrize("case", case_params(CASES))
def test_seeded_with_ids_of_their_own(case):
    first = questions(case, seed=3)
    assert questions(case, seed=3) == first
    assert questions(case, n=2, seed=3) == first[:2]
    all_of_them = first + questions(case, seed=4)
    assert len({one.id for one in all_of_them}) == 8
    assert len({one.prompt for one in all_of_them}) == 8
    json.dumps([asdict(one) for one in first])


@pytest.mark.parametrize("case", case_params(MARKED))
def test_the_question_is_the_last_line(case):
    for one in questions(case):
        assert one.prompt.endswith(f"\n{one.asked}") and "\n" not in one.asked
        assert one.asked.endswith(("?", "."))


@pytest.mark.parametrize("case", ["needle", "variable_tracking", "common_words", "frequent_words"])
def test_no_length_is_refused_where_one_is_needed(case):
    with pytest.raises(ValueError, match=f"task '{case}' needs a length"):
        questions(case, length=None)


@pytest.mark.parametrize("case", case_params(MARKED))
def test_too_short_is_refused(case):
    with pytest.raises(ValueError, match="length=(30|26)"):
        questions(case, length=30)


@pytest.mark.parametrize(
    ("case", "tokens"),
    [("needle", 128), ("variable_tracking", 30), ("common_words", 120), ("frequent_words", 50)],
)
def test_rulers_are_marked_by_the_share_of_answers(case, tokens):
    made = task(case)
    one = Question("x", "prompt", ["Alpha", "beta", "gamma", "delta"], 9)
    marks = [
        ("1. alpha 2. BETA 3. delta", 0.75, False, True),
        ("alphabet, beta; gamma delta", 1.0, True, True),
        ("none of them", 0.0, False, True),
        (" \n", 0.0, False, False),
    ]
    for text, score, right, extracted in marks:
        mark = made.mark(one, text)
        assert (mark.score, mark.right, mark.extracted) == (score, right, extracted)
    [asked] = questions(case, n=1)
    assert asked.max_new_tokens == tokens
    assert made.mark(asked, " ".join(asked.reference)).right
    assert made.mark(asked, asked.opening).score == 0


# -- needles ---------------------------------------------------------------------------------------


def test_kinds_and_depths_take_turns():
    options = {"kinds": ["single", "multi-key"], "depths": [0, 50, 100]}
    found = task("needle", **options).questions(12, 500, 0, count)
    assert [one.about["kind"] for one in found] == ["single", "multi-key"] * 6
    assert [one.depth for one in found] == [0, 0, 0.5, 0.5, 1, 1] * 2
    for one in found:
        context = one.prompt.removesuffix(f"\n{one.asked}")
        lines = context.splitlines()[1:]
        [value] = one.reference
        [at] = [n for n, line in enumerate(lines) if line.endswith(f" is: {value}.")]
        before = sum("special magic" not in line for line in lines[:at])
        others = sum("special magic" in line for line in lines) - 1
        assert before == int((len(lines) - 1 - others) * one.depth)
        assert lines.count(NOISE.sentences[0]) > 15
        key = re.search(r"numbers for (\S+) is: ", lines[at])
        assert key is not None and key[1] in one.asked


def test_several_needles_have_drawn_depths():
    [one] = task("needle", kinds=["multi-query"], needles=3).questions(1, 400, 0, count)
    assert one.depth is None and len(one.about["depths"]) == len(one.reference) == 3
    depths = {one.depth for one in task("needle", depths=()).questions(9, 300, 0, count)}
    assert len(depths) > 4 and all(0 <= depth <= 1 for depth in depths)


@given(st.integers(0, 10**6), st.integers(150, 400))
@settings(max_examples=10)
def test_a_length_that_no_text_comes_out_at_is_missed_by_a_little(seed, length):
    def coarse(text: str) -> int:
        return -(-len(text) // 3) * 3 if len(text) % 2 else len(text)

    [one] = task("needle").questions(1, 4 * length, seed, coarse)
    assert 4 * length - 4 <= coarse(one.prompt) <= 4 * length


# -- ledgers and word problems ---------------------------------------------------------------------


def test_ledgers_without_a_length_are_the_plain_ones():
    found = questions("ledger", length=None, seed=7)
    for one, trace in zip(found, ledgers(4, 7), strict=True):
        assert (one.prompt, one.reference, one.id) == (trace.problem, trace.answer, trace.id)
        assert one.about == {"steps": len(trace.segments), "needed": trace.needed}
        assert one.length is None
        working = "\n\n".join(f"{each.text}\n\n{each.summary}" for each in trace.segments)
        written = len(working.split()) + len(trace.solution.split())
        assert one.max_new_tokens >= 1.5 * written


def test_a_ledger_is_worked_out_anew():
    for one in questions("ledger", n=8):
        total = int(re.search(r"starts at (\d+)", one.prompt)[1])
        operation, step = re.search(r"operation (\d+) of step (\w+)", one.asked).groups()
        asked = None
        for name, changes in re.findall(r"^Step (\w+) (.*)$", one.prompt, re.MULTILINE):
            for number, change in enumerate(changes.split(), start=1):
                total += int(change)
                if (name, number) == (step, int(operation)):
                    asked = total
        assert one.reference == f"{asked}, {total}"


def test_a_ledger_is_marked_by_the_truth_and_by_its_own_working():
    made = task("ledger", asked=1, operations=2)
    problem = (
        "A ledger starts at 20.\nStep fox +5 -3\nStep owl +1 +1\nWhat is the total after operation "
        "1 of step fox, and what is the final total?"
    )
    one = Question("x", problem, "25, 24", 9)
    worked = "Step fox\n20+5=25\n25-3=22\n\nStep owl\n22+1=23\n23+1=24\n\n"
    slipped = worked.replace("22+1=23\n23+1=24", "22+1=33\n33+1=34")
    marks = [
        (worked + "Answer: 25, 24", True, True, True, 1.0),
        (slipped + "Answer: 25, 34", False, True, True, 0.75),
        (worked + "Answer: 26, 24", False, False, True, 1.0),
        (worked, False, False, False, 1.0),
        ("Answer: 25, 24", True, False, True, 0.0),
    ]
    for text, right, recalled, extracted, arithmetic in marks:
        mark = made.mark(one, text)
        assert (mark.right, mark.score, mark.extracted) == (right, float(right), extracted)
        assert mark.about == {"recalled": recalled, "arithmetic": arithmetic}


def test_a_ledger_that_can_not_be_filled_is_refused():
    with pytest.raises(ValueError, match="60 steps, the most there are, don't fill it"):
        task("ledger").questions(1, 5000, 0, count)
    [one] = task("ledger", operations=90).questions(1, 5000, 0, count)
    assert count(one.prompt) > 4800


def test_the_longest_answer_may_be_given():
    [one] = task("ledger", max_new_tokens=77).questions(1, None, 0, count)
    assert one.max_new_tokens == 77


@needs_gym
def test_word_problems_fill_a_length_and_are_marked():
    for one in questions("word_problems", n=2):
        listed = re.findall(r"^(\d+)\) ", one.prompt, re.MULTILINE)
        assert listed == [str(n + 1) for n in range(one.about["problems"])]
        more = task("word_problems", problems=(len(listed) + 1,) * 2)
        [longer] = [other for other in more.questions(2, None, 0, count) if other.id == one.id]
        assert count(longer.prompt) > 400  # one more problem would not have fitted
    made = task("word_problems")
    problem = "1) x\n2) y\nLast, what is the difference of the results of problems 1 and 2?"
    one = Question("x", problem, "3", 9)
    own = "So problem 1 gives 4.\nSo problem 2 gives 9.\n"
    for text, right, recalled, extracted in (
        (own + "Answer: 5", False, True, True),
        (own + "Answer: 3", True, False, True),
        (own, False, False, False),
    ):
        mark = made.mark(one, text)
        assert (mark.right, mark.extracted) == (right, extracted)
        assert mark.score == float(right) and mark.about == {"recalled": recalled}


def test_word_problems_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(word_problems_task, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"reasoning-gym: install zoomkv\[data\]"):
        task("word_problems")
