"""What this package relies on in transformers; a failure here explains many others."""

from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

PROMPT = torch.arange(20, 31)[None]


def test_attention_modules_get_cache_and_keywords(tiny: Any) -> None:
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        model, probe, seen = tiny(family), object(), []
        for layer in model.get_decoder().layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, seen=seen: seen.append(kwargs), with_kwargs=True
            )
        model(PROMPT, cache=DynamicCache(config=model.config), zoomkv=probe)
        assert len(seen) == 2
        for kwargs in seen:
            assert isinstance(kwargs["cache"], Cache)
            assert kwargs["zoomkv"] is probe
            assert "position_ids" in kwargs and "cache_position" not in kwargs


def test_update_gets_the_keywords(tiny_llama: Any) -> None:
    calls = []

    class Spy(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs["kwargs"])
            return super().update(*args)

    model, probe = tiny_llama(), object()
    model(PROMPT, cache=Spy(config=model.config), zoomkv=probe)
    assert [call["zoomkv"] is probe for call in calls] == [True, True]


def test_a_mask_with_four_dimensions_is_handed_on(tiny_llama: Any) -> None:
    masks = []

    def spy(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        masks.append(mask)
        return torch.zeros_like(q).transpose(1, 2), None

    AttentionInterface.register("contract_spy", spy)
    model = tiny_llama()
    model.set_attn_implementation("contract_spy")
    sentinel = torch.empty(1, 1, 1, 0)
    model(PROMPT, attention_mask=sentinel)
    assert all(mask is sentinel for mask in masks) and len(masks) == 2


def test_the_decoder_returns_every_hidden_state(tiny_llama: Any) -> None:
    model, hidden = tiny_llama(), []
    model.get_decoder().register_forward_hook(lambda m, a, output: hidden.append(output[0]))
    model(PROMPT, logits_to_keep=1)
    assert hidden[0].shape == (1, 11, 32)


def test_generate_counts_columns_by_get_seq_length(tiny_llama: Any) -> None:
    fed = []

    class Claims(DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 4

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

    model = tiny_llama()
    model.get_decoder().register_forward_pre_hook(
        lambda m, a, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(PROMPT, cache=Claims(config=model.config), max_new_tokens=1)
    assert fed == [7]


def test_layer_interface(tiny_llama: Any) -> None:
    assert CacheLayerMixin.__abstractmethods__ == {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
    }
    assert {"reorder_cache", "batch_repeat_interleave", "batch_select_indices", "crop"} <= set(
        dir(Cache)
    )
