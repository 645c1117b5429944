"""What it costs to factorise the keys of a prompt's spans, and what the factors lose.

The matrices are random: a common direction, as keys have, and others that fall off like 1 / i. Each
gets the rank at which its factors take no more than its rows, 32 at most. A sample is factorised by
all methods in turn, in an order drawn anew each time; what a whole prompt takes is scaled from it.

Times are of the processor, all threads together, so that a busy machine can be measured too. Values
take as long again as keys.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from _harness import Report, options
from torch import Tensor

from zoomkv.ops.lowrank import Method, break_even_rank, factorise, rebuild

_RANK = 32


@dataclass(frozen=True)
class Case:
    """Spans of a prompt: so many matrices of ``shortest`` to ``longest`` rows of ``dim``."""

    name: str
    matrices: int
    shortest: int
    longest: int
    dim: int

    def sample(self, count: int) -> tuple[Tensor, Tensor]:  # [N, S, D], [N]
        """Rows, padded with zeros, and lengths."""
        draw = torch.Generator().manual_seed(0)
        length = torch.randint(self.shortest, self.longest + 1, (count,), generator=draw)
        rows = torch.randn(count, self.longest, self.dim, generator=draw)
        turn = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=draw)).Q
        rows = rows * torch.arange(1, self.dim + 1) ** -1.0 @ turn
        rows += 3 * torch.randn(count, 1, self.dim, generator=draw) / self.dim**0.5
        beyond = torch.arange(self.longest) >= length[:, None]
        return rows.masked_fill_(beyond[..., None], 0), length


_CASES = [
    Case("SmolLM2-135M, 180 spans of 12 to 32", 30 * 3 * 180, 12, 32, 64),
    Case("8 heads of 128, 32 layers, 60 spans of 16 to 256", 32 * 8 * 60, 16, 256, 128),
]


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=400, help="matrices that are factorised")
    parser.add_argument("--rounds", type=int, default=5, help="times that each method runs")
    parser.add_argument("--quick", action="store_true", help="a few matrices, for tests")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.sample, arguments.rounds = 4, 1
    report = Report(arguments, judged=not arguments.quick)
    for case in _CASES:
        _measure(case, arguments.sample, arguments.rounds, report)
    report.finish()
    return 0


def _measure(case: Case, sample: int, rounds: int, report: Report) -> None:
    rows, length = case.sample(sample)
    rank = break_even_rank(length, case.dim).clamp(max=_RANK)
    methods = list(get_args(Method))
    best = dict.fromkeys(methods, float("inf"))
    for number in range(rounds + 1):  # the first one warms up
        for method in random.Random(number).sample(methods, len(methods)):
            begun = time.process_time()
            factorise(rows, length, rank, method)
            if number:
                best[method] = min(best[method], time.process_time() - begun)
    lost = {method: _lost(rows, length, rank, method) for method in methods}
    report.table(
        f"{case.name}, {case.matrices} matrices",
        ["method", "us a matrix", "s a prompt", "energy lost", "over the optimum"],
        [
            [
                method,
                1e6 * best[method] / sample,
                best[method] / sample * case.matrices,
                lost[method],
                lost[method] / lost["svd"] - 1,
            ]
            for method in methods
        ],
    )


def _lost(rows: Tensor, length: Tensor, rank: Tensor, method: Method) -> float:
    """Mean share of a matrix's energy that its factors don't hold."""
    a, v, _ = factorise(rows, length, rank, method)
    error = (rows - rebuild(a, v)).double().square().sum((1, 2))
    return float((error / rows.double().square().sum((1, 2))).mean())


if __name__ == "__main__":
    raise SystemExit(main())
