"""Made-up results in the format of ``zoomkv evaluate``, as large as a real comparison."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zoomkv.caches.registry import names

BUDGETS = (0.05, 0.1, 0.2, 0.4)
LENGTHS = (512, 1024, 2048, 4096)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
WITHOUT_BUDGET = {
    "full": "full",
    "full_offloaded": "full_offloaded",
    "zoomr": "zoomr c=2 k=3",
    "sumr": "sumr w=64",
}
"""Their labels too; the others are named as the policy is."""

HEADER: dict[str, Any] = {
    "kind": "header",
    "format": 1,
    "zoomkv": "0.1.0",
    "model": "checkpoints/made-up",
    "fingerprint": {"checkpoints/made-up": {"layers": 30, "vocabulary": 49152}},
    "settings": {
        "model": "checkpoints/made-up",
        "precision": "fp32",
        "policies": [{"policy": "h2o", "options": {}, "label": "h2o", "model": None}],
        "tasks": [
            {"task": task, "options": {}, "name": task, "max_new_tokens": None}
            for task in ("needle", "ledger", "fidelity")
        ],
        "seeds": [0],
    },
}


def answer(**changes: Any) -> dict[str, Any]:
    """One answer, right unless changed."""
    return {
        "kind": "answer",
        "task": "needle",
        "policy": "h2o",
        "label": "h2o",
        "options": {},
        "budget": 0.1,
        "protocol": "inside",
        "length": 512,
        "depth": 0.5,
        "seed": 0,
        "id": "0",
        "score": 1.0,
        "right": True,
        "extracted": True,
        "truncated": False,
        "tokens": 20,
        "prompt_tokens": 500,
        "device_bytes_mean": 1000.0,
        "device_bytes_peak": 1200.0,
        "host_bytes": 0.0,
        "bytes_to_device": 0.0,
        "bytes_to_host": 0.0,
        "full_bytes": 12000.0,
        "agreeability": None,
        "about": {},
        "text": "The number is 7.",
    } | changes


def timing_of(line: dict[str, Any], seconds: float, batch: int = 1) -> dict[str, Any]:
    """The sidecar's line of an answer."""
    names = ("task", "label", "budget", "protocol", "length", "seed", "id")
    return {"kind": "timing", **{name: line[name] for name in names}} | {
        "seconds": seconds,
        "batch": batch,
    }


def write_results(
    path: Path,
    answers: Iterable[dict[str, Any]],
    timings: Sequence[dict[str, Any]] = (),
    **header: Any,
) -> Path:
    """A results file, and its sidecar if there are timings."""
    lines = [HEADER | header, *answers]
    path.write_text("".join(map(_line, lines)), encoding="utf-8")
    if timings:
        path.with_name(f"{path.stem}.timing.jsonl").write_text(
            "".join(map(_line, timings)), encoding="utf-8"
        )
    return path


def comparison(
    policies: Sequence[str] | None = None, budgets: Sequence[float] = BUDGETS, n: int = 4
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers and timings: needles at every depth, ledgers, and fidelity.

    Args:
        policies: All registered ones by default.
        budgets: Shares.
        n: Needles at each depth; ledgers are 10 times as many.
    """
    answers = [
        line
        for policy in policies or names()
        for budget in ([None] if policy in WITHOUT_BUDGET else budgets)
        for line in (
            *_needles(policy, budget, n),
            *_ledgers(policy, budget, 10 * n),
            *_fidelity(policy, budget, n),
        )
    ]
    chance = random.Random(5)
    timings = []
    for line in answers:
        pace = 9 + 8 * _skill(line["policy"]) + chance.gauss(0, 1)
        timings.append(timing_of(line, 4 * line["tokens"] / pace, batch=4))
    return answers, timings


def checks() -> list[dict[str, Any]]:
    """What stands before the answers."""
    return [
        {"kind": "check", "policy": "full", "what": "full is sane", "ok": True, "detail": "8 of 8"},
        {
            "kind": "check",
            "policy": "tova",
            "what": "binds nothing equals full",
            "ok": False,
            "detail": "token 31 differs",
        },
    ]


def _skill(policy: str) -> float:
    """From 0 to 1, the same in every run."""
    known = {"full": 1.0, "full_offloaded": 1.0, "zoomr": 0.93, "sekv": 0.9, "beacon_kv": 0.8}
    return known.get(policy, 0.15 + 0.55 * (zlib.crc32(policy.encode()) % 997) / 997)


def _arm(policy: str, budget: float | None, tokens: float) -> dict[str, Any]:
    full = 23040.0 * tokens
    share = budget or {"zoomr": 0.18, "sumr": 0.12, "full_offloaded": 2 / 30}.get(policy, 1.0)
    offloads = policy in ("zoomr", "sumr", "sekv", "full_offloaded")
    return {
        "policy": policy,
        "label": WITHOUT_BUDGET.get(policy, policy),
        "options": {"consensus": 2, "top_k": 3} if policy == "zoomr" else {},
        "budget": budget,
        "device_bytes_mean": 0.8 * share * full,
        "device_bytes_peak": share * full,
        "host_bytes": full if offloads else 0.0,
        "bytes_to_device": 3.1 * share * full if offloads else 0.0,
        "bytes_to_host": full if offloads else 0.0,
        "full_bytes": full,
    }


def _needles(policy: str, budget: float | None, n: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(f"{policy} {budget} needles")
    for protocol in ("inside", "unknown"):
        for length in LENGTHS:
            for depth in DEPTHS:
                for number in range(n):
                    skill = _skill(policy) * (0.55 if protocol == "unknown" else 1)
                    strength = 4 * skill + 1.6 * math.log((budget or 0.5) * 8) - length / 2500
                    strength += 1.2 * abs(depth - 0.4) - 1.4
                    sure = policy.startswith("full") and chance.random() < 0.98
                    right = sure or chance.random() < 1 / (1 + math.exp(-2 * strength))
                    yield answer(
                        protocol=protocol,
                        length=length,
                        depth=depth,
                        id=f"{length}-{depth}-{number}",
                        score=float(right),
                        right=right,
                        tokens=chance.randint(8, 20),
                        prompt_tokens=length - 12,
                        **_arm(policy, budget, length),
                    )


def _ledgers(policy: str, budget: float | None, n: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(f"{policy} {budget} ledgers")
    for number in range(n):
        right = chance.random() < _skill(policy) * (0.5 + 0.5 * (budget or 0.9))
        agreed = None
        if policy == "zoomr":
            spread = 0.07 if right else 0.15
            slope = -0.004 if right else 0.002
            start = 0.72 if right else 0.6
            agreed = [
                round(min(1, max(0, start + slope * step + chance.gauss(0, spread))), 4)
                for step in range(chance.randint(24, 40))
            ]
        yield answer(
            task="ledger",
            protocol=None,
            length=None,
            depth=None,
            id=str(number),
            score=1.0 if right else 0.5 * (chance.random() < 0.5),
            right=right,
            extracted=right or chance.random() < 0.8,
            truncated=not right and chance.random() < 0.1,
            tokens=chance.randint(300, 700),
            prompt_tokens=120,
            agreeability=agreed,
            **_arm(policy, budget, 700),
        )


def _fidelity(policy: str, budget: float | None, n: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(f"{policy} {budget} fidelity")
    harm = 0.0 if policy.startswith("full") else (1.1 - _skill(policy)) / (20 * (budget or 0.3))
    for number in range(n):
        positions = list(range(200 + 10 * number))
        kl = [harm * (0.2 + at / 100) * math.exp(chance.gauss(0, 0.5)) for at in positions]
        top1 = [float(chance.random() < math.exp(-value)) for value in kl]
        yield answer(
            task="fidelity",
            protocol=None,
            length=None,
            depth=None,
            id=str(number),
            score=sum(top1) / len(top1),
            right=False,
            tokens=len(positions),
            about={
                "kl": sum(kl) / len(kl),
                "top1": sum(top1) / len(top1),
                "curve": {"position": positions, "kl": kl, "top1": top1},
            },
            text="",
            **_arm(policy, budget, 300),
        )


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
