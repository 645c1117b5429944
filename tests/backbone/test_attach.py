"""Attaching: plain models stay what they were, everything is undone, errors are named."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import zoomkv
from zoomkv.backbone.attach import attached_tokenizer, detach, is_attached
from zoomkv.backbone.prefill import prefill
from zoomkv.caches.registry import make_cache

PROMPT = torch.arange(20, 31)[None]


def hooks(model: Any) -> int:
    decoder = model.get_decoder()
    return sum(
        len(getattr(decoder, name))
        for name in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_forward_pre_hooks_with_kwargs",
            "_forward_hooks_with_kwargs",
        )
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_attached_model_with_a_plain_cache_is_bit_equal(
    tiny: Any, family: str, attention: str
) -> None:
    model = tiny(family)
    model.set_attn_implementation(attention)
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            one = model(ids, attention_mask=mask, cache=DynamicCache(config=model.config))
            more = torch.cat([mask, mask.new_ones(2, 1)], 1)
            two = model(ids[:, :1], attention_mask=more, cache=one.cache)
            return [one.logits, two.logits, model(ids, use_cache=False).logits]

    before = outputs()
    with zoomkv.attach(model):
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(), strict=True))


def test_attach_is_idempotent_and_undone(tiny_llama: Any) -> None:
    model = tiny_llama()
    config = model.config.to_dict()
    tokenizer = object()
    with zoomkv.attach(model, tokenizer):
        assert is_attached(model) and attached_tokenizer(model) is tokenizer
        assert hooks(model) == 4
        with zoomkv.attach(model):  # changes nothing, undoes nothing
            assert hooks(model) == 4
        assert is_attached(model)
        assert model.config._attn_implementation == "zoomkv_sdpa"
    assert not is_attached(model) and attached_tokenizer(model) is None
    assert hooks(model) == 0
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == config
    detach(model)  # nothing to do


def test_a_copied_model_is_attached_on_its_own(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    cache = make_cache("full", twin)
    out = twin.generate(PROMPT, cache=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(out, tiny_llama().generate(PROMPT, max_new_tokens=8, do_sample=False))
    detach(twin)
    assert not is_attached(twin) and hooks(twin) == 0
    assert is_attached(model) and hooks(model) == 4


def test_peft_wrapped_models(tiny_llama: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(r=2, init_lora_weights=False)).eval()
    plain = model.generate(input_ids=PROMPT, max_new_tokens=12, do_sample=False)
    with zoomkv.attach(model):
        cache = make_cache("full", model)
        out = model.generate(input_ids=PROMPT, cache=cache, max_new_tokens=12, do_sample=False)
        assert torch.equal(out, plain)
        assert cache.seen == 22
    assert hooks(model) == 0


def test_deprecated_keyword_works(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    cache = make_cache("full", model)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        model.get_decoder()(PROMPT[:, :1], past_key_values=cache)
    assert cache.seen == 12


def test_the_step_survives_gradient_checkpointing(tiny_llama: Any) -> None:
    """Checkpointing drops the cache, not other keywords: training relies on that."""
    from zoomkv.backbone.protocol import Step

    model = tiny_llama().train()
    model.gradient_checkpointing_enable()
    seen: list[Any] = []
    for layer in model.get_decoder().layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs.get("probe")), with_kwargs=True
        )
    step = Step(PROMPT, None, PROMPT, 0, True)
    assert not hasattr(step, "to")
    model(PROMPT, probe=step, use_cache=False).logits.sum().backward()
    assert len(seen) == 4 and all(probe is step for probe in seen)  # forward and recomputation


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tiny: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8)), "gpt2"),
        (lambda tiny: tiny("mistral", sliding_window=8), "sliding window of 8"),
        (
            lambda tiny: tiny(
                "qwen2",
                use_sliding_window=True,
                sliding_window=8,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "sliding window of 8",
        ),
    ],
    ids=["gpt2", "window", "hybrid"],
)
def test_unsupported_models_are_refused_by_name(tiny: Any, make: Any, message: str) -> None:
    model = make(tiny)
    with pytest.raises(ValueError, match=message):
        zoomkv.attach(model)
    with pytest.raises(ValueError, match=message):
        make_cache("full", model)
    assert hooks(model) == 0


def test_inputs_embeds_are_refused(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    embeds = model.get_input_embeddings()(PROMPT)
    with pytest.raises(ValueError, match="inputs_embeds is not supported"):
        model.generate(inputs_embeds=embeds, cache=make_cache("full", model), max_new_tokens=2)


def test_a_cache_without_attachment_says_so(tiny_llama: Any) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"zoomkv.attach\(model\)"):
        model.generate(PROMPT, cache=make_cache("full", model), max_new_tokens=2)


def test_prefill_helper(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    with torch.no_grad():
        plain = model(PROMPT).logits[:, -1]
    for chunk in (None, 1, 4, 100):
        cache = make_cache("streaming_llm", model, budget=6)
        logits = prefill(model, cache, PROMPT, torch.ones_like(PROMPT), chunk_size=chunk)
        torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-5)
        assert cache.footprint().rows_max == 6  # compressed as soon as the prompt ended
    with pytest.raises(ValueError, match="at least one new token"):
        prefill(model, cache, PROMPT[:, :0])
    with pytest.raises(ValueError, match="chunk_size"):
        prefill(model, cache, PROMPT, chunk_size=0)


def test_hooks_hold_no_model(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    for hook in (*model.model._forward_hooks.values(), *model.model._forward_pre_hooks.values()):
        assert getattr(hook, "__closure__", None) is None
    assert not any(isinstance(value, nn.Module) for value in vars(make_cache("full", model)))
