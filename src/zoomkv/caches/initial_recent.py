"""``initial_recent``: BeaconKV's control, scored by the first and the recent queries
(Initial+Recent in arXiv 2609.04971).

All is as in ``beacon_kv`` except which queries stand for the past: the first ones, for good. Chosen
here, where the paper is silent: 16 of each; the first of the answer rather than of the prompt; they
look from the current position as beacons do, so that only the choice differs.
"""

from typing import Any

import torch
from torch import Tensor

from zoomkv.backbone.rotary import rotary_of
from zoomkv.caches.beacon_kv import ObservedCache, check_choice
from zoomkv.caches.beacons import Beacons
from zoomkv.caches.budget import check_at_least, check_flag
from zoomkv.ops.rope import Rotary


class FirstQueries(Beacons):
    """The first queries take the beacons' place.

    Args:
        rotary: Of the model.
        initial: How many, for each head.
        recent: Recent queries, for each head.
        from_prompt: Whether the prompt's queries are the first ones; else those after it.
        align: Whether they look from the last token; else from where they stand.
    """

    def __init__(
        self, rotary: Rotary, initial: int, recent: int, from_prompt: bool, align: bool
    ) -> None:
        self.from_prompt, self.align = from_prompt, align
        super().__init__(rotary, initial, recent)

    def start(self, batch: int) -> None:
        """See ``KeptQueries``."""
        super().start(batch)
        if not self.from_prompt:
            self._first = torch.full_like(self._first, torch.iinfo(torch.int32).max)

    def choose(self, query: Tensor, positions: Tensor) -> Tensor:
        """See ``Beacons``."""
        late = torch.iinfo(positions.dtype).max
        oldest = positions.masked_fill(positions < 0, late).argsort(dim=-1)[..., : self.beacons]
        return oldest.masked_fill(positions.gather(-1, oldest) < 0, -1)

    def prompt_ended(self, free: Tensor) -> None:  # [B]
        """See ``KeptQueries``."""
        super().prompt_ended(free)
        self._first = self._first.minimum(self.length)

    def aligned(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See ``KeptQueries``."""
        if self.align:
            return super().aligned(query, positions)
        return query.float(), positions


class InitialRecentCache(ObservedCache):
    """Keeps what the first and the recent queries look at.

    Args:
        model: The causal LM that will use it.
        initial: First queries that score, for each query head.
        recent_queries: Queries before an eviction that score.
        source: ``decode``: the first of the answer; ``prompt``: of the whole text.
        align: Whether the first queries look from the current position; else from their own.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: Options that contradict each other, or a rope type that can't be undone.
    """

    name = "initial_recent"

    def __init__(
        self,
        model: Any,
        initial: int = 16,
        recent_queries: int = 16,
        source: str = "decode",
        align: bool = True,
        **protocol: Any,
    ) -> None:
        check_at_least("initial", initial, 0)
        check_at_least("recent_queries", recent_queries, 1)
        from_prompt = check_choice("source", source, ("decode", "prompt")) == "prompt"
        rotary = rotary_of(model)
        check_flag("align", align)
        self.queries = FirstQueries(rotary, initial, recent_queries, from_prompt, align)
        super().__init__(model, **protocol)
