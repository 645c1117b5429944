"""Which tokens end a sentence: on a made vocabulary, and on a real one."""

from typing import Any

import pytest
import torch

from zoomkv.spans.boundaries import blank_ids, boundary_mask

ENDS = [".", "!", "?", "...", ":", "\n\n", "\n\n\n", " .", "\r\n\r\n"]
MERGED_ENDS = [
    ").", ".)", ".\n", ".\n\n", ":\n", '?"', '."', ".\u201d", "**:", ":**", ".]", "\n\n    ",
    ")\n\n", "\n \n\n", "::", "end.",
]  # fmt: skip
OTHERS = ["", "a", " ", "\n", "    ", "\t", ",", ";", ".a", "3.5", "=", ")", '"', "\n\na", "\ufffd"]
SPECIAL = ["<eos>", "?."]


class WordTokenizer:
    """A vocabulary that is a list of strings."""

    def __init__(self, words: list[str], special: list[str]) -> None:
        self.words = words
        self.all_special_ids = [words.index(word) for word in special]

    def get_vocab(self) -> dict[str, int]:
        return {f"token {i}": i for i in range(len(self.words))}

    def batch_decode(self, ids: list[list[int]], clean_up_tokenization_spaces: bool) -> list[str]:
        assert not clean_up_tokenization_spaces
        return ["".join(self.words[i] for i in row) for row in ids]


TOKENIZER = WordTokenizer([*ENDS, *MERGED_ENDS, *OTHERS, *SPECIAL], SPECIAL)


def marked(mask: torch.Tensor) -> list[str]:
    return [TOKENIZER.words[i] for i in mask.nonzero().flatten()]


def test_modes() -> None:
    size = len(TOKENIZER.words) + 5  # embeddings are often padded
    exact, suffix = (boundary_mask(TOKENIZER, size, mode) for mode in ("exact", "suffix"))
    assert exact.shape == suffix.shape == (size,) and suffix.dtype == torch.bool
    assert marked(exact) == ENDS
    assert marked(suffix) == ENDS + MERGED_ENDS


def test_smaller_embedding() -> None:
    assert boundary_mask(TOKENIZER, 3).tolist() == [True, True, True]


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="'suffix' or 'exact'"):
        boundary_mask(TOKENIZER, 3, "sentence")  # type: ignore[arg-type]


def test_blank_ids() -> None:
    blank = [TOKENIZER.words[i] for i in blank_ids(TOKENIZER)]
    assert blank == [w for w in TOKENIZER.words if w and not w.strip()]
    assert "\n\n" in blank and " " in blank and "" not in blank


def test_real_vocabulary(pristine_tokenizer: Any) -> None:
    suffix = boundary_mask(pristine_tokenizer, 49_280)
    exact = boundary_mask(pristine_tokenizer, 49_280, "exact")
    assert not (exact & ~suffix).any() and suffix.sum() > exact.sum() >= 10
    assert not suffix[pristine_tokenizer.all_special_ids].any()
    text = "Add 2 to 3. Is it 5? (It is.)\n\nSo, the next step: go on"
    ids = torch.tensor(pristine_tokenizer(text, add_special_tokens=False).input_ids)
    ends = [pristine_tokenizer.decode(ids[: i + 1]) for i in suffix[ids].nonzero().flatten()]
    for sentence in ("Add 2 to 3.", "Add 2 to 3. Is it 5?", "Add 2 to 3. Is it 5? (It is.)"):
        assert sentence in ends
    assert ends[-1].endswith("step:")
