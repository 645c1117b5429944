"""``keydiff``: rows whose keys differ most from the others' (Park et al., 2025, arXiv 2504.15364).

Faithful: a row is worth minus the cosine of its key, as rotated, and the mean of all keys of unit
length; for each KV head by itself; no query is needed. Adapted: the paper reads prompts in blocks
under a bounded cache, while here a prompt is read whole, then scored once; in the answer an eighth
goes at once, and the newest rows stay (``recent``; the paper protects none).
"""

import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.decoding import DecodingCache
from zoomkv.caches.evicting import EvictingLayer
from zoomkv.caches.slots import Slots


class KeyDiffLayer(EvictingLayer):
    """The more a key is like the mean of all, the sooner its row goes."""

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        valid = self.slots.valid().to(keys.device)  # [B, 1, T]
        unit = F.normalize(keys.float(), dim=-1).masked_fill(~valid[..., None], 0.0)
        # The sum points where the mean does.
        anchor = F.normalize(unit.sum(2), dim=-1)
        return -(unit @ anchor[..., None])[..., 0]


class KeyDiffCache(DecodingCache):
    """Keeps rows with unlike keys.

    Args:
        model: The causal LM that will use it.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "keydiff"

    def make_layer(self, number: int, slots: Slots) -> KeyDiffLayer:
        """See ``DecodingCache``."""
        return KeyDiffLayer(number, slots)
