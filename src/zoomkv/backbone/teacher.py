"""A frozen model that reads a text with all its keys and values, and what it looked at.

The router of SeKV (arXiv 2606.31145, section 3.3) learns from it. A text is a context, read once,
and a continuation, whose rows the teacher answers over the whole context (``teach``) and a student
over what is left of it (``continue_with``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.replaced import Attend, replaced_attention
from zoomkv.backbone.surprisal import surprisal
from zoomkv.ops.attention import grouped_attention
from zoomkv.spans.surprisal import Spans, by_position

_CHUNK = 2**25  # attention weights at once: 128 MiB in fp32


@dataclass(frozen=True, slots=True)
class Context:
    """What a model keeps of the texts that it read, by position: pads are gone."""

    keys: list[Tensor]
    """After RoPE, ``[B, Hkv, T, D]`` for each layer; zeros beyond a row's tokens."""
    values: list[Tensor]
    """Likewise."""
    surprisal: Tensor
    """Nats of each token, fp32 ``[B, T]``; zeros beyond a row's tokens."""
    length: Tensor
    """Tokens of each row, int64 ``[B]``."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """What the teacher says behind a context, and where its supervised rows looked for it.

    Of each query head's attention, ``span_mass`` summed over the spans and ``outside`` make 1.
    """

    hidden: Tensor
    """States of all rows of the continuation, ``[B, Q, hidden]``, after the final norm: the
    model's output head makes logits of them."""
    span_mass: list[Tensor]
    """Attention on the tokens of each span, fp32 ``[B, H, q, S]`` for each layer; no layer if no
    spans were given."""
    outside: list[Tensor]
    """Attention on the tokens that are in no span (anchors, exact runs and the continuation
    itself), fp32 ``[B, H, q]`` for each layer."""
    far: Tensor | None
    """Attention on tokens beyond the window, mean over layers and heads, fp32 ``[B, q]``."""


@torch.no_grad()
def read_context(
    model: Any,
    ids: Tensor,  # [B, T]
    real: Tensor | None = None,  # bool [B, T]
    surprisal_chunk: int | None = 256,
) -> Context:
    """Reads texts in one forward, each as if it were alone.

    Args:
        model: A causal LM of a supported family, plain or wrapped by PEFT, attached or not.
        ids: The tokens, on the model's device.
        real: False for padding, wherever it stands; positions count real tokens only.
        surprisal_chunk: Tokens whose logits are held together; None: zeros for surprisals.

    Raises:
        ValueError: A row without a token, or as ``replaced_attention`` and ``surprisal``.
    """
    real = torch.ones_like(ids) if real is None else real.to(ids.device)
    # With pads behind the tokens, causality alone hides them.
    ids, length = by_position(ids, real.bool())
    if not ids.numel() or not bool(length.all()):
        raise ValueError("a row of the context has no token; leave it out")
    exists = torch.arange(ids.shape[1], device=ids.device) < length[:, None]
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys.append(key.masked_fill(~exists[:, None, :, None], 0))
        values.append(value.masked_fill(~exists[:, None, :, None], 0))
        return grouped_attention(query, key, value, scale=scaling, causal=True)

    hidden = continue_with(model, ids, torch.zeros_like(length), attend)
    if surprisal_chunk is None:
        nats = hidden.new_zeros(ids.shape, dtype=torch.float32)
    else:
        nats = surprisal(model, hidden, ids, exists, surprisal_chunk)
    return Context(keys, values, nats, length)


def continue_with(
    model: Any,
    continuation: Tensor,  # [B, Q]
    length: Tensor,  # [B]
    attend: Attend,
) -> Tensor:  # [B, Q, hidden]
    """Runs tokens that stand behind ``length`` others, under another attention.

    Args:
        model: As for ``read_context``.
        continuation: The tokens, all real, on the model's device.
        length: Tokens before them in each row: the position of the first one.
        attend: What the layers call instead of their own attention (see ``replaced_attention``).

    Returns:
        States after the final norm, with a gradient if it is enabled; the model's output head makes
        logits of them.

    Raises:
        ValueError: As ``replaced_attention``, or no tokens.
    """
    if not continuation.numel():
        raise ValueError(f"a continuation of {list(continuation.shape)} has no tokens; give some")
    offset = torch.arange(continuation.shape[1], device=continuation.device)
    positions = length.to(continuation.device)[:, None] + offset
    with replaced_attention(model, attend):
        output = model.get_decoder()(input_ids=continuation, position_ids=positions)
    hidden: Tensor = output[0]
    return hidden


@torch.no_grad()
def teach(
    model: Any,
    context: Context,
    spans: Spans | None,
    continuation: Tensor,  # [B, Q]
    rows: Tensor | None = None,  # [q] or [B, q]
    far_window: int | None = None,
) -> Teaching:
    """Runs a continuation over the whole context, and sums up what some of its rows looked at.

    Attention weights exist for the supervised rows alone, a few of them at a time, in fp32. Which
    rows are worth it, a first call without spans but with ``far_window`` tells, and ``far_rows``.

    Args:
        model: As for ``read_context``.
        context: What it read before.
        spans: Spans of the context whose attention is asked for; None: of none.
        continuation: The tokens that follow, as many in each row, on the model's device.
        rows: The supervised rows of the continuation, for all or for each of the batch; all by
            default.
        far_window: Tokens farther than so many before the row that looks are far; None: don't ask.

    Returns:
        On CUDA the order of addition, and with it the masses' last bit, may vary.

    Raises:
        ValueError: Spans of another context, rows that don't exist, or as ``continue_with``.
    """
    batch, columns = context.surprisal.shape
    count, device = continuation.shape[1], continuation.device
    if len(continuation) != batch:
        raise ValueError(f"{len(continuation)} continuations of {batch} contexts; give one each")
    if spans is not None and spans.number.shape != context.surprisal.shape:
        raise ValueError(
            f"spans of {list(spans.number.shape)} tokens for a context of {[batch, columns]}; give "
            "those of this context"
        )
    rows = torch.arange(count, device=device) if rows is None else rows.to(device)
    if not rows.numel() or not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ValueError(f"the continuation has rows 0 to {count - 1}; supervise some of them")

    # Where queries and keys stand; what is no key stands behind everything.
    length = context.length.to(device)[:, None]
    before = torch.arange(columns, device=device).expand(batch, -1)
    own = length + torch.arange(count, device=device)
    nowhere = torch.iinfo(own.dtype).max
    place = torch.cat([before.where(before < length, nowhere), own], dim=1)[:, None]
    seen = (place <= own[..., None])[:, None]  # [B, 1, Q, T + Q]
    gaze = _Gaze(spans, rows.expand(batch, -1), own, place, far_window)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        key = torch.cat([context.keys[layer], key], dim=2)
        value = torch.cat([context.values[layer], value], dim=2)
        gaze.watch(query, key, scaling)
        parts = [
            grouped_attention(query[:, :, part], key, value, seen[:, :, part], scaling)
            for part in _slices(query, key)
        ]
        return torch.cat(parts, dim=2)

    hidden = continue_with(model, continuation, context.length, attend)
    return Teaching(
        hidden,
        span_mass=[mass[..., :-1] for mass in gaze.masses],
        outside=[mass[..., -1] for mass in gaze.masses],
        far=None if gaze.far is None else gaze.far / len(context.keys),
    )


def far_rows(far: Tensor, count: int) -> Tensor:  # [B, q] -> int64 [B, count]
    """The candidates that look farthest: a router learns most from those.

    Args:
        far: Attention of each candidate on what is far, as ``teach`` gives it.
        count: How many of them are wanted.

    Returns:
        Their numbers among the candidates, ascending; of equals the first ones.

    Raises:
        ValueError: A ``count`` that isn't 1 to the number of candidates.
    """
    if not 1 <= count <= far.shape[1]:
        raise ValueError(f"{count} of {far.shape[1]} candidates are wanted; give 1 to all of them")
    return far.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


class _Gaze:
    """Sums up what supervised rows look at, layer after layer."""

    def __init__(
        self,
        spans: Spans | None,
        rows: Tensor,  # [B, q]
        own: Tensor,  # [B, Q]
        place: Tensor,  # [B, 1, T + Q]
        far_window: int | None,
    ) -> None:
        position = own.gather(1, rows)[..., None]
        self._rows = rows
        self._unseen = (place > position)[:, None]  # [B, 1, q, T + Q]
        self._near = self._number = None
        self.far: Tensor | None = None
        """Sum over layers of the mean over heads, ``[B, q]``."""
        self.masses: list[Tensor] = []
        """For each layer ``[B, H, q, S + 1]``; what is in no span comes last."""
        if far_window is not None:
            self._near = (place >= position - far_window)[:, None]
            self.far = torch.zeros(rows.shape, device=own.device)
        if spans is not None:
            self._spans = spans.size.shape[1]
            number = spans.number.to(own.device)
            number = F.pad(number, (0, own.shape[1]), value=-1)
            self._number = number.where(number >= 0, self._spans)[:, None, None]

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Adds a layer: queries ``[B, H, Q, D]`` of the continuation, keys ``[B, Hkv, T + Q, D]``.

        Everything is fp32, autocast or not.
        """
        if self._near is None and self._number is None:
            return
        batch, heads, _, width = query.shape
        index = self._rows[:, None, :, None].expand(-1, heads, -1, width)
        query, key = query.gather(2, index).float() * scaling, key.float()
        sums = []
        with torch.autocast(query.device.type, enabled=False):
            for part in _slices(query, key):
                asked = query[:, :, part].reshape(batch, key.shape[1], -1, width)
                weights = (asked @ key.transpose(-1, -2)).view(batch, heads, -1, key.shape[2])
                weights = weights.masked_fill_(self._unseen[:, :, part], -torch.inf).softmax(-1)
                if self._number is not None:
                    empty = weights.new_zeros(*weights.shape[:3], self._spans + 1)
                    sums.append(empty.scatter_add_(3, self._number.expand_as(weights), weights))
                if self._near is not None and self.far is not None:
                    weights.masked_fill_(self._near[:, :, part], 0)
                    self.far[:, part] += weights.sum(3).mean(1)
        if sums:
            self.masses.append(torch.cat(sums, dim=2))


def _slices(query: Tensor, key: Tensor) -> list[slice]:
    """Cuts ``[B, H, Q, D]`` queries so that few weights on ``[B, Hkv, T, D]`` exist at once."""
    batch, heads, count = query.shape[:3]
    size = max(1, _CHUNK // (batch * heads * key.shape[2]))
    return [slice(start, start + size) for start in range(0, count, size)]
