"""Needles in a haystack: does a policy keep what a later question asks for, and in how many bytes.

Two protocols. ``inside``: context and question are one prompt, so a policy that compresses at its
end has seen the question. ``unknown``: the context is read and compressed first; the question then
follows in the same user turn. Both feed the same tokens. A policy that leaves the prompt alone, as
those that evict while decoding do without ``count_prefix``, keeps the whole context in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from zoomkv.data.needles import Needle
from zoomkv.evaluation import answering
from zoomkv.evaluation.answering import Reply, answer
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
    (reply,) = answer(generator, parts, max_new_tokens, recording)
    return _attempt(needle, reply)


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
        replies = answer(generator, parts, max_new_tokens)
        arm.seconds += sum(reply.seconds for reply in replies)
        arm.attempts += map(_attempt, batch, replies)
        yield arm


def split_prompt(
    generator: Generator, needle: Needle, opening: bool
) -> tuple[list[int], list[int]]:
    """A needle's tokens, cut where the question begins; see ``answering.split_prompt``.

    Args:
        generator: Gives chat template and tokenizer.
        needle: The prompt.
        opening: Whether the tokens end with RULER's opening of the answer.

    Raises:
        ValueError: The chat template rewrites the question.
    """
    begun = needle.opening if opening else ""
    return answering.split_prompt(generator, needle.prompt, needle.question, begun)


def _attempt(needle: Needle, reply: Reply) -> Attempt:
    return Attempt(
        id=needle.id,
        kind=needle.kind,
        length=needle.length,
        depths=needle.depths,
        found=string_match(reply.text, needle.answers),
        text=reply.text,
        ids=reply.ids,
        finished=reply.finished,
        device_bytes_mean=reply.device_bytes_mean,
        device_bytes_peak=reply.device_bytes_peak,
        host_bytes=reply.host_bytes,
    )
