"""What a cache would hold while a known text is generated, without running the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoomkv.caches.base import PolicyCache

_SAMPLED_EVERY = 8  # decode steps between two readings of the footprint


def replayed_bytes(
    cache: PolicyCache,
    prompt: Tensor,  # [B, P]
    mask: Tensor,  # [B, P]
    answers: Sequence[Sequence[int]],
    pad_id: int,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Mean device bytes of a cache over the decode steps of known answers.

    The cache is driven as an attached model drives it, with zeros for keys and values. That is
    exact for policies whose choice depends on the text alone (``streaming_llm``, ``sumr``); for
    ``zoomr`` all summaries tie.

    Args:
        cache: New and empty.
        prompt: Prompt ids, padded on the left.
        mask: 0 where the prompt is padding.
        answers: Generated ids of each row; shorter rows are fed ``pad_id`` at the end.
        pad_id: The id that is fed to ended rows.
        dtype: Of keys and values.

    Returns:
        Bytes, for the whole batch.
    """
    length = max(map(len, answers))
    said = torch.tensor([[*ids, *[pad_id] * (length - len(ids))] for ids in answers])
    alive = torch.arange(length) < torch.tensor([len(ids) for ids in answers])[:, None]
    ids = torch.cat([prompt, said], 1)
    mask = torch.cat([mask, alive.long()], 1)
    cache.expect_prompt(prompt.shape[1])
    readings = []
    start, end = 0, prompt.shape[1]
    # The last token is never fed back, as in generate().
    while end < ids.shape[1]:
        _forward(cache, ids[:, start:end], mask[:, :end], dtype)
        if (end - prompt.shape[1]) % _SAMPLED_EVERY == 0:
            readings.append(cache.footprint().device_bytes)
        start, end = end, end + 1
    readings.append(cache.footprint().device_bytes)
    return sum(readings) / len(readings)


def _forward(cache: PolicyCache, ids: Tensor, mask: Tensor, dtype: torch.dtype) -> None:
    shape = cache.shape
    step = cache.begin(ids, mask, None)
    rows = torch.zeros(*ids.shape, shape.kv_heads, shape.head_dim, dtype=dtype).transpose(1, 2)
    for layer in range(shape.layers):
        read, _ = cache.update(rows, rows, layer, step)
        if step.observer is not None:
            query = rows.new_zeros(len(ids), shape.heads, ids.shape[1], shape.head_dim)
            step.observations.append(step.observer(step, layer, query, read))
    cache.commit(step, rows.new_zeros(*ids.shape, 0))
