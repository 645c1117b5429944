"""Needles under a share of full KV: what a budget loses, and what routing loses.

    python benchmarks/needles.py run [--lengths 2048 4096] [--budgets 0.1 0.2] [--n 50]
    python benchmarks/needles.py table [--out FILE.json]

Single needles (RULER's format) in the last third of the book, at every depth. Each prompt is read
once; every policy then answers it. ``unknown``: the context is compressed before the question
comes. ``inside``: it is compressed with the question in sight. A run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _harness import write_json
from rich.console import Console
from rich.progress import Progress

from zoomkv.data.needles import Needle, NeedleShape, haystack, needles
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
    "sekv fixed spans": ("sekv", {"spans": "fixed"}),
    "sekv paper's spans": ("sekv", {"spans": "paper", "alpha": "auto", "min_span": 1}),
    "sekv anchors": ("sekv", {"anchor_share": 0.015}),
    "sekv plain means": ("sekv", {"coarse_weights": "mean"}),
    "sekv no entries": ("sekv", {"coarse_share": 0.0}),
    "sekv factors": ("sekv", {"recovery": "lowrank"}),
    "sekv factors before RoPE": ("sekv", {"recovery": "lowrank", "rope": "pre"}),
    # These need a checkpoint whose router is the paper's.
    "paper": ("sekv", {"router": "paper"}),
    "paper exact rows": ("sekv", {"router": "paper", "recovery": "exact"}),
    "paper before RoPE": ("sekv", {"router": "paper", "rope": "pre"}),
    "paper one threshold": ("sekv", {"router": "paper", "threshold": 0.5}),
    "streaming_llm": ("streaming_llm", {}),
    "snapkv": ("snapkv", {"count_prefix": True}),
}
MAIN = [
    *("sekv", "sekv sketch", "sekv mean-key", "sekv random", "sekv closed", "sekv oracle"),
    *("sekv span-oracle", "streaming_llm", "snapkv"),
]
"""The others are what parts of the method are worth."""


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
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=MAIN)
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

    cells = [(protocol, "full", full) for protocol in arguments.protocols]
    for protocol, budget, arm in product(arguments.protocols, arguments.budgets, arguments.arms):
        policy, options = ARMS[arm]
        generator = Generator(model, tokenizer, policy, budget=budget, **options)
        cells.append((protocol, f"{arm} {budget}", generator))
    hay = haystack("book", "evaluation")
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("needles", total=len(arguments.lengths) * arguments.n)
        for length in arguments.lengths:
            made = needles(arguments.n, NeedleShape(length), hay, count, arguments.seed)
            for number, needle in enumerate(made):
                if answer(found, cells, needle, number, length):
                    write_json(path, found, indent=None)
                progress.advance(bar)


def answer(
    found: dict[str, Any],
    cells: list[tuple[str, str, Generator]],
    needle: Needle,
    number: int,
    length: int,
) -> bool:
    """One needle under every policy that lacks it; whether there were any."""
    hits = found["hits"]
    missing = [
        (protocol, generator, key)
        for protocol, arm, generator in cells
        if len(hits.setdefault(key := f"{length} {protocol} {arm}", [])) <= number
    ]
    if not missing:
        return False
    _, generator, _ = missing[0]
    context, question = split_prompt(generator, needle, True)
    ids = torch.tensor([context + question], device=generator.model.device)
    recording = record(generator.model, ids)
    for protocol, generator, key in missing:
        attempt = answer_recorded(generator, needle, recording, len(context), protocol, 16)
        hits[key].append(attempt.hit)
        found["bytes"][key] = max(found["bytes"].get(key, 0), attempt.device_bytes_peak)
    return True


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
