"""What the caches hold on the device over a long generation, from the storages of their tensors.

No model runs in the first part: the caches are driven as an attached model drives them, with random
keys, values and queries and scripted ids (a prompt, then paragraphs of 250 tokens, each with a
summary of 20 and its two delimiters). Device bytes are read after every single step, indexes and
the slack of buffers included. With random numbers nearly every summary gets a vote and is read,
which is the worst case. The full caches are counted without slack, which favours them.

The figures for larger models are arithmetic: rows and index entries as measured, times the bytes of
a row of that model; ZoomR's by its peak.

The second part is about budgets for the output (BeaconKV, arXiv 2609.04971, table 4). Two layers of
Qwen3-4B's shape, one batch row, are driven past the full budget for several eviction cycles, until
nothing grows any more. What they hold at the peak of all steps, rows, index and kept queries apart,
is multiplied by layers and batch: layers are alike, and so are batch rows. The work space of an
eviction is not part of a cache; ``gpu.py`` sees it.

The third part runs SmolLM2-135M over a real text with an exact and with an int8 host tier: bytes
moved between the tiers, and how often both put the same token first.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
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
from gpu import PAPER, QWEN3_4B, Setting, parameters
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import zoomkv
from zoomkv.backbone.delimiters import add_to_model
from zoomkv.backbone.load import load_base
from zoomkv.backbone.prefill import prefill
from zoomkv.caches.base import PolicyCache
from zoomkv.caches.registry import make_cache
from zoomkv.caches.tiers import storage_bytes
from zoomkv.data.render import PROMPT, Renderer
from zoomkv.data.traces import read_traces
from zoomkv.ops.consensus import memory_saving

_TEXT = Path(__file__).parents[1] / "data" / "samples" / "word_problems.jsonl"
_BYTES = 2  # of an element: bf16
_GB = 10**9  # the unit in which the BeaconKV paper's sums come out
_SHORT_PROMPT = 256  # tokens, where budgets count the output
_BUDGETED = ("beacon_kv", "rpc")
_RESIDENCIES = ("resident", "streamed")


@dataclass(frozen=True)
class Shape:
    """The part of a model's shape that its KV cache depends on."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int

    @property
    def row(self) -> int:
        """Bytes of K and V of one token in one layer, over the batch."""
        return 2 * self.batch * self.kv_heads * self.head_dim * _BYTES


SMOLLM2 = Shape("SmolLM2-135M", 30, 9, 3, 64, batch=1)
LARGER = (
    Shape("R1-Distill-Qwen-7B", 28, 28, 4, 128, batch=16),
    Shape("R1-Distill-Llama-8B", 32, 32, 8, 128, batch=16),
)
QWEN3 = Shape("Qwen3-4B", 36, 32, 8, 128, batch=14)
TINY = Shape("tiny", 4, 4, 2, 16, batch=1)


@dataclass
class Meter:
    """Follows the device bytes of a cache that is being driven."""

    cache: PolicyCache
    bytes: list[int] = field(default_factory=list)
    peak: int = 0
    index_at_peak: int = 0
    """Bytes at the peak that are not keys and values."""

    def read(self) -> None:
        """To be called after each step."""
        now = storage_bytes(self.cache.device_tensors())
        self.bytes.append(now)
        if now > self.peak:
            self.peak, self.index_at_peak = now, index_bytes(self.cache)

    @property
    def mean(self) -> float:
        """Mean over the steps."""
        return sum(self.bytes) / len(self.bytes)


@dataclass(frozen=True)
class Held:
    """Device bytes of a cache with a budget, by what they are for."""

    rows: int
    """Keys and values, the slack of buffers included."""
    index: int
    """Which row stands where."""
    queries: int
    """What is kept to score rows with."""

    @classmethod
    def by(cls, cache: PolicyCache) -> "Held":
        """What a cache holds now."""
        sets = [layer.working_set for layer in cache.layers]
        rows = storage_bytes(tensor for each in sets for tensor in each.device_tensors())
        slots = [slots for slots, _ in cache.groups]
        index = storage_bytes(tensor for each in slots for tensor in each.device_tensors())
        return cls(rows, index, storage_bytes(cache.device_tensors()) - rows - index)

    @property
    def total(self) -> int:
        """All of them."""
        return self.rows + self.index + self.queries

    def times(self, number: int) -> "Held":
        """The same, so many times."""
        return Held(self.rows * number, self.index * number, self.queries * number)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(words)
    if arguments.quick:
        arguments.generated, arguments.text_tokens = 320, 80
        arguments.output, arguments.budget = 2000, 128
    quiet()
    report = Report(arguments, judged=not arguments.quick)
    with torch.inference_mode():
        for part in arguments.parts:
            _PARTS[part](arguments, report)
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Device memory of the caches over a long generation, and the int8 host tier.")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens, N_p")
    parser.add_argument("--generated", type=int, default=16384, help="tokens, N_g")
    parser.add_argument("--window", type=int, default=512, help="w")
    parser.add_argument("--consensus", type=int, default=2, help="paragraphs read in full, c")
    parser.add_argument("--budget", type=int, default=2048, help="rows of output")
    parser.add_argument("--output", type=int, default=32768, help="tokens, where budgets count")
    parser.add_argument(
        "--text-tokens", type=int, default=512, help="of the real text, for the host tier"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a trial, in seconds: tiny random model, made-up text",
    )
    return parser


# -- device memory ---------------------------------------------------------------------------------


def _device_memory(arguments: argparse.Namespace, report: Report) -> None:
    shape = TINY if arguments.quick else SMOLLM2
    prompt, generated = arguments.prompt, arguments.generated
    script = Script(BareTokenizer())
    meters, caches = {}, {}
    for residency in _RESIDENCIES:
        name = f"zoomr {residency}"
        cache = _cache(
            shape, "zoomr", residency=residency, window=arguments.window,
            consensus=arguments.consensus,
        )  # fmt: skip
        meters[name], caches[name] = Meter(cache), cache
        feeder = Feeder(cache.shape, torch.bfloat16)
        with nothing_loaded():
            feeder.read_prompt(cache, prompt, script.word)
            feeder.think(cache, script, 0, generated, meters[name].read)
    full = {name: _full(shape, name, prompt + generated) for name in ("full", "full_offloaded")}
    # Both grow evenly from the prompt on.
    average = (prompt + generated / 2) / (prompt + generated)
    mib = 2**20
    rows = [
        [name, size / mib, size / mib, size * average / mib, full["full"] / size,
         full["full_offloaded"] / size, full["full"] / size]
        for name, size in full.items()
    ]  # fmt: skip
    for name, meter in meters.items():
        rows.append(
            [name, meter.bytes[-1] / mib, meter.peak / mib, meter.mean / mib,
             full["full"] / meter.peak, full["full_offloaded"] / meter.peak,
             full["full"] * average / meter.mean]
        )  # fmt: skip
        report.details[name] = {
            "peak": meter.peak, "mean": meter.mean, "index_at_peak": meter.index_at_peak,
            "footprint": caches[name].footprint().to_dict(),
        }  # fmt: skip
    report.table(
        f"Device KV, {shape.name}, {shape.layers} layers, bf16, N_p={prompt}, N_g={generated}, "
        f"w={arguments.window}, c={arguments.consensus}, paragraphs of 250+20 tokens",
        ["cache", "MiB at the end", "peak", "mean", "full / peak", "full_offloaded / peak",
         "mean full / mean"],
        rows,
    )  # fmt: skip
    closed = generated // script.period
    formula = memory_saving(
        prompt, generated, arguments.consensus, 250, 20, closed, arguments.window
    )
    resident, streamed = meters["zoomr resident"], meters["zoomr streamed"]
    report.details["formula"] = {"voted": closed, "saving": formula}
    report.check("full / zoomr resident", full["full"] / resident.peak, ">=", 5.4)
    report.check("full / zoomr streamed", full["full"] / streamed.peak, ">=", 75)
    offloaded = full["full_offloaded"]
    report.check("full_offloaded / zoomr streamed", offloaded / streamed.peak, ">=", 5)
    _larger_models(shape, resident, streamed, prompt + generated, report)


def _larger_models(
    measured: Shape, resident: Meter, streamed: Meter, tokens: int, report: Report
) -> None:
    def rows_of(meter: Meter, layers: int) -> float:
        """Rows of each of the layers that are on the device."""
        return (meter.peak - meter.index_at_peak) / layers / measured.row

    rows, buffer = rows_of(resident, measured.layers), rows_of(streamed, 2)
    # An index entry is a key without a value.
    entries = 2 * streamed.index_at_peak / measured.layers / measured.row
    gib, lines = 2**30, []
    for model in (measured, *LARGER):
        index = model.layers * entries / 2
        held = [model.layers * tokens, 2 * tokens, model.layers * rows + index, 2 * buffer + index]
        sizes = [count * model.row / gib for count in held]
        full, offloaded, _, zoomr = held
        lines.append(
            [f"{model.name}, {model.layers} layers, batch {model.batch}", *sizes,
             full / zoomr, offloaded / zoomr]
        )  # fmt: skip
        if model is not measured:
            report.check(f"{model.name}: full / zoomr streamed", full / zoomr, ">=", 20)
            report.check(f"{model.name}: full_offloaded / it", offloaded / zoomr, ">=", 4)
    report.table(
        f"By arithmetic, bf16, GiB: {rows:.0f} rows resident, {buffer:.0f} in each buffer, "
        f"{entries:.0f} index entries",
        ["model", "full", "full_offloaded", "zoomr resident", "zoomr streamed",
         "full / streamed", "full_offloaded / streamed"],
        lines,
    )  # fmt: skip


def _cache(shape: Shape, policy: str, **chosen: Any) -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=shape.heads * shape.head_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 20,
    )
    # A cache reads its model's configuration and nothing else.
    return make_cache(
        policy, SimpleNamespace(config=config, dtype=torch.bfloat16), BareTokenizer(), **chosen
    )


def _full(shape: Shape, policy: str, tokens: int) -> int:
    """Device bytes of a cache that reads everything, without slack."""
    cache = _cache(shape, policy)
    feeder = Feeder(cache.shape, torch.bfloat16)
    with nothing_loaded():
        feeder.read_prompt(cache, tokens - 1, 4)
        feeder.decode(cache, torch.tensor([[4]]))
    layers = 2 if policy == "full_offloaded" else shape.layers
    exact = layers * tokens * shape.row
    held = storage_bytes(cache.device_tensors())
    assert exact <= held, "less than the rows take"
    return exact


# -- budgets for the output ------------------------------------------------------------------------


def _budgets(arguments: argparse.Namespace, report: Report) -> None:
    shape = replace(TINY, batch=3) if arguments.quick else QWEN3
    budget, tokens = arguments.budget, _SHORT_PROMPT + arguments.output
    driven, times = replace(shape, layers=2, batch=1), shape.layers // 2 * shape.batch
    held = {"full": Held(_full(driven, "full", tokens), 0, 0).times(times)}
    for policy in _BUDGETED:
        held[policy] = peak_past_budget(driven, policy, _SHORT_PROMPT, budget).times(times)
    full = held["full"].total
    weights = _BYTES * parameters(QWEN3_4B, shape.layers, tiny=arguments.quick)
    rows, sums = [], []
    for name, parts in held.items():
        sizes = (parts.rows, parts.index, parts.queries, parts.total)
        rows.append(
            [name, *(size / _GB for size in sizes), f"{parts.queries / parts.rows:.1%}",
             full / parts.total]
        )  # fmt: skip
        paper = _paper(name, budget) if not arguments.quick else None
        sums.append(
            [name, weights / _GB, parts.total / _GB, (weights + parts.total) / _GB,
             (weights + full) / (weights + parts.total), *(paper or ("", ""))]
        )  # fmt: skip
        report.details[f"budget {budget}, {name}"] = {**vars(parts), "weights": weights}
        if name != "full":
            report.check(f"{shape.name}: full / {name}", full / parts.total, ">=", 12)
    where = (
        f"{shape.name}, {shape.layers} layers, batch {shape.batch}, bf16, prompt {_SHORT_PROMPT}, "
        f"{arguments.output} generated tokens, budget {budget}, GB of 10^9 bytes"
    )
    report.table(
        f"Device KV, measured on 2 layers and 1 batch row, times {times}: {where}",
        ["cache", "rows", "index", "queries", "all", "queries / rows", "full / it"],
        rows,
    )
    report.table(
        f"With weights, by arithmetic, beside the BeaconKV paper's peak memory: {where}",
        ["cache", "weights", "KV", "both", "full / it", "paper: both", "paper: full / it"],
        sums,
    )


def _paper(name: str, budget: int) -> tuple[float, float] | None:
    """GB that the BeaconKV paper measured, and how often they go into those of the full cache."""
    full = PAPER[Setting("DynamicCache", QWEN3.batch)][0]
    setting = Setting(name, QWEN3.batch, budget)
    peak = full if name == "full" else PAPER[setting][0] if setting in PAPER else None
    return None if peak is None else (peak, full / peak)


def peak_past_budget(shape: Shape, policy: str, prompt: int, budget: int, cycles: int = 4) -> Held:
    """What a cache with a budget for the output holds at most, in all steps.

    Args:
        shape: Of the cache.
        policy: Its name.
        prompt: Tokens.
        budget: Rows of output.
        cycles: Eviction cycles past the full budget, an eighth of it each.

    Raises:
        RuntimeError: If it still grows in the last cycle: then more tokens would need more.
    """
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 20,
    )
    # Some policies read the model's rotary embedding.
    model = Qwen3ForCausalLM(config).to(dtype=torch.bfloat16)
    cache = make_cache(policy, model, budget=budget)
    script, held = Script(BareTokenizer()), []
    feeder = Feeder(cache.shape, torch.bfloat16, batch=shape.batch)
    feeder.read_prompt(cache, prompt, script.word)
    held.append(Held.by(cache))
    cycle = -(-budget // 8)
    feeder.think(cache, script, 0, budget + cycles * cycle, lambda: held.append(Held.by(cache)))
    before, last = (max(part, key=lambda h: h.total) for part in (held[:-cycle], held[-cycle:]))
    if last.total > before.total:
        raise RuntimeError(f"{policy} grows beyond its budget of {budget} rows")
    return before


# -- host precision --------------------------------------------------------------------------------


def _host_precision(arguments: argparse.Namespace, report: Report) -> None:
    model, tokenizer, prompt, thought = _text(arguments)
    zoomkv.attach(model, tokenizer)
    lines, worst = [], 0.0
    for residency in _RESIDENCIES:
        runs = {}
        for precision in ("auto", "int8"):
            cache = make_cache(
                "zoomr", model, window=64, residency=residency, host_precision=precision
            )
            first = _read(model, cache, prompt, thought, f"{residency}, {precision}")
            counts = cache.footprint()
            runs[precision] = first, counts.bytes_to_device + counts.bytes_to_host, counts
        share = runs["int8"][1] / runs["auto"][1]
        agreement = float((runs["int8"][0] == runs["auto"][0]).float().mean())
        worst = max(worst, share)
        for precision, (_, moved, counts) in runs.items():
            same = agreement if precision == "int8" else 1.0
            lines.append(
                [f"{residency}, {'bf16' if precision == 'auto' else precision}", moved / 2**20,
                 counts.host_bytes / 2**20, moved / runs["auto"][1], f"{same:.1%}"]
            )  # fmt: skip
        report.details[f"host tier, {residency}"] = {"share": share, "top_1": agreement}
    report.table(
        f"Host tier of zoomr (w=64, c=2), {len(prompt) + len(thought)} tokens of real text, "
        f"{len(thought)} of them generated",
        ["residency, precision", "MiB moved", "host MiB", "of bf16's bytes", "same first token"],
        lines,
    )
    report.check("int8 host tier, share of bf16's bytes moved", worst, "<=", 0.54)


def _read(model: Any, cache: Any, prompt: Tensor, thought: Tensor, label: str) -> Tensor:  # [T]
    """Feeds a text token by token; returns the most likely next token at each place."""
    first = [prefill(model, cache, prompt[None]).argmax(-1)]
    for number in track(range(len(thought)), label):
        logits = model(thought[number].view(1, 1), cache=cache, logits_to_keep=1).logits
        first.append(logits[:, -1].argmax(-1))
    return torch.cat(first)


def _text(arguments: argparse.Namespace) -> tuple[Any, Any, Tensor, Tensor]:
    """A model in bf16, its tokenizer, and the ids of a prompt and of a thought with summaries."""
    if arguments.quick:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        model, tokenizer = LlamaForCausalLM(config).eval().to(dtype=torch.bfloat16), BareTokenizer()
        script = Script(tokenizer, 24, 4, 8)
        ids = torch.cat([script.token(n)[0] for n in range(arguments.text_tokens)])
        return model, tokenizer, ids[:16], ids[16:]
    model, tokenizer = load_base("smollm2-135m", "bf16")
    add_to_model(model, tokenizer)
    rendered = Renderer(tokenizer, max_length=4096).all(read_traces(_TEXT))
    longest = max(rendered, key=lambda example: len(example.input_ids))
    ids = torch.tensor(longest.input_ids)
    start = longest.kinds.count(PROMPT)
    return model, tokenizer, ids[:start], ids[start : start + arguments.text_tokens]


_PARTS = {"zoomr": _device_memory, "budgets": _budgets, "host": _host_precision}


if __name__ == "__main__":
    raise SystemExit(main())
