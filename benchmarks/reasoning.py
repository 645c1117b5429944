"""Eviction while reasoning: ledgers of 12 to 20 steps under small output budgets.

    python benchmarks/reasoning.py recall   [--n 30] [--budgets 128 256] [--out FILE.json]
    python benchmarks/reasoning.py fidelity [--traces 6] [--budgets 128 256 512]
    python benchmarks/reasoning.py ablation [--traces 6] [--budgets 128 256 512]
    python benchmarks/reasoning.py tables

``recall``: every policy answers the same fresh problems; *recalled*: both asked values equal what
the text itself says in its steps; *right*: both equal the truth. The budget is of output rows, the
prompt stays (the BeaconKV paper's rule). ``zoomr`` has no budget; ``h2o`` runs once more at its
mean device bytes, prompt and indexes included. ``fidelity``: KL(full || policy) and equal first
tokens along the full cache's own texts. ``ablation``: the paper's, on the same texts. Each command
goes on where it was stopped (the record lies in ``benchmarks/records``), and takes its problems and
texts from ``recall``'s full arm.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from _harness import write_json
from rich.console import Console
from rich.progress import Progress, TextColumn

from zoomkv.caches.tiers import storage_bytes
from zoomkv.data.ledger import LedgerShape, ledgers
from zoomkv.data.traces import Trace
from zoomkv.evaluation.budgets import matching
from zoomkv.evaluation.fidelity import fidelity, full_log_probs
from zoomkv.evaluation.recall import Arm, run_arm
from zoomkv.evaluation.replay import replayed_bytes
from zoomkv.evaluation.statistics import mcnemar
from zoomkv.generation import Generator, load

ZOOMR: dict[str, Any] = {"window": 64, "consensus": 2, "top_k": 2}
POLICIES: dict[str, dict[str, Any]] = {
    "random": {},
    "h2o": {},
    "snapkv": {},
    "rpc": {},
    "r_kv": {},
    "initial_recent": {},
    "beacon_kv": {},
    "streaming_llm": {"count_prefix": False},
}
SPLITS = (0, 1, 4, 16, 28, 31)  # beacons of 32 observation queries


def main() -> None:
    arguments = _arguments()
    session = Session(arguments)
    {
        "recall": recall,
        "fidelity": lambda s: agreement(s, "fidelity", _fidelity_arms(arguments.budgets)),
        "ablation": lambda s: agreement(s, "ablation", _ablation_arms(arguments.budgets)),
        "tables": lambda s: None,
    }[arguments.what](session)
    print(tables(session.record))


class Session:
    """The record that all commands share, and the model, loaded when first needed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.path = Path(arguments.out)
        names = ("checkpoint", "n", "steps", "seed", "max_new_tokens", "precision")
        settings = json.loads(json.dumps({name: getattr(arguments, name) for name in names}))
        self.record: dict[str, Any] = {"settings": settings, "recall": {}}
        if self.path.exists():
            self.record = json.loads(self.path.read_text(encoding="utf-8"))
            if self.record["settings"] != settings:
                raise SystemExit(f"{self.path} holds a run with other settings: name another --out")
        self._loaded: tuple[Any, Any] | None = None

    @property
    def model(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        if self._loaded is None:
            self._loaded = load(self.arguments.checkpoint, precision=self.arguments.precision)
        return self._loaded

    @property
    def problems(self) -> list[Trace]:
        """The ledgers; their seed is used in no training."""
        shape = LedgerShape(steps=tuple(self.arguments.steps))
        return list(ledgers(self.arguments.n, self.arguments.seed, shape))

    def save(self) -> None:
        """Writes the record as a whole."""
        write_json(self.path, self.record, indent=None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["recall", "fidelity", "ablation", "tables"])
    parser.add_argument("--checkpoint", default="checkpoints/zoomr-smollm2-135m")
    parser.add_argument("--n", type=int, default=30)
    parser.add_argument("--traces", type=int, default=6, help="texts for fidelity and ablation")
    parser.add_argument("--steps", type=int, nargs=2, default=(12, 20))
    parser.add_argument("--seed", type=int, default=404)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--max-new-tokens", type=int, default=1000)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", default="benchmarks/records/reasoning.json")
    return parser.parse_args()


# -- recall ----------------------------------------------------------------------------------------


def recall(session: Session) -> None:
    """Runs the arms that the record lacks."""
    _arm(session, "full", "full")
    for budget in session.arguments.budgets:
        for policy in session.arguments.policies:
            _arm(session, f"{policy} {budget}", policy, budget=budget, **POLICIES[policy])
    zoomr = _arm(session, "zoomr", "zoomr", **ZOOMR)
    if "h2o as zoomr" not in session.record["recall"]:
        budget = matching(partial(_bytes, session), zoomr.device_bytes[0], 400)
        _arm(session, "h2o as zoomr", "h2o", budget=budget, count_prefix=True)


def _arm(session: Session, name: str, policy: str, **options: Any) -> Arm:
    done = session.record["recall"]
    if name not in done:
        arguments = session.arguments
        generator = Generator(*session.model, policy, **options)
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[shown]}"))
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(name, total=arguments.n, shown="")
            for arm in run_arm(
                generator, session.problems, arguments.batch_size, arguments.max_new_tokens
            ):
                shown = f"recalled {sum(arm.recalled)}, right {sum(arm.right)}, {arm.seconds:.0f} s"
                progress.update(bar, completed=len(arm.recalled), shown=shown)
        print(f"{name}: {shown} of {arguments.n}", file=sys.stderr)
        done[name] = arm.to_dict()
        if name != "full":  # whose texts are what all others are fed
            done[name] |= {"texts": [], "ids": []}
        session.save()
    return Arm(**done[name])


def _bytes(session: Session, budget: int) -> float:
    """Mean device bytes of a ledger under ``h2o``, for the full cache's texts."""
    model, tokenizer = session.model
    generator = Generator(model, tokenizer, "h2o", budget=budget, count_prefix=True)
    size = session.arguments.batch_size
    prompts = tokenizer(
        [generator.render(problem.problem) for problem in session.problems[:size]],
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    texts = session.record["recall"]["full"]["ids"][:size]
    total = replayed_bytes(
        generator.new_cache(),
        prompts["input_ids"],
        prompts["attention_mask"],
        texts,
        tokenizer.pad_token_id,
        model.dtype,
    )
    return total / len(texts)


# -- fidelity and ablations ------------------------------------------------------------------------

Arms = dict[str, tuple[str, dict[str, Any]]]


def _fidelity_arms(budgets: list[int]) -> Arms:
    # What rounding alone makes of it: token by token against all at once.
    arms: Arms = {"full": ("full", {})}
    for budget in budgets:
        for policy, options in POLICIES.items():
            arms[f"{policy} {budget}"] = (policy, {"budget": budget, **options})
    return arms


def _ablation_arms(budgets: list[int]) -> Arms:
    first = budgets[0]
    arms: Arms = {
        f"split {beacons}+{32 - beacons}": (
            "beacon_kv",
            {"budget": first, "beacons": beacons, "recent_queries": 32 - beacons},
        )
        for beacons in SPLITS
    }
    for budget in budgets:
        for how in ("max", "mean"):
            arms[f"{how} {budget}"] = ("beacon_kv", {"budget": budget, "aggregate": how})
    for sampling in ("continual", "naive", "kmeans"):
        arms[f"{sampling} {first}"] = ("beacon_kv", {"budget": first, "sampling": sampling})
    for budget in budgets:
        arms[f"initial+recent {budget}"] = ("initial_recent", {"budget": budget})
        if budget > 128:  # its prompt counts
            for interval in (1, 8, 16):
                options = {"budget": budget, "interval": interval}
                arms[f"sentences every {interval} {budget}"] = ("sentence_kv", options)
    return arms


def agreement(session: Session, part: str, arms: Arms) -> None:
    """Runs the arms that a part of the record lacks."""
    if "full" not in session.record["recall"]:
        raise SystemExit("run `recall` first: its full arm writes the texts")
    done = session.record.setdefault(part, {})
    # An arm that differs in nothing from one that was measured is not run again.
    known = {
        _key(arm["policy"], arm["options"]): arm
        for each in ("fidelity", "ablation")
        for arm in session.record.get(each, {}).values()
    }
    reference = None
    for name, (policy, options) in arms.items():
        if name in done:
            continue
        if (found := known.get(_key(policy, options))) is None:
            model, tokenizer = session.model
            prompts, answers = _texts(session)
            if reference is None:
                reference = full_log_probs(model, prompts, answers)
            generator = Generator(model, tokenizer, policy, **options)
            cache = generator.new_cache()
            with Progress(console=Console(stderr=True)) as progress:
                bar = progress.add_task(name, total=None)

                def watch(step: int, steps: int, bar: Any = bar, progress: Any = progress) -> None:
                    progress.update(bar, completed=step, total=steps)

                pad = tokenizer.pad_token_id
                result = fidelity(model, cache, prompts, answers, reference, pad, watch)
            footprint = cache.footprint()
            found = {
                "policy": policy,
                "options": options,
                "texts": len(answers),
                "tokens": sum(map(len, answers)),
                **result.summary(),
                "device_bytes": footprint.device_bytes,
                "query_bytes": _query_bytes(cache),
            }
            known[_key(policy, options)] = found
            print(f"{name}: KL {found['kl']:.4f}, top-1 {found['top1']:.4f}", file=sys.stderr)
        done[name] = found
        session.save()


_DEFAULTS = {"beacons": 16, "recent_queries": 16, "aggregate": "max", "sampling": "continual"}


def _key(policy: str, options: dict[str, Any]) -> str:
    return json.dumps([policy, sorted((_DEFAULTS | options).items())])


def _texts(session: Session) -> tuple[list[list[int]], list[list[int]]]:
    model, tokenizer = session.model
    generator = Generator(model, tokenizer, "full")
    count = session.arguments.traces
    prompts = [
        tokenizer(generator.render(problem.problem), add_special_tokens=False)["input_ids"]
        for problem in session.problems[:count]
    ]
    return prompts, session.record["recall"]["full"]["ids"][:count]


def _query_bytes(cache: Any) -> int:
    """Device bytes that are neither rows of the layers nor their indexes."""
    rows = storage_bytes(t for layer in cache.layers for t in layer.device_tensors())
    slots = storage_bytes(t for slots, _ in cache.groups for t in slots.device_tensors())
    return int(cache.footprint().device_bytes - rows - slots)


# -- tables ----------------------------------------------------------------------------------------


def tables(record: dict[str, Any]) -> str:
    """Everything that the record holds, as Markdown."""
    parts = []
    if record["recall"]:
        parts.append(_recall_table(record["recall"]))
    for part in ("fidelity", "ablation"):
        if record.get(part):
            parts.append(_agreement_table(part, record[part]))
    return "\n\n".join(parts)


def _recall_table(arms: dict[str, Any]) -> str:
    lines = [
        "| cache | n | recalled (95 %) | right (95 %) | p to BeaconKV, recalled | right "
        "| KV mean, MiB | KV peak | cut off | no answer | tokens |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, fields in arms.items():
        arm = Arm(**fields)
        row = arm.summary()
        rival = arms.get(f"beacon_kv {name.split()[-1]}")
        p = ["", ""]
        if rival is not None and rival is not fields:
            p = [f"{mcnemar(rival[m], fields[m]):.2g}" for m in ("recalled", "right")]
        lines.append(
            f"| {name} | {row['n']} | {_share(row, 'recalled')} | {_share(row, 'right')} "
            f"| {p[0]} | {p[1]} | {row['device_bytes_mean'] / 2**20:.2f} "
            f"| {row['device_bytes_peak'] / 2**20:.2f} | {row['truncated']} "
            f"| {row['n'] - row['extracted']} | {row['tokens']:.0f} |"
        )
    return "\n".join(lines)


def _agreement_table(part: str, arms: dict[str, Any]) -> str:
    lines = [
        f"| {part} | texts | KL (nats) | ± | same first token | ± | queries kept, MiB a text |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | {arm['texts']} | {arm['kl']:.4f} | {arm['kl_error']:.4f} "
        f"| {100 * arm['top1']:.2f} % | {100 * arm['top1_error']:.2f} "
        f"| {arm['query_bytes'] / arm['texts'] / 2**20:.2f} |"
        for name, arm in arms.items()
    ]
    return "\n".join(lines)


def _share(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{100 * row[name]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


if __name__ == "__main__":
    main()
