"""Rotary position embedding and its inverse."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of a model's queries and keys, in the half-split layout of transformers.

    Coordinate i of the first half of the rotary dims turns with coordinate i of the second half,
    by ``position * inv_freq[i]``; dims beyond the rotary ones are left alone. The angles and the
    arithmetic are fp32 whatever the dtype or autocast; results have the input's dtype.

    Positions are integers that broadcast to the leading dims of ``x``: for ``x [B, H, N, D]``,
    ``[N]``, ``[B, 1, N]`` or ``[B, H, N]``.

    Model data, not a sequence's state: ``copy.deepcopy`` gives the same object.
    """

    inv_freq: Tensor
    """Radians a position, fp32 ``[R / 2]``, for R rotary dims."""
    scaling: float = 1.0
    """Factor that rotating puts on the rotary dims (YaRN's attention scaling); not 0."""
    _on: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.inv_freq.dim() != 1 or not self.inv_freq.is_floating_point():
            raise ValueError(
                f"inv_freq is {self.inv_freq.dtype} of shape {tuple(self.inv_freq.shape)}; "
                "give floats [R / 2], one for each pair of rotary dims"
            )
        if self.scaling == 0:
            raise ValueError("scaling is 0; a rotation scaled by 0 has no inverse")
        # A copy: the model's buffer may be cast or moved later.
        object.__setattr__(self, "inv_freq", self.inv_freq.detach().float().clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates to ``positions``, as the model does before attention.

        Args:
            x: Queries or keys before RoPE ``[..., D]``.
            positions: Where they stand; broadcasts to ``x.shape[:-1]``.

        Raises:
            ValueError: ``positions`` that don't fit ``x``, or ``x`` narrower than R.
        """
        cos, sin = self._turn(x, positions)
        return self._apply(x, cos * self.scaling, sin * self.scaling)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undoes ``rotate``: what the query or key was before RoPE.

        Args:
            x: Queries or keys after RoPE ``[..., D]``.
            positions: Where they stand; broadcasts to ``x.shape[:-1]``.

        Raises:
            ValueError: As for ``rotate``.
        """
        cos, sin = self._turn(x, positions)
        return self._apply(x, cos / self.scaling, -sin / self.scaling)

    def shift(self, x: Tensor, from_positions: Tensor, to_positions: Tensor) -> Tensor:
        """Moves rotated queries or keys elsewhere: ``rotate(unrotate(x, from), to)`` in one turn.

        Args:
            x: Queries or keys after RoPE ``[..., D]``.
            from_positions: Where they stand; broadcasts to ``x.shape[:-1]``.
            to_positions: Where they shall stand; broadcasts likewise.

        Returns:
            The moved ones; the scaling is undone and put back, so it cancels.

        Raises:
            ValueError: As for ``rotate``.
        """
        cos_a, sin_a = self._turn(x, from_positions)
        cos_b, sin_b = self._turn(x, to_positions)
        # The model rounds each angle to fp32; far out, the angle of the difference of positions
        # isn't the difference of those, so the two turns are composed instead.
        return self._apply(x, cos_b * cos_a + sin_b * sin_a, sin_b * cos_a - cos_b * sin_a)

    def _turn(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, ``[..., R / 2]``."""
        rotary, shape = 2 * len(self.inv_freq), x.shape[:-1]
        if x.shape[-1] < rotary:
            raise ValueError(f"x has {x.shape[-1]} dims, fewer than the {rotary} rotary ones")
        try:
            positions.expand(shape)  # only to check: the angles stay as few as positions are
        except RuntimeError:
            raise ValueError(
                f"positions {list(positions.shape)} don't broadcast to the leading dims "
                f"{list(shape)} of x"
            ) from None
        if x.device not in self._on:
            self._on[x.device] = self.inv_freq.to(x.device)
        angle = positions.to(x.device)[..., None].float() * self._on[x.device]
        return angle.cos(), angle.sin()

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x32, half = x.float(), len(self.inv_freq)
        first, second, rest = x32.tensor_split((half, 2 * half), dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, dim=-1).to(x.dtype)
