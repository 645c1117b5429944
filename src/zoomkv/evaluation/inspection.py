"""Where the queries of a text look: one dense forward, measured layer by layer.

Reproduces the observations of BeaconKV (arXiv 2609.04971, section 2) on any text. What is kept of
a layer is small: counts, histograms, and the queries and keys of the one head that is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoomkv.backbone.capture import captured
from zoomkv.backbone.rotary import rotary_of
from zoomkv.evaluation.attention_map import (
    BETWEEN,
    GLOBAL,
    LOCAL,
    distance_histogram,
    distances,
    kinds,
    median_distance,
    top_keys,
)
from zoomkv.evaluation.query_geometry import OBSERVED, coverage, observation_sets

_INTERVAL = 128  # what BeaconKV's figure 3 counts, and its evictions are apart at 1,024 rows
_STRETCH = 32
_BINS = 64


@dataclass(frozen=True)
class Rules:
    """What is measured, and what counts as local or global.

    Raises:
        ValueError: A value out of range.
    """

    top_k: int = 16
    """Keys of a query whose distances count."""
    window: int = 256
    """A median distance up to this is local."""
    fraction: float = 0.25
    """A larger one that exceeds this share of the query's position is global."""
    layer: int | None = None
    """The layer that is shown; None: see ``head``."""
    head: int | None = None
    """The query head that is shown; None: the one with the most global queries in the interval.

    A head whose queries are global in more than half of it comes after those whose are not: it
    revisits nothing, it always looks far. Of equal ones the first.
    """
    interval: tuple[int, int] | None = None
    """First token and the one behind the last, from 0; None: the text's last 128 tokens."""
    stretch: tuple[int, int] | None = None
    """The tokens of the attention map; None: the 32 of the interval that show both kinds best."""
    seed: int = 0
    """Of the random observation set."""

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.window < 0:
            raise ValueError(f"top_k={self.top_k}, window={self.window}: give at least 1 and 0")
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction={self.fraction}: choose a share of at least 0 and below 1")


@dataclass(frozen=True)
class Head:
    """One query head of one layer, over the whole text. On the CPU."""

    layer: int
    head: int
    query: Tensor  # fp32 [T, D]
    """After RoPE."""
    key: Tensor  # fp32 [T, D]
    """After RoPE."""
    unrotated: Tensor  # fp32 [T, D]
    """Queries before RoPE."""
    scaling: float
    top: Tensor  # int64 [T, K]
    """Positions of the top keys, best first, -1 where there are fewer."""
    median: Tensor  # [T]
    """Attention distance of each query."""
    kind: Tensor  # int8 [T]
    """``LOCAL``, ``BETWEEN`` or ``GLOBAL``."""


@dataclass(frozen=True)
class Inspection:
    """What one pass over a text found."""

    rules: Rules
    length: int
    prompt: int
    """Tokens of the prompt, which come first; they are no part of the text."""
    interval: tuple[int, int]
    stretch: tuple[int, int]
    counts: Tensor  # int64 [L, H]
    """Global queries of the interval."""
    text_counts: Tensor  # int64 [L, H]
    """Global queries of the whole text."""
    heads_where_global: Tensor  # int64 [T]
    """In how many heads the query of each token is global."""
    histograms: Tensor  # int64 [L, H, 2, bins]
    """Distances of all top keys of the text's local and global queries."""
    bin_width: int
    head: Head
    """The one that is shown."""
    coverage: dict[str, Tensor] = field(default_factory=dict)  # [L, steps]
    """Mean over a layer's heads for each step of the interval, by observation set; empty if the
    text before the interval is too short to choose from."""


@torch.no_grad()
def inspect_tokens(
    model: Any,
    ids: Sequence[int],
    prompt: int,
    rules: Rules | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Runs the model once over the tokens and measures every head's queries.

    Args:
        model: A causal LM of a supported family, in evaluation mode.
        ids: The tokens, without padding.
        prompt: How many of them are the prompt.
        rules: What to measure.
        progress: Called after each layer with layers done and layers in all.

    Raises:
        ValueError: Nothing after the prompt, an interval, stretch, layer or head that is not
            there, or a kind of RoPE that can't be undone.
    """
    rules = rules or Rules()
    length = len(ids)
    if not 0 <= prompt <= length - 2:
        raise ValueError(
            f"{length} tokens, {prompt} of them the prompt: a text needs at least 2 after it"
        )
    decoder = model.get_decoder()
    config = decoder.config
    layers = config.num_hidden_layers
    _within("layer", rules.layer, layers)
    _within("head", rules.head, config.num_attention_heads)
    interval = _range("interval", rules.interval, length) or _last(prompt, length)
    stretch = _range("tokens", rules.stretch, length)
    meter = _Meter(rules, prompt, length, interval, rotary_of(model))

    def observe(layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        meter.measure(layer, query[0], key[0], scaling)
        progress(layer + 1, layers)

    device = next(decoder.parameters()).device
    with captured(model, observe):
        decoder(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
    head = meter.shown
    assert head is not None
    return Inspection(
        rules=rules,
        length=length,
        prompt=prompt,
        interval=interval,
        stretch=stretch or _telling_stretch(head.kind, interval),
        counts=torch.stack(meter.counts),
        text_counts=torch.stack(meter.text_counts),
        heads_where_global=meter.heads_where_global,
        histograms=torch.stack(meter.histograms),
        bin_width=meter.bin_width,
        head=head,
        coverage={name: torch.stack(rows) for name, rows in meter.coverage.items()},
    )


class _Meter:
    """Reduces one layer after the other to what is kept of it."""

    def __init__(
        self, rules: Rules, prompt: int, length: int, interval: tuple[int, int], rotary: Any
    ) -> None:
        self.rules, self.prompt, self.interval, self.rotary = rules, prompt, interval, rotary
        self.bin_width = -(-length // _BINS)
        self.counts: list[Tensor] = []
        self.text_counts: list[Tensor] = []
        self.heads_where_global = torch.zeros(length, dtype=torch.long)
        self.histograms: list[Tensor] = []
        self.coverage: dict[str, list[Tensor]] = {}
        self.shown: Head | None = None
        self._rank: tuple[bool, int, int] | None = None
        self._generator = torch.Generator().manual_seed(rules.seed)

    def measure(
        self,
        layer: int,
        query: Tensor,  # [H, T, D]
        key: Tensor,  # [Hkv, T, D]
        scaling: float,
    ) -> None:
        """Takes in one layer."""
        start, end = self.interval
        with torch.autocast(query.device.type, enabled=False):
            top = top_keys(query, key, self.rules.top_k)
            distance = distances(top)
            median = median_distance(distance)
            kind = kinds(median, self.rules.window, self.rules.fraction)
            written = kind.clone()
            written[:, : self.prompt] = BETWEEN  # so that the prompt's queries don't count
            histogram = distance_histogram(distance, written, self.bin_width)
            positions = torch.arange(query.shape[1], device=query.device)
            unrotated = self.rotary.unrotate(query.float(), positions)
            self._cover(unrotated)
        self.counts.append((kind[:, start:end] == GLOBAL).sum(1).cpu())
        self.text_counts.append((written == GLOBAL).sum(1).cpu())
        self.heads_where_global += (kind == GLOBAL).sum(0).cpu()
        self.histograms.append(histogram.cpu())
        head = self._candidate(layer)
        if head is not None:
            group = head * key.shape[0] // query.shape[0]
            self.shown = Head(
                layer=layer,
                head=head,
                query=query[head].float().cpu(),
                key=key[group].float().cpu(),
                unrotated=unrotated[head].cpu(),
                scaling=scaling,
                top=top[head].cpu(),
                median=median[head].cpu(),
                kind=kind[head].cpu(),
            )

    def _candidate(self, layer: int) -> int | None:
        """The head of the newest layer that is to be shown rather than the one so far."""
        if self.rules.layer not in (None, layer):
            return None
        half = (self.interval[1] - self.interval[0]) // 2
        counts, text_counts = self.counts[-1].tolist(), self.text_counts[-1].tolist()
        ranks = [
            (0 < count <= half, count, text_count)
            for count, text_count in zip(counts, text_counts, strict=True)
        ]
        best = self.rules.head
        if best is None:
            best = ranks.index(max(ranks))
        if self._rank is not None and ranks[best] <= self._rank:
            return None
        self._rank = ranks[best]
        return best

    def _cover(self, unrotated: Tensor) -> None:  # [H, T, D]
        start, end = self.interval
        history = unrotated[:, self.prompt : start]
        if history.shape[1] <= OBSERVED:
            return
        later = unrotated[:, start:end]
        for name, chosen in observation_sets(history, self._generator).items():
            observed = history.take_along_dim(chosen[..., None], dim=1)
            mean = coverage(observed, later).mean(0)
            self.coverage.setdefault(name, []).append(mean.cpu())


def _last(prompt: int, length: int) -> tuple[int, int]:
    """The last 128 tokens, or the last half of a shorter text."""
    return length - min(_INTERVAL, (length - prompt + 1) // 2), length


def _telling_stretch(kind: Tensor, interval: tuple[int, int]) -> tuple[int, int]:
    """The 32 tokens of the interval with the most queries of the rarer of the two kinds."""
    start, end = interval
    size = min(_STRETCH, end - start)
    inside = kind[start:end]
    both = torch.stack([inside == LOCAL, inside == GLOBAL]).long()
    rarer = both.unfold(1, size, 1).sum(-1).amin(0)
    first = start + int((rarer == rarer.max()).nonzero()[0])
    return first, first + size


def _within(name: str, value: int | None, count: int) -> None:
    if value is not None and not 0 <= value < count:
        raise ValueError(f"{name} {value}: the model has {name}s 0 to {count - 1}")


def _range(name: str, value: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    if value is not None and not 0 <= value[0] < value[1] <= length:
        raise ValueError(
            f"{name} {value[0]} to {value[1]}: give START below END, within the {length} tokens"
        )
    return value
