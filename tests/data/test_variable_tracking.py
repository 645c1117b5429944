"""Variables: followed by an interpreter of their own, never too long, seeded, RULER's words."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.needles import NOISE
from zoomkv.data.variable_tracking import VariableShape, variable_prompts, variables

NOISE_LINE = NOISE.sentences[0]


def count_words(text: str) -> int:
    return len(text.split())


def interpreted(text: str) -> dict[str, str]:
    """Every variable's number; assignments are carried out in the order of the text."""
    state: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"VAR ([A-Z]+) = (VAR ([A-Z]+)|[0-9]+)", line):
            assert found[1] not in state, "assigned twice"
            state[found[1]] = state[found[3]] if found[3] else found[2]
    return state


def task_of(one) -> str:
    """The prompt without its example."""
    return one.prompt[one.prompt.rindex("Memorize and track") :]


@given(
    st.integers(0, 10**9),
    st.integers(260, 1500),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
)
@settings(max_examples=60)
def test_the_answers_are_what_an_interpreter_finds(seed, length, chains, hops, example):
    shape = VariableShape(length + 350 * example, chains, hops, example)
    one = variables(seed, shape, count_words)
    state = interpreted(task_of(one))
    [value] = re.findall(r"assigned the value (\d+) in the text above\.$", one.prompt)
    assert [name for name in state if state[name] == value] == list(one.answers)
    assert len(one.answers) == hops + 1
    assert len(state) == chains * (hops + 1) and len(set(state.values())) == chains
    assert all(number.isdigit() and len(number) == 5 for number in state.values())


@given(st.integers(0, 10**9), st.integers(500, 3000))
@settings(max_examples=40)
def test_as_long_as_may_be_and_no_longer(seed, length):
    one = variables(seed, VariableShape(length), count_words)
    assert one.length == count_words(one.prompt)
    assert length - 4 <= one.length <= length  # the longest sentence has 4 words, and one is next


def test_any_measure_will_do(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    for measure, length in ((len, 5000), (count, 2000)):
        one = variables(3, VariableShape(length), measure)
        assert 0.98 * length <= measure(one.prompt) <= length


def test_what_is_not_assigned_is_noise():
    one = variables(5, VariableShape(900, 2, 3, example=False), count_words)
    _, _, text = one.context.partition("\n\n")
    rest = [line for line in text.splitlines() if not line.startswith("VAR ")]
    assert len(rest) > 30 and set(rest[:-1]) == {NOISE_LINE}
    assert NOISE_LINE.startswith(rest[-1])


def test_assignments_are_spread_over_the_text():
    places = []
    for one in variable_prompts(40, VariableShape(1500, example=False), count_words):
        lines = one.context.splitlines()[2:]
        places += [at / len(lines) for at, line in enumerate(lines) if line.startswith("VAR ")]
    assert min(places) < 0.05 and max(places) > 0.95
    assert 0.45 < sum(places) / len(places) < 0.55


def test_the_example_is_answered_and_has_names_of_its_own():
    one = variables(2, VariableShape(800, 2, 4), count_words)
    shown = one.prompt[: one.prompt.rindex("Memorize and track")]
    [(value, count, again, answer)] = re.findall(
        r"Question: Find all variables that are assigned the value (\d+) in the text above\. "
        r"Answer: According to the chain\(s\) of variable assignment in the text above, "
        r"(\d+) variables are assgined the value (\d+), they are: ([A-Z ]+)\n\n$",
        shown,
    )
    state = interpreted(shown)
    assert value == again and int(count) == 5
    assert [name for name in state if state[name] == value] == answer.split()
    assert all(len(name) == 3 for name in state) and shown.count(NOISE_LINE) == 10
    assert not set(state) & set(interpreted(task_of(one)))
    assert one.prompt.count("Question: ") == 2


def test_no_name_is_written_anyway():
    for seed in range(50):
        one = variables(seed, VariableShape(300, 3, 4, example=False), count_words)
        plain = re.sub(r"VAR .*", "", one.prompt).upper()
        assert not any(name in plain + one.opening.upper() for name in one.answers)


def test_the_words_are_rulers():
    one = variables(0, VariableShape(400, example=False), count_words)
    assert one.context.startswith(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    value = one.question.split()[9]
    assert one.question == (
        f"Question: Find all variables that are assigned the value {value} in the text above."
    )
    assert one.opening == (
        "Answer: According to the chain(s) of variable assignment in the text above, 5 variables "
        f"are assgined the value {value}, they are:"
    )


def test_seeded():
    shape = VariableShape(600)
    first = list(variable_prompts(4, shape, count_words, seed=1))
    assert first == list(variable_prompts(4, shape, count_words, seed=1))
    other = list(variable_prompts(4, shape, count_words, seed=2))
    assert len({one.id for one in first + other}) == len({one.prompt for one in first + other}) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VariableShape(500, chains=0), "chains=0, hops=4: choose both from 1"),
        (lambda: VariableShape(500, hops=101), "hops=101"),
        (lambda: variables(0, VariableShape(100), count_words), "length=100: the shortest prompt"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
