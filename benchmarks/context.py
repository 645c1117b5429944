"""A decode step of ``sekv`` behind a long context, and what building its memory costs.

What is timed are real forward passes of SmolLM2-135M, one token each, in one process: all
contenders take turns, step by step, in an order drawn anew each time. The context is real text (the
documentation strings of Python's standard library), read once by the model, and what follows it is
fed token by token, so that rows are fetched from the host as they would be. Steps in which tokens
join the context count with their share.

The floor is a plain cache with preallocated buffers that holds as many rows as ``sekv`` reads:
exact ones, fetched ones and coarse entries. ``DynamicCache`` holds everything; once more at 2K.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _harness import Contender, Report, Script, options, quiet, take_turns
from decode import FloorLayer, timed_model, twin
from transformers.cache_utils import Cache, DynamicCache

import zoomkv
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import make_cache
from zoomkv.data.long_text import StdlibText
from zoomkv.evaluation.recording import Recording, record

_SHORT = 2048
_LIMITS = {"floor": 1.5, "DynamicCache 2K": 1.4}


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(words)
    if arguments.quick:
        arguments.contexts, arguments.steps, arguments.window = [300], 6, 16
    quiet()
    report = Report(arguments, judged=not arguments.quick)
    model, tokenizer = timed_model(arguments.precision, arguments.quick)
    bare = twin(model)
    floor = twin(model)
    floor.config._attn_implementation = "benchmark_floor"
    zoomkv.attach(model, tokenizer)
    for context in arguments.contexts:
        _measure(context, arguments, report, model, tokenizer, bare, floor)
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Decode steps behind a long context, and building its memory.")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--budget", type=float, default=0.1, help="share of full KV")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64, help="decode steps to time")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--quick", action="store_true", help="a trial: a tiny random model")
    return parser


def _measure(
    context: int,
    arguments: argparse.Namespace,
    report: Report,
    model: Any,
    tokenizer: Any,
    bare: Any,
    floor: Any,
) -> None:
    shape, warm_up = ModelShape.of(model), 2
    length = context + arguments.steps + warm_up
    ids = _random(length, shape) if arguments.quick else _text(tokenizer, length)
    with torch.inference_mode():
        begun = time.perf_counter()
        recording = record(model, ids[:, :context])
        reading = time.perf_counter() - begun
        cache = make_cache(
            "sekv", model, budget=arguments.budget, window=arguments.window, slack=arguments.window
        )
        cache.expect_prompt(context)
        begun = time.perf_counter()
        recording.feed(cache, context)  # besides building it copies the rows once
        building = time.perf_counter() - begun

        def decoding(model: Any, cache: Any) -> Callable[[int], None]:
            def step(number: int) -> None:
                at = context + warm_up + number
                model(input_ids=ids[:, at : at + 1], cache=cache, logits_to_keep=1)

            return step

        rows = _rows_read(cache)
        layers = [FloorLayer(shape, model.dtype, lambda: rows) for _ in range(shape.layers)]
        contenders = [
            Contender("floor", decoding(floor, Cache(layers=layers))),
            Contender("sekv", decoding(model, cache)),
            Contender("DynamicCache", decoding(bare, _filled(recording, context)), every=2),
        ]
        short = min(_SHORT, context // 2)
        contenders.append(
            Contender("DynamicCache 2K", decoding(bare, _filled(recording, short)), every=2)
        )
        timings = take_turns(contenders, 0, arguments.steps, Script(tokenizer), warm_up)
    table = []
    for contender in contenders:
        name = contender.name
        ratio, _ = timings.ratio(name, "floor")
        table.append([name, timings.milliseconds(name), ratio])
    footprint, trace = cache.footprint(), cache.trace()
    asked = sum(sum(entry["asked"]) for entry in trace)
    fetched = sum(sum(entry["fetched"]) for entry in trace)
    row = 2 * shape.head_dim * model.dtype.itemsize
    full = context * shape.layers * shape.kv_heads * row
    report.table(
        f"Decode step behind {context} tokens, {arguments.precision}, budget {arguments.budget}",
        ["cache", "ms", "x floor"],
        table,
    )
    report.table(
        f"sekv behind {context} tokens",
        ["rows read", "device MiB", "of full", "fetched of what was asked", "KiB a step"],
        [[
            rows, footprint.device_bytes / 2**20, f"{footprint.device_bytes / full:.1%}",
            f"{fetched / max(asked, 1):.1%}",
            fetched * row / 2**10 / (arguments.steps + warm_up),
        ]],
    )  # fmt: skip
    for base, limit in _LIMITS.items():
        ratio, error = timings.ratio("sekv", base)
        report.check(f"{context}: sekv, x {base}", ratio, "<=", limit, error)
    if context >= 4 * _SHORT:
        ratio, error = timings.ratio("sekv", "DynamicCache")
        report.check(f"{context}: sekv, x DynamicCache", ratio, "<=", 1.0, error)
    label = f"{context}: building the memory, x reading the prompt"
    report.check(label, building / reading, "<=", 0.5)


def _random(length: int, shape: ModelShape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (1, length), generator=generator)


def _text(tokenizer: Any, length: int) -> torch.Tensor:
    ids: list[int] = []
    for document in StdlibText().documents(len):
        ids += tokenizer(document["text"], add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            break
    return torch.tensor([ids[:length]])


def _rows_read(cache: Any) -> int:
    """Exact rows, fetched ones and coarse entries that a query reads in a layer."""
    layer = cache.layers[0]
    entries = 0 if layer.entries is None else layer.entries.keys.shape[2]
    return int(cache.slots.length + layer.held.slots + entries)


def _filled(recording: Recording, length: int) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(recording.keys, recording.values, strict=True)):
        cache.update(keys[:, :, :length].clone(), values[:, :, :length].clone(), layer)
    return cache


if __name__ == "__main__":
    raise SystemExit(main())
