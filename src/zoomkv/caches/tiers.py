"""Where rows live: preallocated buffers on the device, chunks on the host, and what moves between.

Nothing here needs CUDA. On a CPU both tiers are RAM, and the accounting is the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoomkv.backbone.protocol import Placement
from zoomkv.caches.codecs import Codec, make_codec
from zoomkv.caches.slots import Index

Parts = tuple[Tensor, ...]
"""Stored form of rows: the parts of the keys, then those of the values."""

_CHUNK = 256


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Tensor:
    """Zeros that stay writable, also when first needed in inference mode.

    Zeros, as a masked slot still takes part in a product: what lies there must be finite.
    """
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)


@dataclass(slots=True)
class Traffic:
    """Bytes that went from one tier to the other since the last reset."""

    to_device: int = 0
    to_host: int = 0


@dataclass(slots=True)
class RowCodec:
    """Codecs of keys and values, which may differ in dtype."""

    keys: Codec
    values: Codec
    key_parts: int

    def encode(self, keys: Tensor, values: Tensor) -> Parts:
        """Stored form of some rows."""
        return (*self.keys.encode(keys), *self.values.encode(values))

    def decode(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows."""
        return (
            self.keys.decode(parts[: self.key_parts]),
            self.values.decode(parts[self.key_parts :]),
        )


class DeviceRows:
    """Keys and values of one layer in preallocated buffers ``[B, Hkv, C, D]``.

    Capacity grows by small steps, so slack stays small; a step is 1/32 of what is there, so that
    copying costs a few rows for each row that is added.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Empty buffers for rows like the given ones ``[B, Hkv, *, D]``."""
        self.keys = _like(keys)
        self.values = _like(values)

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.keys.shape[2]

    def reserve(self, length: int, ceiling: int | None = None) -> None:
        """Makes room for ``length`` rows, with some slack, but never more than ``ceiling``."""
        if length <= self.capacity:
            return
        step = max(64, self.capacity // 32)
        capacity = -(-length // step) * step
        self._resize(capacity if ceiling is None else max(length, min(capacity, ceiling)))

    def fit(self, length: int, slack: int = 0) -> None:
        """Gives memory back when more than ``slack`` rows beyond ``length`` lie idle."""
        if self.capacity > length + slack:
            self._resize(length + slack // 2)

    def write(self, place: Placement, keys: Tensor, values: Tensor) -> None:  # [B, Hkv, Q, D]
        """Stores the rows of one forward."""
        if place.scatter is None:
            self.keys[:, :, place.stored : place.length] = keys
            self.values[:, :, place.stored : place.length] = values
        else:
            batch, column, slot = place.scatter
            self.keys[batch, :, slot] = keys[batch, :, column]
            self.values[batch, :, slot] = values[batch, :, column]

    def view(self, length: int) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, length, D]
        """The first rows, without a copy."""
        return self.keys[:, :, :length], self.values[:, :, :length]

    def select(self, rows: Tensor) -> None:  # [B']
        """Keeps the given batch rows."""
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""
        yield from (self.keys, self.values)

    def _resize(self, capacity: int) -> None:
        kept = min(capacity, self.capacity)
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            shape = (*old.shape[:2], capacity, old.shape[3])
            new = allocate(shape, old.dtype, old.device)
            new[:, :, :kept] = old[:, :, :kept]
            setattr(self, name, new)


class HostRows:
    """Encoded rows of one layer on the host, in chunks: growing copies nothing.

    Chunks are pinned when the model runs on CUDA.
    """

    def __init__(self, keys: Tensor, values: Tensor, codec: RowCodec, traffic: Traffic) -> None:
        """Nothing yet, for rows like the given ones ``[B, Hkv, *, D]``."""
        self.codec = codec
        self.traffic = traffic
        self._pinned = keys.is_cuda
        self._like = tuple(
            part.cpu() for part in codec.encode(keys[:, :, :0].detach(), values[:, :, :0].detach())
        )
        self._chunks: list[Parts] = []

    @property
    def batch(self) -> int:
        """Batch rows."""
        return self._like[0].shape[0]

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` rows."""
        host = torch.device("cpu")
        while len(self._chunks) * _CHUNK < length:
            chunk = tuple(
                allocate((*p.shape[:2], _CHUNK, p.shape[3]), p.dtype, host, self._pinned)
                for p in self._like
            )
            self._chunks.append(chunk)

    def trim(self, length: int) -> None:
        """Gives back chunks beyond ``length`` rows."""
        del self._chunks[-(-length // _CHUNK) :]

    def write(self, place: Placement, keys: Tensor, values: Tensor) -> None:  # [B, Hkv, Q, D]
        """Stores the rows of one forward, coming from the device."""
        self.reserve(place.length)
        if place.scatter is None:
            parts = self.codec.encode(keys, values)
            self.traffic.to_host += size_of(parts)
            for number, start, stop in _chunks_of(place.stored, place.length):
                first = number * _CHUNK + start - place.stored
                for chunk, part in zip(self._chunks[number], parts, strict=True):
                    rows = part[:, :, first : first + stop - start]
                    chunk[:, :, start:stop].copy_(rows, non_blocking=True)
            return
        assert place.host_scatter is not None
        batch, column, _ = place.scatter
        parts = self.codec.encode(keys[batch, :, column], values[batch, :, column])
        self.traffic.to_host += size_of(parts)
        self.put((place.host_scatter[0], slice(None), place.host_scatter[2]), parts)

    def take(self, index: Index) -> Parts:  # parts [n, Hkv, *] or [n, *]
        """Copies rows out, of all heads or of one each, in encoded form, on the host."""
        batch, head, slot = index
        assert isinstance(batch, Tensor) and isinstance(slot, Tensor)
        # Chunk by chunk, each seen as a list of rows: one index is faster than three.
        heads = self._like[0].shape[1]
        of = head[:, None] if isinstance(head, Tensor) else torch.arange(heads)
        row = (batch[:, None] * heads + of) * _CHUNK + (slot % _CHUNK)[:, None]
        chunk_of = slot // _CHUNK
        order = chunk_of.argsort()
        touched, sizes = chunk_of[order].unique_consecutive(return_counts=True)
        chunks = [self._chunks[number] for number in touched.tolist()]
        each = [size * row.shape[1] for size in sizes.tolist()]
        rows = row[order].flatten().split(each)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        out = []
        for which, like in enumerate(self._like):
            width = like.shape[3]
            found = like.new_empty(*row.shape, width)
            for chunk, of, piece in zip(
                chunks, rows, found.view(-1, width).split(each), strict=True
            ):
                torch.index_select(chunk[which].view(-1, width), 0, of, out=piece)
            out.append(found[back, 0] if isinstance(head, Tensor) else found[back])
        return tuple(out)

    def put(self, index: Index, parts: Parts) -> None:  # parts [n, Hkv, *]
        """Writes encoded rows; there must be room for them."""
        batch, _, slot = index
        assert isinstance(batch, Tensor) and isinstance(slot, Tensor)
        parts = tuple(part.to("cpu") for part in parts)
        for chunk, here, offset in self._touched(slot):
            for stored, part in zip(chunk, parts, strict=True):
                stored[batch[here], :, offset] = part[here]

    def load(self, length: int, keys: Tensor, values: Tensor) -> None:
        """Brings the first rows to the device, into ``keys`` and ``values`` ``[B, Hkv, C, D]``."""
        for number, start, stop in _chunks_of(0, length):
            parts = tuple(part[:, :, start:stop] for part in self._chunks[number])
            self.traffic.to_device += size_of(parts)
            moved = tuple(part.to(keys.device, non_blocking=True) for part in parts)
            first, last = number * _CHUNK + start, number * _CHUNK + stop
            keys[:, :, first:last], values[:, :, first:last] = self.codec.decode(moved)

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        self._like = tuple(part[rows] for part in self._like)
        old, self._chunks = self._chunks, []
        self.reserve(len(old) * _CHUNK)
        for target, source in zip(self._chunks, old, strict=True):
            for new, part in zip(target, source, strict=True):
                new.copy_(part[rows])

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""
        for chunk in self._chunks:
            yield from chunk

    def _touched(self, slot: Tensor) -> Iterator[tuple[Parts, Tensor, Tensor]]:  # [n]
        """Chunks that hold some of the slots: chunk, which of the slots, offsets within it."""
        chunk_of = slot // _CHUNK
        for number in chunk_of.unique().tolist():
            here = (chunk_of == number).nonzero().squeeze(1)
            yield self._chunks[number], here, slot[here] - number * _CHUNK


def make_row_codec(precision: str, keys: Tensor, values: Tensor) -> RowCodec:
    """Codecs for rows like the given ones."""
    key_codec = make_codec(precision, keys.shape[-1], keys.dtype)
    value_codec = make_codec(precision, values.shape[-1], values.dtype)
    return RowCodec(key_codec, value_codec, 1 if precision == "auto" else 2)


def settle(device: torch.device) -> None:
    """Waits until the copies under way have arrived, before the CPU reads what they brought."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors: a small view of a large one is large."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _like(rows: Tensor) -> Tensor:  # [B, Hkv, *, D] -> [B, Hkv, 0, D]
    return allocate((*rows.shape[:2], 0, rows.shape[3]), rows.dtype, rows.device)


def size_of(parts: Parts) -> int:
    """Bytes of some tensors' elements."""
    return sum(part.numel() * part.element_size() for part in parts)


def _chunks_of(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Chunks that rows ``[start, stop)`` lie in: number, first and last offset within it."""
    for number in range(start // _CHUNK, -(-stop // _CHUNK)):
        first = number * _CHUNK
        yield number, max(start - first, 0), min(stop - first, _CHUNK)
