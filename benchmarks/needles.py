"""Needles under a share of full KV: what a budget loses, and what routing loses.

    python benchmarks/needles.py run [--lengths 2048 4096] [--budgets 0.1 0.2] [--n 50] [--out FILE.json]
    python benchmarks/needles.py table [--out FILE.json]

Single needles (RULER's format) in the last third of the book, at every depth. Each prompt is read
once; every policy then answers it. ``unknown``: the context is compressed before the question
comes. ``inside``: it is compressed with the question in sight. A run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _harness import write_json
from rich.console import Console
from rich.progress import Progress

from zoomkv.data.needles import NeedleShape, haystack, needles
from zoomkv.evaluation.needle import answer_recorded, split_prompt
from zoomkv.evaluation.recording import record
from zoomkv.evaluation.statistics import mcnemar, wilson
from zoomkv.generation import Generator, load

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "sekv": ("sekv", {}),  # by the router that the checkpoint has
    "sekv sketch": ("sekv", {"router": "sketch"}),
    "sekv mean-key": ("sekv", {"router": "mean-key"}),
    "sekv random": ("sekv", {"router": "random"}),
    "sekv closed": ("sekv", {"router": "closed"}),
    "sekv oracle": ("sekv", {"router": "oracle"}),
    "sekv span-oracle": ("sekv", {"router": "span-oracle"}),
    "streaming_llm": ("streaming_llm", {}),
    "snapkv": ("snapkv", {"count_prefix": True}),
}


def main() -> None:
    arguments = _arguments()
    path = Path(arguments.out)
    settings = {name: getattr(arguments, name) for name in ("checkpoint", "seed", "precision")}
    found: dict[str, Any] = {"settings": settings, "hits": {}, "bytes": {}}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise SystemExit(f"{path} holds a run with other settings: name another --out")
    if arguments.what == "run":
        run(arguments, found, path)
    print(table(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--checkpoint", default="checkpoints/sekv-smollm2-135m")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.15, 0.2])
    parser.add_argument("--protocols", nargs="+", default=["unknown", "inside"])
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", default="benchmarks/records/needles.json")
    return parser.parse_args()


def run(arguments: argparse.Namespace, found: dict[str, Any], path: Path) -> None:
    """Answers what the record lacks, needle by needle, all policies on each."""
    model, tokenizer = load(arguments.checkpoint, precision=arguments.precision)
    full = Generator(model, tokenizer, "full")

    def count(text: str) -> int:
        return len(tokenizer(full.render(text), add_special_tokens=False)["input_ids"])

    cells: list[tuple[str, str, Generator]] = []
    for protocol in arguments.protocols:
        cells.append((protocol, "full", full))
        for budget in arguments.budgets:
            for arm in arguments.arms:
                policy, options = ARMS[arm]
                generator = Generator(model, tokenizer, policy, budget=budget, **options)
                cells.append((protocol, f"{arm} {budget}", generator))
    total = len(arguments.lengths) * arguments.n
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("needles", total=total)
        for length in arguments.lengths:
            hay = haystack("book", "evaluation")
            made = needles(arguments.n, NeedleShape(length), hay, count, arguments.seed)
            for number, needle in enumerate(made):
                recording = None
                for protocol, arm, generator in cells:
                    key = f"{length} {protocol} {arm}"
                    hits = found["hits"].setdefault(key, [])
                    if len(hits) > number:
                        continue
                    context, question = split_prompt(full, needle, True)
                    if recording is None:
                        ids = torch.tensor([context + question], device=model.device)
                        recording = record(model, ids)
                    attempt = answer_recorded(
                        generator, needle, recording, len(context), protocol, 16
                    )
                    hits.append(attempt.hit)
                    peak = found["bytes"].get(key, 0)
                    found["bytes"][key] = max(peak, attempt.device_bytes_peak)
                if recording is not None:
                    write_json(path, found)
                    print(f"{length}: {number + 1} needles", file=sys.stderr)
                progress.advance(bar)


def table(found: dict[str, Any]) -> str:
    """Found needles by length, protocol and policy."""
    lines = [
        "| context | question | policy | n | found (95 %) | p to `sekv` | KV, MiB | of full |",
        "|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for key, hits in found["hits"].items():
        length, protocol, arm = key.split(" ", 2)
        low, high = wilson(sum(hits), len(hits))
        own = found["hits"].get(f"{length} {protocol} sekv {arm.split(' ')[-1]}")
        p = ""
        if own is not None and own is not hits and arm != "full" and len(own) == len(hits):
            p = f"{mcnemar(own, hits):.2g}"
        peak = found["bytes"][key]
        whole = found["bytes"].get(f"{length} {protocol} full", peak)
        lines.append(
            f"| {length} | {protocol} | {arm} | {len(hits)} | {sum(hits)} "
            f"({100 * low:.0f} to {100 * high:.0f} %) | {p} | {peak / 2**20:.2f} "
            f"| {100 * peak / whole:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
