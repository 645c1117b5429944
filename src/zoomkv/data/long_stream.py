"""Batches of long documents, read as a stream that can go on from any batch."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from zoomkv.data.asked import AskedText
from zoomkv.data.long_text import TextSource
from zoomkv.data.turns import Turns

Source = TextSource | AskedText
Position = list[int]
"""Of a reader: passes over its source, document and token that come next, documents left out."""

_REMEMBERED = 1024  # batches before which the readers' positions are known


@dataclass(frozen=True)
class Stage:
    """A part of the training with contexts of one length."""

    context: int
    """Tokens of a context."""
    share: float = 1.0
    """Of the training, in proportion to the shares of the other stages."""


class Passages:
    """Windows of a source's documents, side by side, of a length that may change at any time.

    The source is read lazily, one document at a time, and begun again at its end.

    Args:
        source: Of the documents.
        turns: Gives the tokenizer.
        cross_documents: Let windows go on from one document to the next, with the end-of-text
            token between them. Otherwise what is left at a document's end is dropped.
        name: What errors call the source.
    """

    def __init__(
        self, source: TextSource, turns: Turns, cross_documents: bool = False, name: str = "train"
    ) -> None:
        self.source, self.turns, self.name = source, turns, name
        self.separator = turns.tokenizer.eos_token_id if cross_documents else None
        self.seek([0, 0, 0, 0])

    @property
    def position(self) -> Position:
        """What ``seek`` takes to give the next window again."""
        return [self.passes, self._document, self._token, self.skipped]

    def seek(self, position: Position) -> None:
        """Makes the reader go on from a position; documents before it are read, not tokenised."""
        self.passes, self._document, self._token, self.skipped = position
        self._documents: Iterator[Any] | None = None
        self._ids: list[int] | None = None

    def window(self, size: int) -> tuple[list[int], str]:
        """The next tokens, and their name: the document that they begin in, and where in it.

        Raises:
            ValueError: A whole pass over the source does not fill the window.
        """
        room = size - len(self.turns.prefix)
        ids: list[int] = []
        name, longest, ends = "", 0, 0
        while len(ids) < room:
            if (document := self._current()) is None:
                ends, ids = ends + 1, []
                if ends == 2:
                    raise ValueError(
                        f"{self.name}: no document fills a window of {size} tokens, the longest "
                        f"has {longest}; choose shorter contexts, longer documents, or let windows "
                        "cross them"
                    )
                continue
            part = document[self._token : self._token + room - len(ids)]
            if not ids:
                name = f"{self._name}@{self._token}"
            ids += part
            if len(ids) == room:
                self._token += len(part)
                break
            longest = max(longest, len(document))
            if self.separator is None:
                self.skipped += self._token == 0
                ids = []
            self._document, self._token, self._ids = self._document + 1, 0, None
        return [*self.turns.prefix, *ids], name

    def _current(self) -> list[int] | None:
        """Tokens of the document that comes next; None, once, at the end of a pass."""
        if self._ids is None:
            if self._documents is None:
                documents = self.source.documents(self._count)
                self._documents = islice(documents, self._document, None)
            document = next(self._documents, None)
            if document is None:
                self.seek([self.passes + 1, 0, 0, self.skipped])
                return None
            self._name, self._ids = document["id"], self.turns.encode(document["text"])
            if self.separator is not None:
                self._ids.append(self.separator)
        return self._ids

    def _count(self, text: str) -> int:
        return self.turns.count([text])[0]


class LongBatches(Dataset[dict[str, Any]]):
    """Batches by number: the same number always gives the same batch, whoever asks, and when.

    Asked for in ascending order, as a loader does, they are read as a stream. An earlier number
    makes the readers go back to the nearest batch before it that they know the positions of.

    Each row draws its source by its number in the stream. Of the rows of all processes together
    this one builds every ``world``-th, but reads past the others: processes learn from the same
    rows in a step as one with that many times the batch size, in that order.

    Args:
        sources: Documents, or documents with questions, of which the number is that of the row.
        weights: How many rows are drawn from each, in proportion.
        turns: Gives the tokens.
        stages: Lengths of the contexts, one stage after the other.
        steps: Batches in all stages together; after them the last stage goes on.
        continuation: Tokens that follow each context.
        batch_size: Rows of a batch in one process.
        seed: Decides the order of the sources.
        rank: This process's number.
        world: Number of processes.
        cross_documents: See ``Passages``.
        name: What errors call the sources; it also decides the order.
        mirrored: Number documents with questions from -1 down: others than a training on the same
            sources has.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        turns: Turns,
        stages: Sequence[Stage],
        steps: int,
        continuation: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        cross_documents: bool = False,
        name: str = "train",
        mirrored: bool = False,
    ) -> None:
        self.mirrored = mirrored
        self.sources, self.weights, self.turns, self.name = sources, weights, turns, name
        self.stages, self.continuation, self.batch_size = stages, continuation, batch_size
        self.seed, self.rank, self.world = seed, rank, world
        self.ends = stage_ends(stages, steps)
        self.readers = {
            number: Passages(source, turns, cross_documents, f"{name}[{number}]")
            for number, source in enumerate(sources)
            if isinstance(source, TextSource)
        }
        self.positions: dict[int, dict[int, Position]] = {0: self._positions()}
        """Before batches that are known, those of each reader."""
        self._next: int | None = None

    def __getitem__(self, step: int) -> dict[str, Any]:
        """``context`` int64 ``[B, T]``, ``continuation`` int64 ``[B, Q]``, ``supervised`` bool
        ``[B, Q]`` (the tokens of the continuation that matter) and ``id``, a list of B names; and
        ``next``, the number and the readers' positions of the batch that follows."""
        if self._next is None or step < self._next:
            self._next = max(known for known in self.positions if known <= step)
            for number, position in self.positions[self._next].items():
                self.readers[number].seek(position)
        while self._next < step:
            self._rows(self._next, build=False)
            self._next += 1
        rows = self._rows(step)
        self._next += 1
        columns = torch.arange(self.continuation)
        return {
            "context": torch.tensor([context for context, *_ in rows]),
            "continuation": torch.tensor([continuation for _, continuation, *_ in rows]),
            "supervised": columns < torch.tensor([[supervised] for *_, supervised, _ in rows]),
            "id": [name for *_, name in rows],
            "next": (self._next, self._positions()),
        }

    def remember(self, step: int, positions: dict[int, Position]) -> None:
        """Notes where the readers stand before a batch, so that one may begin there."""
        self.positions[step] = positions
        if len(self.positions) > _REMEMBERED:
            del self.positions[next(known for known in self.positions if known)]

    def context(self, step: int) -> int:
        """Tokens of the contexts of a batch."""
        return self.stages[min(bisect_right(self.ends, step), len(self.stages) - 1)].context

    def _positions(self) -> dict[int, Position]:
        return {number: reader.position for number, reader in self.readers.items()}

    def _rows(self, step: int, build: bool = True) -> list[tuple[list[int], list[int], int, str]]:
        """This process's rows of a batch: context, continuation, how much matters, and name."""
        rows = []
        context, together = self.context(step), self.batch_size * self.world
        for number in range(step * together, (step + 1) * together):
            drawn = random.Random(f"{self.name} {self.seed} {number}")
            [chosen] = drawn.choices(range(len(self.sources)), self.weights)
            mine = build and number % self.world == self.rank
            source = self.sources[chosen]
            if isinstance(source, TextSource):
                ids, name = self.readers[chosen].window(context + self.continuation)
                if mine:
                    rows.append((ids[:context], ids[context:], self.continuation, name))
            elif mine:
                document = -1 - number if self.mirrored else number
                made = self.turns.framed(source, document, context, self.continuation)
                rows.append((made.context, made.continuation, made.supervised, made.id))
        return rows


class Steps(Sampler[int]):
    """The numbers of an epoch's batches, which can start anywhere in it.

    Args:
        steps: Batches in an epoch.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.epoch = 0
        self.skip = 0
        """Batches of the current epoch that a resumed training has already seen."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        first, self.skip = self.skip, 0
        begin = self.epoch * self.steps
        yield from range(begin + first, begin + self.steps)


def stage_ends(stages: Sequence[Stage], steps: int) -> list[int]:
    """The batch that each stage ends before."""
    shares = list(accumulate(stage.share for stage in stages))
    return [round(steps * share / shares[-1]) for share in shares]
