"""Counts of what a layer's queries did, of steps that count alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


class Tally:
    """Named counts, int64 ``[B, *]`` on the host. What a step notes waits until it is committed."""

    def __init__(self) -> None:
        self._total: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        """What has been counted."""
        return list(self._total)

    def of(self, name: str) -> Tensor:
        """The count of all committed steps."""
        return self._total[name]

    def start(self, name: str, zeros: Tensor) -> None:
        """Begins a count."""
        self._total[name] = zeros

    def note(self, name: str, count: Tensor, *, again: bool = False) -> None:
        """Notes a step's count.

        Args:
            name: Of what.
            count: How many.
            again: Joins what a step noted that broke off; otherwise replaces it.
        """
        count = count.to("cpu")
        if again and name in self._pending:
            count = self._pending[name] + count
        self._pending[name] = count

    def commit(self) -> None:
        """The step counts."""
        for name, count in self._pending.items():
            self._total[name] = self._total[name] + count if name in self._total else count
        self._pending = {}

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        self._total = {name: count[rows] for name, count in self._total.items()}
        self._pending = {name: count[rows] for name, count in self._pending.items()}

    def tensors(self) -> Iterator[Tensor]:
        """All that is stored."""
        yield from self._total.values()
        yield from self._pending.values()
