"""What a decode step costs with the policies that drop rows, averaged over whole eviction cycles.

What is timed are real forward passes of SmolLM2-135M, one token each, in one process: all policies
and the floor take turns, step by step, in an order drawn anew each time. A cycle is an eighth of
the budget: in it every policy evicts once, so scoring, moving and sampling queries count with their
true share.

Each cache first reads a prompt of twice the budget, drops what exceeds the budget, and goes through
a whole cycle without the model (driven as an attached model drives it, with random numbers). What a
step costs depends on the rows that are stored, not on how many tokens were seen before; ``--seen``
makes the prompt longer for those who doubt it. The budget counts everything (``count_prefix``).

The floor is a plain cache with preallocated buffers that holds as many rows.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _harness import Contender, Feeder, Report, Script, options, quiet, take_turns
from decode import FloorLayer, timed_model, twin
from transformers.cache_utils import Cache

import zoomkv
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import POLICIES, make_cache
from zoomkv.caches.tiers import storage_bytes

_EVERYTHING = {"count_prefix": True}
_POLICIES: dict[str, dict[str, Any]] = {
    "streaming_llm": {},
    "random": _EVERYTHING,
    "beacon_kv": _EVERYTHING,
    "initial_recent": _EVERYTHING,
    "rpc": _EVERYTHING,
    "snapkv": _EVERYTHING,
    "pyramidkv": _EVERYTHING,
    "chunkkv": _EVERYTHING,
    "h2o": _EVERYTHING,
    "tova": _EVERYTHING,
    "keydiff": _EVERYTHING,
    "r_kv": _EVERYTHING,
    "sentence_kv": {},
    "semanticache": {},
}
_LIMITS = {"r_kv": 1.5}  # its redundancy is quadratic
_LIMIT = 1.15


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(words)
    if arguments.quick:
        arguments.budgets, arguments.batches, arguments.cycles = [96], [2], 1
    quiet()
    report = Report(arguments, judged=not arguments.quick)
    for budget in arguments.budgets:
        for batch in arguments.batches:
            _measure(budget, batch, arguments, report)
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Decode steps with the policies that drop rows, against the floor.")
    parser.add_argument("--policies", nargs="+", choices=_POLICIES, default=list(_POLICIES))
    parser.add_argument("--budgets", nargs="+", type=int, default=[512, 1024], help="rows")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--cycles", type=int, default=2, help="eviction cycles to time")
    parser.add_argument("--seen", type=int, help="tokens of the prompt, by default 2 x budget")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--quick", action="store_true", help="a trial: a tiny random model")
    return parser


def _measure(budget: int, batch: int, arguments: argparse.Namespace, report: Report) -> None:
    model, tokenizer = timed_model(arguments.precision, arguments.quick)
    bare = twin(model)
    bare.config._attn_implementation = "benchmark_floor"
    zoomkv.attach(model, tokenizer)
    shape = ModelShape.of(model)
    script = Script(tokenizer, 24, 4, 8) if arguments.quick else Script(tokenizer)
    cycle, seen = -(-budget // 8), arguments.seen or 2 * budget
    feeder = Feeder(shape, model.dtype)
    caches: dict[str, Any] = {}
    with torch.inference_mode():
        for name in arguments.policies:
            if name not in POLICIES:
                continue
            cache = make_cache(name, model, tokenizer, budget=budget, **_POLICIES[name])
            feeder.read_prompt(cache, seen, script.word)
            feeder.think(cache, script, 0, cycle)
            cache.batch_repeat_interleave(batch)
            caches[name] = cache

        def decoding(model: Any, cache: Any) -> Callable[[int], None]:
            def step(number: int) -> None:
                token = script.token(number).expand(batch, 1)
                model(input_ids=token, cache=cache, logits_to_keep=1)

            return step

        # The mean of a cycle: between the rows that an eviction leaves and the whole budget.
        rows = budget - cycle // 2
        layers = [FloorLayer(shape, model.dtype, lambda: rows, batch) for _ in range(shape.layers)]
        floor = Contender("floor", decoding(bare, Cache(layers=layers)))
        contenders = [Contender(name, decoding(model, cache)) for name, cache in caches.items()]
        timings = take_turns(
            [floor, *contenders], cycle, cycle * (1 + arguments.cycles), script, warm_up=2
        )
    table = []
    for name, cache in caches.items():
        ratio, error = timings.ratio(name, "floor")
        footprint = cache.footprint()
        queries = _besides_rows(cache)
        table.append(
            [name, timings.milliseconds(name), ratio, round(footprint.rows_mean),
             footprint.device_bytes / 2**20, f"{queries / footprint.device_bytes:.1%}"]
        )  # fmt: skip
        label = f"{budget} rows, batch {batch}: {name}, x floor"
        report.check(label, ratio, "<=", _LIMITS.get(name, _LIMIT), error)
    table.append(["floor", timings.milliseconds("floor"), 1.0, rows, "", ""])
    report.table(
        f"Decode step, {arguments.precision}, budget {budget}, batch {batch}, "
        f"{arguments.cycles} eviction cycles of {cycle} steps",
        ["cache", "ms", "x floor", "rows stored", "device MiB", "of it queries"],
        table,
    )


def _besides_rows(cache: Any) -> int:
    """Device bytes that are neither rows nor what is kept for each row."""
    rows = storage_bytes(t for layer in cache.layers for t in layer.device_tensors())
    slots = storage_bytes(t for slots, _ in cache.groups for t in slots.device_tensors())
    return int(cache.footprint().device_bytes - rows - slots)


if __name__ == "__main__":
    raise SystemExit(main())
