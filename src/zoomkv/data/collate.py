"""Examples packed into rows of one length, without any seeing another."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from zoomkv.data.render import IGNORE, NOTHING, PROMPT

LIKE_LENGTH_POOL = 16
"""Batches among which rows are sorted by length."""


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Indices of examples in groups that fit one row each, first fit in the order given.

    Args:
        lengths: Tokens of each example; none longer than ``max_length``.
        max_length: Tokens in a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for index, length in enumerate(lengths):
        fits = (row for row in range(first_open, len(rows)) if room[row] >= length)
        row = next(fits, None)
        if row is None:
            rows.append([])
            room.append(max_length)
            row = len(rows) - 1
            # Looking back a bounded number of rows keeps packing linear in the data's size.
            first_open = max(first_open, len(rows) - 64)
        rows[row].append(index)
        room[row] -= length
    return rows


def collate(
    rows: Sequence[Sequence[dict[str, Any]]], pad_id: int, packed: bool = True
) -> dict[str, Tensor]:
    """A batch of rows of examples, padded on the right.

    In a packed batch positions restart with every example (and once more for the padding):
    transformers builds its block-diagonal causal mask from such restarts, so packed examples
    never see each other. With one example in each row, causality alone hides the padding, and
    leaving ``position_ids`` out lets attention run without any mask.

    Args:
        rows: For each row its examples, as ``Rendered`` has them; none: only padding.
        pad_id: Fills the tail; masked by length, so it may equal the end-of-text id.
        packed: Whether rows hold more than one example.

    Returns:
        ``input_ids``, ``labels``, ``kinds``, ``looks_up`` and, if packed, ``position_ids``, each
        ``[B, T]`` int64. The first token of an example is never a label: nothing predicts it.
    """
    length = max(1, *(sum(len(example["input_ids"]) for example in row) for row in rows))
    shape = (len(rows), length)
    ids = torch.full(shape, pad_id)
    labels = torch.full(shape, IGNORE)
    kinds = torch.full(shape, PROMPT)
    looks_up = torch.full(shape, NOTHING)
    positions = torch.arange(length).repeat(len(rows), 1)
    for number, row in enumerate(rows):
        end = 0
        for example in row:
            start, end = end, end + len(example["input_ids"])
            ids[number, start:end] = torch.as_tensor(example["input_ids"])
            kinds[number, start:end] = torch.as_tensor(example["kinds"])
            looks_up[number, start:end] = torch.as_tensor(example["looks_up"])
            positions[number, start:end] = torch.arange(end - start)
            said = kinds[number, start:end] != PROMPT
            said[0] = False
            labels[number, start:end][said] = ids[number, start:end][said]
        positions[number, end:] = torch.arange(length - end)
    batch = {"input_ids": ids, "labels": labels, "kinds": kinds, "looks_up": looks_up}
    return batch | {"position_ids": positions} if packed else batch


class PackedBatches(Sampler[list[list[int]]]):
    """Batches of packed rows, shuffled anew each epoch, that can start anywhere in one.

    Every epoch gives every process the same number of full batches, so that schedules and resuming
    can count on it: examples are packed once, and only the order of the rows changes. Two processes
    learn from the same rows in a step as one with twice the batch size.

    Args:
        lengths: Tokens of each example.
        max_length: Tokens in a row; with ``packing=False`` each row holds one example.
        batch_size: Rows in a batch.
        seed: Decides the order together with the epoch.
        packing: Whether several examples may share a row.
        shuffle: Off, the order is that of the examples. What is missing from the last batches is
            then filled up with empty rows, not with rows that were there already.
        rank: This process's number: its share of the batches.
        world: Number of processes.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_length: int,
        batch_size: int,
        seed: int = 0,
        packing: bool = True,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.lengths = list(lengths)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.rank, self.world = rank, world
        self.epoch = 0
        self.skip = 0
        """Batches of the current epoch that a resumed training has already seen."""
        self.rows = (
            pack(self.lengths, max_length)
            if packing
            else [[index] for index in range(len(self.lengths))]
        )

    @property
    def sampler(self) -> PackedBatches:
        """Itself: a batch sampler's own sampler is where the trainer looks for ``set_epoch``."""
        return self

    @property
    def plan(self) -> str:
        """A digest of all that decides which examples meet in which step."""
        together = self.batch_size * self.world
        decides = (self.lengths, self.rows, together, self.seed, self.shuffle)
        return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[list[int]]]:
        steps = self._steps(random.Random(f"{self.seed} {self.epoch}"))
        first, self.skip = self.skip, 0
        for rows in steps[first:]:
            yield rows[self.rank :: self.world]

    def _steps(self, rng: random.Random) -> list[list[list[int]]]:
        """The rows of each step, all processes together, in the order of this epoch."""
        together = self.batch_size * self.world
        order = list(self.rows)
        missing = len(self) * together - len(order)
        if self.shuffle:
            rng.shuffle(order)
            order += list(islice(cycle(order), missing))
        else:
            order += [[] for _ in range(missing)]
        # Rows of like length meet in a step: little padding, still well mixed.
        pool = together * LIKE_LENGTH_POOL
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        for rows in pools:
            rows.sort(key=lambda row: sum(self.lengths[index] for index in row))
        order = [row for rows in pools for row in rows]
        steps = [order[start : start + together] for start in range(0, len(order), together)]
        if self.shuffle:
            rng.shuffle(steps)
        return steps
