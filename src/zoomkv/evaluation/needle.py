"""Needles in a haystack: does a policy keep what a later question asks for, and in how many bytes.

Two protocols. ``inside``: context and question are one prompt, so a policy that compresses at its
end has seen the question. ``unknown``: the context is read and compressed first; the question then
follows in the same user turn. Both feed the same tokens. A policy that leaves the prompt alone, as
those that evict while decoding do without ``count_prefix``, keeps the whole context in both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from zoomkv.backbone.prefill import prefill
from zoomkv.caches.base import Footprint, PolicyCache
from zoomkv.data.needles import Needle
from zoomkv.evaluation.recording import Recording
from zoomkv.evaluation.statistics import wilson
from zoomkv.generation import Generator

Protocol = Literal["inside", "unknown"]


@dataclass(frozen=True)
class Attempt:
    """What came of one needle. Bytes are of its share of the batch's cache."""

    id: str
    kind: str
    length: int
    depths: tuple[float, ...]
    found: float
    """Share of the answers that the text contains."""
    text: str
    """What was generated; RULER's opening, where it was given, is not repeated."""
    ids: list[int]
    finished: bool
    """The text was not cut off."""
    device_bytes_mean: float
    """Over the forwards from the question's on."""
    device_bytes_peak: float
    """The same, and what is held once the context has been compressed. What every policy holds
    passingly, while it reads a prompt, does not count."""
    host_bytes: float
    """Peak."""

    @property
    def hit(self) -> bool:
        """All answers are there."""
        return self.found == 1


@dataclass(frozen=True)
class Tally:
    """Attempts taken together."""

    n: int
    hits: int
    interval: tuple[float, float]
    """95 % Wilson interval of the share of hits."""
    found: float
    """Mean share of answers that were found: RULER's score."""
    device_bytes_mean: float
    device_bytes_peak: float
    host_bytes: float
    truncated: int
    """Texts that were cut off."""

    @classmethod
    def of(cls, attempts: Sequence[Attempt]) -> Tally:
        """Counts hits and averages; peaks are the largest of all."""
        n, hits = len(attempts), sum(attempt.hit for attempt in attempts)
        return cls(
            n=n,
            hits=hits,
            interval=wilson(hits, n),
            found=sum(attempt.found for attempt in attempts) / n,
            device_bytes_mean=sum(attempt.device_bytes_mean for attempt in attempts) / n,
            device_bytes_peak=max(attempt.device_bytes_peak for attempt in attempts),
            host_bytes=max(attempt.host_bytes for attempt in attempts),
            truncated=sum(not attempt.finished for attempt in attempts),
        )


@dataclass
class NeedleArm:
    """One policy on a list of needles, under one protocol."""

    policy: str
    options: dict[str, Any]
    protocol: Protocol
    attempts: list[Attempt] = field(default_factory=list)
    seconds: float = 0.0

    def total(self) -> Tally:
        """All attempts."""
        return Tally.of(self.attempts)

    def cells(self) -> dict[tuple[int, tuple[float, ...], str], Tally]:
        """By length, depths and kind, in that order."""
        groups: dict[tuple[int, tuple[float, ...], str], list[Attempt]] = {}
        for attempt in self.attempts:
            key = (attempt.length, attempt.depths, attempt.kind)
            groups.setdefault(key, []).append(attempt)
        return {key: Tally.of(groups[key]) for key in sorted(groups)}

    def record(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        cells = [
            {"length": length, "depths": list(depths), "kind": kind, **asdict(tally)}
            for (length, depths, kind), tally in self.cells().items()
        ]
        return {
            "policy": self.policy,
            "options": self.options,
            "protocol": self.protocol,
            "seconds": self.seconds,
            "total": asdict(self.total()),
            "cells": cells,
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }


def string_match(text: str, answers: Sequence[str]) -> float:
    """RULER's score: the share of answers that stand in a text, whatever their case."""
    text = text.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def answer_recorded(
    generator: Generator,
    needle: Needle,
    recording: Recording,
    context: int,
    protocol: Protocol = "unknown",
    max_new_tokens: int = 128,
) -> Attempt:
    """Answers one needle whose prompt was read before, as ``run_needles`` would.

    Args:
        generator: Of one policy.
        needle: What is asked.
        recording: Of ``split_prompt``'s two parts.
        context: Tokens of the first part.
        protocol: When the question comes.
        max_new_tokens: Longest answer.
    """
    ids = recording.ids[0].tolist()
    parts = [[ids]] if protocol == "inside" else [[ids[:context]], [ids[context:]]]
    (answer,), meter = _answer(generator, parts, max_new_tokens, recording)
    return _attempt(needle, answer, meter, 1)


def run_needles(
    generator: Generator,
    needles: Sequence[Needle],
    protocol: Protocol = "unknown",
    batch_size: int = 1,
    max_new_tokens: int = 128,
    opening: bool = True,
) -> Iterator[NeedleArm]:
    """Answers needles batch by batch, greedily, and marks the answers.

    Args:
        generator: Of one policy; gives the model, its caches and the chat template.
        needles: Those of like length should stand together; shorter ones are padded on the left.
        protocol: When the question comes.
        batch_size: Needles answered together.
        max_new_tokens: Longest answer.
        opening: Begin the answers as RULER does, in the model's place.

    Yields:
        The same arm after every batch, grown.

    Raises:
        ValueError: No such protocol, or a chat template that rewrites the question.
    """
    if protocol not in get_args(Protocol):
        raise ValueError(f"protocol={protocol!r}: choose one of {', '.join(get_args(Protocol))}")
    arm = NeedleArm(generator.policy, dict(generator.options), protocol)
    for start in range(0, len(needles), batch_size):
        batch = needles[start : start + batch_size]
        prompts = [split_prompt(generator, needle, opening) for needle in batch]
        if protocol == "inside":
            parts = [[context + question for context, question in prompts]]
        else:
            parts = [[context for context, _ in prompts], [question for _, question in prompts]]
        begun = time.perf_counter()
        answers, meter = _answer(generator, parts, max_new_tokens)
        arm.seconds += time.perf_counter() - begun
        arm.attempts += [
            _attempt(needle, answer, meter, len(batch))
            for needle, answer in zip(batch, answers, strict=True)
        ]
        yield arm


def split_prompt(
    generator: Generator, needle: Needle, opening: bool
) -> tuple[list[int], list[int]]:
    """The prompt's tokens, cut where the question begins.

    Together they are what the generator feeds for the whole prompt: a token that holds the end of
    the context and the beginning of the question goes with the question.

    Args:
        generator: Gives chat template and tokenizer.
        needle: The prompt.
        opening: Whether the tokens end with RULER's opening of the answer.

    Raises:
        ValueError: The chat template rewrites the question.
    """
    text = generator.render(needle.prompt)
    end = text.rfind(f"\n{needle.question}")
    if end < 0:
        raise ValueError("the chat template rewrites prompts, so the question can't be told apart")
    if opening:
        text += needle.opening if generator.chat else f" {needle.opening}"
    encoded = generator.tokenizer(
        text, add_special_tokens=not generator.chat, return_offsets_mapping=True
    )
    ids = encoded["input_ids"]
    first = next(at for at, (_, stop) in enumerate(encoded["offset_mapping"]) if stop > end)
    return ids[:first], ids[first:]


def _attempt(
    needle: Needle, answer: tuple[str, list[int], bool], meter: _Meter, batch: int
) -> Attempt:
    text, ids, finished = answer
    return Attempt(
        id=needle.id,
        kind=needle.kind,
        length=needle.length,
        depths=needle.depths,
        found=string_match(text, needle.answers),
        text=text,
        ids=ids,
        finished=finished,
        device_bytes_mean=meter.device_bytes_mean / batch,
        device_bytes_peak=meter.device_bytes_peak / batch,
        host_bytes=meter.host_bytes / batch,
    )


class _Meter(StoppingCriteria):
    """Reads a cache's footprint after every forward of a generation; never stops it."""

    def __init__(self, cache: PolicyCache) -> None:
        self.cache = cache
        self.before: list[Footprint] = []
        self.steps: list[Footprint] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.steps.append(self.cache.footprint())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def device_bytes_mean(self) -> float:
        return sum(reading.device_bytes for reading in self.steps) / len(self.steps)

    @property
    def device_bytes_peak(self) -> int:
        return max(reading.device_bytes for reading in self.before + self.steps)

    @property
    def host_bytes(self) -> int:
        return max(reading.host_bytes for reading in self.before + self.steps)


def _answer(
    generator: Generator,
    parts: list[list[list[int]]],
    max_new_tokens: int,
    recording: Recording | None = None,
) -> tuple[list[tuple[str, list[int], bool]], _Meter]:
    """Text, ids and whether it ended, for each row; ``parts`` are prompts one after the other."""
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
            meter.before.append(cache.footprint())
        cache.expect_prompt(ids.shape[1])
        if recording is not None and not cache.seen:
            recording.feed(cache, ids.shape[1] - 1)  # generate reads the last token itself
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
            # The model's own sampling defaults would only raise warnings.
            **dict.fromkeys(("temperature", "top_p", "top_k")),
            stopping_criteria=StoppingCriteriaList([meter]),
        )
    answers = []
    for row in output[:, ids.shape[1] :].tolist():
        end = next((at for at, token in enumerate(row) if token in ends), None)
        row = row if end is None else row[: end + 1]
        answers.append((tokenizer.decode(row, skip_special_tokens=True), row, end is not None))
    return answers, meter


def _padded(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:  # 2 x [B, T]
    """Ids padded on the left, and 0 where padding is."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
