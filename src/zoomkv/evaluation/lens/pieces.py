"""A text cut into the pieces that its tokens contribute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, special tokens included.

    A character that several tokens make together belongs to the last of them; the others are
    empty. So is a token whose text only shows with what follows.

    Args:
        tokenizer: Anything with ``decode``.
        ids: The whole text.

    Returns:
        One piece for each id; joined they are ``tokenizer.decode(ids)``, exactly.
    """
    text = _decoded(tokenizer, ids)
    pieces: list[str] = []
    told = 0  # characters that have been given to tokens
    before, pending = 0, 0  # ids from ``before`` give the context of those from ``pending``
    for end in range(1, len(ids) + 1):
        context = _decoded(tokenizer, ids[before:pending])
        piece = _decoded(tokenizer, ids[before:end])[len(context) :]
        # Half a character decodes to U+FFFD, which the text holds only if nothing completes it.
        if piece and text.startswith(piece, told) and (end == len(ids) or piece[-1] != "\ufffd"):
            before, pending = pending, end
            told += len(piece)
            pieces.append(piece)
        else:
            pieces.append("")
    if pieces:
        pieces[-1] += text[told:]
    return pieces


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
