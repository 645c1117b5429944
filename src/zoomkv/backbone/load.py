"""Base models: a hub id, a local folder, a GGUF file or the embedded default."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from zoomkv.backbone.embedded import EMBEDDED_NAME, check_spelling, dequantised, embedded_gguf
from zoomkv.backbone.families import check_supported

Precision = Literal["fp32", "bf16", "nf4", "int8"]
QUANTISED = ("nf4", "int8")
_NO_MODEL = "no such hub id, folder or GGUF file that can be read"


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
        ValueError: No such model, a broken one, unsupported architecture, windowed attention, or
            another option that can't be had.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision '{precision}': choose one of {', '.join(get_args(Precision))}")
    target = _device(device)
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve(name)
    with _explained(name, _NO_MODEL):
        config = AutoConfig.from_pretrained(folder)
    check_supported(config, name)
    options: dict[str, Any] = {
        "attn_implementation": attention,
        "dtype": torch.float32 if precision == "fp32" else torch.bfloat16,
        "output_loading_info": True,
    }
    if precision in QUANTISED:
        options |= {"quantization_config": _quantisation(precision), "device_map": {"": target}}
    with _explained(name, "can't be loaded"), _quiet_off_terminal():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise ValueError(f"model '{name}': {len(missing)} weights are missing, first {missing[0]}")
    if precision not in QUANTISED:
        model.to(target)
    return model.eval(), load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a base model; it pads on the left, as generation needs.

    Raises:
        ValueError: No such model, or its tokenizer knows no end of text.
    """
    from transformers import AutoTokenizer

    with _explained(name, "its tokenizer can't be read"):
        tokenizer = AutoTokenizer.from_pretrained(resolve(name), padding_side="left")
    if tokenizer.eos_token is None:
        raise ValueError(f"model '{name}': its tokenizer has no end-of-text token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def resolve(name: str) -> str:
    """What ``from_pretrained`` is to read for a model name; GGUF files are dequantised once."""
    if name == EMBEDDED_NAME:
        with _quiet_off_terminal():
            return str(dequantised(embedded_gguf()))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model '{name}': there is no such GGUF file")
        with _explained(name, "not a GGUF file that transformers can read"), _quiet_off_terminal():
            return str(dequantised(path))
    if path.exists():
        return str(path)
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise ValueError(f"model '{name}': there is no such folder")
    check_spelling(name)
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Asks the hub for a model once: ``from_pretrained`` would try for half a minute."""
    from transformers.utils import has_file

    with _explained(name, _NO_MODEL):
        if not has_file(name, "config.json"):
            raise OSError("the hub can't be reached, or has no model's config.json of that name")


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turns what transformers raises over a bad model into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if reason.startswith("model '"):
            raise
        raise ValueError(f"model '{name}': {what} ({reason})") from error


@contextmanager
def _quiet_off_terminal() -> Iterator[None]:
    """Hides transformers' progress bars where no terminal would show them move."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device '{device}': choose cpu, cuda, cuda:N or auto") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device '{device}': there is no CUDA device here; choose cpu or auto")
    return target


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
