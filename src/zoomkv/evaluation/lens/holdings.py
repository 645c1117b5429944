"""How a cache holds each token for the query that is being answered, whatever its policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoomkv.caches.base import PolicyCache
from zoomkv.caches.evicting import EvictingCache
from zoomkv.caches.sekv import SeKVCache
from zoomkv.caches.semanticache import SemantiCache, SemantiLayer
from zoomkv.caches.sentence_kv import SentenceKVCache
from zoomkv.caches.sumr import SumRCache

PLAIN, ZOOMED, SUMMARY = 0, 1, 2
"""What a token's own row is read as: like any other, because it was chosen, as a summary."""


class Heads(NamedTuple):
    """How many KV heads of one layer read each token, and how; int64 ``[n]`` each, CPU."""

    exact: Tensor
    """Read its own row."""
    coarse: Tensor
    """Read it in a mean of several rows alone."""


def heads_of(cache: PolicyCache, layer: int) -> Heads:
    """What the query of the step that is about to be committed reads, itself apart.

    Args:
        cache: Of one sequence, between a forward and its ``commit``.
        layer: Of the model.
    """
    read = cache.readable(layer)[0]  # [1 or Hkv, n]
    mean = torch.zeros_like(read)
    if isinstance(cache, SeKVCache):
        mean = cache.coarse(layer)[0]
    elif isinstance(cache, SemantiCache):
        mean = ~read | _clustered(cache.layers[layer], read)
    every = cache.shape.kv_heads
    exact, coarse = (
        (which.sum(0) * (every // len(which))).to("cpu") for which in (read & ~mean, mean)
    )
    return Heads(exact, coarse)


def marks_of(cache: PolicyCache) -> Tensor | None:  # uint8 [n], CPU
    """What own rows are read as; None: all plain. Says nothing about tokens that nobody reads."""
    if isinstance(cache, SumRCache):
        return _segment_marks(cache)
    longest = int(cache.lengths[0])
    if isinstance(cache, SeKVCache):  # what is not among the exact rows was fetched
        return (~cache.slots.readable(longest)[0, 0] * ZOOMED).to(torch.uint8)
    if isinstance(cache, SentenceKVCache):
        chosen = [cache.chosen(layer)[0].any(0) for layer in range(len(cache))]
        return (torch.stack(chosen).any(0) * ZOOMED).to("cpu", torch.uint8)
    return None


def drops_for_good(cache: PolicyCache) -> bool:
    """Whether a token that nobody reads is lost; if not, the host has it."""
    return isinstance(cache, EvictingCache)


def _clustered(layer: SemantiLayer, read: Tensor) -> Tensor:  # bool [Hkv, n] -> bool [Hkv, n]
    """Stored positions whose rows are means: a cluster has the position of its first token."""
    inside = torch.zeros_like(read)
    if layer.log_size is not None:
        slots = layer.slots
        size = layer.log_size[0, :, : int(slots.count[0])]
        head, slot = (size > 0).nonzero(as_tuple=True)
        inside[head, slots.positions[0, head, slot].long()] = True
    return inside


def _segment_marks(cache: SumRCache) -> Tensor:  # uint8 [n]
    """Paragraphs that were zoomed into, and summaries that are read, by the last choice."""
    marks = torch.zeros(int(cache.lengths[0]), dtype=torch.uint8)
    choices = cache.trace()
    if not choices:
        return marks
    table, choice = cache.tracker.table, choices[-1]
    start, middle, end = (
        bound[0] for bound in (table.regular_start, table.regular_end, table.summary_end)
    )
    zoomed, summarised = (
        torch.tensor(choice[name], dtype=torch.int64) for name in ("zoomed", "summarised")
    )
    empty = start[zoomed] == middle[zoomed]  # zooming into an empty paragraph reads its summary
    summarised = torch.cat([summarised, zoomed[empty]])
    for mark, first, last in (
        (ZOOMED, start[zoomed], middle[zoomed]),
        (SUMMARY, middle[summarised], end[summarised]),
    ):
        # +1 where a range begins, -1 where it ends: no loop over segments.
        depth = torch.zeros(len(marks) + 1, dtype=torch.int64)
        one = torch.ones_like(first)
        depth.index_add_(0, first, one).index_add_(0, last, -one)
        marks[depth.cumsum(0)[:-1] > 0] = mark
    return marks
