"""Capturing shows each layer's queries and keys, changes nothing, and leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor

import zoomkv
from zoomkv.backbone.attach import is_attached
from zoomkv.backbone.capture import captured

IDS = torch.arange(3, 40)[None]


def state(model: Any) -> tuple[str, int]:
    decoder = model.get_decoder()
    return model.config._attn_implementation, len(decoder._forward_pre_hooks)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_what_is_seen_gives_the_models_own_attention(
    tiny: Any, family: str, attention: str
) -> None:
    model = tiny(family)
    model.set_attn_implementation("eager")
    plain = model(IDS, output_attentions=True)
    model.set_attn_implementation(attention)
    seen: list[Tensor] = []

    def observe(layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        assert layer == len(seen)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ key.transpose(-1, -2) * scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        seen.append(scores.masked_fill(future, -torch.inf).softmax(-1))

    with captured(model, observe):
        model(IDS)
    for found, expected in zip(seen, plain.attentions, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attach_first", [False, True])
@torch.no_grad()
def test_the_model_computes_and_is_afterwards_what_it_was(tiny: Any, attach_first: bool) -> None:
    model = tiny("llama")
    if attach_first:
        zoomkv.attach(model)
    before, was = model(IDS).logits, state(model)
    with captured(model, lambda *seen: None):
        assert torch.equal(model(IDS).logits, before)
    assert torch.equal(model(IDS).logits, before)
    assert is_attached(model) == attach_first and state(model) == was


@torch.no_grad()
def test_an_error_of_the_observer_undoes_it_too(tiny: Any) -> None:
    model = tiny("llama")
    was = state(model)

    def fail(*seen: Any) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), captured(model, fail):
        model(IDS)
    assert state(model) == was and not is_attached(model)
    model(IDS)


@torch.no_grad()
def test_two_models_at_once(tiny: Any) -> None:
    first, second = tiny("llama", seed=1), tiny("qwen3")
    layers: dict[str, list[int]] = {"first": [], "second": []}
    with (
        captured(first, lambda layer, *seen: layers["first"].append(layer)),
        captured(second, lambda layer, *seen: layers["second"].append(layer)),
    ):
        first(IDS)
        second(IDS)
    assert layers == {"first": [0, 1], "second": [0, 1]}
