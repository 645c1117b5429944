"""Queries and keys of chosen tokens are those that the attention computes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from zoomkv.backbone.voters import attention_inputs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_equal_to_the_models_own(family: str, request, monkeypatch) -> None:
    model = request.getfixturevalue(f"tiny_{family}")()
    modeling = sys.modules[type(model).__module__]
    rotated: list[Any] = []
    original = modeling.apply_rotary_pos_emb

    def spy(*args: Any, **kwargs: Any) -> Any:
        rotated.append(original(*args, **kwargs))
        return rotated[-1]

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", spy)
    ids = torch.randint(3, 100, (2, 12))
    with torch.no_grad(), attention_inputs(model.get_decoder()) as inputs:
        model(ids)
    batch, position = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 11])
    assert len(inputs) == len(rotated) == model.config.num_hidden_layers
    for layer, (queries, keys) in zip(inputs, rotated, strict=True):
        torch.testing.assert_close(layer.queries(batch, position), queries[batch, :, position])
        torch.testing.assert_close(layer.keys(batch, position), keys[batch, :, position])


def test_leaves_no_hook_behind(tiny_llama) -> None:
    model = tiny_llama()
    with pytest.raises(RuntimeError, match="on purpose"), attention_inputs(model.get_decoder()):
        raise RuntimeError("on purpose")
    attention = model.get_decoder().layers[0].self_attn
    assert not attention._forward_pre_hooks
