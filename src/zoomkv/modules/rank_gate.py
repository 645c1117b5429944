"""How much of each low-rank component of a span is worth keeping (SeKV, section 3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Gates of a new predictor are near sigmoid(3) = 0.95: it begins by keeping everything, so that
# training has whole spans to compare with and the cost term takes away what isn't missed.
_OPEN = 3.0


class RankGate(nn.Module):
    """Predicts a gate in (0, 1) for each component from the spectrum and the span's mean key.

    One small network (rank + head_dim -> hidden -> hidden -> rank, GELU) serves all layers, heads
    and spans, keys and values alike; values have gates of their own, from their own spectrum
    (arXiv 2606.31145, equation 7). A gate depends on the span alone, so it is computed once, when
    the span is stored.

    Args:
        head_dim: Width of the context, D.
        rank: Components that it knows, the most that a span may have.
        hidden: Width of the two hidden layers.
        generator: Where the initial weights come from; torch's own by default.

    Raises:
        ValueError: A size below 1.
    """

    def __init__(
        self,
        head_dim: int,
        rank: int = 32,
        hidden: int = 64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if min(head_dim, rank, hidden) < 1:
            raise ValueError(
                f"head_dim={head_dim}, rank={rank}, hidden={hidden}: give sizes of at least 1"
            )
        self.rank = rank
        self.first = nn.Linear(rank + head_dim, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, rank)
        for layer in (self.first, self.second, self.last):
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.last.bias, _OPEN)

    def forward(self, sigma: Tensor, context: Tensor) -> Tensor:  # [..., R], [..., D] -> [..., R]
        """Gates of the components of spans, in fp32, whatever autocast says.

        Only the shape of the spectrum counts, sigma over its largest, and the direction of the
        context.

        Args:
            sigma: Singular values, largest first, R up to ``rank``; 0 where there is no component.
            context: The mean key of each span, for keys and values alike. Leading dimensions
                broadcast to those of ``sigma``, so that both spectra can be given as a stack.

        Returns:
            Gates, above 0 for every component and exactly 0 where there is none.

        Raises:
            ValueError: More components than ``rank``.
        """
        count = sigma.shape[-1]
        if count > self.rank:
            raise ValueError(
                f"spans have up to {count} components and the rank gate knows {self.rank}; "
                "factorise with a smaller rank"
            )
        with torch.autocast(sigma.device.type, enabled=False):
            sigma = sigma.float()
            largest = sigma[..., :1]
            spectrum = F.pad(sigma / largest.where(largest > 0, 1), (0, self.rank - count))
            direction = F.normalize(context.float(), dim=-1)
            x = torch.cat([spectrum, direction.expand(*sigma.shape[:-1], -1)], dim=-1)
            x = F.gelu(_linear(self.first, x))
            x = F.gelu(_linear(self.second, x))
            # The least float keeps "nearly none" apart from "no such component".
            gates = _linear(self.last, x).sigmoid().clamp(min=torch.finfo(torch.float32).tiny)
            return gates[..., :count].where(sigma > 0, 0)


def kept(gates: Tensor, least: float = 0.05) -> Tensor:  # [..., R] -> bool [..., R]
    """The components that stay at deployment: those whose gate is at least ``least``.

    Gates need not fall with the index: a component goes wherever it stands, and those behind it
    may stay. Of a span whose gates are all below ``least`` the first (strongest) one stays.

    Args:
        gates: As ``RankGate`` gives them; 0: no component.
        least: The gate below which a component is not worth its storage.
    """
    stays = (gates >= least) & (gates > 0)
    first = ~stays.any(-1, keepdim=True) & (gates[..., :1] > 0)
    return torch.cat([stays[..., :1] | first, stays[..., 1:]], dim=-1)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """In fp32, also where a trainer has cast the parameters."""
    return F.linear(x, layer.weight.float(), layer.bias.float())
