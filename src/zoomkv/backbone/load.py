"""Base models: a hub id, a local folder, a GGUF file or the embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

from zoomkv.backbone.embedded import EMBEDDED_NAME, dequantised, embedded_gguf

Precision = Literal["fp32", "bf16", "nf4", "int8"]
SUPPORTED = ("llama", "qwen2", "qwen3", "mistral")


def load_base(
    name: str,
    precision: Precision = "fp32",
    device: str = "auto",
    attention: str = "sdpa",
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, in evaluation mode.

    Args:
        name: A hub id, a local folder, a ``.gguf`` file, or ``smollm2-135m``.
        precision: Weights in fp32 or bf16, or quantised by bitsandbytes to NF4 (double
            quantisation, bf16 compute) or int8.
        device: ``auto`` takes CUDA where there is one, else the CPU.
        attention: The transformers attention implementation (``sdpa``, ``eager``,
            ``flash_attention_2``).

    Returns:
        ``(model, tokenizer)``.

    Raises:
        ValueError: Unknown name, unsupported architecture, windowed attention.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision '{precision}': choose one of {', '.join(get_args(Precision))}")
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve(name)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model '{name}': no such hub id, folder or GGUF file that can be read ({reason})"
        ) from error
    check_supported(config, name)
    target = _device(device)
    options: dict[str, Any] = {"attn_implementation": attention}
    if precision in ("nf4", "int8"):
        options |= {"quantization_config": _quantisation(precision), "device_map": {"": target}}
    else:
        options["dtype"] = torch.float32 if precision == "fp32" else torch.bfloat16
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except OSError as error:
        raise ValueError(f"model '{name}': {str(error).strip().splitlines()[0]}") from error
    if precision in ("fp32", "bf16"):
        model.to(target)
    return model.eval(), load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a base model; it pads on the left, as generation needs."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(name), padding_side="left")
    except (OSError, ValueError) as error:
        raise ValueError(f"model '{name}': {str(error).strip().splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def resolve(name: str) -> str:
    """What ``from_pretrained`` is to read for a model name; GGUF files are dequantised once."""
    if name == EMBEDDED_NAME:
        return str(dequantised(embedded_gguf()))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model '{name}': there is no such GGUF file")
        return str(dequantised(path))
    return str(path) if path.exists() else name


def check_supported(config: Any, name: str = "model") -> None:
    """Refuses, by name, models whose layers the caches don't know.

    Raises:
        ValueError: Another family than Llama, Qwen2, Qwen3 or Mistral, or windowed layers.
    """
    family = config.model_type
    if family not in SUPPORTED:
        raise ValueError(
            f"model '{name}': architecture '{family}' is not supported; "
            f"supported are {', '.join(SUPPORTED)}"
        )
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = "sliding_attention" in kinds or (window is not None and not kinds)
    if windowed and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"model '{name}': '{family}' with a sliding window of {window} tokens is not "
            "supported; its layers drop rows on their own"
        )


def _device(device: str) -> torch.device:
    if device != "auto":
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _quantisation(precision: Precision) -> Any:
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
