"""What the caches of lm-eval's tasks held and moved, to be reported beside the accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from zoomkv.caches.base import PolicyCache
from zoomkv.caches.tiers import storage_bytes


@dataclass
class Memory:
    """Sums over the batches of one task; bytes are of a whole batch's cache, while it decodes."""

    row_bytes: int
    """What one token takes in the full cache, over all layers and KV heads."""
    answers: int = 0
    """Generated texts, or continuations that were scored."""
    truncated: int = 0
    """Texts that ran into the length limit before they ended."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated or scored."""
    steps: int = 0
    held: int = 0
    held_peak: int = 0
    full: int = 0
    full_peak: int = 0
    host_bytes: int = 0
    to_device: int = 0
    to_host: int = 0
    whole: bool = True
    """Whether every query so far could read every row."""

    def read(self, cache: PolicyCache) -> None:
        """Adds a decode step. The full cache is counted without the padding that it would hold."""
        held = storage_bytes(cache.device_tensors())
        full = int(cache.lengths.sum()) * self.row_bytes
        self.steps += 1
        self.held += held
        self.full += full
        self.held_peak = max(self.held_peak, held)
        self.full_peak = max(self.full_peak, full)

    def finish(self, cache: PolicyCache) -> None:
        """Adds what a batch's cache kept on the host and moved by its end."""
        footprint = cache.footprint()
        self.host_bytes = max(self.host_bytes, footprint.host_bytes)
        self.to_device += footprint.bytes_to_device
        self.to_host += footprint.bytes_to_host
        self.whole &= footprint.rows_mean >= float(cache.lengths.double().mean())

    def to_dict(self) -> dict[str, int | float]:
        """The figures of the task.

        Returns:
            ``answers``, ``truncated``, ``prompt_tokens``, ``tokens``; ``device_bytes_mean`` over
            decode steps and ``device_bytes_peak``; ``full_bytes_mean`` and ``full_bytes_peak``,
            what the full cache holds of the same tokens; ``share_of_full``, the first mean by the
            other; ``host_bytes``, the most of any batch; ``bytes_to_device``, ``bytes_to_host``.
        """
        steps = max(self.steps, 1)
        return {
            "answers": self.answers,
            "truncated": self.truncated,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "device_bytes_mean": self.held / steps,
            "device_bytes_peak": self.held_peak,
            "full_bytes_mean": self.full / steps,
            "full_bytes_peak": self.full_peak,
            "share_of_full": self.held / self.full if self.full else 0.0,
            "host_bytes": self.host_bytes,
            "bytes_to_device": self.to_device,
            "bytes_to_host": self.to_host,
        }


class Meter(StoppingCriteria):
    """Reads a cache while it generates; never stops anything."""

    def __init__(self, memory: Memory, cache: PolicyCache) -> None:
        self.memory, self.cache = memory, cache

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # bool [B]
        self.memory.read(self.cache)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
