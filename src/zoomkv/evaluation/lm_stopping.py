"""Where a generated answer ends, and what of it is the answer: stop strings, summaries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from zoomkv.spans.thoughts import Delimiters, parse


def without_summaries(
    ids: Sequence[int], delimiters: Delimiters, decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of generated ids without the summaries that stand behind its paragraphs.

    What is a summary is decided by ids, as the caches decide it: the same letters in plain text are
    none. The blank line behind a summary goes too where one stands before it, so paragraphs are
    separated as if nothing had stood there.

    Args:
        ids: Generated ids only.
        delimiters: What begins and ends a summary.
        decode: Ids to text.
    """
    text = ""
    for segment in parse(ids, delimiters):
        if segment.start < segment.summary_start:
            piece = decode(ids[segment.start : segment.summary_start])
            text += piece.lstrip() if text[-1:].isspace() else piece
    return text


class StopStrings(StoppingCriteria):
    """Ends each row at its own end-of-text id or stop string, whatever the other rows do.

    Args:
        tokenizer: Of the model.
        stops: Texts that end an answer; special tokens may be among them.
        eos: Ids that end it.
        prompt: Columns of the prompt, where no stop string is looked for.
        rows: Of the batch.
        visible: The part of a row's generated ids in which stop strings count, as text with its
            special tokens; None: all.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        eos: Collection[int],
        prompt: int,
        rows: int,
        visible: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.lengths: list[int | None] = [None] * rows
        """Generated tokens of each row, up to and including what ended it; None: not ended."""
        self._tokenizer, self._visible = tokenizer, visible
        self._stops = [stop for stop in stops if stop]
        self._eos, self._prompt = set(eos), prompt
        # A token is at least a byte long; the first one may be cut or lose a leading space.
        self._window = 2 + max((len(stop.encode()) for stop in self._stops), default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # bool [B]
        generated = input_ids[:, self._prompt :]
        size = generated.shape[1]
        open_rows = [row for row, length in enumerate(self.lengths) if length is None]
        tails = generated[open_rows, -self._window :].tolist()
        texts = self._tokenizer.batch_decode(tails) if self._stops else [""] * len(tails)
        for row, tail, text in zip(open_rows, tails, texts, strict=True):
            if tail[-1] in self._eos or (self._stops_in(text) and self._counts(generated[row])):
                self.lengths[row] = size
        ended = [length is not None for length in self.lengths]
        return torch.tensor(ended, device=input_ids.device)

    def _stops_in(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)

    def _counts(self, ids: Tensor) -> bool:
        return self._visible is None or self._stops_in(self._visible(ids.tolist()))
