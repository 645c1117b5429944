"""The last few queries of every layer and head, kept to score rows with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape


class QueryWindow:
    """Queries as they were rotated, with the positions that they were rotated for.

    One for a cache: all layers stand in one tensor, so a decode step writes once.

    Args:
        size: Queries kept for each head, W.

    Attributes:
        positions: ``[B, W]``, CPU; -1 where there is none yet. In any order.
    """

    positions: Tensor

    def __init__(self, size: int) -> None:
        self.size = size
        self.start(0)

    def start(self, batch: int) -> None:
        """Begins anew with nothing."""
        self._queries: Tensor | None = None  # [L, B, H, W, D]
        self.positions = torch.full((batch, self.size), -1, dtype=torch.int64)

    def of(self, layer: int) -> Tensor:  # [B, H, W, D]
        """A layer's queries, zeros where there is none yet."""
        assert self._queries is not None
        return self._queries[layer]

    def digest(self, step: Step, query: Tensor) -> Tensor:  # [B, H, Q, D] -> [B, H, n, D]
        """What ``take`` needs of one layer's queries of a step: each row's last ones."""
        columns, _ = self._last(step)
        if columns is None:
            return query[:, :, -self.size :].clone()
        columns = columns.to(query.device)[:, None, :, None]
        return query.gather(2, columns.expand(-1, query.shape[1], -1, query.shape[3]))

    def take(self, step: Step) -> None:
        """Adds the digests of all layers, ``step.observations``; the oldest queries go."""
        new = torch.stack(step.observations)  # [L, B, H, n, D]
        _, positions = self._last(step)
        if self._queries is None:
            self._queries = new.new_zeros(*new.shape[:3], self.size, new.shape[4])
        if new.shape[3] == 1 and step.real is None and len(set(self._oldest())) == 1:
            slot = self._oldest()[0]
            self._queries[:, :, :, slot] = new[:, :, :, 0]
            self.positions[:, slot] = positions[:, 0]
            return
        both = torch.cat([self.positions, positions], 1)
        self.positions, newest = both.topk(self.size, dim=1)
        newest = newest.to(new.device)[None, :, None, :, None]
        every = torch.cat([self._queries, new], 3)
        shape = (*new.shape[:3], self.size, new.shape[4])
        self._queries = every.gather(3, newest.expand(shape))

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        self.positions = self.positions[rows]
        if self._queries is not None:
            self._queries = self._queries[:, rows.to(self._queries.device)]

    def bytes_per_row(self, shape: ModelShape, element_bytes: int) -> int:
        """Device bytes of one batch row, of a model whose queries have numbers of such a size."""
        return shape.layers * shape.heads * self.size * shape.head_dim * element_bytes

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        if self._queries is not None:
            yield self._queries

    def host_tensors(self) -> Iterator[Tensor]:
        """What lies on the host."""
        yield self.positions

    def _oldest(self) -> list[int]:
        return self.positions.argmin(1).tolist()

    def _last(self, step: Step) -> tuple[Tensor | None, Tensor]:  # [B, n] or None, [B, n]
        """Columns of each row's last real tokens, and their positions; -1 where too few."""
        count = min(self.size, step.size)
        if step.real is None:
            return None, step.positions[:, -count:]
        columns = torch.arange(step.size).where(step.real, -1).topk(count, dim=1).values
        positions = step.positions.gather(1, columns.clamp(min=0)).where(columns >= 0, -1)
        return columns.clamp(min=0), positions
