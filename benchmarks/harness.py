"""What `zoomkv evaluate` costs beside plain generation of the same tokens.

    python benchmarks/harness.py [--checkpoint M] [--batch 8] [--tokens 64] [--rounds 3]

The same ledgers, in the same batches, are answered twice: by a bare ``model.generate`` with the
policy's cache, and by an evaluation's cell, which meters every forward, marks the answers and
writes them to the disk. Model and questions are there already. Rounds take turns, and the best
of each counts. Target: at most 1.05.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import write_json

from zoomkv.evaluation.answering import answer
from zoomkv.evaluation.budgets import arms_of
from zoomkv.evaluation.cells import Cell
from zoomkv.evaluation.results import timing_path
from zoomkv.evaluation.settings import Settings, TaskSettings
from zoomkv.evaluation.tasks.registry import task
from zoomkv.evaluation.writing import LineFile
from zoomkv.generation import load


def main() -> None:
    arguments = _arguments()
    model, tokenizer = load(arguments.checkpoint, arguments.precision)
    found = [_measure(policy, model, tokenizer, arguments) for policy in arguments.policies]
    print("| policy | plain, s | harness, s | ratio |\n|---|--:|--:|--:|")
    for row in found:
        print(
            f"| {row['policy']} | {row['plain']:.2f} | {row['harness']:.2f} | {row['ratio']:.3f} |"
        )
    if arguments.out:
        write_json(Path(arguments.out), {"settings": vars(arguments), "rows": found})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="smollm2-135m")
    parser.add_argument("--policies", nargs="+", default=["full", "h2o", "sekv"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="JSON")
    return parser.parse_args()


def _measure(
    policy: str, model: Any, tokenizer: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    arms = arms_of(Settings.of({"policies": [policy], "budgets": [0.2]}))
    options = {"steps": (3, 4), "max_new_tokens": arguments.tokens}
    cell = Cell(
        given=TaskSettings("ledger", batch_size=arguments.batch),
        task=task("ledger", **options),
        length=None,
        seed=0,
        n=arguments.batch * arguments.batches,
        batch_size=arguments.batch,
        protocols=("inside",),
        arms=arms,
        model=model,
        tokenizer=tokenizer,
    )
    prompts = [prompt.ids for prompt in cell.prompts]
    generator = cell.generator(policy, arms[0].at(arms[0].budgets[0]))
    answer(generator, [prompts[:1]], 2)  # what is compiled or read once is
    plain = harness = float("inf")
    for _ in range(arguments.rounds):
        plain = min(plain, _timed(lambda: _plain(generator, prompts, arguments)))
        harness = min(harness, _timed(lambda: _evaluated(cell)))
    return {"policy": policy, "plain": plain, "harness": harness, "ratio": harness / plain}


def _plain(generator: Any, prompts: list[list[int]], arguments: argparse.Namespace) -> None:
    for start in range(0, len(prompts), arguments.batch):
        batch = prompts[start : start + arguments.batch]
        pad, width = generator.tokenizer.pad_token_id, max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            output = generator.model.generate(
                input_ids=ids.to(generator.model.device),
                attention_mask=mask.to(generator.model.device),
                cache=generator.new_cache(),
                max_new_tokens=arguments.tokens,
                pad_token_id=pad,
                do_sample=False,
                **dict.fromkeys(("temperature", "top_p", "top_k")),
            )
        generator.tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)


def _evaluated(cell: Cell) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        with LineFile(path) as file, LineFile(timing_path(path)) as timings:
            for unit in cell.units():
                for answered in unit.answers(0):
                    file.append([line for line, _ in answered])
                    timings.append([timing for _, timing in answered])


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
