"""Queries before RoPE, recovered from those that reach the attention of real models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zoomkv.backbone.rotary import SUPPORTED_ROPE, rotary_of

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS.get(kind, {}), **more}


@torch.no_grad()
def observe(model: Any, ids: Tensor, positions: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's queries ``[B, H, T, D]`` before and after RoPE, in one forward."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    decoder = model.get_decoder()

    def keep(module: Any, args: Any, output: Tensor) -> None:
        heads = output.view(*ids.shape, -1, decoder.layers[0].self_attn.head_dim)
        before.append(heads.transpose(1, 2))

    def attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        after.append(query)
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("watched", attention)
    model.config._attn_implementation = "watched"
    handles = [
        getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj).register_forward_hook(keep)
        for layer in decoder.layers
    ]
    model(ids, position_ids=positions)
    for handle in handles:
        handle.remove()
    assert len(before) == len(after) == len(decoder.layers)
    return before, after


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_before_rope(tiny, family: str, kind: str) -> None:
    model = tiny(family, rope_parameters=rope(kind))
    ids = torch.randint(3, 100, (2, 12))
    # Far apart, unequal between the rows, with gaps.
    positions = torch.tensor([[5], [700]]) + torch.arange(12) * 37
    rotary = rotary_of(model)
    assert (rotary.scaling != 1) == (kind == "yarn")
    for before, after in zip(*observe(model, ids, positions), strict=True):
        assert (after - before).abs().max() > 0.1
        at = positions[:, None]
        torch.testing.assert_close(rotary.unrotate(after, at), before, atol=1e-5, rtol=0)
        torch.testing.assert_close(rotary.rotate(before, at), after, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", SCALINGS)
def test_shifted_is_the_models_own_elsewhere(tiny, kind: str) -> None:
    model, ids = tiny("llama", rope_parameters=rope(kind)), torch.randint(3, 100, (2, 12))
    here, there = torch.arange(12)[None], torch.arange(900, 912)[None]
    # The first layer's queries before RoPE don't depend on the positions.
    (_, after), (_, elsewhere) = (observe(model, ids, at) for at in (here, there))
    got = rotary_of(model).shift(after[0], here, there)
    torch.testing.assert_close(got, elsewhere[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_half_precision(tiny, family: str) -> None:
    """A cast rounds the frequencies too; the model turns by the rounded ones, and so do we."""
    model = tiny(family, rope_parameters=rope("yarn")).to(torch.bfloat16)
    positions = torch.arange(300, 312)[None]
    cos, sin = model.get_decoder().rotary_emb(torch.zeros(()), positions)
    ones = torch.ones(12, cos.shape[-1])
    ones[:, cos.shape[-1] // 2 :] = 0  # the first half turns by cos, into the second by sin
    half = cos.shape[-1] // 2
    got = rotary_of(model).rotate(ones, positions[0])
    expected = torch.cat((cos[0, :, :half], sin[0, :, half:]), dim=-1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)

    ids = torch.randint(3, 100, (1, 12))
    for before, after in zip(*observe(model, ids, positions), strict=True):
        back = rotary_of(model).unrotate(after, positions[:, None])
        assert back.dtype == torch.bfloat16
        error = (back - before).float().norm() / before.float().norm()
        assert error < 0.01  # the model's own rounding; a wrong angle gives more than 1


def test_part_of_the_dims_as_the_family_has_it(tiny) -> None:
    """These families ignore a partial factor with the default type, and so do we."""
    model = tiny("llama", rope_parameters=rope("default", partial_rotary_factor=0.5))
    positions = torch.arange(40, 52)[None]
    (before, *_), (after, *_) = observe(model, torch.randint(3, 100, (1, 12)), positions)
    rotary = rotary_of(model)
    assert 2 * len(rotary.inv_freq) == after.shape[-1]
    torch.testing.assert_close(rotary.unrotate(after, positions), before, atol=1e-5, rtol=0)


def test_wrapped_by_peft_and_shared(tiny) -> None:
    from peft import LoraConfig, get_peft_model

    plain = tiny("qwen3", rope_parameters=rope("yarn"))
    expected = rotary_of(plain)
    wrapped = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"]))
    got = rotary_of(wrapped)
    assert torch.equal(got.inv_freq, expected.inv_freq) and got.scaling == expected.scaling
    assert copy.deepcopy(got) is got


REFUSED: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
    "proportional": {},
    "home_made": {},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(tiny, kind: str, monkeypatch) -> None:
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "home_made", ROPE_INIT_FUNCTIONS["linear"])
    more = {"factor": 2.0} if kind == "home_made" else REFUSED[kind]
    model = tiny("llama", rope_parameters=rope(kind, **more))
    with pytest.raises(ValueError) as caught:
        rotary_of(model)
    message = str(caught.value)
    assert f"rope type '{kind}' is not supported" in message and "\n" not in message
    assert all(name in message for name in SUPPORTED_ROPE)


def test_another_family_is_refused() -> None:
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    model = PhiForCausalLM(PhiConfig(vocab_size=8, num_hidden_layers=1, **sizes))
    with pytest.raises(ValueError, match="architecture 'phi' is not supported"):
        rotary_of(model)
