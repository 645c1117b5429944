"""How little each token of a cache's text was expected, as states of the decoder come in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.backbone.surprisal import surprisal

_GROWTH = 256


class SurprisalMeter:
    """Surprisals by position. States of decode steps wait until ``settle`` measures them together.

    Args:
        head: The model's output head; shared, not copied.

    Attributes:
        nats: fp32 ``[B, positions and slack]``, CPU.
        measured: Tokens of each row whose surprisal is known, ``[B]``.
    """

    nats: Tensor
    measured: Tensor

    def __init__(self, head: Any) -> None:
        self._head = _Head(head)
        self.start(0)

    def start(self, batch: int) -> None:
        """Begins anew with nothing."""
        self.nats = torch.zeros(batch, 0)
        self.measured = torch.zeros(batch, dtype=torch.int64)
        self._before: tuple[Tensor, Tensor] | None = None  # state [B, 1, hidden], id [B, 1]
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []  # states, ids, real

    def note(self, step: Step, hidden: Tensor) -> None:
        """Takes the states of a step; those of a prompt are measured at once."""
        real = torch.ones_like(step.ids, dtype=torch.bool) if step.real is None else step.real
        self._pending.append((hidden.detach().clone(), step.ids.clone(), real))
        if step.size > 1:
            try:
                self.settle()
            except BaseException:
                self._pending.pop()  # the step does not count
                raise

    def settle(self) -> None:
        """Measures what is pending."""
        if not self._pending:
            return
        fresh = [hidden for hidden, _, _ in self._pending]
        ids, real = (torch.cat([entry[i] for entry in self._pending], 1) for i in (1, 2))
        before = self._before or (fresh[0][:, :1], ids[:, :1])
        known = (self.measured > 0)[:, None]
        states = torch.cat([before[0], *fresh], 1)
        ids = torch.cat([before[1], ids], 1)
        real = torch.cat([known, real], 1)
        nats = surprisal(self._head, states, ids, real).to("cpu")
        column, row = torch.arange(ids.shape[1]), torch.arange(len(ids))
        last = column.where(real, 0).amax(1)  # what comes before each row's next token
        self._before = (
            states[row.to(states.device), last.to(states.device)][:, None].clone(),
            ids[row, last][:, None].clone(),
        )
        position = (self.measured - known[:, 0].long())[:, None] + real.cumsum(1) - 1
        more = int(position.max()) + 1 - self.nats.shape[1]
        if more > 0:
            self.nats = F.pad(self.nats, (0, more + _GROWTH))
        batch, at = (real & (column > 0)).nonzero(as_tuple=True)
        self.nats[batch, position[batch, at]] = nats[batch, at]
        self.measured = self.measured + real[:, 1:].sum(1)
        self._pending = []

    def state_bytes(self) -> int:
        """Device bytes of one token's state."""
        if self._before is None:
            return 0
        state = self._before[0][0]
        return state.numel() * state.element_size()

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        self.nats, self.measured = self.nats[rows], self.measured[rows]
        if self._before is not None:
            states, ids = self._before
            self._before = (states[rows.to(states.device)], ids[rows])
        self._pending = [(h[rows.to(h.device)], i[rows], r[rows]) for h, i, r in self._pending]

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        if self._before is not None:
            yield self._before[0]
        yield from (states for states, _, _ in self._pending)

    def host_tensors(self) -> Iterator[Tensor]:
        """What lies on the host."""
        yield from (self.nats, self.measured)
        if self._before is not None:
            yield self._before[1]
        for _, ids, real in self._pending:
            yield from (ids, real)


class _Head:
    """An output head where a model is asked for."""

    def __init__(self, head: Any) -> None:
        self._module = head

    def get_output_embeddings(self) -> Any:
        """As of a model."""
        return self._module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of the model, not of a sequence
