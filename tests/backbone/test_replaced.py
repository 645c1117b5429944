"""A replaced attention sees what the layers compute with, carries gradients, and leaves nothing."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import zoomkv
from zoomkv.backbone.attach import is_attached
from zoomkv.backbone.replaced import Attend, replaced_attention
from zoomkv.ops.attention_reference import attention_reference

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
IDS = torch.randint(1, 128, (2, 11), generator=torch.Generator().manual_seed(0))
CHECKPOINTING = {"use_reentrant": False}
CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return attention_reference(query, key, value, CAUSAL, scale=scaling)


def tilted(tilt: Tensor) -> Attend:
    """Causal attention whose queries are turned off course; ``tilt`` is ``[D]`` or ``[L, D]``."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        own = tilt[layer] if tilt.dim() == 2 else tilt
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = (query + own) @ key.transpose(-1, -2) * scaling
        weights = scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1).to(value.dtype)
        return weights @ (value * (1 + own.to(value.dtype)))

    return attend


def state(model: Any) -> Any:
    decoder = model.get_decoder()
    checkpoints = [layer.__dict__.get("_gradient_checkpointing_func") for layer in decoder.layers]
    return model.config._attn_implementation, len(decoder._forward_pre_hooks), checkpoints


def frozen(model: Any, checkpointing: dict[str, Any] | None = None) -> Any:
    """A model without trainable parameters, perhaps under gradient checkpointing."""
    model.requires_grad_(False)
    if checkpointing is not None:
        model.train().gradient_checkpointing_enable(checkpointing)
    return model


def in_double(model: Any) -> Any:
    """The same in float64 from end to end; its own norms compute in fp32."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model.double()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_causal_attention_gives_the_models_own_logits(tiny, family, kv_heads, attached) -> None:
    model = tiny(family, kv_heads=kv_heads)
    if attached:
        zoomkv.attach(model)
    expected, was = model(IDS).logits, state(model)
    with replaced_attention(model, causal):
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(model(IDS).logits, expected)
    assert is_attached(model) == attached and state(model) == was


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_is_shown_comes_after_rope_layer_by_layer(tiny, family, monkeypatch) -> None:
    model = tiny(family)
    modeling = sys.modules[type(model).__module__]
    rotated: list[Any] = []
    original = modeling.apply_rotary_pos_emb

    def spy(*args: Any, **kwargs: Any) -> Any:
        rotated.append(original(*args, **kwargs))
        return rotated[-1]

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", spy)
    seen: list[Any] = []
    values: list[Tensor] = []
    handles = [
        layer.self_attn.v_proj.register_forward_hook(lambda *call: values.append(call[-1]))
        for layer in model.model.layers
    ]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert layer == len(seen) and scaling == query.shape[-1] ** -0.5
        seen.append((query, key, value))
        return torch.zeros_like(query)

    with replaced_attention(model, attend):
        model(IDS, position_ids=torch.arange(7, 18)[None])
    for handle in handles:
        handle.remove()
    assert len(seen) == len(rotated) == 2
    for (query, key, value), found, projected in zip(seen, rotated, values, strict=True):
        assert torch.equal(query, found[0]) and torch.equal(key, found[1])
        assert torch.equal(value.transpose(1, 2).flatten(2), projected)


@torch.no_grad()
def test_nothing_of_the_layers_own_attention_is_left(tiny_llama) -> None:
    model = tiny_llama()
    without = copy.deepcopy(model)
    for layer in without.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    with replaced_attention(model, lambda layer, query, *_: torch.zeros_like(query)):
        assert torch.equal(model(IDS).logits, without(IDS).logits)


@torch.no_grad()
def test_a_mask_is_not_looked_at(tiny_llama) -> None:
    model = tiny_llama()
    mask = torch.ones_like(IDS)
    mask[:, :4] = 0
    with replaced_attention(model, causal):
        positions = torch.arange(11)[None]
        masked = model(IDS, attention_mask=mask, position_ids=positions).logits
        assert torch.equal(masked, model(IDS).logits)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_agree_with_finite_differences(tiny, family, kv_heads) -> None:
    model = frozen(in_double(tiny(family, kv_heads=kv_heads)))
    generator = torch.Generator().manual_seed(0)
    tilt = torch.randn(2, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    def run(tilt: Tensor) -> Tensor:
        with replaced_attention(model, tilted(tilt)):
            return model(IDS[:1]).logits[:, -3:, :5]

    assert torch.autograd.gradcheck(run, (tilt,), fast_mode=True)
    assert all(row.any() for row in torch.autograd.grad(run(tilt).sum(), tilt)[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_checkpointed_layers_are_recomputed_behind_the_block(
    tiny_llama, attached, reentrant
) -> None:
    generator = torch.Generator().manual_seed(1)
    tilts = [torch.randn(2, 8, generator=generator, requires_grad=True) for _ in range(2)]

    def gradients(model: Any, calls: list[int]) -> list[Tensor]:
        losses = []
        for tilt in tilts:
            attend = tilted(tilt)

            def counted(layer: int, *args: Any, attend: Attend = attend) -> Tensor:
                calls.append(layer)
                return attend(layer, *args)

            with replaced_attention(model, counted):
                losses.append(model(IDS).logits.logsumexp(-1).sum())
        # In the other order, so that nothing but the graph can know which attend was whose.
        backward = [torch.autograd.grad(losses[n], tilts[n])[0] for n in (1, 0)]
        return backward[::-1]

    models = [frozen(tiny_llama()), frozen(tiny_llama(), {"use_reentrant": reentrant})]
    if attached:
        for model in models:
            zoomkv.attach(model)
    once: list[int] = []
    twice: list[int] = []
    was = state(models[1])
    expected, found = gradients(models[0], once), gradients(models[1], twice)
    assert len(once) == 4 and len(twice) == 8  # else nothing was recomputed
    assert not torch.allclose(expected[0], expected[1])
    for one, other in zip(expected, found, strict=True):
        assert one.any()
        torch.testing.assert_close(other, one)
    assert state(models[1]) == was


def test_parameters_get_gradients_too(tiny_llama) -> None:
    model = tiny_llama()
    plain = torch.autograd.grad(model(IDS).logits.logsumexp(-1).sum(), model.parameters())
    with replaced_attention(model, causal):
        loss = model(IDS).logits.logsumexp(-1).sum()
    for found, expected in zip(torch.autograd.grad(loss, model.parameters()), plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [None, CHECKPOINTING])
def test_under_autocast(tiny_qwen3, checkpointing) -> None:
    model = frozen(tiny_qwen3(), checkpointing)
    tilt = torch.zeros(8, requires_grad=True)

    def gradient(autocast: bool) -> Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            replaced_attention(model, tilted(tilt)),
        ):
            logits = model(IDS).logits
        assert logits.dtype == (torch.bfloat16 if autocast else torch.float32)
        (found,) = torch.autograd.grad(logits.float().logsumexp(-1).mean(), tilt)
        return found

    exact, rough = gradient(False), gradient(True)
    assert rough.dtype == torch.float32 and exact.any()
    assert float((rough - exact).norm() / exact.norm()) < 0.1


@torch.no_grad()
def test_a_result_in_fp32_fits_a_model_in_bf16(tiny_llama) -> None:
    model = tiny_llama().bfloat16()
    plain = model(IDS).logits
    with replaced_attention(model, causal):  # the reference is fp32
        found = model(IDS).logits
    assert found.dtype == torch.bfloat16
    assert float((found - plain).float().norm() / plain.float().norm()) < 0.05


@pytest.mark.parametrize("checkpointing", [None, CHECKPOINTING])
def test_adapted_models(tiny_llama, checkpointing) -> None:
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(tiny_llama(), options)
    if checkpointing is not None:
        model.train().gradient_checkpointing_enable(checkpointing)
    adapters = [value for value in model.parameters() if value.requires_grad]
    plain = model(IDS).logits
    expected = torch.autograd.grad(plain.logsumexp(-1).sum(), adapters)
    with replaced_attention(model, causal):
        logits = model(IDS).logits
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)
    found = torch.autograd.grad(logits.logsumexp(-1).sum(), adapters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [None, CHECKPOINTING])
def test_an_error_undoes_it_too(tiny_llama, checkpointing) -> None:
    model = frozen(tiny_llama(), checkpointing)
    was, expected = state(model), model(IDS).logits

    def fail(*seen: Any) -> Tensor:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), replaced_attention(model, fail):
        model(IDS)
    assert state(model) == was and not is_attached(model)
    assert torch.equal(model(IDS).logits, expected)


def test_copies_made_inside_keep_to_themselves(tiny_llama) -> None:
    model = frozen(tiny_llama(), CHECKPOINTING)
    tilt = torch.ones(8, requires_grad=True)
    with replaced_attention(model, tilted(tilt)):
        twin = copy.deepcopy(model)
        expected = torch.autograd.grad(model(IDS).logits.sum(), tilt)[0]
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    # What is recomputed is the copy, under the copy's own configuration.
    found = torch.autograd.grad(twin(IDS).logits.sum(), tilt)[0]
    torch.testing.assert_close(found, expected)
    assert model.config._attn_implementation == "sdpa" != twin.config._attn_implementation


@torch.no_grad()
def test_two_models_and_blocks_within_blocks(tiny) -> None:
    first, second = tiny("llama"), tiny("qwen3")
    expected = first(IDS).logits, second(IDS).logits

    def nothing(layer: int, query: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(query)

    with replaced_attention(first, causal), replaced_attention(second, nothing):
        outer = first(IDS).logits
        assert not torch.allclose(second(IDS).logits, expected[1], atol=1e-2)
        with replaced_attention(first, nothing):
            assert not torch.allclose(first(IDS).logits, expected[0], atol=1e-2)
        assert torch.equal(first(IDS).logits, outer)
    assert torch.equal(first(IDS).logits, expected[0])
    assert torch.equal(second(IDS).logits, expected[1])


@torch.no_grad()
def test_bad_input(tiny_llama) -> None:
    model = tiny_llama()
    cache = DynamicCache()
    model(IDS, cache=cache)
    with replaced_attention(model, causal):
        assert model(IDS).cache is None
        with pytest.raises(ValueError, match="reads no cache"):
            model(IDS[:, :1], cache=cache)
    zoomkv.attach(model)
    with (
        replaced_attention(model, causal),
        pytest.raises(ValueError, match="reads no cache"),
    ):
        model(IDS, cache=zoomkv.make_cache("full", model))
    wrong = r"attend gave \[2, 4, 11, 3\] for layer 0; give \[2, 4, 11, 8\]"
    with (
        pytest.raises(ValueError, match=wrong),
        replaced_attention(model, lambda layer, query, *_: query[..., :3]),
    ):
        model(IDS)
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9))
    with (
        pytest.raises(ValueError, match="'gpt2' is not supported"),
        replaced_attention(other, causal),
    ):
        pass
