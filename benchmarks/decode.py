"""What a decode step costs at 16K seen tokens: our caches, the floor, and transformers' own cache.

What is timed are real forward passes of the model, one token each, in one process: all contenders
take turns, step by step, in an order drawn anew each time, so that noise hits all alike. Means are
over whole paragraphs of scripted ids, so over at least ten whole selection intervals: steps that
choose, fetch rows, evict them and write to the host count with their true share. Caches that have
no intervals and read everything take part in every eighth round only.

The caches get to 16K tokens without 16K forward passes: they are driven as an attached model drives
them (``begin``, ``update``, ``commit``), with random keys, values and queries. For ``zoomr`` token
by token through prompt, paragraphs and summaries, so that its tables, index, archive and working
sets are those of a real run; a streamed cache does not bring rows to the device meanwhile, as
nobody would look at them. Caches that read everything, and ``streaming_llm``, are filled as by one
long prompt, which leaves them in the same state. Attention costs the same whatever the numbers are.
Random summaries win votes alike, so nearly all of them are read: more rows than a real text would
need, not fewer.

The floor is a plain cache with preallocated buffers that holds just the rows that the policy reads
in the same round, under the same attention function, without any bookkeeping.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _harness import (
    BareTokenizer,
    Contender,
    Feeder,
    Report,
    Script,
    Timings,
    nothing_loaded,
    options,
    quiet,
    take_turns,
)
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import zoomkv
from zoomkv.backbone.delimiters import add_to_model
from zoomkv.backbone.load import Precision, load_base
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import make_cache
from zoomkv.ops.attention import grouped_attention

_FASTER = {"fp32": 2.5, "bf16": 2.0}  # than DynamicCache, at least
_SELDOM = 8  # rounds between two steps of what reads everything
_SHORT = 512  # rows of the caches that compare an attached model with an unattached one


class FloorLayer(CacheLayerMixin):
    """Preallocated buffers; each step writes one row and reads as many as ``rows`` says."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, rows: Callable[[], int], batch: int = 1
    ) -> None:
        super().__init__()
        size = (batch, shape.kv_heads, rows() + 4 * _SHORT, shape.head_dim)
        self._keys, self._values = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
        self.rows = rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # 2 x [1, Hkv, rows, D]
        """Writes the newest row over the last; returns all."""
        rows = self.rows()
        self._keys[:, :, rows - 1 : rows] = key_states
        self._values[:, :, rows - 1 : rows] = value_states
        return self._keys[:, :, :rows], self._values[:, :, :rows]

    def get_seq_length(self) -> int:
        """Rows that are read, the newest apart."""
        return self.rows() - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Everything is readable."""
        return self.rows(), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


def _floor_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    return grouped_attention(query, key, value, scale=scaling).transpose(1, 2), None


AttentionInterface.register("benchmark_floor", _floor_attention)
AttentionMaskInterface.register("benchmark_floor", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.seen, arguments.prompt, arguments.window, arguments.paragraphs = 600, 40, 32, 1
    if arguments.seen < _SHORT + arguments.prompt:
        parser.error(f"--seen must be at least {_SHORT + arguments.prompt}")
    quiet()
    report = Report(arguments, judged=not arguments.quick)
    for precision in arguments.precision:
        _measure(precision, arguments, report)
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Decode steps of SmolLM2-135M at many seen tokens, against floor and peers.")
    parser.add_argument("--seen", type=int, default=16384, help="tokens seen, prompt included")
    parser.add_argument("--prompt", type=int, default=512, help="of them, tokens of the prompt")
    parser.add_argument("--window", type=int, default=512, help="window of zoomr")
    parser.add_argument(
        "--paragraphs", type=int, default=2, help="to time; each holds eight selection intervals"
    )
    parser.add_argument("--precision", nargs="+", choices=_FASTER, default=list(_FASTER))
    parser.add_argument(
        "--quick", action="store_true", help="a trial, in seconds: a tiny random model, few tokens"
    )
    return parser


def _measure(precision: Precision, arguments: argparse.Namespace, report: Report) -> None:
    model, tokenizer = timed_model(precision, arguments.quick)
    script = Script(tokenizer, 24, 4, 8) if arguments.quick else Script(tokenizer)
    start = arguments.seen - arguments.prompt
    stop = start + arguments.paragraphs * script.period
    with torch.inference_mode():
        caches, contenders = _contenders(model, tokenizer, script, arguments)
        before = {name: cache.footprint() for name, cache in caches.items()}
        timings = take_turns(contenders, start, stop, script)
    rows = []
    for contender in contenders:
        name = contender.name
        cells: list[Any] = ["", "", ""]
        if name in caches:
            after = caches[name].footprint()
            moved = after.bytes_to_device - before[name].bytes_to_device
            steps = after.seen - before[name].seen
            cells = [round(after.rows_mean), after.device_bytes / 2**20, moved / steps / 2**20]
        rows.append([name, timings.milliseconds(name), *_against(timings, name), *cells])
    report.table(
        f"Decode step, {precision}, {arguments.seen} seen tokens, "
        f"{arguments.paragraphs * script.choices} selection intervals",
        ["cache", "ms", "x its floor", "DynamicCache / it", "rows read", "device MiB",
         "MiB fetched a step"],
        rows,
    )  # fmt: skip
    for name in ("zoomr resident", "streaming_llm"):
        value, error = timings.ratio(name, f"floor of {name}")
        report.check(f"{precision}: {name}, x floor", value, "<=", 1.15, error)
        value, error = timings.ratio("DynamicCache", name)
        report.check(f"{precision}: DynamicCache / {name}", value, ">=", _FASTER[precision], error)
    value, error = timings.ratio(_ATTACHED, _PLAIN)
    # Within the noise of the paired runs: no slower by more than two standard errors.
    report.check(f"{precision}: attached / unattached", value, "<=", 1 + 2 * error, error)
    report.details[precision] = {
        c.name: {"ms": timings.milliseconds(c.name), "every": c.every} for c in contenders
    }


_ATTACHED = f"DynamicCache, {_SHORT} rows, attached"
_PLAIN = f"DynamicCache, {_SHORT} rows, unattached"


def _against(timings: Timings, name: str) -> tuple[str, str]:
    if name.startswith(("floor", _ATTACHED, _PLAIN)):
        return "", ""
    base = {"zoomr resident": name, "streaming_llm": name, "zoomr streamed": "zoomr resident"}
    floor = f"{timings.ratio(name, f'floor of {base[name]}')[0]:.3f}" if name in base else ""
    return floor, f"{timings.ratio('DynamicCache', name)[0]:.2f}"


def timed_model(precision: Precision, quick: bool) -> tuple[Any, Any]:
    """The model, not attached yet, and a tokenizer with the two delimiters."""
    if quick:
        return small_model(precision)
    model, tokenizer = load_base("smollm2-135m", precision)
    add_to_model(model, tokenizer)
    return model, tokenizer


def small_model(precision: str) -> tuple[Any, Any]:
    """A tiny random model for trials, and as much of a tokenizer as it needs."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=65536,
    )
    return LlamaForCausalLM(config).eval().to(dtype=dtype), BareTokenizer()


def twin(model: Any) -> Any:
    """Another model object over the same weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _contenders(
    model: Any, tokenizer: Any, script: Script, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[Contender]]:
    """Our caches by name, filled; and everything that is to be timed."""
    plain, bare = twin(model), twin(model)
    bare.config._attn_implementation = "benchmark_floor"
    zoomkv.attach(model, tokenizer)
    shape, seen = ModelShape.of(model), arguments.seen
    feeder = Feeder(shape, model.dtype)
    caches: dict[str, Any] = {}
    for residency in ("resident", "streamed"):
        cache = make_cache("zoomr", model, residency=residency, window=arguments.window)
        with nothing_loaded():
            feeder.read_prompt(cache, arguments.prompt, script.word)
            feeder.think(cache, script, 0, seen - arguments.prompt - 2)
        caches[f"zoomr {residency}"] = cache
    rows = caches["zoomr resident"].slots.length
    caches["streaming_llm"] = make_cache("streaming_llm", model, budget=rows)
    caches["full"] = make_cache("full", model)
    caches["full_offloaded"] = make_cache("full_offloaded", model)
    for name in ("streaming_llm", "full", "full_offloaded"):
        feeder.read_prompt(caches[name], seen - 2, script.word)

    def ours(name: str) -> Contender:
        every = _SELDOM if name.startswith("full") else 1
        return Contender(name, _decoding(model, caches[name], script), every)

    def floor(name: str) -> Contender:
        slots = caches[name].groups[0][0]
        cache = Cache(
            layers=[
                FloorLayer(shape, model.dtype, lambda: slots.length) for _ in range(shape.layers)
            ]
        )
        return Contender(f"floor of {name}", _decoding(bare, cache, script))

    def peer(name: str, model: Any, length: int, every: int = 1) -> Contender:
        cache = DynamicCache()
        feeder.read_prompt(cache, length, script.word)
        return Contender(name, _decoding(model, cache, script), every)

    return caches, [
        ours("zoomr resident"),
        floor("zoomr resident"),
        ours("zoomr streamed"),
        ours("streaming_llm"),
        floor("streaming_llm"),
        peer(_ATTACHED, model, _SHORT),
        peer(_PLAIN, plain, _SHORT),
        ours("full"),
        ours("full_offloaded"),
        peer("DynamicCache", plain, seen - 2, _SELDOM),
    ]


def _decoding(model: Any, cache: Any, script: Script) -> Callable[[int], None]:
    def step(number: int) -> None:
        model(input_ids=script.token(number), cache=cache, logits_to_keep=1)

    return step


if __name__ == "__main__":
    raise SystemExit(main())
