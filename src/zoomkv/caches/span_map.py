"""Which span each token of a context is in, and how large the spans are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.spans.surprisal import Spans


class SpanMap:
    """The spans of each batch row, in order; all layers and heads share them."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.of = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        """The span of each token ``[B, T]``; -1: in none."""
        self.log_size = torch.zeros(batch, 0, device=device)
        """Tokens of each span, fp32 ``[B, S]``; -inf where there is none."""
        self.count = torch.zeros(batch, dtype=torch.int64)
        """Spans of each batch row, on the host ``[B]``."""

    def __len__(self) -> int:
        """Tokens of the longest batch row, those in no span included."""
        return self.of.shape[1]

    def inside(self) -> Tensor:  # CPU [B]
        """How many tokens are in spans."""
        return (self.of >= 0).sum(1).to("cpu")

    def add(self, spans: Spans, start: Tensor, present: Tensor) -> None:
        """New tokens have been cut.

        Args:
            spans: By column, on the host.
            start: Position of the first column ``[B]``.
            present: Which columns there are, bool ``[B, M]``.
        """
        device, first = self.of.device, self.count
        batch, column = (present & (spans.number >= 0)).nonzero(as_tuple=True)
        number = (spans.number[batch, column] + first[batch]).to(device)
        position = (start[batch] + column).to(device)
        total = int((start + present.sum(1)).max())
        self.of = F.pad(self.of, (0, total - len(self)), value=-1)
        self.of[batch.to(device), position] = number
        self.count = first + spans.count
        entries = torch.arange(spans.size.shape[1]) < spans.count[:, None]
        batch, entry = entries.nonzero(as_tuple=True)
        more = max(int(self.count.max()), 1) - self.log_size.shape[1]
        self.log_size = F.pad(self.log_size, (0, max(more, 0)), value=-torch.inf)
        sizes = spans.size[batch, entry].float().log().to(device)
        self.log_size[batch.to(device), (first[batch] + entry).to(device)] = sizes

    def pair(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # CPU [B]
        """Joins the first spans, two by two: what is old is coarse.

        Args:
            pairs: How many pairs there are in each batch row ``[B]``.

        Returns:
            Where each span goes ``[B, S]``; its tokens before, fp32 ``[B, S]``; the tokens of the
            spans that there are now, fp32 ``[B, S']``.
        """
        device = self.of.device
        by = pairs.to(device)[:, None]
        entry = torch.arange(self.log_size.shape[1], device=device)
        self.count = self.count - pairs
        left = int(self.count.max())
        into = torch.where(entry < 2 * by, entry // 2, entry - by).clamp(max=left)
        mass = self.log_size.exp()
        merged = mass.new_zeros(len(mass), left + 1).scatter_add_(1, into, mass)[:, :-1]
        moved = into.gather(1, self.of.clamp(min=0))
        self.of = moved.where(self.of >= 0, -1)
        self.log_size = merged.log()
        return into, mass, merged

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        there = rows.to(self.of.device)
        self.of, self.log_size = self.of[there], self.log_size[there]
        self.count = self.count[rows]

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        yield from (self.of, self.log_size)
