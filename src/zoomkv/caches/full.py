"""``full``: every row on the device, in preallocated buffers. The exact reference."""

from typing import Any

from zoomkv.caches.base import ModelShape, PolicyCache, PolicyLayer
from zoomkv.caches.slots import Slots
from zoomkv.caches.tiers import Traffic
from zoomkv.caches.working_sets import ResidentSet


class FullCache(PolicyCache):
    """Keeps everything on the device.

    Args:
        model: The causal LM that will use it.
    """

    name = "full"
    keeps_everything = True

    def __init__(self, model: Any) -> None:
        shape, slots = ModelShape.of(model), Slots()
        layers = [PolicyLayer(number, slots, ResidentSet()) for number in range(shape.layers)]
        super().__init__(shape, layers, Traffic())
