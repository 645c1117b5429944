"""Paragraphs: they give back the text, respect fences and formulas, and short ones are merged."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.segment import MIN_TOKENS, estimate_tokens, segment_thought


def count_words(text: str) -> int:
    return len(text.split())


LONG = "one two three four five six"
PIECES = st.sampled_from(
    [
        "a",
        LONG,
        "\n",
        "\n\n",
        "\n \t\n",
        "\r\n\r\n",
        " ",
        "```\n",
        "```py\n",
        "~~~\n",
        "$$",
        "$",
        "é漢🙂",
    ]
)
TEXTS = st.lists(PIECES, max_size=30).map("".join)


@given(text=TEXTS, min_tokens=st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_paragraphs_give_back_the_text_and_only_the_last_is_short(text: str, min_tokens: int):
    paragraphs = segment_thought(text, count_words, min_tokens)
    assert "".join(paragraphs) == text
    assert all(count_words(paragraph) >= min_tokens for paragraph in paragraphs[:-1])
    assert all(re.search(r"\n[ \t\r]*\n\s*$", paragraph) for paragraph in paragraphs[:-1])
    if text.strip():
        assert all(paragraph.strip() for paragraph in paragraphs)


@given(
    before=st.lists(st.sampled_from([LONG, "a", "$5"]), max_size=3),
    block=st.sampled_from(["```\n{}\n```", "~~~py\n{}\n~~~~", "  ````\n{}\n  ````", "$$\n{}\n$$"]),
    body=st.lists(st.sampled_from(["x = 1", "", "", "  y", "a $ b"]), min_size=1, max_size=6),
    after=st.lists(st.sampled_from([LONG, "a"]), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_a_closed_block_is_never_cut(before, block, body, after):
    block = block.format("\n".join(body))
    text = "\n\n".join([*before, block, *after])
    paragraphs = segment_thought(text, count_words, min_tokens=0)
    assert sum(block in paragraph for paragraph in paragraphs) == 1
    assert len(paragraphs) == len(before) + 1 + len(after)


def test_an_unclosed_block_protects_nothing():
    assert len(segment_thought(f"```py\n{LONG}\n\n{LONG}", count_words, 0)) == 2
    assert len(segment_thought(f"$$ {LONG}\n\n{LONG}", count_words, 0)) == 2


def test_dollars_inside_code_do_not_open_a_formula():
    text = f"```sh\necho $$\n```\n\n{LONG}\n\n```sh\necho $$\n```"
    assert len(segment_thought(text, count_words, 0)) == 3


def test_short_paragraphs_join_the_next_and_the_last_stays_short():
    text = f"x = 1\n\n{LONG}\n\n- a\n\n- b\n\n{LONG}\n\nso x"
    paragraphs = segment_thought(text, count_words, min_tokens=6)
    assert [paragraph.strip() for paragraph in paragraphs] == [
        f"x = 1\n\n{LONG}",
        f"- a\n\n- b\n\n{LONG}",
        "so x",
    ]


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("", []),
        ("\n\n", ["\n\n"]),
        (f"\n\n{LONG}", [f"\n\n{LONG}"]),
        (f"{LONG}\n\n  ", [f"{LONG}\n\n  "]),
        (f"{LONG}\r\n\r\n{LONG}", [f"{LONG}\r\n\r\n", LONG]),
        (f"{LONG}\n{LONG}", [f"{LONG}\n{LONG}"]),
    ],
)
def test_edges(text: str, paragraphs: list[str]):
    assert segment_thought(text, count_words, min_tokens=3) == paragraphs


def test_default_counter_suits_any_script():
    assert estimate_tokens("") == 0
    assert estimate_tokens("a" * (4 * MIN_TOKENS)) == MIN_TOKENS
    assert estimate_tokens("漢" * 4) == 3
