"""A question about a long document, with the full cache and with SeKV at a tenth of the memory.

    python examples/needle.py [--checkpoint MODEL] [--length TOKENS] [--budget SHARE] [--seed N]

The document (the last third of Verne's *In the Year 2889*) hides one number. It is read and
compressed before the question is known. Ends with a table of what it took.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import zoomkv
from zoomkv.data.needles import NeedleShape, haystack, needle
from zoomkv.evaluation.needle import run_needles

COLUMNS = ("cache", "found", "device peak", "of full", "host", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="checkpoints/sekv-smollm2-135m")
    parser.add_argument("--length", type=int, default=4096, help="tokens of document and question")
    parser.add_argument("--budget", type=float, default=0.1, help="share of full KV")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--precision", default="bf16")
    arguments = parser.parse_args()

    screen = Console(highlight=False)
    model, tokenizer = zoomkv.load(arguments.checkpoint, precision=arguments.precision)
    arms: list[tuple[str, dict[str, Any]]] = [("full", {}), ("sekv", {"budget": arguments.budget})]
    generators = [zoomkv.Generator(model, tokenizer, name, **options) for name, options in arms]

    def count(text: str) -> int:
        ids = tokenizer(generators[0].render(text), add_special_tokens=False)["input_ids"]
        return len(ids)

    hidden = needle(
        arguments.seed, NeedleShape(arguments.length), haystack("book", "evaluation"), count
    )
    screen.rule("the question")
    screen.print(f"({arguments.length} tokens of a book, then)\n{hidden.question}")
    table = Table(title=f"the answer is {hidden.answers[0]}; KV in MiB", box=None)
    for column in COLUMNS:
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    full_bytes = 0.0
    for generator in generators:
        screen.rule(generator.policy)
        begun = time.perf_counter()
        *_, arm = run_needles(generator, [hidden], "unknown", max_new_tokens=24)
        [attempt] = arm.attempts
        screen.print(f"{hidden.opening}{attempt.text}")
        full_bytes = full_bytes or attempt.device_bytes_peak
        table.add_row(
            generator.policy,
            "yes" if attempt.hit else "no",
            f"{attempt.device_bytes_peak / 2**20:.1f}",
            f"{attempt.device_bytes_peak / full_bytes:.0%}",
            f"{attempt.host_bytes / 2**20:.1f}",
            f"{time.perf_counter() - begun:.1f}",
        )
    screen.print(table)
    screen.print("Peak while question and answer are read; the prompt's own reading comes on top.")


if __name__ == "__main__":
    main()
