"""Writes the golden files of a peer, kvpress: its scores and the tokens it keeps.

    python tests/golden/make_kvpress.py

kvpress needs an older transformers than ours, so this script makes a virtual environment of its
own and runs itself again inside it. README.md, beside this file, describes what it writes.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HERE = Path(__file__).resolve().parent
# In the order of installation: a torch that is there already is not replaced.
REQUIREMENTS = ["torch==2.13.0", "transformers==5.2.0", "kvpress==0.5.5"]

# 101 tokens end in an incomplete chunk of 8, and give layer budgets of PyramidKV that end in .5.
TINY_PROMPT_LENGTH = 101
TINY_CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.25,  # large, for attention that is far from uniform
}

TEXT = """\
The harbour master kept two logbooks. The first was bound in green cloth and held what the law
asked for: the name of each vessel, her tonnage, the hour at which she passed the breakwater, and
the fee that was paid. The second had no cover at all, and in it he wrote what he thought worth
remembering. On the ninth of March he noted that the barque Ellida had come in with a torn jib and
a crew that would not speak of it. On the tenth he noted that the wind had turned north-west, and
that Ellida's cook had bought 14 sacks of flour, although the ship was to sail within the day.

Years later, when the insurers sent a young woman to settle the claim, she read the green book
first and found nothing. Every figure agreed with every other. It was only by chance that she
lifted the loose sheets from the bottom of the drawer, and saw the line about the flour. A ship of
that size carries nine men; nine men on a voyage of four days eat one sack, perhaps two. She did
the sum again on the back of an envelope. Then she asked the clerk three questions: who had owned
the cargo, which port had been named in the papers, and whether anybody had seen the cook since.

The clerk answered the first two without looking up. At the third he put down his pen."""


def make_presses(window: dict[str, int], chunk_length: int, ratio: float) -> dict[str, Any]:
    """The presses that are run, by the name that their tensors carry."""
    import kvpress  # only the environment below has it

    snapkv = {"compression_ratio": ratio, **window}
    return {
        "streaming_llm": kvpress.StreamingLLMPress(compression_ratio=ratio, n_sink=4),
        "snapkv": kvpress.SnapKVPress(**snapkv),
        "pyramidkv": kvpress.PyramidKVPress(**snapkv, beta=20),
        "tova": kvpress.TOVAPress(compression_ratio=ratio),
        "keydiff": kvpress.KeyDiffPress(compression_ratio=ratio),
        "chunkkv": kvpress.ChunkKVPress(kvpress.SnapKVPress(**snapkv), chunk_length=chunk_length),
        "observed_attention": kvpress.ObservedAttentionPress(compression_ratio=ratio),
    }


def locate(full: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Where each row of ``kept`` ``[Hkv, n, d]`` stands in ``full`` ``[Hkv, T, d]``, bit by bit."""
    same = (kept[:, :, None] == full[:, None]).all(-1)
    if not (same.sum(-1) == 1).all():
        raise ValueError("a kept key is not exactly one of the prompt's keys")
    return same.int().argmax(-1)


def prefill(model: Any, prompt: torch.Tensor, press: Any) -> list[dict[str, torch.Tensor]]:
    """Prefills under a press, and reads from each layer's cache what the press did to it.

    Returns:
        For each layer ``keys`` ``[Hkv, T, d]`` before compression, ``scores`` ``[Hkv, T]``
        and ``kept`` ``[Hkv, n_kept]``, sorted.
    """
    scorer = getattr(press, "press", press)  # ChunkKV wraps the press that gives the scores
    layers: list[dict[str, torch.Tensor]] = [{} for _ in model.model.layers]
    score, compress = scorer.score, press.compress

    def watched_score(module: Any, *args: Any) -> torch.Tensor:
        layers[module.layer_idx]["scores"] = scores = score(module, *args)
        return scores

    def watched_compress(module: Any, hidden: Any, keys: Any, values: Any, *args: Any) -> Any:
        layers[module.layer_idx].update(keys=keys, values=values)
        return compress(module, hidden, keys, values, *args)

    scorer.score, press.compress = watched_score, watched_compress
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model.model(prompt[None], past_key_values=cache)

    for layer, left in zip(layers, cache.layers, strict=True):
        for name, tensor in layer.items():
            layer[name] = tensor[0].clone()
        index = locate(layer["keys"], left.keys[0])
        rows = torch.arange(len(index))[:, None]
        if not torch.equal(layer.pop("values")[rows, index], left.values[0]):
            raise ValueError("the kept values are not those of the kept keys")
        layer["kept"] = index.sort(-1).values
    return layers


def margin(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """For each KV head, the lowest score that was kept minus the highest that was not."""
    dropped = torch.ones_like(scores, dtype=torch.bool).scatter(1, kept, False)
    lowest = scores.masked_fill(dropped, torch.inf).amin(-1)
    return lowest - scores.masked_fill(~dropped, -torch.inf).amax(-1)


def attention_inputs(model: Any, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each layer's attention sees: queries and keys after RoPE, and values, ``[H, T, d]``."""
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen: dict[str, torch.Tensor] = {}

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        for name, tensor in {"queries": query, "keys": key, "values": value}.items():
            seen[f"inputs/{name}/{module.layer_idx}"] = tensor[0].contiguous()
        return plain(module, query, key, value, *args, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        with torch.no_grad():
            model.model(prompt[None])
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
    return seen


def write(
    name: str,
    model: Any,
    prompt: torch.Tensor,
    presses: dict[str, Any],
    *,
    more: dict[str, torch.Tensor],
    info: dict[str, Any],
    index: torch.dtype,
) -> None:
    """Runs every press on one model, and writes ``name``.safetensors with ``more`` tensors."""
    tensors = {"prompt": prompt.to(torch.int32), **more}
    runs: dict[str, Any] = {}
    depth = len(model.model.layers)
    score_layers = sorted({0, depth // 2, depth - 1})
    for run, press in presses.items():
        # Only the eager kernel gives the weights that this press sums; ChunkKV refuses them.
        attention = "eager" if run.startswith("observed_attention") else "sdpa"
        model.set_attn_implementation(attention)
        options = asdict(press)
        runs[run] = {"press": type(press).__name__, "options": options, "attention": attention}
        layers = prefill(model, prompt, press)
        for i, layer in enumerate(layers):
            tensors[f"{run}/kept/{i}"] = layer["kept"].to(index)
            if i in score_layers:
                tensors[f"{run}/scores/{i}"] = layer["scores"]
        kept = [layer["kept"].shape[-1] for layer in layers]
        report = f"{name} {run}: kept {min(kept)}..{max(kept)}"
        if not run.startswith("chunkkv"):  # which ranks chunks, not tokens
            margins = torch.stack([margin(layer["scores"], layer["kept"]) for layer in layers])
            tensors[f"{run}/margin"] = margins
            report += f", least margin {margins.min():.2g}"
        print(report)
    versions = {package: version(package) for package in ("kvpress", "transformers", "torch")}
    info = info | {"versions": versions, "runs": runs, "score_layers": score_layers}
    # One entry alone: safetensors writes several in an order that changes from run to run.
    path = HERE / f"{name}.safetensors"
    save_file(tensors, path, metadata={"info": json.dumps(info, sort_keys=True)})
    print(f"{path.name}: {path.stat().st_size} bytes")


def write_tiny() -> None:
    # Of the first 200 seeds, that with the largest least margin: here rounding decides nothing.
    torch.manual_seed(22)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_CONFIG), dtype=torch.float32).eval()
    prompt = torch.randint(TINY_CONFIG["vocab_size"], (TINY_PROMPT_LENGTH,))
    weights = {f"weights/{name}": w.clone() for name, w in model.model.state_dict().items()}
    presses = {
        f"{name}-{ratio}": press
        for ratio in (0.5, 0.25)
        for name, press in make_presses({"window_size": 16, "kernel_size": 5}, 8, ratio).items()
    }
    more = weights | attention_inputs(model, prompt)
    info = {"config": TINY_CONFIG}
    write("kvpress_tiny", model, prompt, presses, more=more, info=info, index=torch.int32)


def write_smollm2(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[0]
    checksum = json.loads((folder / "manifest.json").read_text())["model.safetensors"]
    presses = {f"{name}-0.5": press for name, press in make_presses({}, 20, 0.5).items()}
    info = {"model": "smollm2-135m", "weights_checksum": checksum}
    write("kvpress_smollm2", model, prompt, presses, more={}, info=info, index=torch.int16)


def prepare(venv: Path) -> Path:
    """The interpreter of an environment that holds exactly what ``REQUIREMENTS`` names."""
    python, stamp = venv / "bin" / "python", venv / "requirements.txt"
    wanted = "\n".join(REQUIREMENTS)
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.check_call([sys.executable, "-m", "venv", venv])
        for requirement in REQUIREMENTS:
            subprocess.check_call([python, "-m", "pip", "install", "--quiet", requirement])
        stamp.write_text(wanted)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, help="where kvpress lives (default: our cache folder)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # SmolLM2's folder
    args = parser.parse_args()
    if args.inside:
        torch.set_num_threads(1)  # sums in an order that does not depend on the machine's cores
        write_tiny()
        write_smollm2(args.inside)
        return
    from zoomkv.backbone.embedded import cache_folder, dequantised, embedded_gguf

    python = prepare((args.venv or cache_folder() / "kvpress-venv").absolute())
    folder = dequantised(embedded_gguf())
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    subprocess.check_call([python, __file__, "--inside", folder], env=environment)


if __name__ == "__main__":
    main()
