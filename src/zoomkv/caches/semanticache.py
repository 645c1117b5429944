"""``semanticache``: rows of like keys become one (SemantiCache; Wu et al., 2026, arXiv 2603.14303).

Faithful: delimiters stay as they are, and between two of them the rows of a KV head are clustered
greedily around seeds; a cluster is one row of mean key and mean value, and the logarithm of its
size is added to its logit. Adapted: the paper merges prompts at a given threshold; here each KV
head of a layer finds its own, so that the budget holds, and merges again whenever generated rows
have filled it, clusters counting by their sizes. Clusters that would save more than must be saved
give back the rows that fit them worst, so that all heads store equally many. A cluster spans at
most ``reach`` rows. When merging all between delimiters is not enough, it goes on across them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import check_at_least
from zoomkv.caches.evicting import EvictingCache, EvictingLayer
from zoomkv.caches.slots import Slots
from zoomkv.caches.vocabulary import of_vocabulary
from zoomkv.ops.seed_clusters import seed_clusters
from zoomkv.spans.punctuation import delimiter_mask


class SemantiLayer(EvictingLayer):
    """Rows in the order of their positions, some of which stand for several."""

    side_bytes = 4
    log_size: Tensor | None = None  # fp32 [B, Hkv, M], of the first rows; the others are single

    def update(
        self, key_states: Tensor, value_states: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, T, D]
        """See ``PolicyLayer``; the mask becomes an addend of logits."""
        place = step.placements[self.number]
        if self.log_size is not None:
            addend = F.pad(self.log_size, (0, place.length - self.log_size.shape[2]))[:, :, None]
            if place.mask is not None:
                addend = addend.where(place.mask, -torch.inf)
            step.placements[self.number] = replace(place, mask=addend)
        return super().update(key_states, value_states, step)

    def reset(self) -> None:
        """See ``PolicyLayer``."""
        super().reset()
        self.log_size = None

    def select(self, rows: Tensor) -> None:
        """See ``PolicyLayer``."""
        super().select(rows)
        if self.log_size is not None:
            self.log_size = self.log_size[rows.to(self.log_size.device)]

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyLayer``."""
        yield from super().device_tensors()
        if self.log_size is not None:
            yield self.log_size

    def merge(
        self,
        into: Tensor,  # [B, Hkv, T]
        count: Tensor,  # [B], CPU
    ) -> None:
        """Merges stored rows into others of them.

        Args:
            into: For each row the row that it joins, itself if it stays.
            count: How many of a batch row stay.
        """
        keys, values = self.stored()
        length, width, device = keys.shape[2], int(count.max()), keys.device
        valid = self.slots.valid().to(device)
        stays = (into == torch.arange(length, device=device)) & valid
        # What is no row goes behind the last one, and is cut off.
        slot = (stays.cumsum(-1) - 1).gather(-1, into).masked_fill(~valid, width)
        size = torch.ones(slot.shape, device=device)
        if self.log_size is not None:
            size = F.pad(self.log_size, (0, length - self.log_size.shape[2])).exp().round()
        sizes = _joined(size[..., None], slot, width).clamp(min=1)
        rows = self.working_set.rows  # type: ignore[union-attr]
        assert rows is not None
        for stored, x in ((rows.keys, keys), (rows.values, values)):
            stored[:, :, :width] = _joined(x * size[..., None], slot, width).div_(sizes)
        positions = self.slots.positions[..., :length].to(device).expand_as(slot)
        first = positions.new_zeros(*slot.shape[:2], width + 1)
        first.scatter_(-1, slot.masked_fill(~stays, width), positions)
        self.slots.rewrite(first[..., :width].to(self.slots.positions), count)
        self.log_size = sizes[..., 0].log()


def _joined(x: Tensor, slot: Tensor, width: int) -> Tensor:  # [B, h, T, D] -> [B, h, width, D]
    """Sums of the rows that share a slot; those of slot ``width`` go."""
    batch, heads, _, columns = x.shape
    first = torch.arange(batch * heads, device=x.device) * (width + 1)
    index = (slot + first.view(batch, heads, 1)).flatten()
    total = x.new_zeros(batch * heads * (width + 1), columns)
    total.index_add_(0, index, x.reshape(-1, columns))
    return total.view(batch, heads, width + 1, columns)[:, :, :width]


class SemantiCache(EvictingCache):
    """Merges rows of like keys, where others drop some.

    Everything counts within the budget: the prompt, and the sizes of clusters too.

    Args:
        model: The causal LM that will use it.
        tokenizer: Of the model.
        budget: Rows, or a share of full KV.
        n_sink: Tokens at the start that stay as they are.
        recent: Newest tokens that do.
        refill: Share of the budget that merging leaves.
        reach: How many rows a cluster may span.

    Raises:
        ValueError: An option out of range, or no tokenizer.
    """

    name = "semanticache"
    watches_prompt = watches_decoding = True  # to see the tokens, not the queries
    _delimiters: Tensor  # bool [B, positions and slack]

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        budget: int | float = 1024,
        n_sink: int = 4,
        recent: int = 32,
        refill: float = 0.875,
        reach: int = 32,
    ) -> None:
        if not isinstance(refill, float) or not 0 < refill < 1:
            raise ValueError(f"refill={refill!r}: give the share that stays, between 0 and 1")
        self._reach = check_at_least("reach", reach, 1)
        shape = ModelShape.of(model)
        self._between = of_vocabulary(
            tokenizer,
            ("delimiters between clauses", shape.vocabulary),
            lambda t: delimiter_mask(t, shape.vocabulary),
        )
        check_at_least("n_sink", n_sink, 0)
        self._least = n_sink + check_at_least("recent", recent, 0) + 1
        layers = [SemantiLayer(n, Slots(shape.kv_heads)) for n in range(shape.layers)]
        super().__init__(
            shape,
            layers,
            budget,
            prefix=n_sink,
            recent=recent,
            interval=1 - refill,
            room=2,  # all that is not protected may have to become one row, and another must fit
        )

    def watch(self, step: Step, layer: int, query: Tensor, key: Tensor) -> None:
        """See ``PolicyCache``."""

    def watched(self, step: Step) -> None:
        """See ``PolicyCache``: notes where delimiters stand."""
        longest, room = int(self._lengths.max()), self._delimiters.shape[1]
        if longest > room:
            more = longest - room + max(longest // 2, 256)
            self._delimiters = F.pad(self._delimiters, (0, more))
        real = torch.ones_like(step.ids, dtype=torch.bool) if step.real is None else step.real
        batch, column = real.nonzero(as_tuple=True)
        position = step.positions[batch, column]
        self._delimiters[batch, position] = self._between[step.ids[batch, column]]

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self._delimiters = self._delimiters[rows]

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield from (self._delimiters, self._between)

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self._delimiters = torch.zeros(batch, 0, dtype=torch.bool)

    def _evict(self, slots: Slots, layers: Sequence[Any], drop: Tensor) -> None:  # [B]
        """Merges so many rows; merged ones keep the position of the first."""
        (layer,) = layers
        before, longest = slots.count, int(self._lengths.max())
        target = torch.where(drop > 0, (before - drop).clamp(min=self._least), before)
        delimiter = self._delimiters[:, :longest].to(self._device)
        number = delimiter.cumsum(1)
        across = False
        with self.moving(), torch.autocast(self._device.type, enabled=False):
            while bool((slots.count > target).any()):
                keys, _ = layer.stored()
                own, shape = slots.positions[..., : slots.length], keys.shape[:3]
                free = self._droppable(slots, own).to(self._device)
                at = own.to(self._device).long().clamp(max=longest - 1).flatten(1)
                if across:
                    chunk = torch.zeros(shape, dtype=torch.int64, device=self._device)
                else:
                    chunk = number.gather(1, at).view(free.shape).expand(shape)
                    free = free & ~delimiter.gather(1, at).view(free.shape)
                chunk = chunk.masked_fill(~slots.valid().to(self._device), longest + 1)
                counts = (slots.count.to(self._device), target.to(self._device))
                into, count = seed_clusters(keys, free, chunk, *counts, self._reach)
                layer.merge(into, count.to("cpu"))
                across = True
        if slots is self.groups[0][0]:
            self.evicted += int((before - slots.count).sum())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What kind each token of the vocabulary is says nothing about a sequence: it is shared.
        memo[id(self._between)] = self._between
        return super().__deepcopy__(memo)
