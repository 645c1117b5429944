"""Needles: exact lengths, depths counted anew from the text, everything there once, seeded."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.needles import (
    ADJECTIVES,
    NEEDLES,
    NOISE,
    NOUNS,
    Haystack,
    NeedleShape,
    NeedleText,
    haystack,
    needle,
    needles,
)
from zoomkv.data.segment import estimate_tokens

ROOT = Path(__file__).parents[2]
KINDS = ("single", "multi-key", "multi-value", "multi-query")
MARK = "One of the special magic "
needs_book = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="no reasoning-gym")


@pytest.fixture(scope="module")
def count_tokens(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


@pytest.fixture
def story(tmp_path):
    """A file whose sentences are numbered."""
    lines = [f'Here "sentence {n} ends." It\nhas {n * n} in it! Why {n}?' for n in range(40)]
    (tmp_path / "story.txt").write_text("\n\n".join(lines), encoding="utf-8")
    return str(tmp_path / "story.txt")


def hidden(one) -> list[tuple[str, str]]:
    """Keys and values in the order of the text."""
    facts = one.context.split(MARK)[1:]
    heads = [fact.partition(" for ")[2].partition(" is: ") for fact in facts]
    return [(key, value.partition(".")[0]) for key, _, value in heads]


@pytest.mark.parametrize("name", ["noise", "needles", "story"])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_exact(count_tokens, story, name, kind):
    among = haystack(story if name == "story" else name)
    for seed, length in enumerate((331, 332, 333, 600)):
        one = needle(seed, NeedleShape(length, kind, 2), among, count_tokens)
        assert count_tokens(f"{one.context}\n{one.question}") == length == one.length
        assert one.prompt == f"{one.context}\n{one.question}"


@given(st.integers(0, 10**6), st.integers(330, 420), st.sampled_from([NOISE, NEEDLES]))
@settings(max_examples=10)
def test_any_length_is_met(tokenizer, seed, length, among):
    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    one = needle(seed, NeedleShape(length), among, count)
    assert count(one.prompt) == length


@pytest.mark.parametrize("count", [len, estimate_tokens, lambda text: len(text.split())])
def test_any_measure_will_do(count):
    for among in (NOISE, NEEDLES):
        one = needle(1, NeedleShape(700, "multi-query"), among, count)
        assert count(one.prompt) == 700 and len(set(hidden(one))) == len(hidden(one))


@pytest.mark.parametrize("depth", [0.0, 12.5, 50.0, 99.0, 100.0])
def test_a_needle_stands_where_it_was_asked_to(depth):
    one = needle(5, NeedleShape(3000, depths=(depth,)))
    lines = one.context.splitlines()[1:]
    [at] = [n for n, line in enumerate(lines) if line.startswith(MARK)]
    assert one.depths == (depth,) and at == int((len(lines) - 1) * depth / 100)
    others = [line for n, line in enumerate(lines) if n != at]
    assert len(others) > 60 and set(others[:-1]) == set(NOISE.sentences)
    assert others[-1].startswith(NOISE.sentences[0][:5])  # the last may be cut, or go on


def test_several_needles_stand_at_several_depths(story):
    among = haystack(story)
    shape = NeedleShape(900, "multi-query", 3, depths=(80.0, 10.0, 40.0))
    one = needle(2, shape, among)
    text = one.context.partition("\n")[2]
    keys = [f"{MARK}numbers for {key} is: {value}." for key, value in hidden(one)]
    # Words of the haystack before each needle, counted in sentences of the haystack.
    plain = text
    for fact in keys:
        assert plain.count(fact) == 1
        plain = plain.replace(fact, "")
    plain = " ".join(plain.split())
    start = next(n for n, s in enumerate(among.sentences) if plain.startswith(f"{s} "))
    turned = among.sentences[start:] + among.sentences[:start]
    total = next(n for n in range(10**6) if len(" ".join((turned * 9)[:n])) >= len(plain))
    assert plain.startswith(" ".join((turned * 9)[: total - 1]))
    places = []
    for fact in keys:
        before = text.partition(fact)[0]
        for other in keys:
            before = before.replace(other, "")
        before = " ".join(before.split())
        [place] = [n for n in range(total + 1) if " ".join((turned * 9)[:n]) == before]
        places.append(place)
    assert places == [int(total * depth / 100) for depth in (10.0, 40.0, 80.0)]
    by_depth = [one.answers[n] for n in (1, 2, 0)]
    assert [value for _, value in hidden(one)] == by_depth


@pytest.mark.parametrize("among", [NOISE, NEEDLES])
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**9))
@settings(max_examples=8)
def test_answers_are_there_once_and_keys_are_told_apart(among, kind, seed):
    shape = NeedleShape(600, kind, 3)
    one = needle(seed, shape, among)
    found = hidden(one)
    asked = [(key, value) for key, value in found if key in one.question]
    assert sorted(value for _, value in asked) == sorted(one.answers)
    assert all(one.context.count(answer) == 1 for answer in one.answers)
    keys, values = [key for key, _ in found], [value for _, value in found]
    assert len(set(values)) == len(values)
    if kind == "multi-value":
        assert keys.count(asked[0][0]) == 3 and len(set(keys)) == len(keys) - 2
    else:
        assert len(set(keys)) == len(keys)
    if among is NOISE:
        assert len(found) == (1 if kind == "single" else 3)
    else:
        assert len(found) > 20
    assert len(one.answers) == len(one.depths) == shape.asked
    assert not any(answer in one.question + one.opening for answer in one.answers)


def test_the_words_are_rulers(count_tokens):
    one = needle(0, NeedleShape(300), NOISE)
    [(key, value)] = hidden(one)
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    assert f"\nOne of the special magic numbers for {key} is: {value}.\n" in one.context
    subject = f"the special magic number for {key} mentioned in the provided text"
    assert one.question == f"What is {subject}?" and one.opening == f"T{subject[1:]} is"
    assert value.isdigit() and len(value) == 7 and value[0] != "0"
    one = needle(0, NeedleShape(400, "multi-query", 3, values="uuids"), NOISE)
    keys = dict((value, key) for key, value in hidden(one))
    a, b, c = (keys[answer] for answer in one.answers)
    assert one.context.startswith(
        "Some special magic uuids are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuids afterwards.\n"
    )
    subject = f"the special magic uuids for {a}, {b}, and {c} mentioned in the provided text"
    assert one.question == f"What are all {subject}?" and one.opening == f"T{subject[1:]} are"


@pytest.mark.parametrize("keys", ["words", "numbers", "uuids"])
@pytest.mark.parametrize("values", ["words", "numbers", "uuids"])
def test_keys_and_values_of_any_form(keys, values):
    one = needle(3, NeedleShape(900, "multi-key", 4, keys, values), NEEDLES)
    looks = {
        "words": lambda s: s.partition("-")[0] in ADJECTIVES and s.partition("-")[2] in NOUNS,
        "numbers": lambda s: s.isdigit() and len(s) == 7,
        "uuids": lambda s: len(s) == 36 and s.count("-") == 4 and s[14] == "4",
    }
    found = hidden(one)
    assert all(looks[keys](key) and looks[values](value) for key, value in found)
    assert len({name for pair in found for name in pair}) == 2 * len(found)


def test_no_word_key_is_a_part_of_another():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) >= 100
    for words, within in ((ADJECTIVES, str.endswith), (NOUNS, str.startswith)):
        assert not [(a, b) for a in words for b in words if a != b and within(a, b)]


def test_seeds_repeat_and_do_not_meet(story):
    among, shape = haystack(story), NeedleShape(400, "multi-key")
    first = list(needles(3, shape, among, seed=1))
    assert first == list(needles(3, shape, among, seed=1))
    assert [one.id for one in first] == ["needle-1000000", "needle-1000001", "needle-1000002"]
    every = [one for seed in range(3) for one in needles(4, shape, among, seed=seed)]
    assert len({one.context for one in every}) == len({one.answers for one in every}) == 12
    assert len({one.context.split()[25:35][0] for one in every}) > 1  # nor begin alike


def test_what_the_haystack_says_is_no_key_and_no_value():
    pairs = [f"{a}-{n}" for a in ADJECTIVES for n in NOUNS]
    spared = Haystack((" ".join(pairs[:-2]) + ".",))
    one = needle(0, NeedleShape(40_000, "multi-query", 2), spared)
    assert {key for key, _ in hidden(one)} == set(pairs[-2:])
    with pytest.raises(ValueError, match="not so many different words"):
        needle(0, NeedleShape(40_000, "multi-query", 3), spared)


@needs_book
def test_the_book_gives_the_part_that_was_asked_for():
    evaluation, train = haystack("book"), haystack("book", "train")
    assert len(train.sentences) > len(evaluation.sentences) > 50
    long = [{s for s in part.sentences if len(s) > 40} for part in (train, evaluation)]
    assert not long[0] & long[1]
    [document] = NeedleText(1, 800, haystack="book").documents(estimate_tokens)
    assert any(sentence in document["text"] for sentence in long[0])
    assert not any(sentence in document["text"] for sentence in long[1])
    one = needle(0, NeedleShape(800), evaluation)
    assert any(s in one.context for s in long[1]) and not any(s in one.context for s in long[0])


def test_a_folder_is_a_haystack(tmp_path):
    (tmp_path / "a.txt").write_text('One. "Two!" (Three?) Four\n', encoding="utf-8")
    (tmp_path / "b.txt").write_text("Five\nsix.  Seven", encoding="utf-8")
    assert haystack(str(tmp_path)).sentences == (
        "One.",
        '"Two!"',
        "(Three?)",
        "Four",
        "Five six.",
        "Seven",
    )
    with pytest.raises(ValueError, match="no such file or folder"):
        haystack(str(tmp_path / "c.txt"))


def test_documents_to_train_on_end_with_the_answers():
    source = NeedleText(3, 400, seed=2, kind="multi-value", needles=2)
    found = list(source.documents(estimate_tokens))
    assert found == list(source.documents(estimate_tokens))
    shape = NeedleShape(400, "multi-value", 2)
    for document, one in zip(found, needles(3, shape, seed=2), strict=True):
        a, b = one.answers
        assert document["text"] == f"{one.prompt} {one.opening} {a}, and {b}."
        assert document["id"] == one.id


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "double"}, "kind='double'"),
        ({"keys": "letters"}, "keys='letters'"),
        ({"values": "letters"}, "values='letters'"),
        ({"count": 1}, "count=1"),
        ({"count": 101}, "count=101"),
        ({"depths": (1.0, 2.0)}, "depths"),
        ({"depths": (101.0,)}, "depths"),
        ({"kind": "multi-query", "depths": (1.0,)}, "depths"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        NeedleShape(300, **settings)


def test_a_length_that_cannot_be_met_is_refused():
    with pytest.raises(ValueError, match="length=20: the shortest prompt takes"):
        needle(0, NeedleShape(20))
    with pytest.raises(ValueError, match="length=301: with this tokenizer no text comes out"):
        needle(0, NeedleShape(301), NOISE, lambda text: 2 * estimate_tokens(text))
    with pytest.raises(ValueError, match="choose uuids"):
        needle(0, NeedleShape(200_000), NEEDLES)


def test_the_sample_is_what_the_code_makes():
    lines = (ROOT / "data/samples/needles.jsonl").read_text(encoding="utf-8").splitlines()
    made = [needle(n, NeedleShape(256, kind, 3)) for n, kind in enumerate(KINDS)]
    assert [json.loads(line) for line in lines] == [
        json.loads(json.dumps(one.to_dict())) for one in made
    ]
