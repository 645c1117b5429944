"""Arms are marked ledger by ledger, and tuning finds the value that takes as many bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zoomkv.data.ledger import LedgerShape, ledgers
from zoomkv.evaluation.budgets import matching
from zoomkv.evaluation.recall import run_arm
from zoomkv.generation import Answer

LEDGERS = list(ledgers(6, seed=4, shape=LedgerShape(steps=(3, 4))))


class Scripted:
    """Answers every second ledger right; its bytes are a function of its option."""

    def __init__(self, policy: str, **options: Any) -> None:
        self.policy, self.options = policy, options
        self.stats: Any = None

    def generate(self, problems: list[str], max_new_tokens: int) -> list[Answer]:
        rows = 100 + 1.5 * self.options.get("window", 0)
        self.stats = SimpleNamespace(
            device_bytes_mean=rows * len(problems),
            device_bytes_peak=2 * rows * len(problems),
            host_bytes=0,
            bytes_to_device=0,
            agreeability=None,
            seconds=1.0,
        )
        by_problem = {ledger.problem: ledger for ledger in LEDGERS}
        return [self._answer(by_problem[problem]) for problem in problems]

    @staticmethod
    def _answer(ledger: Any) -> Answer:
        if LEDGERS.index(ledger) % 2:
            return Answer("", [1], finished=False)
        text = "".join(f"{part.text}\n\n{part.summary}\n\n" for part in ledger.segments)
        return Answer(text + ledger.solution, [1, 2, 3], finished=True)


def test_an_arm_is_marked_ledger_by_ledger() -> None:
    *_, arm = run_arm(Scripted("full"), LEDGERS, 4, 100)  # type: ignore[arg-type]
    assert arm.recalled == arm.right == arm.extracted == arm.finished == [True, False] * 3
    summary = arm.summary()
    assert summary["n"] == 6 and summary["right"] == 0.5 and summary["truncated"] == 3
    assert summary["device_bytes_mean"] == 100 and summary["device_bytes_peak"] == 200


@pytest.mark.parametrize("guess", [1, 40, 900])
def test_matching_finds_the_value(guess: int) -> None:
    target = 100 + 1.5 * 64
    value = matching(lambda window: 100 + 1.5 * window, target, guess)
    assert abs((100 + 1.5 * value) / target - 1) <= 0.005
