"""Reading a prompt into a cache, in one piece or in chunks."""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def prefill(
    model: Any,
    cache: Any,
    input_ids: Tensor,  # [B, T]
    attention_mask: Tensor | None = None,  # [B, columns seen + T]
    chunk_size: int | None = None,
) -> Tensor:  # [B, V]
    """Feeds a prompt (or a later turn's) to an attached model and tells the cache where it ends.

    Args:
        model: An attached causal LM.
        cache: A cache of this package.
        input_ids: The new columns only.
        attention_mask: 0 for padding, over all columns, those that the cache has seen included.
        chunk_size: Columns of one forward; None feeds all at once.

    Returns:
        Logits behind the last column.

    Raises:
        ValueError: Empty prompt, or one that contradicts what the cache holds.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    seen, columns = cache.seen, input_ids.shape[1]
    cache.expect_prompt(seen + columns)
    logits = None
    for chunk in input_ids.split(chunk_size or max(columns, 1), dim=1):
        seen += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :seen]
        output = model(input_ids=chunk, attention_mask=mask, cache=cache, logits_to_keep=1)
        logits = output.logits[:, -1]
    assert logits is not None
    return logits
