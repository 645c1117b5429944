"""``sentence_kv``: sentences that the current one asks for (SentenceKV; Zhu et al., 2025, COLM).

All tokens lie on the host, grouped into sentences by the text. The mean query of the sentence being
written ranks the others by their mean keys; their tokens are read in that order until the budget is
full, beside the first and the newest tokens.

Faithful: SnapKV's scores thin a prompt to ``semantic_factor`` budgets; means are of what is kept;
the mean query runs along and starts anew behind each sentence. Adapted: selections are some tokens
apart, which leaves KL where it was at an eighth of the cost (``interval=1`` is the paper's);
means and selections are of KV heads, with queries averaged over a group (the published code repeats
KV heads). Up to the second token of a sentence the paper reads everything that is kept; here the
query before goes on asking, or the budget would not hold. A query asks from the step after its own;
behind a prompt its last queries ask. Of the last sentence that fits, as much as fits is read.
Prompts and answers share no sentence; what is being written and is not recent is read last. Means
lie on the host, where rows are selected, so all of the budget is rows; what a prompt does not keep
stays on the host unread, as the heads of a token lie together there.
"""

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import Budget, check_at_least
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.retrieving import RetrievingCache
from zoomkv.caches.snapkv import check_odd
from zoomkv.caches.thinned import Thinned
from zoomkv.caches.vocabulary import of_vocabulary
from zoomkv.ops.observed import mean_over_queries, observed_scores, pooled, weights_of
from zoomkv.spans.punctuation import sentence_end_mask


class SentenceKVCache(RetrievingCache):
    """Reads the first tokens, the newest, and the sentences that the current one asks for.

    Args:
        model: The causal LM that will use it.
        tokenizer: Of the model.
        budget: Rows, or a share of full KV, that are readable.
        start: Tokens at the start that always are.
        recent: Newest tokens that always are.
        semantic_factor: Budgets that a prompt keeps, at least 1.
        window: Last queries of a prompt, which score its tokens.
        kernel: Width of the max pooling of these scores, odd.
        interval: Tokens between two selections; the paper's is 1.
        host_precision: ``auto``, ``int8`` or ``nf4``.

    Raises:
        ValueError: An option out of range, or no tokenizer.
    """

    name = "sentence_kv"
    watches_prompt = watches_decoding = True
    _closed: Tensor  # bool [B, positions and slack], whether a sentence ends there
    _means: Tensor  # fp32 [L, B, Hkv, sentences and slack, D]
    _indexed: Tensor  # [B], sentences that have means
    _query: Tensor  # fp32 [L, B, Hkv, D], the one that asks
    _sum: Tensor  # fp32 [L, B, Hkv, D], of the queries of the sentence being written
    _asked: Tensor  # [B], how many these are
    _selected: Tensor  # [B], lengths at the last selection
    _limit: Tensor  # int32 [L, B, Hkv, sentences], how many tokens of each it chose

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        budget: int | float = 1024,
        start: int = 32,
        recent: int = 32,
        semantic_factor: int | float = 3,
        window: int = 32,
        kernel: int = 7,
        interval: int = 8,
        host_precision: str = "auto",
    ) -> None:
        self._first = check_at_least("start", start, 0)
        self._recent = check_at_least("recent", recent, 1)
        self._interval = check_at_least("interval", interval, 1)
        self._smallest = start + recent + interval
        self._budget = Budget.parse(budget, self._smallest)
        number = isinstance(semantic_factor, int | float) and not isinstance(semantic_factor, bool)
        if not number or not 1 <= semantic_factor < float("inf"):
            raise ValueError(f"semantic_factor={semantic_factor!r}: give a number of at least 1")
        self._factor = semantic_factor
        self._kernel = check_odd("kernel", kernel)
        self._window = QueryWindow(check_at_least("window", window, 1))
        self._thinned = Thinned()
        shape = ModelShape.of(model)
        self._ends = of_vocabulary(
            tokenizer,
            ("sentence ends", shape.vocabulary),
            lambda t: sentence_end_mask(t, shape.vocabulary),
        )
        super().__init__(shape, "resident", host_precision, shared=False)

    # -- turns and steps ------------------------------------------------------------------------

    def watch(self, step: Step, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """See ``PolicyCache``: of a decode step the mean query of each group, ``[B, Hkv, D]``."""
        if step.in_prompt:
            return self._window.digest(step, query)
        return query.float().unflatten(1, (self.shape.kv_heads, -1)).mean((2, 3))

    def watched(self, step: Step) -> None:
        """See ``PolicyCache``: notes where sentences end."""
        if step.in_prompt:
            self._window.take(step)
        longest, room = int(self._lengths.max()), self._closed.shape[1]
        if longest > room:
            self._closed = F.pad(self._closed, (0, longest - room + max(longest // 2, 256)))
        real = torch.ones_like(step.ids, dtype=torch.bool) if step.real is None else step.real
        batch, column = real.nonzero(as_tuple=True)
        self._closed[batch, step.positions[batch, column]] = self._ends[step.ids[batch, column]]

    def decoded(self, step: Step, hidden: Tensor) -> None:
        """See ``PolicyCache``: the mean query of the sentence moves on."""
        new, active = torch.stack(step.observations).to("cpu"), step.added > 0
        self._asked = self._asked + active
        self._sum = self._sum + new * active[:, None, None]
        mean = self._sum / self._asked.clamp(min=1)[:, None, None]
        asks = active & (self._asked > 1)
        self._query = torch.where(asks[:, None, None], mean, self._query)
        over = active & self._ends[step.ids[:, 0]]
        self._asked = self._asked.masked_fill(over, 0)
        self._sum = self._sum.masked_fill(over[:, None, None], 0.0)

    def prepare(self, step: Step) -> None:
        """See ``PolicyCache``."""
        due = self._lengths - self._selected >= self._interval
        if bool(due.any()):
            self._select(due)

    def chosen(self, layer: int) -> Tensor:  # bool [B, Hkv, longest row]
        """Which readable positions the last selection chose by their sentences' scores."""
        read = self.readable(layer)
        position = torch.arange(read.shape[-1], device=read.device)
        newest = (self._selected - self._recent).to(read.device)[:, None, None]
        return read & (position >= self._first) & (position < newest)

    def prompt_started(self, first: bool) -> None:
        """See ``PolicyCache``: what was being written is a sentence, finished or not."""
        if not first:
            self._close()
        for layer in self.layers:
            layer.working_set.limit(None)

    def prompt_read(self, added: Tensor) -> None:
        """See ``PolicyCache``."""
        self._close()
        stay = self._thin(added)
        queries = torch.stack([self._window.of(layer.number) for layer in self.layers])
        present = (self._window.positions >= 0).sum(1)[:, None, None]
        mean = queries.float().sum(3).to("cpu") / present  # where there is no query, zeros stand
        self._query = mean.unflatten(2, (self.shape.kv_heads, -1)).mean(3)
        self._sum = torch.zeros_like(self._query)
        self._asked = torch.zeros_like(self._asked)
        self._window.start(len(added))
        self._select(torch.ones_like(added, dtype=torch.bool), stay)

    # -- within ---------------------------------------------------------------------------------

    def _close(self) -> None:
        """Ends the sentence of each row's last token."""
        self._closed[torch.arange(len(self._lengths)), self._lengths - 1] = True

    def _rows(self) -> Tensor:  # [B]
        return self._budget.rows(self._lengths).clamp(min=self._smallest)

    def _thin(self, added: Tensor) -> Tensor | None:  # [B]
        """Which rows stay when a prompt loses the tokens that its last queries look at least.

        Returns:
            Bool ``[L, B, Hkv, slots]``, or None if all stay.
        """
        drop = (added - (self._factor * self._rows()).long())[:, None, None]
        if not bool((drop > 0).any()):
            return None
        first = self._prompt_start.clamp(min=self._first)[:, None, None]
        last = (self._lengths - max(self._recent, self._window.size))[:, None, None]
        when = self._window.positions
        stay = []
        for layer in self.layers:
            keys, _ = layer.stored()
            positions, valid = layer.slots.positions[..., : keys.shape[2]], layer.slots.valid()
            with torch.autocast(keys.device.type, enabled=False):
                at, there = positions.to(keys.device), valid.to(keys.device)
                query, asked = self._window.of(layer.number), when.to(keys.device)
                scores = observed_scores(query, asked, keys, at, there)
                mean = mean_over_queries(weights_of(scores), asked >= 0)
                score = pooled(mean, at, there.expand_as(at), self._kernel, "max").to("cpu")
            may_go = (positions >= first) & (positions < last) & valid
            order = score.masked_fill(~may_go, torch.inf).argsort(dim=-1, stable=True)
            count = drop.minimum(may_go.sum(-1, keepdim=True))
            stays = (torch.arange(order.shape[-1]) >= count).expand_as(order)
            stay.append(torch.empty_like(may_go).scatter_(-1, order, stays))
        return torch.stack(stay)

    def _sentences(self) -> Tensor:  # [B, T + 1]
        """The number of the sentence of each position, and in the end how many there are."""
        longest = int(self._lengths.max())
        inside = torch.arange(longest) < self._lengths[:, None]
        return F.pad((self._closed[:, :longest] & inside).cumsum(1), (1, 0))

    def _index(self, sentence: Tensor, kept: Tensor | None) -> None:
        """Adds the mean keys of the sentences that have ended since; their rows are archived.

        Args:
            sentence: See ``_sentences``.
            kept: Which tokens count, bool ``[L, B, Hkv, T]``; None: all.
        """
        total = sentence[:, -1:]
        if torch.equal(total[:, 0], self._indexed):
            return
        new = (sentence >= self._indexed[:, None]) & (sentence < total)
        batch, position = new[:, :-1].nonzero(as_tuple=True)
        have, need = self._means.shape[3], int(total.max())
        if need > have:
            self._means = F.pad(self._means, (0, 0, 0, need - have + max(need // 4, 16)))
        # One entry for each sentence that has tokens among these.
        which, entry = (batch * need + sentence[batch, position]).unique(return_inverse=True)
        place = (which // need, slice(None), which % need)
        for layer in self.layers:
            keys, _ = layer.archive.codec.decode(layer.archive.take((batch, slice(None), position)))
            weight = torch.ones(keys.shape[:2])
            if kept is not None:
                weight = kept[layer.number, batch, :, position].float()
            count = weight.new_zeros(len(which), weight.shape[1]).index_add_(0, entry, weight)
            total_keys = weight.new_zeros(len(which), *keys.shape[1:])
            total_keys.index_add_(0, entry, keys.float() * weight[..., None])
            self._means[layer.number][place] = total_keys / count.clamp(min=1)[..., None]
        self._indexed = total[:, 0]

    def _select(self, rows: Tensor, stay: Tensor | None = None) -> None:
        """Chooses anew what some rows read from the next step on.

        Args:
            rows: Bool ``[B]``.
            stay: See ``_thin``.
        """
        self.archive_rows()
        sentence = self._sentences()
        starts = self._starts(sentence)
        length, kept = self.slots.length, None
        positions = torch.stack([slots.positions[..., :length] for slots, _ in self.groups])
        if stay is not None:
            kept = torch.ones(*stay.shape[:3], sentence.shape[1] - 1, dtype=torch.bool)
            *head, slot = (~stay).nonzero(as_tuple=True)
            kept[(*head, positions[(*head, slot)].long())] = False
            self._thinned.add(kept, self._lengths, starts)
        self._index(sentence, kept)

        gone = self._thinned.before(starts.shape[1])
        size = self._others(starts, gone, self._lengths)
        limit = self._limits(size)
        # What has come since the last selection is stored, and what was among the newest then.
        wanted = limit.minimum(self._others(starts, gone, self._selected))
        before = F.pad(self._limit, (0, limit.shape[3] - self._limit.shape[3]))
        more = (wanted - before).clamp(min=0) * rows[:, None, None]
        missing = self._tokens(starts, gone, before, more)

        stops = self._stops(starts, gone, size, limit)
        newest = torch.where(rows, self._lengths - self._recent, 0)[:, None, None]
        at = positions.long().clamp(max=sentence.shape[1] - 2)
        number = sentence[:, None].expand(*at.shape[:3], -1).gather(-1, at)
        keep = (positions < stops.gather(-1, number)) | (positions >= newest)
        self.exchange(keep if stay is None else keep & stay, missing)

        self._limit = torch.where(rows[:, None, None], limit, before)
        self._selected = torch.where(rows, self._lengths, self._selected)
        ceiling = max(int(self._rows().max()), self.slots.length)
        for layer in self.layers:
            layer.working_set.limit(ceiling)

    def _starts(self, sentence: Tensor) -> Tensor:  # [B, T + 1] -> [B, sentences + 1]
        """Where sentences start and the last ends; it is being written. Absent ones are empty."""
        number = torch.arange(int(sentence[:, -1].max()) + 2).repeat(len(sentence), 1)
        return torch.searchsorted(sentence, number).minimum(self._lengths[:, None])

    def _others(self, starts: Tensor, gone: Tensor, lengths: Tensor) -> Tensor:
        """How many tokens of each sentence are read only by choice, when rows are so long.

        Args:
            starts: ``[B, sentences + 1]``.
            gone: Tokens gone before each, ``[L, B, Hkv, sentences + 1]``.
            lengths: ``[B]``.

        Returns:
            int32 ``[L, B, Hkv, sentences]``.
        """
        last = starts[:, 1:].minimum(lengths[:, None] - self._recent)
        count = (last - starts[:, :-1].clamp(min=self._first)).to(torch.int32)
        return (count[:, None] - gone.diff()).clamp(min=0)

    def _limits(self, size: Tensor) -> Tensor:  # int32 [L, B, Hkv, sentences], twice
        """How many tokens of each sentence are chosen: by score, as many as there is room for."""
        always = self._lengths - (self._lengths - self._recent - self._first).clamp(min=0)
        room = (self._rows() - self._interval - always).minimum(self._lengths).to(torch.int32)
        count = size.shape[3]
        with torch.autocast("cpu", enabled=False):
            # This way round as products of a matrix and a vector are slow in batches.
            means = self._means[..., : count - 1, :].transpose(-1, -2)
            score = (self._query[..., None, :] @ means)[..., 0, :]
        absent = torch.arange(count) >= self._indexed[:, None]
        order = _falling(F.pad(score, (0, 1)).masked_fill(absent[:, None], -torch.inf))
        size = size.gather(-1, order)
        ahead = size.cumsum(-1, dtype=torch.int32) - size  # in better sentences
        limit = (room[:, None, None] - ahead).clamp(min=0).minimum(size)
        return torch.empty_like(limit).scatter_(-1, order, limit)

    def _tokens(
        self, starts: Tensor, gone: Tensor, before: Tensor, count: Tensor
    ) -> tuple[Tensor, ...]:
        """Some tokens of each sentence, of those that may be chosen.

        Args:
            starts: ``[B, sentences + 1]``.
            gone: Tokens gone before each, ``[L, B, Hkv, sentences + 1]``.
            before: How many to pass over, ``[L, B, Hkv, sentences]``.
            count: How many to name then, as ``before``.

        Returns:
            Layers, batch rows, heads and positions, each ``[n]``, in this order.
        """
        where = count.nonzero(as_tuple=True)
        layer, batch, head, number = where
        some = count[where].long()
        rank = starts[batch, number].clamp(min=self._first) - gone[where] + before[where]
        rank -= some.cumsum(0) - some
        entry = torch.arange(len(some)).repeat_interleave(some)
        rank = rank[entry] + torch.arange(len(entry))
        layer, batch, head = layer[entry], batch[entry], head[entry]
        return layer, batch, head, self._thinned.positions(layer, batch, head, rank)

    def _stops(self, starts: Tensor, gone: Tensor, size: Tensor, limit: Tensor) -> Tensor:
        """Positions before which all that is left of a sentence is read, as ``limit``."""
        first = starts[:, :-1].clamp(min=self._first)
        last = starts[:, 1:].minimum(self._lengths[:, None] - self._recent).maximum(first)
        first, last = (edge[:, None].to(torch.int32) for edge in (first, last))
        stops = torch.where(limit == size, last, first)
        part = (limit > 0) & (limit < size)
        layer, batch, head, position = self._tokens(starts, gone, limit - 1, part.to(torch.int32))
        stops[part] = position.to(torch.int32) + 1
        return stops

    # -- state -----------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self._window.select(rows)
        self._thinned.select(rows)
        for name in ("_closed", "_indexed", "_selected", "_asked"):
            setattr(self, name, getattr(self, name)[rows])
        for name in ("_means", "_sum", "_query", "_limit"):
            setattr(self, name, getattr(self, name)[:, rows])

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().device_tensors()
        yield from self._window.device_tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield from self._window.host_tensors()
        yield from self._thinned.host_tensors()
        yield from (self._closed, self._indexed, self._selected, self._asked, self._ends)
        yield from (self._means, self._sum, self._query, self._limit)

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self._window.start(batch)
        self._thinned.start(self.shape.layers, batch, self.shape.kv_heads)
        heads = (self.shape.layers, batch, self.shape.kv_heads)
        width = self.shape.head_dim
        self._closed = torch.zeros(batch, 0, dtype=torch.bool)
        self._means = torch.zeros(*heads, 0, width)
        self._indexed = torch.zeros(batch, dtype=torch.int64)
        self._query = torch.zeros(*heads, width)
        self._sum = torch.zeros(*heads, width)
        self._asked = torch.zeros(batch, dtype=torch.int64)
        self._selected = torch.zeros(batch, dtype=torch.int64)
        self._limit = torch.zeros(*heads, 0, dtype=torch.int32)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What kind each token of the vocabulary is says nothing about a sequence: it is shared.
        memo[id(self._ends)] = self._ends
        return super().__deepcopy__(memo)


def _falling(score: Tensor) -> Tensor:  # fp32 [..., n] -> int64 [..., n]
    """The places of scores from the highest down; of equal ones the first goes first.

    Whole numbers sort many times faster than pairs of score and place: both go into one.
    """
    bits = (score + 0.0).view(torch.int32)  # of 0 and -0 neither is higher
    high = ~(bits ^ (bits >> 31 & 0x7FFFFFFF))  # falls as the score rises
    both = (high.long() << 32) | torch.arange(score.shape[-1])
    return torch.from_numpy(np.sort(both.numpy(), axis=-1)) & 0xFFFFFFFF
