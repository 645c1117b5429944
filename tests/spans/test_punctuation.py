"""Tokens that end a sentence, tokens that stand between clauses."""

from typing import Any

import pytest
import torch

from zoomkv.spans.punctuation import delimiter_mask, sentence_end_mask

TEXTS = {
    ".": (True, True),
    " .": (True, True),
    "?!": (True, True),
    "...": (True, True),
    "\u2026": (True, False),
    "\u3002": (True, True),
    '."': (True, False),
    ".)\n": (True, False),
    "end.": (True, False),
    "\n\n": (True, True),
    ".\n\n": (True, True),
    "}\n\n": (True, False),
    "\n": (False, True),
    "\t": (False, True),
    " ": (False, True),
    ",": (False, True),
    "\uff0c": (False, True),
    ";": (False, True),
    ":": (False, True),
    " :\n": (False, True),
    ".5": (False, False),
    "word": (False, False),
    ")": (False, False),
    '"': (False, False),
    "": (False, False),
    "<eos>.": (False, False),  # special
}


class Tokenizer:
    all_special_ids = [len(TEXTS) - 1]

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(len(TEXTS))}

    def batch_decode(self, ids: list[list[int]], **kwargs: Any) -> list[str]:
        return [list(TEXTS)[i[0]] for i in ids]


@pytest.mark.parametrize(("make", "which"), [(sentence_end_mask, 0), (delimiter_mask, 1)])
def test_masks(make: Any, which: int) -> None:
    mask = make(Tokenizer(), 40)
    assert mask.shape == (40,) and mask.dtype == torch.bool
    got = {text for number, text in enumerate(TEXTS) if mask[number]}
    assert got == {text for text, marks in TEXTS.items() if marks[which]}
    assert not mask[len(TEXTS) :].any()
    assert int(make(Tokenizer(), 3).sum()) == 3
