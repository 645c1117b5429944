"""Which token ids end a sentence or a paragraph (ZoomR, section 3.3).

A cache chooses anew what to read after such a token. BPE merges punctuation with its
neighbours (``).``, ``.\\n\\n``, ``?"``), so a list of strings does not do: the whole vocabulary
is decoded once into a mask.
"""

from typing import Any, Literal

import torch
from torch import Tensor

TERMINATORS = frozenset({".", "!", "?", "...", ":", "\n\n", "\n\n\n"})

# What may follow the stop that ends a sentence.
_CLOSERS = " \t\n\r\f\v\u00a0\"'`*_)]}>\u201d\u2019\u00bb"


def boundary_mask(
    tokenizer: Any, vocab_size: int, mode: Literal["suffix", "exact"] = "suffix"
) -> Tensor:  # [V]
    """Marks the tokens that are semantic boundaries.

    Args:
        tokenizer: Anything with ``get_vocab``, ``batch_decode`` and ``all_special_ids``.
        vocab_size: Rows of the model's embedding; may exceed the tokenizer's own count.
        mode: ``exact`` takes tokens that, without leading spaces, are one of ``TERMINATORS``.
            ``suffix`` also takes tokens that end with one, behind which only white space,
            quotes or closing brackets stand. A decimal point counts; that is harmless.

    Returns:
        Bool tensor ``[vocab_size]`` on the CPU; special tokens are False.

    Raises:
        ValueError: If ``mode`` is unknown.
    """
    if mode not in ("suffix", "exact"):
        raise ValueError(f"boundary mode {mode!r} is unknown: use 'suffix' or 'exact'")
    ends = _ends_with_terminator if mode == "suffix" else _is_terminator
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    texts = decode_vocabulary(tokenizer, vocab_size)
    mask[[token for token, text in texts.items() if ends(text)]] = True
    return mask


def blank_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids, in order, of tokens that hold white space and nothing else."""
    return tuple(sorted(t for t, text in decode_vocabulary(tokenizer).items() if text.isspace()))


def decode_vocabulary(tokenizer: Any, vocab_size: int | None = None) -> dict[int, str]:
    """Decodes each ordinary (not special) token on its own.

    Args:
        tokenizer: As in ``boundary_mask``.
        vocab_size: Ids from here on are left out; None keeps all.

    Returns:
        Text by token id. Line ends are plain newlines.
    """
    special = set(tokenizer.all_special_ids)
    ids = [
        token
        for token in tokenizer.get_vocab().values()
        if token not in special and (vocab_size is None or token < vocab_size)
    ]
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    return {t: text.replace("\r\n", "\n") for t, text in zip(ids, texts, strict=True)}


def _is_terminator(text: str) -> bool:
    return text.lstrip(" ") in TERMINATORS


def _ends_with_terminator(text: str) -> bool:
    stripped = text.rstrip(_CLOSERS)
    # A blank line counts itself, so it is looked for in what the stripping took away.
    return stripped.endswith((".", "!", "?", ":")) or "\n\n" in text[len(text.rstrip()) :]
