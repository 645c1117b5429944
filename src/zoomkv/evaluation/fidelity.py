"""How near a policy stays to the full cache along texts that the full cache wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoomkv.caches.base import PolicyCache


@dataclass(frozen=True)
class Fidelity:
    """Agreement with the full cache at each generated token, by text."""

    kl: list[Tensor]
    """KL(full || policy) of the next token's distribution in nats, each ``[answer]``."""
    same: list[Tensor]
    """Whether both hold the same token for the likeliest, bool, each ``[answer]``."""

    def summary(self) -> dict[str, float]:
        """Means over all tokens of all texts, and the standard error over the texts."""
        kl = torch.stack([each.double().mean() for each in self.kl])
        same = torch.stack([each.double().mean() for each in self.same])
        root = len(kl) ** 0.5
        return {
            "kl": float(torch.cat(self.kl).double().mean()),
            "kl_error": float(kl.std()) / root if len(kl) > 1 else float("nan"),
            "top1": float(torch.cat(self.same).double().mean()),
            "top1_error": float(same.std()) / root if len(same) > 1 else float("nan"),
        }

    def curve(self, row: int = 0, width: int = 16) -> dict[str, list[float]]:
        """The agreement along one answer, as JSON can hold it.

        Args:
            row: Which text.
            width: Tokens that are taken together; fewer at the answer's end.

        Returns:
            ``position`` of each bin's first token, counted from 0 at the answer's first, and the
            bin's mean ``kl`` in nats and ``top1``. Positions of different texts are the same ones.

        Raises:
            ValueError: A width below 1.
        """
        if width < 1:
            raise ValueError(f"width={width}: choose at least 1 token")
        return {
            "position": [float(first) for first in range(0, len(self.kl[row]), width)],
            "kl": [float(part.mean()) for part in self.kl[row].double().split(width)],
            "top1": [float(part.mean()) for part in self.same[row].double().split(width)],
        }


@torch.inference_mode()
def full_log_probs(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Log-probabilities of each answer's tokens' successors, under the whole text; ``[n, V]``.

    Entry ``i`` is the distribution from which token ``i`` of the answer was drawn. One dense
    forward a text.
    """
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
        found.append(logits.float().log_softmax(-1))
    return found


@torch.inference_mode()
def fidelity(
    model: Any,
    cache: PolicyCache,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    reference: Sequence[Tensor],
    pad_id: int,
    watch: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Feeds known answers through a cache, all texts as one batch, and compares.

    Args:
        model: Attached.
        cache: New and empty.
        prompts: Ids of each text's prompt.
        answers: Ids of what the full cache wrote.
        reference: From ``full_log_probs``.
        pad_id: Fed on the left of shorter prompts and behind shorter answers.
        watch: Called after each step with the number of steps done and of all.

    Returns:
        The agreement at every answer token.
    """
    width, steps = max(map(len, prompts)), max(map(len, answers))
    rows = [
        [pad_id] * (width - len(prompt)) + [*prompt, *answer] + [pad_id] * (steps - len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    ids = torch.tensor(rows, device=model.device)
    column = torch.arange(ids.shape[1], device=ids.device)
    first = torch.tensor([width - len(prompt) for prompt in prompts], device=ids.device)
    last = torch.tensor([width + len(answer) for answer in answers], device=ids.device)
    mask = ((column >= first[:, None]) & (column < last[:, None])).long()
    kl = [torch.zeros(len(answer)) for answer in answers]
    same = [torch.zeros(len(answer), dtype=torch.bool) for answer in answers]
    cache.expect_prompt(width)
    begin = 0
    for step in range(steps):
        end = width + step
        part = ids[:, begin:end]
        logits = model(part, attention_mask=mask[:, :end], cache=cache, logits_to_keep=1).logits
        found = logits[:, -1].float().log_softmax(-1)
        for row, answer in enumerate(answers):
            if step < len(answer):
                expected = reference[row][step]
                kl[row][step] = (expected.exp() * (expected - found[row])).sum()
                same[row][step] = expected.argmax() == found[row].argmax()
        begin = end
        if watch is not None:
            watch(step + 1, steps)
    return Fidelity(kl, same)
