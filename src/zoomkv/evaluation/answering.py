"""Prompts answered greedily by one cache, and what it held and moved meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from zoomkv.backbone.prefill import prefill
from zoomkv.caches.base import Footprint, ModelShape, PolicyCache
from zoomkv.caches.tiers import DeviceRows
from zoomkv.evaluation.recording import Recording
from zoomkv.generation import Generator


@dataclass(frozen=True)
class Reply:
    """One answer. Bytes are of its share of the batch's cache."""

    text: str
    """Without special tokens."""
    ids: list[int]
    """What was generated, the end-of-text id included."""
    finished: bool
    """The text was not cut off."""
    prompt_tokens: int
    device_bytes_mean: float
    """Over the forwards from the question's on."""
    device_bytes_peak: float
    """The same, and what is held once the context has been compressed. What every policy holds
    passingly, while it reads a prompt, does not count."""
    host_bytes: float
    """Peak."""
    bytes_to_device: float
    """The whole answer's, prompt included."""
    bytes_to_host: float
    full_bytes: float
    """Device bytes of the full cache, at its peak, for the same prompts and answers."""
    agreeability: list[float] | None
    """Of each selection step that has one; None for policies that have none."""
    seconds: float
    """Its share of the batch's time."""


def split_prompt(
    generator: Generator, prompt: str, asked: str, opening: str = ""
) -> tuple[list[int], list[int]]:
    """A prompt's tokens, cut where the question begins.

    Together they are what the generator feeds for the whole prompt: a token that holds the end of
    the context and the beginning of the question goes with the question.

    Args:
        generator: Gives chat template and tokenizer.
        prompt: A context, a line end, and the question.
        asked: The question; if empty, the first part has no tokens.
        opening: Begins the answer, in the model's place.

    Raises:
        ValueError: The chat template rewrites the question.
    """
    text = generator.render(prompt)
    end = text.rfind(f"\n{asked}") if asked else -1
    if asked and end < 0:
        raise ValueError("the chat template rewrites prompts, so the question can't be told apart")
    if opening:
        text += opening if generator.chat else f" {opening}"
    encoded = generator.tokenizer(
        text, add_special_tokens=not generator.chat, return_offsets_mapping=bool(asked)
    )
    ids = encoded["input_ids"]
    if not asked:
        return [], ids
    first = next(at for at, (_, stop) in enumerate(encoded["offset_mapping"]) if stop > end)
    return ids[:first], ids[first:]


def answer(
    generator: Generator,
    parts: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int | Sequence[int],
    recording: Recording | None = None,
) -> list[Reply]:
    """Answers a batch of prompts with a fresh cache, greedily.

    Args:
        generator: Gives model, tokenizer and caches.
        parts: Ids ``[part][row]`` of the prompts' parts. A cache compresses each part before the
            next one comes. Shorter rows are padded on the left.
        max_new_tokens: Longest answer, of all or of each row. What a row says beyond its own, as
            long as others go on, does not count as its answer.
        recording: Of the one prompt, if it was read before.

    Returns:
        A reply for each row.
    """
    begun = time.perf_counter()
    rows = len(parts[0])
    limits = [max_new_tokens] * rows if isinstance(max_new_tokens, int) else list(max_new_tokens)
    model, tokenizer, cache = generator.model, generator.tokenizer, generator.new_cache()
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    ends = [eos] if isinstance(eos, int) else list(eos or [])
    cache.set_eos(ends, tokenizer.pad_token_id)
    meter = _Meter(cache)
    padded = [_padded(rows, tokenizer.pad_token_id) for rows in parts]
    ids = torch.cat([ids for ids, _ in padded], 1).to(model.device)  # [B, columns]
    mask = torch.cat([mask for _, mask in padded], 1).to(model.device)  # [B, columns]
    with torch.inference_mode():
        for part, _ in padded[:-1]:
            columns = cache.seen + part.shape[1]
            if recording is None:
                prefill(model, cache, ids[:, cache.seen : columns], mask[:, :columns])
            else:
                cache.expect_prompt(columns)
                recording.feed(cache, columns)
            meter.read_prompt()
        cache.expect_prompt(ids.shape[1])
        if recording is not None and not cache.seen and ids.shape[1] > 1:
            recording.feed(cache, ids.shape[1] - 1)  # generate reads the last token itself
            meter.longest.append(ids.shape[1] - 1)
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=max(limits),
            eos_token_id=ends,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
            # The model's own sampling defaults would only raise warnings.
            **dict.fromkeys(("temperature", "top_p", "top_k")),
            stopping_criteria=StoppingCriteriaList([meter]),
        )
    said = output[:, ids.shape[1] :].tolist()
    prompts = mask.sum(1).tolist()
    seconds = time.perf_counter() - begun
    texts = []
    for row, limit in zip(said, limits, strict=True):
        row = row[:limit]
        end = next((at for at, token in enumerate(row) if token in ends), None)
        row = row if end is None else row[: end + 1]
        texts.append((tokenizer.decode(row, skip_special_tokens=True), row, end is not None))
    return meter.replies(texts, prompts, model.dtype, seconds)


def full_cache_bytes(shape: ModelShape, dtype: torch.dtype, batch: int, rows: list[int]) -> int:
    """Device bytes of ``full`` after it has held these numbers of rows, one after the other.

    Args:
        shape: Of the model.
        dtype: Of keys and values.
        batch: Rows of the batch.
        rows: Longest row of the batch after each forward.
    """
    like = torch.empty(batch, shape.kv_heads, 0, shape.head_dim, dtype=dtype, device="meta")
    buffers = DeviceRows(like, like)
    for count in rows:
        buffers.reserve(count)
    row = 2 * batch * shape.kv_heads * shape.head_dim * dtype.itemsize
    return shape.layers * row * buffers.capacity


class _Meter(StoppingCriteria):
    """Reads a cache's footprint after every forward of a generation; never stops it."""

    def __init__(self, cache: PolicyCache) -> None:
        self.cache = cache
        self.before: list[Footprint] = []
        self.steps: list[Footprint] = []
        self.longest: list[int] = []  # tokens of the longest row after each forward

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._read(self.steps)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def read_prompt(self) -> None:
        """A part of the prompt that is not the last has been read."""
        self._read(self.before)

    def replies(
        self,
        texts: list[tuple[str, list[int], bool]],
        prompts: list[int],
        dtype: torch.dtype,
        seconds: float,
    ) -> list[Reply]:
        """Texts with their shares of what was read."""
        batch, every = len(texts), self.before + self.steps
        full = full_cache_bytes(self.cache.shape, dtype, batch, self.longest)
        device = [reading.device_bytes for reading in self.steps]
        agreed: list[list[float] | None] = [None] * batch
        for entry in self.cache.trace():
            if "agreeability" in entry:
                row = agreed[entry["row"]] = agreed[entry["row"]] or []
                if entry["agreeability"] is not None:
                    row.append(entry["agreeability"])
        return [
            Reply(
                text=text,
                ids=ids,
                finished=finished,
                prompt_tokens=prompt,
                device_bytes_mean=sum(device) / len(device) / batch,
                device_bytes_peak=max(reading.device_bytes for reading in every) / batch,
                host_bytes=max(reading.host_bytes for reading in every) / batch,
                bytes_to_device=self.steps[-1].bytes_to_device / batch,
                bytes_to_host=self.steps[-1].bytes_to_host / batch,
                full_bytes=full / batch,
                agreeability=shares,
                seconds=seconds / batch,
            )
            for (text, ids, finished), prompt, shares in zip(texts, prompts, agreed, strict=True)
        ]

    def _read(self, readings: list[Footprint]) -> None:
        readings.append(self.cache.footprint())
        self.longest.append(int(self.cache.lengths.max()))


def _padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:  # 2 x [B, T]
    """Ids padded on the left, and 0 where padding is."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (length - len(row)) + [*row] for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
