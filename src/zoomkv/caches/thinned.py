"""Tokens of prompts that are never read again, in each layer and head, and where the others stand.

A prompt loses equally many in all heads, but not the same ones. What is generated later all stays,
so the tables here change only when a prompt loses some.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class Thinned:
    """Counts and finds the tokens that stay.

    The *rank* of such a token is the number of those before it.

    Attributes:
        count: Tokens gone from each head, ``[B]``.
    """

    count: Tensor
    _stands: Tensor  # int32 [L, B, Hkv, ranks], positions; behind, each is its rank + count
    _before: Tensor  # int32 [L, B, Hkv, sentences + 1], gone before each; behind, all are

    def start(self, layers: int, batch: int, heads: int) -> None:
        """Begins anew, with nothing gone."""
        self.count = torch.zeros(batch, dtype=torch.int64)
        self._stands = torch.zeros(layers, batch, heads, 0, dtype=torch.int32)
        self._before = torch.zeros(layers, batch, heads, 0, dtype=torch.int32)

    def add(self, stays: Tensor, lengths: Tensor, starts: Tensor) -> None:
        """Takes away tokens that have stayed so far, equally many from all heads of a batch row.

        Args:
            stays: False where a token goes now, bool ``[L, B, Hkv, T]``.
            lengths: Tokens of each row, ``[B]``.
            starts: Where each sentence starts, and where the last ends, ``[B, sentences + 1]``.
        """
        longest = stays.shape[3]
        count = self.count + (~stays[0, :, 0]).sum(-1)
        behind = torch.arange(int((lengths - count).max())) + count[:, None]
        stands = behind[:, None].to(torch.int32).repeat(len(stays), 1, stays.shape[2], 1)
        stands = stands.view(*stays.shape[:3], -1)
        before = self.before(starts.shape[1]).clone()
        at = starts[:, None].expand(-1, stays.shape[2], -1)
        every = (torch.arange(longest) + self.count[:, None])[:, None].expand(stays.shape[1:])
        for layer, kept in enumerate(stays):
            position = every.clone()  # of each rank so far
            position[..., : self._stands.shape[3]] = self._stands[layer]
            here = kept.gather(-1, position.clamp(max=longest - 1))
            here &= position < lengths[:, None, None]
            batch, head, rank = here.nonzero(as_tuple=True)
            new = here.cumsum(-1)[batch, head, rank] - 1
            stands[layer, batch, head, new] = position[batch, head, rank].to(torch.int32)
            before[layer] += F.pad((~kept).cumsum(-1, dtype=torch.int32), (1, 0)).gather(-1, at)
        self.count, self._stands, self._before = count, stands, before

    def before(self, boundaries: int) -> Tensor:  # int32 [L, B, Hkv, boundaries]
        """How many tokens have gone before each sentence; past the last, all have."""
        more = max(0, boundaries - self._before.shape[3])
        behind = self.count.to(torch.int32)[:, None, None].expand(*self._before.shape[:3], more)
        return torch.cat([self._before[..., :boundaries], behind], -1)

    def positions(self, layer: Tensor, batch: Tensor, head: Tensor, rank: Tensor) -> Tensor:
        """Where tokens that stay stand, all ``[n]``."""
        behind, known = rank + self.count[batch], self._stands.shape[3]
        if not known:
            return behind
        listed = self._stands[layer, batch, head, rank.clamp(max=known - 1)]
        return torch.where(rank < known, listed, behind)

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        self.count = self.count[rows]
        self._stands, self._before = self._stands[:, rows], self._before[:, rows]

    def host_tensors(self) -> Iterator[Tensor]:
        """What lies on the host."""
        yield from (self.count, self._stands, self._before)
