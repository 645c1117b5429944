"""Pieces of a text join to the text, also where several tokens make one character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bases import make_tokenizer
from tokenizers import Tokenizer, decoders, models

from zoomkv.evaluation.lens.pieces import pieces_of

TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@given(st.text(max_size=60))
def test_join_to_the_text(text: str) -> None:
    ids = ids_of(text)
    pieces = pieces_of(TOKENIZER, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, 359), max_size=40))
def test_join_for_any_ids(ids: list[int]) -> None:
    """Whatever a model says: halves of characters, lone bytes, special tokens."""
    pieces = pieces_of(TOKENIZER, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)


def test_a_character_belongs_to_the_token_that_ends_it() -> None:
    ids = ids_of("a\U0001f98ab")
    assert pieces_of(TOKENIZER, ids) == ["a", "", "", "", "\U0001f98a", "b"]


def test_half_a_character_in_the_end_is_shown_as_the_tokenizer_shows_it() -> None:
    ids = ids_of("a\U0001f98a")[:-1]
    assert pieces_of(TOKENIZER, ids)[:1] == ["a"]
    assert "".join(pieces_of(TOKENIZER, ids)) == TOKENIZER.decode(ids) != "a"


def test_special_tokens_are_shown() -> None:
    ids = ids_of("<|im_start|>Step 1")
    assert pieces_of(TOKENIZER, ids)[0] == "<|im_start|>"


class Metaspace:
    """A decoder that drops the first space of whatever it is given, as Llama's does."""

    def __init__(self) -> None:
        self.raw = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "s": 2}, "s"))
        self.raw.decoder = decoders.Metaspace()

    def decode(self, ids: list[int], **kwargs: object) -> str:
        return self.raw.decode(ids)


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [([0, 1, 2], ["one", " two", "s"]), ([1, 2, 0, 0], ["two", "s", " one", " one"]), ([], [])],
)
def test_a_space_that_only_shows_behind_something(ids: list[int], pieces: list[str]) -> None:
    assert pieces_of(Metaspace(), ids) == pieces
