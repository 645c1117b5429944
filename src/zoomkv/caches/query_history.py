"""All queries of a text, to choose beacons from anew at each eviction: what BeaconKV compares its
Continual FPS with (arXiv 2609.04971). For each token they take at least the room of its keys.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.beacons import KeptQueries, take
from zoomkv.ops.rope import Rotary

_GROWTH = 256


class QueryHistory(KeptQueries):
    """Keeps every query; the last ``recent`` are recent, the beacons come from all before them.

    Args:
        rotary: Of the model.
        beacons: Queries that stand for the past, for each head.
        recent: Recent queries, for each head.
        choose: Picks among queries before RoPE, with the signature of ``farthest_points``.
    """

    def __init__(
        self,
        rotary: Rotary,
        beacons: int,
        recent: int,
        choose: Callable[[Tensor, int, Tensor], Tensor],
    ) -> None:
        super().__init__(rotary, beacons, recent)
        self._choose = choose

    def take(self, step: Step) -> None:
        """See ``KeptQueries``: a query's slot is its position."""
        new = torch.stack(step.observations)  # [L, B, H, Q, D]
        start, self.length = self.length, self.length + step.added
        queries = self._reserve(new, int(self.length.max()))
        first = int(start[0])
        if step.real is None and bool((start == first).all()):
            queries[:, :, :, first : first + step.size] = new
            return
        real = torch.ones_like(step.ids) if step.real is None else step.real
        row, column = real.nonzero(as_tuple=True)
        slot = step.positions[row, column].to(new.device)
        row, column = row.to(new.device), column.to(new.device)
        queries[:, row, :, slot] = new[:, row, :, column]

    def of(self, layer: int) -> tuple[Tensor, Tensor]:  # fp32 [B, H, N, D], [B, H, N]
        """See ``KeptQueries``. Layer by layer, as all histories at once would double them."""
        assert self._queries is not None
        longest = int(self.length.max())
        query = self._queries[layer, :, :, :longest]
        length = self.length.to(query.device)[:, None, None]
        last = (length - torch.arange(self.recent, 0, -1, device=query.device)).clamp(min=-1)
        last = last.expand(-1, query.shape[1], -1)
        recent = take(query, last.clamp(min=0)).float()
        if not self.beacons or longest <= self.recent:
            return recent, last
        when = torch.arange(longest, device=query.device)
        before_rope = self.rotary.unrotate(query.float(), when)
        older = (when < length - self.recent).expand(-1, query.shape[1], -1)
        index = self._choose(before_rope, self.beacons, older)
        moved, now = self.aligned(take(query, index.clamp(min=0)), index)
        return torch.cat([moved, recent], 2), torch.cat([now, last], 2)

    def _reserve(self, new: Tensor, length: int) -> Tensor:  # [L, B, H, slots, D]
        """Makes room for so many queries of each row."""
        if self._queries is None:
            self._queries = new.new_zeros(*new.shape[:3], 0, new.shape[4])
        slots = self._queries.shape[3]
        if length > slots:
            wanted = -(-max(length, slots + slots // 4) // _GROWTH) * _GROWTH
            self._queries = F.pad(self._queries, (0, 0, 0, wanted - slots))
        return self._queries
