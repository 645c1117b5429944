"""Ledger recall under one measured memory: full, zoomr, sumr and streaming_llm side by side.

    python benchmarks/recall.py [--checkpoint FOLDER] [--n 60] [--out FILE.json]

ZoomR has no budget of its own, so it runs first; SumR's window and StreamingLLM's budget are then
tuned to ZoomR's mean device bytes by replaying the full cache's text of the first batch.
*Recalled*: both asked values equal what the text itself says in its steps. *Right*: both equal the
truth. Finished arms stand in FILE.json and are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from zoomkv.data.ledger import LedgerShape, ledgers
from zoomkv.data.traces import Trace
from zoomkv.evaluation.budgets import matching
from zoomkv.evaluation.recall import Arm, run_arm
from zoomkv.evaluation.replay import replayed_bytes
from zoomkv.evaluation.statistics import mcnemar
from zoomkv.generation import Generator, load

ZOOMR: dict[str, Any] = {"window": 64, "consensus": 2, "top_k": 2}


def main() -> None:
    arguments = _arguments()
    shape = LedgerShape(steps=tuple(arguments.steps))
    # A seed that no training configuration uses.
    problems = list(ledgers(arguments.n, arguments.seed, shape))
    model, tokenizer = load(arguments.checkpoint, precision=arguments.precision)
    make = partial(Generator, model, tokenizer)
    out = Path(arguments.out)
    done = _read(out, vars(arguments))

    def arm(policy: str, **options: Any) -> Arm:
        if policy not in done:
            done[policy] = _run(make(policy, **options), problems, arguments)
            _write(out, vars(arguments), done)
        return done[policy]

    full, zoomr = arm("full"), arm("zoomr", **ZOOMR)
    first = problems[: arguments.batch_size]
    for policy, option, guess in (("sumr", "window", 96), ("streaming_llm", "budget", 400)):
        if policy not in done:
            measure = partial(_bytes, make, policy, option, first, full)
            value = getattr(arguments, f"{policy}_{option}")
            arm(policy, **{option: value or matching(measure, zoomr.device_bytes[0], guess)})
    print(_table([full, zoomr, done["sumr"], done["streaming_llm"]], zoomr))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="checkpoints/zoomr-smollm2-135m")
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--steps", type=int, nargs=2, default=(8, 12))
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=720)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--sumr-window", type=int, help="instead of tuning it")
    parser.add_argument("--streaming-llm-budget", type=int, help="instead of tuning it")
    parser.add_argument("--out", default="runs/recall.json")
    return parser.parse_args()


def _bytes(
    make: Callable[..., Generator],
    policy: str,
    option: str,
    problems: list[Trace],
    full: Arm,
    value: int,
) -> float:
    """Device bytes of a ledger at a value of a policy's option, for the full cache's text."""
    generator = make(policy, **{option: value})
    tokenizer = generator.tokenizer
    prompts = tokenizer(
        [generator.render(problem.problem) for problem in problems],
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    total = replayed_bytes(
        generator.new_cache(),
        prompts["input_ids"],
        prompts["attention_mask"],
        full.ids[: len(problems)],
        tokenizer.pad_token_id,
        generator.model.dtype,
    )
    return total / len(problems)


def _run(generator: Generator, problems: list[Trace], arguments: argparse.Namespace) -> Arm:
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[shown]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(generator.policy, total=len(problems), shown="")
        batches = run_arm(generator, problems, arguments.batch_size, arguments.max_new_tokens)
        for arm in batches:
            shown = f"recalled {sum(arm.recalled)}, right {sum(arm.right)} of {len(arm.right)}"
            progress.update(bar, completed=len(arm.recalled), shown=shown)
    print(f"{generator.policy} {generator.options}: {shown}", file=sys.stderr)
    return arm


def _table(arms: list[Arm], reference: Arm) -> str:
    lines = [
        "| policy | options | n | recalled (95 %) | right (95 %) | p recalled | p right | KV mean "
        "| KV peak | to zoomr | host | moved | tokens | cut off | tokens/s |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for arm in arms:
        row = arm.summary()
        options = ", ".join(f"{name}={value}" for name, value in arm.options.items())
        pairs = [(reference.recalled, arm.recalled), (reference.right, arm.right)]
        p = [f"{mcnemar(*pair):.2g}" if arm is not reference else "" for pair in pairs]
        lines.append(
            f"| {arm.policy} | {options} | {row['n']} | {_share(row, 'recalled')} "
            f"| {_share(row, 'right')} | {p[0]} | {p[1]} | {_mib(row['device_bytes_mean'])} "
            f"| {_mib(row['device_bytes_peak'])} "
            f"| {row['device_bytes_mean'] / reference.mean_bytes:.3f} | {_mib(row['host_bytes'])} "
            f"| {_mib(row['moved_bytes'])} | {row['tokens']:.0f} | {row['truncated']} "
            f"| {row['tokens_per_second']:.1f} |"
        )
    lines += [
        "",
        "p: exact McNemar test against zoomr. KV, host and moved: MiB for one ledger.",
    ]
    return "\n".join(lines)


def _share(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{100 * row[name]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f}"


def _read(path: Path, settings: dict[str, Any]) -> dict[str, Arm]:
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["settings"] != json.loads(json.dumps(settings)):
        raise SystemExit(f"{path}: holds a run with other settings; name another --out")
    return {name: Arm(**fields) for name, fields in record["arms"].items()}


def _write(path: Path, settings: dict[str, Any], arms: dict[str, Arm]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.partial")
    record = {"settings": settings, "arms": {name: arm.to_dict() for name, arm in arms.items()}}
    partial_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial_path.replace(path)


if __name__ == "__main__":
    main()
