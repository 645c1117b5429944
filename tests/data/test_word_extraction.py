"""Common and frequent words: counted anew from the text, never too long, seeded, RULER's words."""

import math
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.plain_words import WORDS
from zoomkv.data.word_extraction import (
    CommonShape,
    FrequentShape,
    common_word_prompts,
    common_words,
    frequent_word_prompts,
    frequent_words,
    words,
)


def count_words(text: str) -> int:
    return len(text.split())


def lists_of(one) -> list[list[str]]:
    """The entries of each numbered list, the example's first; numbers are checked."""
    found = []
    for text in re.findall(r"appear most often\.\n(.*)\nQuestion", one.prompt):
        numbers, entries = text.split()[::2], text.split()[1::2]
        assert numbers == [f"{number}." for number in range(1, len(numbers) + 1)]
        found.append(entries)
    return found


@given(st.integers(0, 10**9), st.integers(320, 6000), st.booleans())
@settings(max_examples=40)
def test_the_common_words_are_the_top_of_a_count(seed, length, example):
    one = common_words(seed, CommonShape(length, example=example), count_tokens=count_words)
    counts = Counter(lists_of(one)[-1])
    common, other = (30, 3) if length >= 4096 else (6, 1)
    assert {word for word, n in counts.most_common(10)} == set(one.answers)
    assert {counts[word] for word in one.answers} == {common}
    assert {n for word, n in counts.items() if word not in one.answers} == {other}
    assert len(one.answers) == len(set(one.answers)) == 10
    # An entry is two words, its number and itself; one more word would not have fitted.
    assert one.length == count_words(one.prompt) <= length < one.length + 2 * other


def test_any_measure_will_do(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    for measure, length in ((len, 4000), (count, 2500)):
        one = common_words(1, CommonShape(length), count_tokens=measure)
        assert 0.98 * length <= measure(one.prompt) <= length
        one = frequent_words(1, FrequentShape(length), measure)
        assert 0.95 * length <= measure(one.prompt) <= length


@pytest.mark.parametrize(
    ("length", "entries", "often"), [(2000, 40, {3: 10, 1: 10}), (6000, 190, {10: 10, 3: 30})]
)
def test_the_example_is_answered(length, entries, often):
    one = common_words(4, CommonShape(length), count_tokens=count_words)
    shown, _ = lists_of(one)
    counts = Counter(shown)
    assert len(shown) == entries and Counter(counts.values()) == often
    [answer] = re.findall(r"in the list are: (.*)\n", one.prompt)
    listed = re.findall(r"\d+\. (\w+)", answer)
    assert sorted(listed) == sorted(word for word, n in counts.items() if n == max(often))
    assert len(listed) == 10 and one.prompt.count("Question: ") == 2


def test_common_words_say_what_ruler_says():
    shape = CommonShape(500, answers=3, repeats=(4, 2), example=False)
    one = common_words(0, shape, count_tokens=count_words)
    assert one.context.startswith(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n1. "
    )
    assert one.question == "Question: What are the 3 most common words in the above list?"
    assert one.opening == "Answer: The top 3 words that appear most often in the list are:"
    counts = Counter(lists_of(one)[0])
    assert Counter(counts.values())[4] == 3 and set(counts.values()) == {4, 2}


@given(
    st.integers(0, 10**9),
    st.integers(300, 4000),
    st.sampled_from([1.5, 2.0, 3.5]),
    st.sampled_from([None, 50]),
)
@settings(max_examples=40)
def test_the_frequent_words_are_the_top_of_a_count(seed, length, alpha, vocabulary):
    length = length if alpha < 3 else length + 900  # the fourth word is rare
    one = frequent_words(seed, FrequentShape(length, alpha, vocabulary), count_words)
    [text] = re.findall(r"appeared coded words\. (.*)\nQuestion", one.prompt)
    counts = Counter(text.split())
    ranked = counts.most_common()
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == list(one.answers)
    assert ranked[3][1] > (ranked[4][1] if len(ranked) > 4 else 0)
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    assert len(ranked) <= (vocabulary or max(5, length // 50))
    assert one.length == count_words(one.prompt) <= length
    assert one.length > 0.95 * length


def test_numbers_fall_off_as_zetas():
    one = frequent_words(0, FrequentShape(20_000), count_words)
    [text] = re.findall(r"appeared coded words\. (.*)\nQuestion", one.prompt)
    counts = [n for _, n in Counter(text.split()).most_common()]
    # Of all draws the dots are 6 / pi**2; the rest go down with the square of their rank.
    draws = counts[0] * math.pi**2 / 6
    for rank, n in enumerate(counts, start=1):
        assert abs(n - draws * 6 / math.pi**2 / rank**2) <= 1
    assert len(counts) > 90


def test_frequent_words_say_what_ruler_says():
    one = frequent_words(0, FrequentShape(400), count_words)
    assert one.context.startswith(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    )
    assert one.question == (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?"
    )
    assert one.opening == (
        "Answer: According to the coded text above, the three most frequently appeared words are:"
    )


def test_no_answer_can_be_found_inside_another_word():
    assert len(set(WORDS)) == len(WORDS) > 2000 and list(WORDS) == sorted(WORDS)
    assert all(re.fullmatch("[a-z]{3,12}", word) for word in WORDS)
    joined = " ".join(WORDS)
    assert not [word for word in WORDS if joined.count(word) != 1]
    one = common_words(0, CommonShape(300, example=False), count_tokens=count_words)
    said = " ".join((one.context.partition("\n")[0], one.question, one.opening)).lower()
    assert not [word for word in WORDS if word in said]


def test_words_of_a_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The cat saw a wildcat, and snake_case; an output was put. Nor x.py cat!")
    # cat is a part of wildcat, put of output.
    assert words(str(path)) == ("and", "output", "saw", "was", "wildcat")
    assert words() is WORDS


def test_seeded():
    first = list(common_word_prompts(3, CommonShape(700), WORDS, count_words, seed=1))
    assert first == list(common_word_prompts(3, CommonShape(700), WORDS, count_words, seed=1))
    other = list(common_word_prompts(3, CommonShape(700), WORDS, count_words, seed=2))
    assert len({one.id for one in first + other}) == len({one.prompt for one in first + other}) == 6
    first = list(frequent_word_prompts(3, FrequentShape(400), count_words, seed=1))
    assert first == list(frequent_word_prompts(3, FrequentShape(400), count_words, seed=1))
    other = list(frequent_word_prompts(3, FrequentShape(400), count_words, seed=2))
    assert len({one.id for one in first + other}) == len({one.prompt for one in first + other}) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CommonShape(500, answers=0), "answers=0: choose at least 1"),
        (lambda: CommonShape(500, repeats=(2, 2)), "must come more often"),
        (lambda: CommonShape(500, repeats=(2, 0)), "and those once at least"),
        (lambda: common_words(0, CommonShape(90), count_tokens=count_words), "shortest prompt"),
        (lambda: common_words(0, CommonShape(500), WORDS[:19]), "19 different words are too few"),
        (lambda: common_words(0, CommonShape(9000), WORDS[:99]), "all 99 words together fill"),
        (lambda: FrequentShape(500, alpha=1.0), "alpha=1.0: choose from 1.1"),
        (lambda: FrequentShape(500, vocabulary=4), "vocabulary=4: choose at least 5"),
        (lambda: FrequentShape(500, letters=3), "letters=3: choose from 4"),
        (lambda: frequent_words(0, FrequentShape(60), count_words), "the shortest prompt takes"),
        (lambda: words("noise"), "no words to choose from"),
        (lambda: words("/nowhere"), "there is no such file"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
