"""The protocol under which methods that evict while decoding are compared.

When the *output* of a row has filled the budget, an eighth of it goes; the prompt stays and is not
counted, nor are the queries that a method keeps to score with (BeaconKV, "Budget Configuration").
With ``count_prefix`` everything on the device counts, the prompt's rows are candidates like any
other except its first ``n_sink``, and a prompt above the budget is cut down as soon as it is read.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import check_at_least, check_flag
from zoomkv.caches.evicting import EvictingCache, EvictingLayer
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.slots import Slots
from zoomkv.ops.observed import observed_scores


class WindowLayer(EvictingLayer):
    """A layer whose scores come from the last queries."""

    def __init__(self, number: int, slots: Slots, queries: QueryWindow) -> None:
        super().__init__(number, slots)
        self.queries = queries

    def observed(
        self, keys: Tensor, positions: Tensor, candidates_only: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:  # [B, Hkv, G, W, T], bool [B, 1 or Hkv, T], bool [B, W]
        """Scores of all rows by the window's queries, the rows before the window, the queries.

        Args:
            keys: Stored keys.
            positions: Of the stored rows.
            candidates_only: Whether the queries see only rows before the window.
        """
        when = self.queries.positions.to(keys.device)
        positions, valid = positions.to(keys.device), self.slots.valid().to(keys.device)
        present = when >= 0
        first = when.masked_fill(~present, torch.iinfo(when.dtype).max).amin(1)
        candidates = valid & (positions < first[:, None, None])
        seen = candidates if candidates_only else valid
        query = self.queries.of(self.number)
        return observed_scores(query, when, keys, positions, seen), candidates, present


class DecodingCache(EvictingCache):
    """Base of the policies that score all rows now and then, and drop an eighth.

    A subclass sets what its layers need before it calls this, and fills ``make_layer``.

    Args:
        model: The causal LM that will use it.
        budget: Rows of output for each layer and KV head, or a share of full KV.
        recent: Newest rows that are never dropped.
        refill: Share of the budget that an eviction leaves.
        count_prefix: Whether prompt, indexes and kept queries count within the budget.
        n_sink: Tokens at the start that stay, if the prompt counts.

    Raises:
        ValueError: Options that contradict each other; says by which rule.
    """

    shared_heads: bool = False
    """Whether a layer keeps the same rows for all its KV heads."""
    queries: QueryWindow | None = None
    """The last queries, if the policy scores with them."""

    def __init__(
        self,
        model: Any,
        budget: int | float = 1024,
        recent: int = 32,
        refill: float = 0.875,
        count_prefix: bool = False,
        n_sink: int = 4,
    ) -> None:
        if not isinstance(refill, float) or not 0 < refill < 1:
            raise ValueError(f"refill={refill!r}: give the share that stays, between 0 and 1")
        check_at_least("n_sink", n_sink, 0)
        check_flag("count_prefix", count_prefix)
        shape = ModelShape.of(model)
        layers = [
            self.make_layer(number, Slots(1 if self.shared_heads else shape.kv_heads))
            for number in range(shape.layers)
        ]
        super().__init__(
            shape,
            layers,
            budget,
            prefix=n_sink if count_prefix else None,
            recent=recent,
            interval=1 - refill,
            count_prefix=count_prefix,
        )

    def make_layer(self, number: int, slots: Slots) -> EvictingLayer:
        """A layer of the policy."""
        raise NotImplementedError

    def watch(self, step: Step, layer: int, query: Tensor, key: Tensor) -> Any:
        """See ``PolicyCache``."""
        return query if self.queries is None else self.queries.digest(step, query)

    def watched(self, step: Step) -> None:
        """See ``PolicyCache``."""
        if self.queries is not None:
            self.queries.take(step)

    def overhead(self, element_bytes: int) -> int:
        """See ``EvictingCache``."""
        return 0 if self.queries is None else self.queries.bytes_per_row(self.shape, element_bytes)

    def rules(self) -> Iterator[tuple[int, str]]:
        """See ``EvictingCache``."""
        if isinstance(self.queries, QueryWindow):
            window = self.queries.size
            yield (
                self.budget_for(window + 1),
                f"the rows that fit must exceed the queries that score, window={window}, or none "
                "of theirs could ever go",
            )
        yield from super().rules()

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        if self.queries is not None:
            self.queries.select(rows)

    def device_tensors(self) -> Any:
        """See ``PolicyCache``."""
        yield from super().device_tensors()
        if self.queries is not None:
            yield from self.queries.device_tensors()

    def host_tensors(self) -> Any:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        if self.queries is not None:
            yield from self.queries.host_tensors()

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        if self.queries is not None:
            self.queries.start(batch)
