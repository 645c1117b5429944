"""Which token ids end a sentence, and which stand between clauses (SentenceKV, SemantiCache).

Narrower and wider than ``boundaries``, which follows ZoomR: a colon ends no sentence, and a comma
is a delimiter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoomkv.spans.boundaries import decode_vocabulary

# Chinese and Japanese ones too.
_STOPS = (".", "!", "?", "\u2026", "\u3002", "\uff01", "\uff1f")
_DELIMITERS = ".,?!;:\u3002\uff0c\uff1f\uff01\uff1b\uff1a\u3001 \t\n\r\f\v\u00a0"
# What may follow the stop that ends a sentence.
_CLOSERS = " \t\n\r\f\v\u00a0\"'`*_)]}>\u201d\u2019\u00bb\u300d\u300f"


def sentence_end_mask(tokenizer: Any, vocab_size: int) -> Tensor:  # [V]
    """Marks the tokens that end a sentence.

    These end with a full stop, an exclamation or question mark or an ellipsis, behind which only
    white space, quotes or closing brackets stand, or hold a blank line.

    Args:
        tokenizer: Anything with ``get_vocab``, ``batch_decode`` and ``all_special_ids``.
        vocab_size: Rows of the model's embedding; may exceed the tokenizer's own count.

    Returns:
        Bool tensor ``[vocab_size]`` on the CPU; special tokens are False.
    """
    return _marked(
        tokenizer,
        vocab_size,
        lambda text: text.rstrip(_CLOSERS).endswith(_STOPS) or "\n\n" in text,
    )


def delimiter_mask(tokenizer: Any, vocab_size: int) -> Tensor:  # [V]
    """Marks the tokens that are punctuation between clauses, or white space, and nothing else.

    Args:
        tokenizer: As in ``sentence_end_mask``.
        vocab_size: Likewise.

    Returns:
        Bool tensor ``[vocab_size]`` on the CPU; special tokens are False.
    """
    return _marked(tokenizer, vocab_size, lambda text: bool(text) and not text.strip(_DELIMITERS))


def _marked(tokenizer: Any, vocab_size: int, chosen: Callable[[str], bool]) -> Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    texts = decode_vocabulary(tokenizer, vocab_size)
    mask[[token for token, text in texts.items() if chosen(text)]] = True
    return mask
