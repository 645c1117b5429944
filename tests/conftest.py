"""Tiny random models of every supported family, and the cases that run over them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 8}),
}


def make_tiny(family: str, *, kv_heads: int = 2, tied: bool = False, seed: int = 0, **options: Any):
    """A model of 2 layers, hidden 32, 4 query heads, 128 tokens; greedy output varies."""
    config_class, model_class, extra = _FAMILIES[family]
    chosen = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = config_class(**{**chosen, **extra, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A large tied embedding would make every token predict itself.
            if parameter.dim() == 2 and not (tied and "embed" in name):
                parameter.mul_(6)
    model.generation_config.pad_token_id = 0
    return model


def _maker(family: str) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        return make_tiny(family, **options)

    return make


@pytest.fixture
def tiny_llama() -> Callable[..., Any]:
    """Makes a tiny Llama; options as for ``make_tiny``."""
    return _maker("llama")


@pytest.fixture
def tiny_qwen2() -> Callable[..., Any]:
    """Makes a tiny Qwen2."""
    return _maker("qwen2")


@pytest.fixture
def tiny_qwen3() -> Callable[..., Any]:
    """Makes a tiny Qwen3."""
    return _maker("qwen3")


@pytest.fixture
def tiny_mistral() -> Callable[..., Any]:
    """Makes a tiny Mistral without a window."""
    return _maker("mistral")


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Makes a tiny model of the named family: ``tiny("qwen2", tied=True)``."""
    return make_tiny
