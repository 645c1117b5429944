"""What an attached model and a cache tell each other in one forward pass.

The decoder's pre-hook asks the cache for a ``Step`` and passes it down as the keyword ``zoomkv``,
so that every attention module sees it; the post-hook hands it back to be committed. A forward
that raises is never committed: the next ``begin`` starts from what was committed last.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Placement:
    """Where the new rows of one forward go in a layer, and what its queries may read.

    Stored rows stand without gaps in slots ``[0, count)`` of each batch row; new ones follow.
    """

    stored: int
    """Slots in use before the forward, maximum over the batch rows."""
    length: int
    """Slots in use after it."""
    scatter: tuple[Tensor, Tensor, Tensor] | None = None
    """For each token that is kept: batch row, column of the forward, slot (model's device).

    None if all batch rows agree and nothing is padding: then new rows follow slot ``stored``.
    """
    host_scatter: tuple[Tensor, Tensor, Tensor] | None = None
    """The same on the CPU."""
    mask: Tensor | None = None
    """Readable slots, bool ``[B, 1, Q, length]``; None: all of them, causally among the new.

    A layer may put a placement with addends of logits here instead, ``[B, 1 or Hkv, Q, length]``.
    """


@dataclass(slots=True)
class Step:
    """One forward pass, as the cache sees it. (No method named ``to``: hooks would call it.)"""

    ids: Tensor
    """Token ids ``[B, Q]``, CPU."""
    real: Tensor | None
    """False for padding and for rows that are finished, ``[B, Q]``, CPU; None: all are real."""
    positions: Tensor
    """Position of each token in its own row, ``[B, Q]``, CPU; pads repeat the one before."""
    start: int
    """Columns fed before this forward."""
    in_prompt: bool
    """True while the prompt of a turn is being read."""
    placements: list[Placement] = field(default_factory=list)
    """One for each layer; layers that store the same rows share one."""
    observer: "Callable[[Step, int, Tensor, Tensor], Any] | None" = None
    """Called by the attention function, if the cache wants to watch: this step, the layer, its
    queries ``[B, H, Q, D]`` and the keys that they read ``[B, Hkv, T, D]``."""
    reader: "Callable[[int, Tensor, Tensor, Tensor, float], Tensor] | None" = None
    """Called by the attention function in place of its own product, if what a query reads depends
    on the query: layer, queries ``[B, H, Q, D]``, what the layer's ``update`` returned, and the
    factor on logits. Returns the output ``[B, H, Q, D]``."""
    observations: list[Any] = field(default_factory=list)
    """What the observer returned, layer by layer. It counts once the step is committed."""

    @property
    def size(self) -> int:
        """Columns of this forward, Q."""
        return self.ids.shape[1]

    @property
    def added(self) -> Tensor:  # [B]
        """Tokens that this forward adds to each row."""
        if self.real is None:
            return self.ids.new_full((self.ids.shape[0],), self.size)
        return self.real.sum(1)


class SteppedCache(ABC):
    """What a cache must offer so that an attached model drives it."""

    @abstractmethod
    def begin(
        self,
        input_ids: Tensor,  # [B, Q]
        attention_mask: Tensor | None,  # [B, columns]
        position_ids: Tensor | None,  # [B or 1, Q]
    ) -> Step:
        """Checks that the forward continues where the cache stands, and plans it.

        Raises:
            ValueError: If it does not, or if the input can't be served.
        """

    @abstractmethod
    def commit(self, step: Step, hidden: Tensor) -> None:  # [B, Q, hidden]
        """Makes the step count. Called once every layer has stored its rows."""
