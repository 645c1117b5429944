"""A layer's working set: the rows that its next query may read.

``ResidentSet`` keeps them on the device. ``StreamedSet`` keeps them on the host and loads them for
each forward into one of two device buffers that all layers share; on CUDA the next layer is loaded
while this one computes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoomkv.backbone.protocol import Placement
from zoomkv.caches.slots import Index
from zoomkv.caches.tiers import (
    DeviceRows,
    HostRows,
    Parts,
    Traffic,
    allocate,
    make_row_codec,
    size_of,
)


class DoubleBuffer:
    """Two layers' rows on the device, shared by all streamed layers of a cache."""

    def __init__(self) -> None:
        self.sets: list[StreamedSet] = []
        self._buffers: list[DeviceRows] = []
        self._loaded: dict[int, int] = {}  # layer that was prefetched: rows
        self._ceiling: int | None = None
        self._stream: Any = None

    def acquire(self, layer: int, place: Placement, keys: Tensor, values: Tensor) -> DeviceRows:
        """A buffer that holds the layer's stored rows and has room for the new ones."""
        if layer == 0:
            self._forget()  # what a forward that broke off had fetched
        while len(self._buffers) < 2:
            self._buffers.append(DeviceRows(keys, values))
        if layer in self._loaded:
            torch.cuda.current_stream().wait_stream(self._stream)
            del self._loaded[layer]
        else:
            self._load(layer, place)
        if keys.is_cuda and layer + 1 < len(self.sets) and self.sets[layer + 1].host is not None:
            self._prefetch(layer + 1, place)
        return self._buffers[layer % 2]

    def _forget(self) -> None:
        if self._loaded:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._loaded = {}

    def fit(self, length: int, slack: int) -> None:
        """Gives back slack."""
        for buffer in self._buffers:
            buffer.fit(length, slack)

    def limit(self, ceiling: int | None) -> None:
        """Bounds what slack may reach, now and when the buffers grow; None lifts the bound."""
        self._ceiling = ceiling
        if ceiling is not None:
            self.fit(ceiling, 0)

    def clear(self) -> None:
        """Gives everything back."""
        self._forget()
        self._buffers = []

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""
        for buffer in self._buffers:
            yield from buffer.tensors()

    def _load(self, layer: int, place: Placement) -> None:
        buffer = self._buffers[layer % 2]
        buffer.reserve(place.length, self._ceiling)
        host = self.sets[layer].host
        if host is not None:
            host.load(place.stored, *buffer.view(place.stored))

    def _prefetch(self, layer: int, place: Placement) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._buffers[layer % 2].reserve(place.length, self._ceiling)
        # Behind all that is queued: the layer before last may still read this buffer.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._load(layer, place)
        self._loaded[layer] = place.stored

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the stream, which can't be copied, and what it had fetched."""
        return {**self.__dict__, "_stream": None, "_loaded": {}}


class ResidentSet:
    """A layer's working set on the device."""

    def __init__(self) -> None:
        self.rows: DeviceRows | None = None
        self._ceiling: int | None = None

    def extend(
        self,
        place: Placement,
        keys: Tensor,  # [B, Hkv, Q, D]
        values: Tensor,  # [B, Hkv, Q, D]
    ) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, length, D]
        """Stores new rows; returns what the forward attends to."""
        if self.rows is None:
            self.rows = DeviceRows(keys, values)
        rows = self.rows
        if place.length > rows.capacity:
            rows.reserve(place.length, self._ceiling)
        rows.write(place, keys, values)
        if place.stored == 0 and place.scatter is None:
            return keys, values
        return rows.view(place.length)

    def stored(self, length: int) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, length, D]
        """Keys and values of the first rows."""
        assert self.rows is not None
        return self.rows.view(length)

    def take(self, index: Index) -> tuple[Tensor, Tensor]:  # [n, Hkv, D] or [n, D]
        """Keys and values of some rows, on the model's device."""
        assert self.rows is not None
        return self.rows.keys[index], self.rows.values[index]

    def move(self, source: Index, target: Index) -> None:
        """Copies rows to other slots."""
        rows = self.rows
        assert rows is not None
        rows.keys[target] = rows.keys[source]
        rows.values[target] = rows.values[source]

    def export(self, index: Index, archive: HostRows) -> Parts:  # parts [n, Hkv, *]
        """Some rows in the archive's form, on their way to the host."""
        parts = archive.codec.encode(*self.take(index))
        archive.traffic.to_host += size_of(parts)
        return parts

    def admit(self, index: Index, archive: HostRows, parts: Parts) -> None:
        """Stores rows that come from the archive."""
        rows = self.rows
        assert rows is not None
        archive.traffic.to_device += size_of(parts)
        device = rows.keys.device
        rows.keys[index], rows.values[index] = archive.codec.decode(
            tuple(part.to(device, non_blocking=True) for part in parts)
        )

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` rows."""
        assert self.rows is not None
        self.rows.reserve(length, self._ceiling)

    def fit(self, length: int, slack: int = 0) -> None:
        """Gives back slack beyond ``length`` rows."""
        if self.rows is not None:
            self.rows.fit(length, slack)

    def limit(self, ceiling: int | None) -> None:
        """Bounds what slack may reach, now and when the set grows; None lifts the bound."""
        self._ceiling = ceiling
        if ceiling is not None:
            self.fit(ceiling)

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        if self.rows is not None:
            self.rows.select(rows)

    def clear(self) -> None:
        """Gives everything back."""
        self.rows = None
        self._ceiling = None

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        if self.rows is not None:
            yield from self.rows.tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """Nothing."""
        yield from ()


class StreamedSet:
    """A layer's working set on the host; a double buffer brings it to the device when needed.

    New rows go to the host too. With a quantised host they are read exactly in the forward that
    brings them and as the host has them from then on.
    """

    def __init__(self, window: DoubleBuffer, layer: int, precision: str, traffic: Traffic) -> None:
        self._window = window
        self._layer = layer
        self._precision = precision
        self._traffic = traffic
        self._device = torch.device("cpu")
        self.host: HostRows | None = None
        window.sets.append(self)

    def extend(
        self,
        place: Placement,
        keys: Tensor,  # [B, Hkv, Q, D]
        values: Tensor,  # [B, Hkv, Q, D]
    ) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, length, D]
        """Stores new rows; returns what the forward attends to."""
        if self.host is None:
            self._device = keys.device
            codec = make_row_codec(self._precision, keys, values)
            self.host = HostRows(keys, values, codec, self._traffic)
        self.host.write(place, keys, values)
        if place.stored == 0 and place.scatter is None:
            return keys, values
        buffer = self._window.acquire(self._layer, place, keys, values)
        buffer.write(place, keys, values)
        return buffer.view(place.length)

    def stored(self, length: int) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, length, D]
        """Keys and values of the first rows: a copy, not counted as traffic."""
        assert self.host is not None
        like = self.host.codec.decode(self.host.take(_nothing()))
        batch = self.host.batch
        keys, values = (
            allocate((batch, t.shape[1], length, t.shape[2]), t.dtype, torch.device("cpu"))
            for t in like
        )
        before = self._traffic.to_device
        self.host.load(length, keys, values)
        self._traffic.to_device = before
        return keys, values

    def take(self, index: Index) -> tuple[Tensor, Tensor]:  # [n, Hkv, D]
        """Keys and values of some rows, on the model's device."""
        assert self.host is not None
        parts = self.host.take(index)
        self._traffic.to_device += size_of(parts)
        return self.host.codec.decode(tuple(part.to(self._device) for part in parts))

    def move(self, source: Index, target: Index) -> None:
        """Copies rows to other slots."""
        assert self.host is not None
        self.host.put(target, self.host.take(source))

    def export(self, index: Index, archive: HostRows) -> Parts:  # parts [n, Hkv, *]
        """Some rows in the archive's form: they are on the host already."""
        assert self.host is not None
        return self.host.take(index)

    def admit(self, index: Index, archive: HostRows, parts: Parts) -> None:
        """Stores rows that come from the archive, from host to host."""
        assert self.host is not None
        self.host.put(index, parts)

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` rows."""
        assert self.host is not None
        self.host.reserve(length)

    def fit(self, length: int, slack: int = 0) -> None:
        """Gives back slack beyond ``length`` rows."""
        if self.host is not None:
            self.host.trim(length)
        self._window.fit(length, slack)

    def limit(self, ceiling: int | None) -> None:
        """Bounds the slack of the double buffer."""
        self._window.limit(ceiling)

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        self._window.clear()
        if self.host is not None:
            self.host.select(rows)

    def clear(self) -> None:
        """Gives everything back."""
        self._window.clear()
        self.host = None

    def device_tensors(self) -> Iterator[Tensor]:
        """The double buffer, which the first layer reports for all."""
        if self._layer == 0:
            yield from self._window.tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """The rows on the host."""
        if self.host is not None:
            yield from self.host.tensors()


WorkingSet = ResidentSet | StreamedSet


def _nothing() -> Index:
    empty = torch.zeros(0, dtype=torch.int64)
    return (empty, slice(None), empty)
