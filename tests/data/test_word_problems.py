"""Word problems: seeded, consistent with their own working, checkable."""

import dataclasses
import re
from pathlib import Path

import pytest

from zoomkv.data.traces import Segment, Trace, read_traces
from zoomkv.data.word_problems import score_word_problem, word_problem, word_problems

pytest.importorskip("reasoning_gym")

ROOT = Path(__file__).parents[2]


def text_of(trace: Trace) -> str:
    paragraphs = [f"{segment.text}\n\n{segment.summary}\n\n" for segment in trace.segments]
    return "".join(paragraphs) + trace.solution


def test_seeded_and_unlimited():
    first, again = list(word_problems(40, seed=1)), list(word_problems(40, seed=1))
    assert first == again
    ids = {trace.id for seed in (0, 1) for trace in word_problems(40, seed)}
    texts = {trace.problem for seed in (0, 1) for trace in word_problems(40, seed)}
    assert len(ids) == len(texts) == 80


@pytest.mark.parametrize("problems", [(2, 2), (3, 8), (12, 12)])
def test_a_trace_is_consistent(problems):
    for trace in word_problems(60, seed=2, problems=problems):
        assert problems[0] <= len(trace.segments) <= problems[1]
        results = {}
        for number, segment in enumerate(trace.segments, start=1):
            assert segment.text.startswith(f"Problem {number}\n")
            assert "\n\n" not in segment.text and "####" not in segment.text
            [results[number]] = re.findall(rf"So problem {number} gives (-?\d+)\.$", segment.text)
            assert segment.summary == f"problem {number}: {results[number]}"
        asked, a, b = re.findall(
            r"the (\w+) of the results of problems (\d+) and (\d+)\?$", trace.problem
        )[0]
        a, b = int(results[int(a)]), int(results[int(b)])
        assert trace.answer == str(a + b if asked == "sum" else max(a, b) - min(a, b))
        assert trace.solution.endswith(f"Answer: {trace.answer}")
        assert "Give the result" not in trace.problem


def test_every_trace_scores_full_marks_on_itself():
    for trace in word_problems(30, seed=3):
        score = score_word_problem(trace.problem, trace.answer, text_of(trace))
        assert dataclasses.astuple(score) == (True, True, True)


def test_scores_tell_recall_from_truth():
    problem = "What is the difference of the results of problems 1 and 3?"
    own = "So problem 1 gives 5.\n\nSo problem 2 gives 1.\n\nSo problem 3 gives 9.\n\n"

    def marks(text):
        return dataclasses.astuple(score_word_problem(problem, "7", text))

    assert marks(own + "Answer: 4") == (True, False, True)
    assert marks(own + "Answer: 7") == (False, True, True)
    assert marks(own + "Answer: 4\nNo.\nAnswer: 7") == (False, True, True)
    assert marks(own) == (False, False, False)
    assert marks("Answer: 7") == (False, True, True)
    assert marks("So problem 1 gives") == (False, False, False)


def test_a_problem_without_a_whole_result_is_drawn_again(monkeypatch):
    import reasoning_gym

    answers = iter(["6.5", "6", "8/3", "-2"])

    def create_dataset(name, size, seed):
        answer = next(answers)
        return [
            {"question": "q", "answer": answer, "metadata": {"answer_cot": f"w\n#### {answer}"}}
        ]

    monkeypatch.setattr(reasoning_gym, "create_dataset", create_dataset)
    trace = word_problem(0, problems=(2, 2))
    assert trace.segments == (
        Segment("Problem 1\nw\nSo problem 1 gives 6.", "problem 1: 6"),
        Segment("Problem 2\nw\nSo problem 2 gives -2.", "problem 2: -2"),
    )


@pytest.mark.parametrize("problems", [(1, 3), (5, 4), (0, 0)])
def test_a_range_that_makes_no_sense_is_refused(problems):
    with pytest.raises(ValueError, match="choose 2 <= fewest <= most"):
        list(word_problems(1, problems=problems))


def test_the_sample_is_what_the_generator_writes():
    sample = list(read_traces(ROOT / "data/samples/word_problems.jsonl"))
    assert sample == list(word_problems(8, seed=0, problems=(3, 6)))
