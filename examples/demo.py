"""One long answer with the full cache, and with ZoomR, whose history lies on the host.

    python examples/demo.py [--checkpoint FOLDER] [--steps N] [--seed N]

Streams a ledger worked by SmolLM2-135M three times and ends with a table of what it took.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

import zoomkv
from zoomkv.data.ledger import LedgerShape, ledger, score_ledger

ARMS: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("zoomr", {"window": 64, "consensus": 2, "top_k": 2, "residency": "resident"}),
    ("zoomr", {"window": 64, "consensus": 2, "top_k": 2, "residency": "streamed"}),
]

COLUMNS = (
    "cache",
    "answer",
    "recalled",
    "tokens",
    "device\nmean",
    "device\npeak",
    "host",
    "to\ndevice",
    "tok/s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="checkpoints/zoomr-smollm2-135m")
    parser.add_argument("--steps", type=int, default=12, help="steps of the ledger, 3 to 60")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--precision", default="fp32")
    arguments = parser.parse_args()

    screen = Console(highlight=False)
    model, tokenizer = zoomkv.load(arguments.checkpoint, precision=arguments.precision)
    shape = LedgerShape(steps=(arguments.steps, arguments.steps))
    trace = ledger(arguments.seed, shape)
    screen.rule("the problem")
    screen.print(trace.problem)
    title = f"{arguments.steps} steps; the answer is {trace.answer}; KV in MiB"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    for policy, options in ARMS:
        name = f"{policy} {options.get('residency', '')}".strip()
        screen.rule(name)
        generator = zoomkv.Generator(model, tokenizer, policy, **options)
        text = ""
        for piece in generator.stream(trace.problem, max_new_tokens=80 * arguments.steps):
            text += (shown := visible(piece))
            print(shown, end="", flush=True)
        stats = generator.stats
        assert trace.answer is not None
        score = score_ledger(trace.problem, trace.answer, text)
        print()
        figures = (
            stats.device_bytes_mean,
            stats.device_bytes_peak,
            stats.host_bytes,
            stats.bytes_to_device,
        )
        table.add_row(
            name,
            "right" if score.right else "wrong",
            "yes" if score.recalled else "no",
            f"{stats.tokens}",
            *(f"{count / 2**20:.1f}" for count in figures),
            f"{stats.tokens_per_second:.1f}",
        )
    screen.print(table)
    screen.print("recalled: the asked values are those that the text itself says.")
    screen.print("On a CPU both tiers are RAM; the accounting is the same.")


def visible(piece: str) -> str:
    """Summaries behind a mark, no other special tokens."""
    for token, shown in {
        "<|begin_of_summary|>": "\u00bb ",
        "<|end_of_summary|>": "",
        "<|im_end|>": "",
    }.items():
        piece = piece.replace(token, shown)
    return piece


if __name__ == "__main__":
    main()
