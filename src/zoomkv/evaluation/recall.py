"""Ledger recall: does a policy still find what its own text says, and what it costs in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zoomkv.data.ledger import score_ledger
from zoomkv.data.traces import Trace
from zoomkv.evaluation.statistics import wilson
from zoomkv.generation import Answer, Generator


@dataclass
class Arm:
    """One policy on a list of ledgers."""

    policy: str
    options: dict[str, Any]
    recalled: list[bool] = field(default_factory=list)
    """Both asked values equal what the text's own steps say, for each ledger."""
    right: list[bool] = field(default_factory=list)
    """Both asked values equal the truth."""
    extracted: list[bool] = field(default_factory=list)
    """There is an answer that can be read."""
    finished: list[bool] = field(default_factory=list)
    """The text was not cut off."""
    arithmetic: list[float] = field(default_factory=list)
    """Share of the written lines whose sum is right."""
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    """What was generated."""
    device_bytes: list[float] = field(default_factory=list)
    """Mean over decode steps, for each batch, divided by the batch's ledgers."""
    peak_bytes: list[float] = field(default_factory=list)
    """The same, peak."""
    host_bytes: list[float] = field(default_factory=list)
    moved_bytes: list[float] = field(default_factory=list)
    """To the device, for each ledger."""
    agreeability: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def mean_bytes(self) -> float:
        """Device bytes of the cache for one ledger, mean over steps and batches."""
        return sum(self.device_bytes) / len(self.device_bytes)

    def summary(self) -> dict[str, Any]:
        """The figures of a table's row, with 95 % intervals."""
        n = len(self.recalled)
        return {
            "policy": self.policy,
            "options": self.options,
            "n": n,
            "recalled": sum(self.recalled) / n,
            "recalled_interval": wilson(sum(self.recalled), n),
            "right": sum(self.right) / n,
            "right_interval": wilson(sum(self.right), n),
            "extracted": sum(self.extracted),
            "truncated": n - sum(self.finished),
            "arithmetic": sum(self.arithmetic) / n,
            "tokens": sum(self.tokens) / n,
            "device_bytes_mean": self.mean_bytes,
            "device_bytes_peak": max(self.peak_bytes),
            "host_bytes": max(self.host_bytes),
            "moved_bytes": sum(self.moved_bytes) / len(self.moved_bytes),
            "tokens_per_second": sum(self.tokens) / self.seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def run_arm(
    generator: Generator, ledgers: Sequence[Trace], batch_size: int, max_new_tokens: int
) -> Iterator[Arm]:
    """Answers ledgers batch by batch, greedily, and marks the answers.

    Args:
        generator: Of one policy.
        ledgers: Problems; those of like length should stand together.
        batch_size: Ledgers answered together.
        max_new_tokens: Longest answer.

    Yields:
        The same arm after every batch, grown.
    """
    arm = Arm(generator.policy, dict(generator.options))
    for start in range(0, len(ledgers), batch_size):
        batch = ledgers[start : start + batch_size]
        answers = generator.generate([ledger.problem for ledger in batch], max_new_tokens)
        for ledger, answer in zip(batch, answers, strict=True):
            _mark(arm, ledger, answer)
        stats = generator.stats
        assert stats is not None
        arm.device_bytes.append(stats.device_bytes_mean / len(batch))
        arm.peak_bytes.append(stats.device_bytes_peak / len(batch))
        arm.host_bytes.append(stats.host_bytes / len(batch))
        arm.moved_bytes.append(stats.bytes_to_device / len(batch))
        arm.agreeability.append(stats.agreeability)
        arm.seconds += stats.seconds
        yield arm


def _mark(arm: Arm, ledger: Trace, answer: Answer) -> None:
    assert ledger.answer is not None
    score = score_ledger(ledger.problem, ledger.answer, answer.text)
    arm.recalled.append(score.recalled)
    arm.right.append(score.right)
    arm.extracted.append(score.extracted)
    arm.arithmetic.append(score.arithmetic)
    arm.finished.append(answer.finished)
    arm.tokens.append(len(answer.ids))
    arm.texts.append(answer.text)
    arm.ids.append(answer.ids)
