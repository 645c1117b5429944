"""``r_kv``: rows that are looked at and not redundant (R-KV; Cai et al., 2025, arXiv 2505.24133).

Faithful: importance is the last queries' softmax over the rows before the window, their products
maximised over the heads of a group first, averaged over the queries and max-pooled along the
sequence; redundancy is a key's mean cosine with all others of its KV head, in which each key's most
recent lookalike is spared; ``mix`` weighs the two (0.1 in the paper, 0.07 in its code). Mended: the
published code compares the keys of the first batch row alone, and takes the first row of the cache
for the lookalike of a key that has none. Adapted: the prompt stays and does not count, as in
BeaconKV's comparison, though it takes part in both measures; ``count_prefix`` lets it go, as the
paper does. The paper evicts every 128 tokens; here the eighth of the budget decides.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.budget import check_at_least
from zoomkv.caches.decoding import DecodingCache, WindowLayer
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.slots import Slots
from zoomkv.caches.snapkv import check_odd
from zoomkv.ops.observed import mean_over_queries, pooled, weights_of

_ROWS = 256  # of the matrix of cosines, at once


class RKVLayer(WindowLayer):
    """Importance against redundancy."""

    def __init__(
        self,
        number: int,
        slots: Slots,
        queries: QueryWindow,
        kernel: int,
        mix: float,
        threshold: float,
    ) -> None:
        super().__init__(number, slots, queries)
        self.kernel = kernel
        self.mix = mix
        self.threshold = threshold

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        positions, valid = positions.to(keys.device), self.slots.valid().to(keys.device)
        scores, candidates, present = self.observed(keys, positions, candidates_only=True)
        weights = weights_of(scores.amax(2, keepdim=True))
        important = mean_over_queries(weights, present)
        important = pooled(important, positions, candidates, self.kernel, "max")
        redundant = redundancy(keys, positions, valid, self.threshold)
        worth = self.mix * important - (1 - self.mix) * redundant
        return worth.where(candidates, 2.0)  # weights are at most 1


def redundancy(
    keys: Tensor,  # [B, Hkv, T, D]
    positions: Tensor,  # [B, Hkv, T]
    valid: Tensor,  # bool [B, 1 or Hkv, T]
    threshold: float,
) -> Tensor:  # fp32 [B, Hkv, T]
    """How much each key repeats others: softmax over the means of its cosines with all keys.

    A key counts nothing with itself, nor with those that it is the most recent lookalike of, that
    is, the one of the latest position whose cosine with them exceeds ``threshold``: of keys that
    are alike the last is worth keeping. Rows that are not ``valid`` take no part and get 0.
    """
    count = valid.sum(-1, keepdim=True)  # [B, 1 or Hkv, 1]
    unit = F.normalize(keys.float(), dim=-1) * valid[..., None]
    total = unit.new_zeros(unit.shape[:3])
    for start in range(0, unit.shape[2], _ROWS):
        cosine = unit[:, :, start : start + _ROWS] @ unit.transpose(-1, -2)
        cosine.diagonal(start, -2, -1).zero_()
        latest, which = positions[:, :, None].where(cosine > threshold, -1).max(-1, keepdim=True)
        spared = cosine.gather(-1, which).masked_fill_(latest >= 0, 0.0)
        total += cosine.scatter_(-1, which, spared).sum(2)
    return (total / count).masked_fill(~valid, -torch.inf).softmax(-1)


class RKVCache(DecodingCache):
    """Keeps what the last ``window`` queries look at and what does not repeat other rows.

    Args:
        model: The causal LM that will use it.
        window: Queries that score, alpha.
        kernel: Width of the max pooling, odd.
        mix: Weight of importance, lambda; redundancy has the rest.
        threshold: Cosine from which keys are alike, in [0, 1).
        recent: Newest rows that are never dropped.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "r_kv"
    watches_prompt = watches_decoding = True

    def __init__(
        self,
        model: Any,
        window: int = 8,
        kernel: int = 7,
        mix: float = 0.1,
        threshold: float = 0.5,
        recent: int = 8,
        **protocol: Any,
    ) -> None:
        if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix <= 1:
            raise ValueError(f"mix={mix!r}: give the weight of importance, from 0 to 1")
        if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
            raise ValueError(f"threshold={threshold!r}: give a cosine from 0 to below 1")
        self.mix, self.threshold = mix, threshold
        self.kernel = check_odd("kernel", kernel)
        self.queries = QueryWindow(check_at_least("window", window, 1))
        super().__init__(model, recent=recent, **protocol)

    def make_layer(self, number: int, slots: Slots) -> RKVLayer:
        """See ``DecodingCache``."""
        assert self.queries is not None
        return RKVLayer(number, slots, self.queries, self.kernel, self.mix, self.threshold)
