"""Where the paragraphs and summaries of every row of a batch stand."""

import torch
from torch import Tensor

_FIRST_CAPACITY = 16


class SegmentTable:
    """Batched record of closed segments, in each row's own token positions (pads not counted).

    Segment i of a row is a paragraph R_i ``[regular_start, regular_end)`` directly followed by
    its summary S_i ``[summary_start, summary_end)``; the interior is S_i without delimiters.
    Entries from ``count`` on are empty ranges. All tensors are int64 on the CPU.

    Attributes:
        count: Closed segments ``[B]``.
        open_start: Where the paragraph being written begins ``[B]``.
    """

    def __init__(self, batch_size: int) -> None:
        self.count = torch.zeros(batch_size, dtype=torch.int64)
        self.open_start = torch.zeros(batch_size, dtype=torch.int64)
        # start, summary start, interior start, interior end, end
        self._bounds = torch.zeros(5, batch_size, _FIRST_CAPACITY, dtype=torch.int64)
        # start and end of the prompts of later turns
        self._pinned = torch.zeros(2, batch_size, 0, dtype=torch.int64)

    @property
    def regular_start(self) -> Tensor:  # [B, N_cap]
        """First position of R_i."""
        return self._bounds[0]

    @property
    def regular_end(self) -> Tensor:  # [B, N_cap]
        """One past R_i; an empty paragraph ends where it starts."""
        return self._bounds[1]

    @property
    def summary_start(self) -> Tensor:  # [B, N_cap]
        """First position of S_i: R_i and S_i touch."""
        return self._bounds[1]

    @property
    def interior_start(self) -> Tensor:  # [B, N_cap]
        """First position between the delimiters of S_i."""
        return self._bounds[2]

    @property
    def interior_end(self) -> Tensor:  # [B, N_cap]
        """One past the last position between the delimiters of S_i."""
        return self._bounds[3]

    @property
    def summary_end(self) -> Tensor:  # [B, N_cap]
        """One past S_i, its closing delimiter included."""
        return self._bounds[4]

    def append(
        self,
        rows: Tensor,  # bool [B]
        summary_start: Tensor,  # [B]
        interior_start: Tensor,  # [B]
        interior_end: Tensor,  # [B]
        end: Tensor,  # [B]
    ) -> None:
        """Closes the open segment of the marked rows; the next one starts at ``end``."""
        where = rows.nonzero().squeeze(1)
        if int(self.count.max()) == self._bounds.shape[2]:
            self._bounds = torch.cat([self._bounds, torch.zeros_like(self._bounds)], dim=2)
        bounds = torch.stack([self.open_start, summary_start, interior_start, interior_end, end])
        # Not in place: a table made in inference mode may be used outside.
        place = (torch.arange(5)[:, None], where, self.count[where])
        self._bounds = self._bounds.index_put(place, bounds[:, where])
        self.count = self.count + rows
        self.open_start = torch.where(rows, end, self.open_start)

    def pin(self, start: Tensor, end: Tensor) -> None:  # [B], [B]
        """Keeps ``[start, end)`` readable for good: the prompt of a later turn."""
        self._pinned = torch.cat([self._pinned, torch.stack([start, end])[:, :, None]], dim=2)

    def readable(
        self,
        zoomed: Tensor,  # bool [B, N]
        summarised: Tensor,  # bool [B, N]
        length: Tensor,  # [B]
        prompt: Tensor,  # [B]
        window: int,
        open_cap: int | None = None,
    ) -> Tensor:  # bool [B, T]
        """The final index set I_f of ZoomR (section 3.3) as a mask over positions.

        I_f is the prompt (of every turn), the last ``window`` positions, R_i of the zoomed and
        S_i of the summarised segments, and the paragraph being written, which has no summary
        yet. Zooming into an empty paragraph keeps its summary instead.

        Args:
            zoomed: Segments to read in full.
            summarised: Segments to read as their summary; may not overlap ``zoomed``.
            length: Positions that each row has seen.
            prompt: Tokens of each row's (first) prompt.
            window: Newest positions that are always readable.
            open_cap: Newest positions of the open paragraph that are kept; None keeps all.

        Returns:
            Mask ``[B, length.max()]``, False from a row's own ``length`` on. CPU tensors.
        """
        size = zoomed.shape[1]
        start, middle, _, _, end = self._bounds[:, :, :size]
        as_summary = summarised | (zoomed & (start == middle))
        zero = torch.zeros_like(length)
        open_start = self.open_start
        if open_cap is not None:
            open_start = open_start.maximum(length - open_cap)

        tails = torch.stack([zero, (length - window).clamp(min=0), open_start], dim=1)
        tail_ends = torch.stack([prompt, length, length], dim=1)
        starts = torch.cat([start, middle, self._pinned[0], tails], dim=1)
        ends = torch.cat([middle, end, self._pinned[1], tail_ends], dim=1)
        always = torch.ones(len(length), starts.shape[1] - 2 * size, dtype=torch.bool)
        chosen = torch.cat([zoomed, as_summary, always], dim=1).int()

        # Ranges may overlap: +1 at each start, -1 at each end, readable where the sum is positive.
        total = int(length.max())
        depth = torch.zeros(len(length), total + 1, dtype=torch.int32)
        depth.scatter_add_(1, starts.clamp(max=total), chosen)
        depth.scatter_add_(1, ends.clamp(max=total), -chosen)
        return (depth.cumsum(1)[:, :total] > 0) & (torch.arange(total) < length[:, None])

    def index_select(self, rows: Tensor) -> None:  # [B']
        """Keeps the given rows, in the given order; a row may come twice."""
        self.count = self.count[rows]
        self.open_start = self.open_start[rows]
        self._bounds = self._bounds[:, rows]
        self._pinned = self._pinned[:, rows]
