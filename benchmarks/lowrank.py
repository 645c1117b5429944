"""What it costs to factorise the keys of a prompt's spans, and what the factors lose.

The matrices are random: a common direction, as keys have, and others that fall off like 1 / i. Each
gets the rank at which its factors take no more than its rows, 32 at most. A sample is factorised by
all methods in turn, in an order drawn anew each time; what a whole prompt takes is scaled from it.

Times are of the processor, all threads together, so that a busy machine can be measured too. Values
take as long again as keys.

With ``--model`` also what spans of a real text need: those that surprisal cuts, beside blocks of
the same lengths that stand anywhere, keys after RoPE and before it, and values. Components go until
``--energy`` of the squares stays, and never more than pay for themselves.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from _harness import Report, options
from torch import Tensor

from zoomkv.backbone.load import load_base
from zoomkv.backbone.rotary import rotary_of
from zoomkv.backbone.teacher import Context, read_context
from zoomkv.data.long_text import BookText
from zoomkv.ops.lowrank import Method, break_even_rank, factorise, rebuild
from zoomkv.spans.splitter import Splitter
from zoomkv.spans.surprisal import SINKS

_RANK = 32
_SHUFFLES = 4


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
    parser.add_argument("--model", help="whose keys and values of a book to look at as well")
    parser.add_argument("--tokens", type=int, default=2048, help="of the book")
    parser.add_argument("--energy", type=float, default=0.99, help="share of squares that stays")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.sample, arguments.rounds = 4, 1
        arguments.tokens = min(arguments.tokens, 160)
    report = Report(arguments, judged=not arguments.quick)
    for case in _CASES:
        _measure(case, arguments.sample, arguments.rounds, report)
    if arguments.model is not None:
        _measure_text(arguments.model, arguments.tokens, arguments.energy, report)
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


def _measure_text(name: str, tokens: int, energy: float, report: Report) -> None:
    """What factors of a text's spans need, lose and weigh, beside those of random blocks."""
    model, tokenizer = load_base(name)
    text = next(iter(BookText().documents(len)))["text"]
    ids = torch.tensor([tokenizer(text)["input_ids"][:tokens]], device=model.device)
    context = read_context(model, ids)
    count = ids.shape[1]
    for scheme, splitter in (
        ("fine", Splitter("fine", 12, 32)),
        ("paper", Splitter("paper", 16, 256)),
    ):
        nats = context.surprisal[:, SINKS:]
        spans = splitter.cut(nats, context.length - SINKS)
        start, size = spans.start[0] + SINKS, spans.size[0]
        if not len(size):
            continue
        draw = torch.Generator().manual_seed(0)
        shuffles = [_anywhere(size, count, draw) for _ in range(_SHUFFLES)]
        rows = []
        for where, starts in (("surprisal", [start]), ("random", shuffles)):
            for what, layers in _layers(context, model):
                found = [_needs(layer, at, size, energy) for layer in layers for at in starts]
                rank, error, weight = torch.tensor(found).mean(0).tolist()
                rows.append([f"{where}, {what}", rank, error, f"{weight:.1%}"])
        mean = float(size.double().mean())
        report.table(
            f"{name}, {count} tokens of a book, {len(size)} spans ({scheme}) of {mean:.1f} tokens, "
            f"{energy:.0%} of the squares",
            ["blocks", "rank", "relative error", "bytes moved / rows"],
            rows,
        )


def _layers(context: Context, model: Any) -> list[tuple[str, list[Tensor]]]:  # [Hkv, T, D]
    rotary, at = rotary_of(model), torch.arange(context.keys[0].shape[2])
    return [
        ("keys after RoPE", [x[0].float() for x in context.keys]),
        ("keys before RoPE", [rotary.unrotate(x[0].float(), at) for x in context.keys]),
        ("values", [x[0].float() for x in context.values]),
    ]


def _anywhere(size: Tensor, count: int, draw: torch.Generator) -> Tensor:  # [N]
    """Starts of blocks of these sizes that follow each other at random, with random gaps."""
    rest = size.new_ones(count - SINKS - int(size.sum()))
    units = torch.cat([size, rest])
    order = torch.randperm(len(units), generator=draw)
    start = torch.empty_like(units)
    start[order] = units[order].cumsum(0) - units[order] + SINKS
    return start[: len(size)]


def _needs(rows: Tensor, start: Tensor, size: Tensor, energy: float) -> tuple[float, float, float]:
    """Means over blocks and heads of rank and relative error, and bytes over those of rows."""
    heads, _, dim = rows.shape
    column = torch.arange(int(size.max()))
    at = (start[:, None] + column).clamp(max=rows.shape[1] - 1)
    blocks = rows[:, at].masked_fill((column >= size[:, None])[None, ..., None], 0).flatten(0, 1)
    length = size.repeat(heads)
    a, v, sigma = factorise(blocks, length, break_even_rank(length, dim).clamp(1, _RANK))
    total = blocks.double().square().sum((1, 2))
    squares = sigma.double().square()
    stays = (squares.cumsum(-1) - squares < energy * total[:, None]) & (sigma > 0)
    rank = stays.sum(-1)
    lost = blocks - rebuild(a * stays[:, None], v)
    error = (lost.double().square().sum((1, 2)) / total.clamp(min=1e-30)).sqrt()
    weight = (rank * (length + dim)).sum() / (length * dim).sum()
    return float(rank.double().mean()), float(error.mean()), float(weight)


if __name__ == "__main__":
    raise SystemExit(main())
