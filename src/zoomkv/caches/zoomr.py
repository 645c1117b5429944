"""``zoomr``: zooming into the paragraphs that all heads agree on (arXiv 2604.10898, section 3).

The model writes a short summary behind each paragraph. The mean key of a summary is the index
entry of its paragraph: at a sentence end every query head of every layer votes for the ``top_k``
summaries that it likes best. The ``consensus`` paragraphs with the most votes are read in full,
the other voted ones as their summaries, the rest not at all, until the next sentence end.
"""

from collections.abc import Iterator
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.budget import Budget, check_at_least
from zoomkv.caches.sumr import SumRCache
from zoomkv.ops.consensus import VoteHeads, agreeability, choose, vote
from zoomkv.spans.thoughts import Delimiters

_GROWTH = 16  # summaries
_HEADROOM = 16  # rows of a budget that a choice leaves to what is generated until the next one


class ZoomRCache(SumRCache):
    """Reads a few paragraphs in full and others as summaries, by the votes of all heads.

    With a ``budget`` the least-voted summaries go first, then the least-voted paragraphs; the
    prompt, the window and the paragraph being written stay, even if they exceed it alone. Each
    batch row has a budget of its own: one with fewer summaries than another may use as rows what
    the index, which is as long for all, has reserved for it.

    Args:
        model: The causal LM that will use it.
        tokenizer: Of the model.
        delimiters: What begins and ends a summary; by default the tokenizer's special tokens.
        window: Newest tokens that are always readable, w.
        consensus: Paragraphs read in full, c; 0 reads voted summaries only.
        top_k: Votes of each head, k.
        vote_heads: ``query``: each query head votes; ``kv_mean``: the mean query of each KV head.
        max_interval: Most tokens between two choices.
        open_cap: Newest tokens of the paragraph being written that stay readable; None: all.
        boundary: ``suffix`` takes tokens that end a sentence, ``exact`` only lone punctuation.
        budget: Rows, or a share of full KV, that readable rows and index may take; None: no bound.
        residency: ``resident`` or ``streamed``, see ``RetrievingCache``.
        host_precision: ``auto``, ``int8`` or ``nf4``.

    Raises:
        ValueError: An option out of range, no tokenizer, or one without summary tokens.
    """

    name = "zoomr"
    watches_decoding = True
    _mean_keys: Tensor | None  # [L, B, Hkv, N, D]
    _votes: Tensor  # int32 [B, N], of each row's own last boundary
    _dispensable: Tensor  # bool [B]

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        delimiters: Delimiters | None = None,
        *,
        window: int = 512,
        consensus: int = 2,
        top_k: int = 2,
        vote_heads: str = "query",
        max_interval: int = 128,
        open_cap: int | None = None,
        boundary: str = "suffix",
        budget: int | float | None = None,
        residency: str = "resident",
        host_precision: str = "auto",
    ) -> None:
        check_at_least("window", window, 1)
        self._consensus = check_at_least("consensus", consensus, 0)
        self._top_k = check_at_least("top_k", top_k, 1)
        if vote_heads not in get_args(VoteHeads):
            raise ValueError(
                f"vote_heads={vote_heads!r}: choose one of {', '.join(get_args(VoteHeads))}"
            )
        self._vote_heads: Any = vote_heads
        self._budget = None if budget is None else Budget.parse(budget, smallest=window + 1)
        super().__init__(
            model,
            tokenizer,
            delimiters,
            window=window,
            max_interval=max_interval,
            open_cap=open_cap,
            boundary=boundary,
            residency=residency,
            host_precision=host_precision,
        )

    def summarised(self, rows: Tensor) -> None:  # bool [B]
        """See ``SumRCache``: adds the mean key of each new summary's interior to the index."""
        table = self.tracker.table
        latest = (table.count - 1).clamp(min=0)
        every = torch.arange(len(rows))
        first, last = table.interior_start[every, latest], table.interior_end[every, latest]
        position = torch.arange(int(last[rows].max()))
        inside = (position >= first[:, None]) & (position < last[:, None]) & rows[:, None]
        batch, position = inside.nonzero(as_tuple=True)
        weight = (1.0 / inside.sum(1).clamp(min=1))[batch, None, None]
        means = []
        for layer in self.layers:
            archive = layer.archive
            keys, _ = archive.codec.decode(archive.take((batch, slice(None), position)))
            zeros = torch.zeros(len(rows), *keys.shape[1:])
            means.append(zeros.index_add_(0, batch, keys.float() * weight).to(keys.dtype))
        mean = torch.stack(means).to(self._device)  # [L, B, Hkv, D]
        if self._mean_keys is None:
            self._mean_keys = mean.new_zeros(*mean.shape[:3], 0, mean.shape[3])
        if (more := int(table.count.max()) - self._mean_keys.shape[3]) > 0:
            self._mean_keys = F.pad(self._mean_keys, (0, 0, 0, more + -more % _GROWTH))
        which = rows.nonzero().squeeze(1)
        self._mean_keys[:, which, :, latest[which]] = mean[:, which].transpose(0, 1)

    def choose(self, rows: Tensor, step: Step) -> tuple[Tensor, Tensor]:  # 2 x bool [B, N]
        """See ``SumRCache``: one product of all layers' queries with all mean keys."""
        count = self.tracker.table.count
        size = int(count.max())
        self._votes = F.pad(self._votes, (0, size - self._votes.shape[1]))
        if size and step.observations:
            assert self._mean_keys is not None
            queries = torch.stack(step.observations)  # [L, B, H, 1, D]
            grouped = queries.view(*queries.shape[:2], self.shape.kv_heads, -1, queries.shape[-1])
            votes = vote(
                grouped, self._mean_keys[:, :, :, :size], count, self._top_k, self._vote_heads
            )
            # The others are not at a boundary: their last vote still counts.
            self._votes = torch.where(rows[:, None], votes.to("cpu"), self._votes)
        zoomed, summarised = choose(self._votes, count, self._consensus)
        if self._budget is not None:
            zoomed, summarised = self._within_budget(zoomed, summarised)
        chosen = (zoomed | summarised).any(1)
        self._dispensable = torch.where(rows, chosen, self._dispensable)
        return zoomed, summarised

    def entry(self, row: int, zoomed: Tensor, summarised: Tensor) -> dict[str, Any]:
        """See ``SumRCache``."""
        count = int(self.tracker.table.count[row])
        telling = count > self._consensus and bool(self._votes[row].any())
        share = float(agreeability(self._votes, zoomed)[row]) if telling else None
        return {
            **super().entry(row, zoomed, summarised),
            "votes": self._votes[row, :count].tolist(),
            "agreeability": share,
        }

    def prompt_read(self, added: Tensor) -> None:
        """See ``PolicyCache``."""
        super().prompt_read(added)
        self._bound_storage()

    def update_reading(self, rows: Tensor, step: Step) -> None:
        """See ``SumRCache``."""
        super().update_reading(rows, step)
        self._bound_storage()

    def prepare(self, step: Step) -> None:
        """See ``PolicyCache``: a full budget can't wait for the next sentence end."""
        if self._budget is None or not bool(self._dispensable.any()):
            return
        full = self._dispensable & (self.slots.count + 1 > self._capacity())
        if bool(full.any()):
            self.archive_rows()
            self.update_reading(full, step)

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self._votes = self._votes[rows]
        self._dispensable = self._dispensable[rows]
        if self._mean_keys is not None:
            self._mean_keys = self._mean_keys[:, rows.to(self._mean_keys.device)]

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().device_tensors()
        if self._mean_keys is not None:
            yield self._mean_keys

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield from (self._votes, self._dispensable)

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self._votes = torch.zeros(batch, 0, dtype=torch.int32)
        self._mean_keys = None
        self._dispensable = torch.zeros(batch, dtype=torch.bool)  # something may still go

    def _capacity(self) -> Tensor:  # [B]
        """Rows of each batch row's own budget that its index leaves."""
        assert self._budget is not None
        # An entry of the index is a key without a value: half a row for each layer and KV head.
        entries = -(-self.tracker.table.count // _GROWTH) * _GROWTH
        return self._budget.rows(self._lengths) - -(-entries // 2)

    def _bound_storage(self) -> None:
        """Keeps slack within the budget too; what may not be dropped is kept even beyond it."""
        if self._budget is not None:
            ceiling = max(int(self._capacity().max()), self.slots.length)
            for layer in self.layers:
                layer.working_set.limit(ceiling)

    def _within_budget(
        self, zoomed: Tensor, summarised: Tensor
    ) -> tuple[Tensor, Tensor]:  # 2 x bool [B, N]
        """Gives up the least-voted summaries, then the least-voted paragraphs, until all fits."""
        table, size = self.tracker.table, zoomed.shape[1]
        nothing = torch.zeros_like(zoomed)
        always = self.readable_with(nothing, nothing)
        covered = F.pad(always.cumsum(1), (1, 0))  # [B, T + 1]
        start, middle, end = (
            bound[:, :size].clamp(max=covered.shape[1] - 1)
            for bound in (table.regular_start, table.regular_end, table.summary_end)
        )
        # Zooming into an empty paragraph reads its summary.
        as_text = zoomed & (start < middle)
        first, last = torch.where(as_text, start, middle), torch.where(as_text, middle, end)
        cost = (last - first) - (covered.gather(1, last) - covered.gather(1, first))
        chosen = zoomed | summarised
        rank = (zoomed.long() * (1 << 32) + self._votes.long()) * size + torch.arange(size)
        order = rank.masked_fill(~chosen, -1).argsort(dim=1, descending=True)
        total = (cost * chosen).gather(1, order).cumsum(1)
        room = (self._capacity() - _HEADROOM - always.sum(1))[:, None]
        fits = torch.zeros_like(chosen).scatter(1, order, total <= room)
        return zoomed & fits, summarised & fits
