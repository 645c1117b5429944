"""Two papers' tables of device memory and throughput, on one GPU (``--table``).

``fig3``: figure 3a/b of the ZoomR paper, batch 16 and 16K tokens. Models have the shapes of
R1-Distill-Llama-8B and R1-Distill-Qwen-7B, cut to a few layers, with random weights in bf16. Device
memory is what the allocator counts above the weights, beside what the caches say of themselves;
memory at the full number of layers follows from rows and index entries. Throughput is that of the
cut model: compare the caches, not the tokens a second.

The caches get to their length as in ``decode.py``, without forward passes of the model: ``zoomr``
token by token with one row, which is then repeated (``batch_repeat_interleave``). In the timed
steps, real forwards, every row stands at another place of the script, so rows end their sentences
at different times, as in a real batch.

On CUDA, a profile says how much of the time of copies to the device there was a kernel at work.

``table4``: table 4 of the BeaconKV paper (arXiv 2609.04971), Qwen3-4B's shape and 32K generated
tokens, prompts not counted. Two models are built, of ``--layers`` and of half as many; time and
peak at 36 layers lie on the straight lines through what was measured at both, so embedding, logits
and bookkeeping count once and a layer 36 times. The peak is the allocator's: weights, cache and
work space, evictions included.

* A cache with a budget is driven past it without the model, with one row, which is then repeated.
  One whole eviction cycle, an eighth of the budget, warms up and has its peaks read, ``--cycles``
  are timed: a step is the mean of whole cycles. All rows evict in the same step.
* What keeps everything costs more with every token. It is timed at half its final length, which is
  the mean over the generation for a cost that grows evenly; its peak is taken at the end.

Latency is 32K times such a step: no prefill, no sampling. Settings whose estimate exceeds the free
memory are left out, and listed.
"""

import argparse
import gc
import sys
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
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicCache

import zoomkv
from zoomkv.caches.base import ModelShape, PolicyCache
from zoomkv.caches.beacons import WORKSPACE
from zoomkv.caches.registry import make_cache

_MIB = 2**20
_PROMPT = 256  # tokens, of table 4
_BYTES = 2  # of an element: bf16
Family = tuple[Any, Any, int, dict[str, int]]
"""Classes of configuration and model, layers, and the other sizes."""
_MODELS: dict[str, Family] = {
    "llama-8b": (LlamaConfig, LlamaForCausalLM, 32, {
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "qwen-7b": (Qwen2Config, Qwen2ForCausalLM, 28, {
        "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    }),
}  # fmt: skip
QWEN3_4B: Family = (Qwen3Config, Qwen3ForCausalLM, 36, {
    "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
})  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "full_offloaded": ("full_offloaded", {}),
    "zoomr resident": ("zoomr", {"residency": "resident"}),
    "zoomr streamed": ("zoomr", {"residency": "streamed"}),
}


_GB = 10**9  # the unit in which the sums of the BeaconKV paper come out


@dataclass(frozen=True)
class Setting:
    """A row of table 4 of the BeaconKV paper."""

    cache: str
    batch: int
    budget: int | None = None
    """Rows of output; None: everything is kept."""


_FULL, _BEACON, _RPC = (
    Setting("DynamicCache", 14), Setting("beacon_kv", 14, 2048), Setting("rpc", 14, 2048),
)  # fmt: skip
_TABLE4 = (
    _FULL,
    Setting("full", 14),
    *(
        Setting(name, batch, budget)
        for budget, batch in ((2048, 14), (2048, 192), (1024, 320))
        for name in ("beacon_kv", "rpc", "snapkv")
    ),
)
PAPER: dict[Setting, tuple[float, float, float]] = {
    _FULL: (77.0, 82.3, 5573.4),
    _BEACON: (13.3, 356.4, 1287.3),
}
"""What the BeaconKV paper's text gives of its table 4, measured on an A100 of 80 GB: peak in GB,
tokens a second, seconds for 32K tokens."""


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
        arguments.layers, arguments.window, arguments.output = 2, 64, 200
    elif arguments.device == "cpu":
        parser.error("there is no CUDA device: only --dry-run makes sense here")
    if arguments.layers < 2:
        parser.error("--layers must be at least 2")
    quiet()
    report = Report(arguments, judged=not arguments.dry_run)
    begun = time.monotonic()
    with torch.inference_mode():
        if arguments.table != "table4":
            for name in arguments.models:
                _measure_model(name, arguments, report)
        if arguments.table != "fig3":
            _measure_table4(arguments, report)
    report.details["seconds"] = time.monotonic() - begun
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Device memory and throughput of a batch of long thoughts on one GPU.")
    parser.add_argument("--table", choices=("fig3", "table4", "all"), default="all")
    parser.add_argument(
        "--models", nargs="+", choices=_MODELS, default=list(_MODELS), help="of fig3"
    )
    parser.add_argument("--layers", type=int, default=8, help="of each model that are built")
    parser.add_argument("--batch", type=int, default=16, help="of fig3")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of fig3's prompt")
    parser.add_argument(
        "--seen", type=int, default=16384, help="tokens seen in fig3, prompt included"
    )
    parser.add_argument("--window", type=int, default=512, help="window of zoomr")
    parser.add_argument(
        "--steps",
        type=int,
        default=68,
        help="to time, of caches without a budget: two selection intervals",
    )
    parser.add_argument("--output", type=int, default=32768, help="tokens that table4 generates")
    parser.add_argument("--cycles", type=int, default=1, help="eviction cycles to time in table4")
    parser.add_argument("--device", default=None, help="by default CUDA where there is one")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes, in seconds, on a CPU too"
    )
    return parser


# -- figure 3 of ZoomR -----------------------------------------------------------------------------


def _measure_model(name: str, arguments: argparse.Namespace, report: Report) -> None:
    depth = _MODELS[name][2]
    model = built(_MODELS[name], arguments.layers, arguments.dry_run, arguments.device)
    deeper = depth / arguments.layers
    results = []
    for cache in ("DynamicCache", *_CACHES):
        results.append(_measure(cache, model, deeper, arguments))
        _give_back(arguments.device)
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
    before = _allocated(arguments.device)
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
        torch.cuda.reset_peak_memory_stats()
    seconds = _timed(step, range(2, 2 + arguments.steps), name, arguments.device)
    fetched = (_fetched(cache) - moved) / arguments.steps
    held, at_full_depth = _sizes(cache, deeper)
    result = Measured(
        name=name,
        seconds=seconds,
        allocated=_allocated(arguments.device) - before,
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
    held = _held(cache)
    if not isinstance(cache, PolicyCache):
        return held, held * deeper
    index = index_bytes(cache)
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


# -- table 4 of BeaconKV ---------------------------------------------------------------------------


@dataclass
class Cost:
    """What a setting costs, at one number of layers."""

    seconds: float
    """Of a step."""
    held: float
    """Bytes of the cache."""
    peaks: Tensor
    """Most bytes allocated in each step of a cycle, weights included ``[steps]``; without CUDA,
    what weights and cache take."""

    @property
    def peak(self) -> float:
        """Most bytes allocated in any step."""
        return float(self.peaks.max())


def _measure_table4(arguments: argparse.Namespace, report: Report) -> None:
    device, tiny = arguments.device, arguments.dry_run
    depths = (arguments.layers // 2, arguments.layers)
    depth = depths[1] if tiny else QWEN3_4B[2]
    _give_back(device)
    settings = {setting: _shrunk(setting) if tiny else setting for setting in _TABLE4}
    free, skipped = _free(device), []
    for setting, actual in list(settings.items()):
        if (need := needed(actual, depths[1], arguments.output, tiny)) > free:
            skipped.append([*_label(actual), need / _GB, free / _GB])
            del settings[setting]
    if skipped:
        report.table("Left out", ["cache", "batch", "budget", "GB needed", "GB free"], skipped)
    costs: dict[Setting, list[Cost]] = {setting: [] for setting in settings}
    for layers in depths:
        before = _allocated(device)
        model = built(QWEN3_4B, layers, tiny, device)
        for setting, actual in settings.items():
            costs[setting].append(_cost(actual, model, before, arguments))
            _give_back(device)
        del model
        _give_back(device)
    rows, whole = [], {}
    for setting, actual in settings.items():
        cost = whole[setting] = at_depth(depth, depths, costs[setting])
        paper = ("", "", "") if tiny else PAPER.get(setting, ("", "", ""))[::-1]
        rows.append(
            [*_label(actual), costs[setting][1].seconds * 1e3, cost.seconds * 1e3,
             cost.seconds * arguments.output, actual.batch / cost.seconds,
             cost.held / _GB, cost.peak / _GB, *paper]
        )  # fmt: skip
    report.table(
        f"{'Tiny' if tiny else 'Qwen3-4B'}, {depths[0]} and {depths[1]} layers built, at {depth} "
        f"by straight lines; prompt {_PROMPT}, {arguments.output} generated tokens, bf16, "
        "GB of 10^9 bytes; the paper's are from an A100",
        ["cache", "batch", "budget", f"ms, {depths[1]} layers", f"ms, {depth}",
         f"s for {arguments.output}", "tokens/s", "KV GB", "peak GB",
         "paper: s", "paper: tokens/s", "paper: peak GB"],
        rows,
    )  # fmt: skip
    if _FULL in whole and _BEACON in whole:
        full, beacon = whole[_FULL], whole[_BEACON]
        report.check("Qwen3-4B: full / beacon_kv, peak", full.peak / beacon.peak, ">=", 5.8)
        report.check("Qwen3-4B: full / beacon_kv, ms", full.seconds / beacon.seconds, ">=", 4.3)
    if _RPC in whole and _BEACON in whole:
        ratio = whole[_BEACON].seconds / whole[_RPC].seconds
        report.check("Qwen3-4B: beacon_kv / rpc, ms", ratio, "<=", 1.1)
    report.details["table4"] = [
        {
            **vars(actual),
            "layers": depths,
            "costs": [{**vars(c), "peaks": c.peaks.tolist()} for c in costs[setting]],
        }
        for setting, actual in settings.items()
    ]


def _shrunk(setting: Setting) -> Setting:
    budget = None if setting.budget is None else setting.budget // 16
    return Setting(setting.cache, 1 + setting.batch // 160, budget)


def _label(setting: Setting) -> list[Any]:
    return [setting.cache, setting.batch, setting.budget or ""]


def at_depth(depth: int, depths: tuple[int, int], costs: Sequence[Cost]) -> Cost:
    """The costs at another number of layers, on the straight line through two.

    Steps have their peaks for different reasons, some of which grow with the layers and some of
    which don't: each step has its own line.
    """
    small, large = costs
    beyond = (depth - depths[1]) / (depths[1] - depths[0])
    return Cost(
        *(
            more + (more - less) * beyond
            for less, more in zip(vars(small).values(), vars(large).values(), strict=True)
        )
    )


def needed(setting: Setting, layers: int, output: int, tiny: bool) -> float:
    """Device bytes that a setting takes at most, by arithmetic, the model included."""
    config = _config(QWEN3_4B, layers, tiny)
    heads, kv_heads, width = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    rows, row = _PROMPT + (setting.budget or output), 2 * kv_heads * width * _BYTES
    held = rows * (row + 4 * kv_heads) * 33 // 32  # int32 positions; slack of the buffers
    if setting.budget is None:
        work = 2 * rows * row  # a layer, copied when a row is added
    else:
        # Kept queries, and those that replace them.
        held += heads * width * 64 * _BYTES
        # Scores and weights of 32 queries in fp32 with three masks, and the keys in fp32, twice.
        work = rows * (32 * heads * 12 + 2 * 4 * kv_heads * width)
        # The choice of beacons, layer by layer at most.
        work += 6 * 4 * max(32 * heads * width, WORKSPACE // setting.batch)
    logits = 8 * config.vocab_size
    # A tenth for what the allocator can't use.
    return 1.1 * (
        parameters(QWEN3_4B, layers, tiny) * _BYTES
        + setting.batch * (layers * held + work + logits)
    )


def _cost(setting: Setting, model: Any, before: int, arguments: argparse.Namespace) -> Cost:
    """Measures a setting; ``before`` is what was allocated before the model."""
    device, label = arguments.device, f"{setting.cache}, batch {setting.batch}"
    if setting.budget is None:
        steps = arguments.steps
        cache = _kept(setting, model, _PROMPT + (arguments.output - steps) // 2 - 2)
        _peaks(setting, model, cache, before, 2)
        seconds = _timed(_decoding(setting, model, cache), range(steps), label, device)
        del cache
        _give_back(device)
        cache = _kept(setting, model, _PROMPT + arguments.output - 2)
        peaks = _peaks(setting, model, cache, before, 2)
    else:
        cycle = -(-setting.budget // 8)
        cache = _bounded(setting, model)
        peaks = _peaks(setting, model, cache, before, cycle)
        steps = cycle * arguments.cycles
        seconds = _timed(_decoding(setting, model, cache), range(steps), label, device)
    return Cost(seconds, _held(cache), peaks)


def _decoding(setting: Setting, model: Any, cache: Any) -> Callable[[int], None]:
    token = torch.full((setting.batch, 1), Script(BareTokenizer()).word, device=model.device)

    def step(number: int) -> None:
        model(input_ids=token, cache=cache, logits_to_keep=1)

    return step


def _peaks(setting: Setting, model: Any, cache: Any, before: int, steps: int) -> Tensor:  # [steps]
    """Decodes, which also warms up, and reads the peak of each step."""
    step, peaks = _decoding(setting, model, cache), torch.zeros(steps, dtype=torch.float64)
    weights = sum(p.nbytes for p in model.parameters())
    for number in range(steps):
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step(number)
            peaks[number] = torch.cuda.max_memory_allocated() - before
        else:
            step(number)
            peaks[number] = weights + _held(cache)
    return peaks


def _kept(setting: Setting, model: Any, length: int) -> Any:
    """A cache that keeps everything, after a prompt of so many tokens."""
    whole = setting.cache == "DynamicCache"
    cache: Any = DynamicCache() if whole else make_cache(setting.cache, model)
    feeder = Feeder(ModelShape.of(model), torch.bfloat16, model.device.type, setting.batch)
    feeder.read_prompt(cache, length, Script(BareTokenizer()).word)
    return cache


def _bounded(setting: Setting, model: Any) -> Any:
    """A cache whose budget has been full, so that what it holds grows no more."""
    assert setting.budget is not None
    cache = make_cache(setting.cache, model, budget=setting.budget)
    script = Script(BareTokenizer())
    feeder = Feeder(ModelShape.of(model), torch.bfloat16, model.device.type)
    feeder.read_prompt(cache, _PROMPT, script.word)
    feeder.think(cache, script, 0, setting.budget + 1)
    cache.batch_repeat_interleave(setting.batch)
    return cache


# -- models and the device -------------------------------------------------------------------------


def built(family: Family, layers: int, tiny: bool, device: str) -> Any:
    """A model with random weights in bf16, attached; ``tiny`` keeps only the family."""
    config = _config(family, layers, tiny)
    with _defaults(torch.bfloat16, device):
        model = family[1](config).eval()
    zoomkv.attach(model, BareTokenizer())
    return model


def parameters(family: Family, layers: int, tiny: bool = False) -> int:
    """Number of weights that a model has; none is made."""
    with torch.device("meta"):
        return sum(p.numel() for p in family[1](_config(family, layers, tiny)).parameters())


def _config(family: Family, layers: int, tiny: bool) -> Any:
    sizes = _TINY if tiny else family[3]
    return family[0](num_hidden_layers=layers, max_position_embeddings=1 << 17, **sizes)


def _timed(step: Callable[[int], None], numbers: range, label: str, device: str) -> float:
    """Mean seconds of a step."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for number in track(numbers, f"timing {label}"):
        step(number)
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / len(numbers)


def _held(cache: Any) -> int:
    """Device bytes of a cache; of transformers' own, what its tensors take."""
    if isinstance(cache, PolicyCache):
        return cache.footprint().device_bytes
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device.startswith("cuda") else sys.maxsize


def _give_back(device: str) -> None:
    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()


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
