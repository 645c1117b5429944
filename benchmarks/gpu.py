"""Figure 3a/b of the ZoomR paper: device memory and throughput at batch 16 and 16K tokens.

Models have the shapes of R1-Distill-Llama-8B and R1-Distill-Qwen-7B, cut to a few layers, with
random weights in bf16. Device memory is what the allocator counts above the weights, beside what
the caches say of themselves; memory at the full number of layers follows from rows and index
entries. Throughput is that of the cut model: compare the caches, not the tokens a second.

The caches get to their length as in ``decode.py``, without forward passes of the model: ``zoomr``
token by token with one row, which is then repeated (``batch_repeat_interleave``). In the timed
steps, real forwards, every row stands at another place of the script, so rows end their sentences
at different times, as in a real batch.

On CUDA, a profile says how much of the time of copies to the device there was a kernel at work.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from _harness import (
    BareTokenizer,
    Feeder,
    Report,
    Script,
    index_bytes,
    nothing_loaded,
    options,
    quiet,
    track,
)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache

import zoomkv
from zoomkv.caches.base import ModelShape, PolicyCache
from zoomkv.caches.registry import make_cache

_MIB = 2**20
_MODELS: dict[str, tuple[Any, Any, int, dict[str, int]]] = {
    "llama-8b": (LlamaConfig, LlamaForCausalLM, 32, {
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "qwen-7b": (Qwen2Config, Qwen2ForCausalLM, 28, {
        "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    }),
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "full_offloaded": ("full_offloaded", {}),
    "zoomr resident": ("zoomr", {"residency": "resident"}),
    "zoomr streamed": ("zoomr", {"residency": "streamed"}),
}


@dataclass
class Measured:
    """What one cache cost."""

    name: str
    seconds: float
    """Of a step."""
    allocated: int
    """Bytes above the weights, after the last step; 0 without CUDA."""
    peak: int
    """The same, maximum over the steps."""
    device_bytes: int
    """What the cache says; of transformers' own cache, what its tensors take."""
    at_full_depth: float
    """The same at the model's full number of layers."""
    fetched: float
    """Bytes to the device, each step."""
    overlap: float | None = None
    """See ``overlapped``."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.dry_run:
        arguments.batch, arguments.prompt, arguments.seen, arguments.steps = 3, 64, 900, 12
        arguments.layers, arguments.window = 2, 64
    elif arguments.device == "cpu":
        parser.error("there is no CUDA device: only --dry-run makes sense here")
    quiet()
    report = Report(arguments, judged=not arguments.dry_run)
    begun = time.monotonic()
    with torch.inference_mode():
        for name in arguments.models:
            _measure_model(name, arguments, report)
    report.details["seconds"] = time.monotonic() - begun
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Device memory and throughput of a batch of long thoughts on one GPU.")
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=list(_MODELS))
    parser.add_argument("--layers", type=int, default=8, help="of each model that are built")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--seen", type=int, default=16384, help="tokens seen, prompt included")
    parser.add_argument("--window", type=int, default=512, help="window of zoomr")
    parser.add_argument("--steps", type=int, default=68, help="to time: two selection intervals")
    parser.add_argument("--device", default=None, help="by default CUDA where there is one")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes, in seconds, on a CPU too"
    )
    return parser


def _measure_model(name: str, arguments: argparse.Namespace, report: Report) -> None:
    config_class, model_class, depth, sizes = _MODELS[name]
    config = config_class(
        num_hidden_layers=arguments.layers,
        max_position_embeddings=1 << 17,
        **(_TINY if arguments.dry_run else sizes),
    )
    with _defaults(torch.bfloat16, arguments.device):
        model = model_class(config).eval()
    zoomkv.attach(model, BareTokenizer())
    deeper = depth / arguments.layers
    results = []
    for cache in ("DynamicCache", *_CACHES):
        results.append(_measure(cache, model, deeper, arguments))
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    by_name = {result.name: result for result in results}
    # Transformers' own cache has no slack: that favours the full cache.
    full, offloaded = by_name["DynamicCache"], by_name["full_offloaded"]
    streamed = by_name["zoomr streamed"]
    rows = [
        [r.name, arguments.batch / r.seconds, r.seconds * 1e3, r.allocated / _MIB, r.peak / _MIB,
         r.device_bytes / _MIB, r.at_full_depth / _MIB, full.at_full_depth / r.at_full_depth,
         r.fetched / _MIB, "" if r.overlap is None else f"{r.overlap:.0%}"]
        for r in results
    ]  # fmt: skip
    report.table(
        f"{name}, {arguments.layers} of {depth} layers, batch {arguments.batch}, "
        f"{arguments.seen} seen tokens, bf16 (MiB)",
        ["cache", "tokens/s", "ms", "allocated", "peak", "footprint", f"at {depth} layers",
         "full / it", "fetched a step", "copies hidden"],
        rows,
    )  # fmt: skip
    saved = full.at_full_depth / streamed.at_full_depth
    report.check(f"{name}: full / zoomr streamed", saved, ">=", 20)
    saved = offloaded.at_full_depth / streamed.at_full_depth
    report.check(f"{name}: full_offloaded / zoomr streamed", saved, ">=", 4)
    for result in (offloaded, streamed):
        if result.overlap is not None:
            report.check(f"{name}: {result.name}, copies hidden", result.overlap, ">=", 0.5)
    report.details[name] = [vars(result) for result in results]


def _measure(name: str, model: Any, deeper: float, arguments: argparse.Namespace) -> Measured:
    cuda = arguments.device.startswith("cuda")
    before = torch.cuda.memory_allocated() if cuda else 0
    script = Script(BareTokenizer())
    cache = _filled(name, model, script, arguments)
    phases = torch.arange(arguments.batch) * script.period // arguments.batch
    start = arguments.seen - arguments.prompt

    def step(number: int) -> None:
        token = script.token(start + number, phases).to(arguments.device)
        model(input_ids=token, cache=cache, logits_to_keep=1)

    for number in range(2):  # warms up
        step(number)
    moved = _fetched(cache)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for number in track(range(2, 2 + arguments.steps), f"timing {name}"):
        step(number)
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / arguments.steps
    fetched = (_fetched(cache) - moved) / arguments.steps
    held, at_full_depth = _sizes(cache, deeper)
    result = Measured(
        name=name,
        seconds=seconds,
        allocated=torch.cuda.memory_allocated() - before if cuda else 0,
        peak=torch.cuda.max_memory_allocated() - before if cuda else 0,
        device_bytes=held,
        at_full_depth=at_full_depth,
        fetched=fetched,
    )
    if cuda and name in ("full_offloaded", "zoomr streamed"):
        result.overlap = _profile(lambda n: step(2 + arguments.steps + n))
    return result


def _filled(name: str, model: Any, script: Script, arguments: argparse.Namespace) -> Any:
    """A cache that holds ``seen`` tokens of each row, filled without the model."""
    shape = ModelShape.of(model)
    if name == "DynamicCache":
        cache: Any = DynamicCache()
    else:
        policy, chosen = _CACHES[name]
        if policy == "zoomr":
            chosen = {**chosen, "window": arguments.window}
        cache = make_cache(policy, model, **chosen)
    thinking = name.startswith("zoomr")
    batch = 1 if thinking else arguments.batch
    feeder = Feeder(shape, torch.bfloat16, arguments.device, batch)
    with nothing_loaded():
        feeder.read_prompt(cache, arguments.prompt if thinking else arguments.seen, script.word)
        if thinking:
            feeder.think(cache, script, 0, arguments.seen - arguments.prompt)
            cache.batch_repeat_interleave(arguments.batch)
    return cache


def _fetched(cache: Any) -> int:
    return cache.footprint().bytes_to_device if isinstance(cache, PolicyCache) else 0


def _sizes(cache: Any, deeper: float) -> tuple[int, float]:
    """Device bytes, and what they would be with ``deeper`` times as many layers."""
    if not isinstance(cache, PolicyCache):
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        return held, held * deeper
    held, index = cache.footprint().device_bytes, index_bytes(cache)
    # All layers of a cache without rows of their own on the device share two buffers.
    shared = not any(True for _ in cache.layers[1].device_tensors())
    return held, index * deeper + (held - index) * (1 if shared else deeper)


def _profile(step: Callable[[int], None], steps: int = 3) -> float:
    """Share of the copies to the device, or of the kernels if those are shorter, that overlap."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(steps):
            step(number)
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        if "HtoD" in event.name:
            copies.append(span)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    return overlapped(copies, kernels)


Span = tuple[float, float]


def overlapped(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Time during which both kinds of spans are under way, over the time of the shorter kind.

    1 means that the shorter kind is hidden as a whole, 0 that the two take turns.
    """
    marks = [
        (at, kind, change)
        for kind, spans in enumerate((one, other))
        for span in spans
        for at, change in zip(span, (1, -1), strict=True)
    ]
    depth, total, both, last = [0, 0], [0.0, 0.0], 0.0, 0.0
    for at, kind, change in sorted(marks):
        busy = [count > 0 for count in depth]
        total = [time + (at - last) * on for time, on in zip(total, busy, strict=True)]
        both += (at - last) * all(busy)
        depth[kind] += change
        last = at
    return both / min(total) if min(total) > 0 else 0.0


@contextmanager
def _defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """New tensors have this dtype and are made on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    raise SystemExit(main())
