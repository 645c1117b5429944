"""``beacon_kv``: rows that beacon or recent queries look at (BeaconKV, arXiv 2609.04971).

Faithful: beacons by Continual FPS over queries before RoPE, a buffer for each query head, 32
queries at most; at an eviction the beacons look from the current position, the recent queries from
their own, through a softmax over all stored rows; the maximum over queries and over the heads of a
group decides, for each KV head by itself. Chosen here, where the paper is silent: what a buffer
holds beyond the beacons when they are fixed goes through FPS once more; the newest 32 rows are
protected, as in its experiments; a share of full KV may serve as the budget.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.backbone.rotary import rotary_of
from zoomkv.caches.beacons import Beacons, KeptQueries
from zoomkv.caches.budget import LARGEST, check_at_least
from zoomkv.caches.decoding import DecodingCache
from zoomkv.caches.evicting import EvictingLayer
from zoomkv.caches.query_history import QueryHistory
from zoomkv.caches.slots import Slots
from zoomkv.ops.farthest_point import farthest_points, nearest_to_centroids
from zoomkv.ops.observed import mean_over_queries, observed_scores, weights_of

_FROM_HISTORY = {"naive": farthest_points, "kmeans": nearest_to_centroids}


class ObservedLayer(EvictingLayer):
    """A layer whose rows are worth the attention of the queries that were kept."""

    def __init__(self, number: int, slots: Slots, queries: KeptQueries, aggregate: str) -> None:
        super().__init__(number, slots)
        self.queries = queries
        self.aggregate = aggregate
        self.candidates: Tensor | None = None  # bool [B, Hkv, T], where no others may be seen

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        query, when = self.queries.of(self.number)
        readable = self.slots.valid() if self.candidates is None else self.candidates
        # A single KV head's index lies on the host.
        there = positions.to(keys.device), readable.to(keys.device)
        weights = weights_of(observed_scores(query, when, keys, *there))
        if self.aggregate == "mean":
            return mean_over_queries(weights, when[:, 0] >= 0)
        return weights.amax(dim=(2, 3))


class ObservedCache(DecodingCache):
    """Base of the caches that score with kept queries. A subclass sets what its layers need before
    it calls this.
    """

    watches_prompt = watches_decoding = True
    queries: Any  # KeptQueries
    aggregate: str = "max"
    score_domain: str = "all"

    def make_layer(self, number: int, slots: Slots) -> ObservedLayer:
        """See ``DecodingCache``."""
        return ObservedLayer(number, slots, self.queries, self.aggregate)

    def watch(self, step: Step, layer: int, query: Tensor, key: Tensor) -> Any:
        """See ``PolicyCache``."""
        return self.queries.digest(step, layer, query)

    def overhead(self, element_bytes: int) -> int:
        """See ``EvictingCache``."""
        return self.queries.bytes_per_row(self.shape, element_bytes)

    def rules(self) -> Iterator[tuple[int, str]]:
        """See ``EvictingCache``: there must be something to choose."""
        beacons, recent = self.queries.beacons, self.queries.recent
        yield (
            beacons + recent + 1,
            f"it must exceed the queries that are kept for each head, {beacons} + {recent}; raise "
            "it or keep fewer",
        )
        protected = self._recent + (self._prefix or 0)
        yield (
            self.budget_for(_before_eviction(protected + 1, self._interval)),
            f"what an eviction leaves must exceed the {protected} that are protected; raise budget "
            "or refill, or lower recent",
        )
        yield from super().rules()

    def _keep_budget(self, coming: Tensor | None) -> None:  # [B]
        slots, _ = self.groups[-1]  # the last to be evicted from
        before = slots.count
        free = self.capacity(len(self.groups) - 1) - before
        with self.moving():
            if coming is None:
                self.queries.prompt_ended(free)
            else:
                self.queries.advance(free)
        super()._keep_budget(coming)
        if slots.count is not before:
            dropped = before - slots.count
            with self.moving():
                self.queries.evicted(dropped > 0, free + dropped)

    def _evict(self, slots: Slots, layers: Sequence[Any], drop: Tensor) -> None:  # [B]
        if self.score_domain == "candidates":
            layers[0].candidates = self._droppable(slots, slots.positions[:, :, : slots.length])
        super()._evict(slots, layers, drop)
        layers[0].candidates = None


class BeaconKVCache(ObservedCache):
    """Keeps what beacon and recent queries look at.

    Args:
        model: The causal LM that will use it.
        beacons: Queries that stand for the past, for each query head.
        recent_queries: Queries before an eviction that score as well.
        aggregate: ``max`` or ``mean``, over queries and the heads of a group.
        sampling: ``continual``: beacons come from at most ``beacons + recent_queries`` queries at a
            time. For comparison, from all queries of the text, which are kept, on top of the
            budget: by FPS with ``naive``, next to centroids with ``kmeans``.
        score_domain: ``all``: softmax over all stored rows; ``candidates``: over those that may be
            dropped.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: Options that contradict each other, or a rope type that can't be undone.
    """

    name = "beacon_kv"

    def __init__(
        self,
        model: Any,
        beacons: int = 16,
        recent_queries: int = 16,
        aggregate: str = "max",
        sampling: str = "continual",
        score_domain: str = "all",
        **protocol: Any,
    ) -> None:
        check_at_least("beacons", beacons, 0)
        check_at_least("recent_queries", recent_queries, 1)
        check_choice("sampling", sampling, ("continual", *_FROM_HISTORY))
        self.aggregate = check_choice("aggregate", aggregate, ("max", "mean"))
        self.score_domain = check_choice("score_domain", score_domain, ("all", "candidates"))
        rotary = rotary_of(model)
        if sampling == "continual":
            self.queries = Beacons(rotary, beacons, recent_queries)
        elif protocol.get("count_prefix"):
            raise ValueError(
                f"sampling='{sampling}' keeps every query, so no budget can bound all that is on "
                "the device: leave count_prefix off, or sample continually"
            )
        else:
            choose = _FROM_HISTORY[sampling]
            self.queries = QueryHistory(rotary, beacons, recent_queries, choose)
        super().__init__(model, **protocol)


def _before_eviction(left: int, interval: float) -> int:
    """The fewest rows of which so many are left when a share of them, rounded up, has gone."""
    rows = max(left, min(LARGEST, int(left / max(1 - interval, 1 / LARGEST)) - 1))
    while rows - math.ceil(rows * interval) < left and rows <= LARGEST:
        rows += 1
    return rows


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    """Returns one of the choices, or raises ValueError."""
    if value not in choices:
        raise ValueError(f"{option}={value!r}: choose one of {', '.join(choices)}")
    return value
