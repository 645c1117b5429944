"""What ``sekv`` holds of a long context in models that don't fit here, from storages.

No model runs. One layer of the model's shape (two, where layers are streamed) is driven as an
attached model drives it, with random keys, values and queries, through a prompt and some tokens
after it; device bytes are read after every step, indexes and the slack of buffers included, and
multiplied by the layers, which are alike. States of a narrow made-up decoder with a vocabulary of
64 give the surprisals, so spans are cut at random places.

Weights are arithmetic. The SeKV paper's sums (arXiv 2606.31145, section 4: Qwen2.5-14B, 74.8 GB
with the full cache at 128K and 34.9 GB with SeKV) stand beside ours; they hold 20 GB more than
weights and KV come to.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from _harness import BareTokenizer, Feeder, Report, Script, options, quiet
from gpu import Family, parameters
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from zoomkv.caches.registry import make_cache
from zoomkv.caches.tiers import storage_bytes

_GB = 10**9
_HIDDEN, _VOCABULARY = 8, 64
_BYTES = 2  # of an element: bf16
_DRIVEN = {"resident": 1, "streamed": 2}  # layers
_STEPS = 40  # after the prompt: tokens join the context at least once

_LLAMA3_8B: Family = (LlamaConfig, LlamaForCausalLM, 32, {
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
})  # fmt: skip
_QWEN25_14B: Family = (Qwen2Config, Qwen2ForCausalLM, 48, {
    "hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 152064,
    "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
})  # fmt: skip
_MODELS = {"Llama-3-8B": _LLAMA3_8B, "Qwen2.5-14B": _QWEN25_14B}
_PAPER = {("Qwen2.5-14B", 131072): (74.8, 34.9), ("Qwen2.5-14B", 8192): (36.0, 31.2)}


@dataclass
class Peaks:
    """Most bytes of the layers that were driven."""

    reading: int = 0
    """While the prompt is read."""
    passing: int = 0
    """What attention reads then that the cache does not keep, of one layer."""
    decoding: int = 0
    """From the first token after it on."""
    host: int = 0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(words)
    quiet()
    report = Report(arguments, judged=not arguments.quick)
    contexts = [512] if arguments.quick else arguments.contexts
    with torch.inference_mode():
        for context in contexts:
            for name in arguments.models:
                _measure(name, context, arguments, report)
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("Device memory of sekv at long contexts of larger models.")
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=list(_MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 131072])
    parser.add_argument("--budget", type=float, default=0.1, help="share of full KV")
    parser.add_argument("--quick", action="store_true", help="a trial: a short context")
    return parser


def _measure(name: str, context: int, arguments: argparse.Namespace, report: Report) -> None:
    family = _MODELS[name]
    layers, sizes = family[2], family[3]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes.get("head_dim") or sizes["hidden_size"] // heads
    row = 2 * kv_heads * width * _BYTES
    full = layers * (context + _STEPS) * row
    weights = _BYTES * parameters(family, layers)
    table = []
    for residency in ("resident", "streamed"):
        driven = _DRIVEN[residency]
        peaks = peaks_of(driven, heads, kv_heads, width, context, arguments.budget, residency)
        # A streamed cache has the exact rows of two layers on the device, whatever its depth.
        reading = peaks.reading * (layers if residency == "resident" else 1) + peaks.passing
        held = peaks.decoding * layers // driven
        paper = _PAPER.get((name, context), ("", ""))
        table.append(
            [residency, full / _GB, held / _GB, f"{held / full:.1%}", reading / _GB,
             peaks.host * layers // driven / _GB, weights / _GB, (weights + full) / _GB,
             (weights + held) / _GB, f"{1 - (weights + held) / (weights + full):.1%}", *paper]
        )  # fmt: skip
        report.check(
            f"{name}, {context}, {residency}: share of full KV", held / full, "<=", arguments.budget
        )
    report.table(
        f"{name}, {layers} layers, {context} tokens, bf16, budget {arguments.budget}, GB of 10^9 "
        "bytes",
        ["residency", "full KV", "sekv KV", "of full", "KV while reading", "host", "weights",
         "with full KV", "with sekv", "less", "paper: full", "paper: SeKV"],
        table,
    )  # fmt: skip


def peaks_of(
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    context: int,
    budget: float,
    residency: str,
) -> Peaks:
    """Reads a prompt of random numbers into a cache and decodes some tokens."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=heads * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=1 << 20,
    )
    head = torch.nn.Linear(_HIDDEN, _VOCABULARY, bias=False, dtype=torch.bfloat16)
    model: Any = SimpleNamespace(
        config=config, dtype=torch.bfloat16, get_output_embeddings=lambda: head
    )
    model.get_decoder = lambda: model
    cache = make_cache("sekv", model, budget=budget, residency=residency)
    peaks, script = Peaks(), Script(BareTokenizer())
    feeder = Feeder(cache.shape, torch.bfloat16, hidden=_HIDDEN)

    def note(keys: torch.Tensor, values: torch.Tensor) -> None:
        held = storage_bytes(cache.device_tensors())
        peaks.reading = max(peaks.reading, held)
        peaks.passing = storage_bytes([*cache.device_tensors(), keys, values]) - held

    cache.expect_prompt(context)
    feeder.read(cache, context, script.word, note)
    for number in range(_STEPS):
        peaks.decoding = max(peaks.decoding, storage_bytes(cache.device_tensors()))
        feeder.decode(cache, script.token(number).expand(1, 1))
    peaks.decoding = max(peaks.decoding, storage_bytes(cache.device_tensors()))
    peaks.host = storage_bytes(cache.host_tensors())
    return peaks


if __name__ == "__main__":
    raise SystemExit(main())
