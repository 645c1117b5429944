"""The plain parser on well-formed and malformed text, and the delimiters of real tokenizers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY, Delimiters, Segment, parse

BEGIN, END, BLANK, ABORT = 8, 9, 7, 6
PLAIN = Delimiters((BEGIN,), (END,), blank=(BLANK,), abort=(ABORT,))
TEXTUAL = Delimiters((1, 2), (2, 3), other_begins=((4, 1, 2),), other_ends=((5,),), blank=(7,))


def closed(*bounds: int) -> Segment:
    return Segment(*bounds)


def rest(start: int, unfinished: int, end: int) -> Segment:
    return Segment(start, unfinished, end, end, end, closed=False)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([1, 2], [rest(0, 2, 2)], id="no delimiters"),
        pytest.param([1, 8, 2, 9], [closed(0, 1, 2, 3, 4)], id="one summary"),
        pytest.param(
            [1, 8, 2, 9, 3, 8, 4, 5, 9, 1],
            [closed(0, 1, 2, 3, 4), closed(4, 5, 6, 8, 9), rest(9, 10, 10)],
            id="two summaries and an open paragraph",
        ),
        pytest.param([1, 8, 2], [rest(0, 1, 3)], id="begin only"),
        pytest.param([1, 9, 2], [rest(0, 3, 3)], id="end only"),
        pytest.param([1, 8, 8, 9], [closed(0, 1, 2, 3, 4)], id="begin begin end"),
        pytest.param([9, 1, 8, 2, 9], [closed(0, 2, 3, 4, 5)], id="end before begin"),
        pytest.param([1, 8, 9, 2, 8, 3, 9], [closed(0, 4, 5, 6, 7)], id="empty summary"),
        pytest.param([1, 8, 7, 9, 2], [rest(0, 5, 5)], id="blank summary"),
        pytest.param(
            [1, 8, 2, 9, 8, 3, 9],
            [closed(0, 1, 2, 3, 4), closed(4, 4, 5, 6, 7)],
            id="two summaries in a row",
        ),
        pytest.param(
            [1, 8, 2, 9, 7, 7, 8, 3, 9],
            [closed(0, 1, 2, 3, 4), closed(4, 4, 7, 8, 9)],
            id="only white space between two summaries",
        ),
        pytest.param([8, 9, 8, 2, 9], [closed(0, 2, 3, 4, 5)], id="empty summary is text"),
        pytest.param([1, 8, 2, 6, 9], [rest(0, 5, 5)], id="broken off by end of thought"),
        pytest.param([1, 8, 2, 2, 2, 9], [closed(0, 1, 2, 5, 6)], id="as long as the cap"),
        pytest.param([1, 8, 2, 2, 2, 2, 9], [rest(0, 7, 7)], id="longer than the cap"),
        pytest.param([1, 8, 2, 2, 2, 2, 8, 3, 9], [closed(0, 6, 7, 8, 9)], id="after one too long"),
    ],
)
def test_parse(ids: list[int], expected: list[Segment]) -> None:
    assert parse(ids, PLAIN, summary_cap=3) == expected


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([0, 1, 2, 6, 2, 3], [closed(0, 1, 3, 4, 6)], id="whole sequences count"),
        pytest.param([0, 4, 1, 2, 6, 5], [closed(0, 1, 4, 5, 6)], id="longest spelling wins"),
        pytest.param([1, 2, 3, 5], [closed(0, 0, 2, 3, 4)], id="an id is used up once"),
        pytest.param([1, 6, 2, 3], [rest(0, 4, 4)], id="interrupted sequence"),
    ],
)
def test_parse_textual(ids: list[int], expected: list[Segment]) -> None:
    assert parse(ids, TEXTUAL) == expected


@given(st.lists(st.integers(0, 9), max_size=40), st.sampled_from([PLAIN, TEXTUAL]))
def test_segments_tile_every_prefix(ids: list[int], delimiters: Delimiters) -> None:
    for length in range(len(ids) + 1):
        segments = parse(ids[:length], delimiters, summary_cap=4)
        edges = [0, *(s.end for s in segments)]
        assert [s.start for s in segments] == edges[:-1] and edges[-1] == length
        assert all(s.closed for s in segments[:-1])
        for s in segments:
            assert s.start <= s.summary_start <= s.interior_start <= s.interior_end <= s.end
            assert not s.closed or s.interior_start < s.interior_end < s.end


@pytest.mark.parametrize(("begin", "end"), [((), (1,)), ((1,), ()), ((1,), (1,))])
def test_useless_delimiters_are_refused(begin: tuple[int, ...], end: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="summary"):
        Delimiters(begin, end)


def test_special_delimiters_are_ids_not_letters(smollm2_tokenizer: Any) -> None:
    tokenizer = smollm2_tokenizer
    with pytest.raises(ValueError, match="begin_of_summary"):
        Delimiters.special(tokenizer)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [BEGIN_OF_SUMMARY, END_OF_SUMMARY, "</think>"]}
    )
    delimiters = Delimiters.special(tokenizer)
    assert delimiters.abort == tuple(
        sorted([tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("</think>")])
    )
    text = f"Add 2 to 3.\n\n{BEGIN_OF_SUMMARY}It is 5 \U0001f600.{END_OF_SUMMARY}\n\nNext"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    summary, tail = parse(ids, delimiters)
    assert summary.closed and not tail.closed
    assert tokenizer.decode(ids[: summary.summary_start]) == "Add 2 to 3.\n\n"
    assert tokenizer.decode(ids[summary.interior_start : summary.interior_end]) == (
        "It is 5 \U0001f600."
    )
    spelled = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert len(spelled) > len(ids)
    assert [s.closed for s in parse(spelled, delimiters)] == [False]


@pytest.fixture(scope="module")
def textual_delimiters(pristine_tokenizer: Any) -> Delimiters:
    return Delimiters.textual(pristine_tokenizer)


@pytest.mark.parametrize("before", ["x", ".", " ", "\n", "\n\n", ").\n\n", "$", "**"])
@pytest.mark.parametrize("after", ["", "x", ".", "\n", "\n\n", " <", "**", " The"])
def test_textual_delimiters_survive_merged_tokens(
    pristine_tokenizer: Any, textual_delimiters: Delimiters, before: str, after: str
) -> None:
    text = f"Add 2 to 3{before}<summary>It is 5.</summary>{after}"
    ids = pristine_tokenizer(text, add_special_tokens=False).input_ids
    segment = parse(ids, textual_delimiters)[0]
    assert segment.closed
    summary = pristine_tokenizer.decode(ids[segment.summary_start : segment.end])
    assert "<summary>It is 5.</summary>" in summary
    interior = ids[segment.interior_start : segment.interior_end]
    assert pristine_tokenizer.decode(interior) == "It is 5."
    outside = ids[: segment.summary_start] + ids[segment.end :]
    assert "summary" not in pristine_tokenizer.decode(outside)
