"""``full_offloaded``: every row on the host, two layers' rows on the device at a time. Exact."""

from typing import Any

from zoomkv.caches.base import ModelShape, PolicyCache, PolicyLayer
from zoomkv.caches.codecs import check_precision
from zoomkv.caches.slots import Slots
from zoomkv.caches.tiers import Traffic
from zoomkv.caches.working_sets import DoubleBuffer, StreamedSet


class FullOffloadedCache(PolicyCache):
    """Keeps everything on the host and brings it to the device layer by layer, in every forward.

    Args:
        model: The causal LM that will use it.
        host_precision: ``auto`` stores rows as they are; ``int8`` and ``nf4`` quantise them.

    Raises:
        ValueError: Unknown precision.
    """

    name = "full_offloaded"
    keeps_everything = True

    def __init__(self, model: Any, host_precision: str = "auto") -> None:
        check_precision(host_precision)
        shape, slots, traffic, window = ModelShape.of(model), Slots(), Traffic(), DoubleBuffer()
        layers = [
            PolicyLayer(number, slots, StreamedSet(window, number, host_precision, traffic))
            for number in range(shape.layers)
        ]
        super().__init__(shape, layers, traffic)
