"""A replay holds what a real generation holds, at every step."""

from __future__ import annotations

import pytest
import torch

import zoomkv
from zoomkv.evaluation.replay import replayed_bytes


@pytest.mark.parametrize(("policy", "options"), [("streaming_llm", {"budget": 24}), ("full", {})])
def test_equals_a_real_generation(tiny_llama, policy, options) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    prompt = torch.randint(1, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    cache = zoomkv.make_cache(policy, model, **options)
    cache.expect_prompt(prompt.shape[1])
    readings: list[int] = []
    ids, full_mask, fed = prompt, mask, prompt
    with torch.no_grad():
        for number in range(40):
            logits = model(fed, attention_mask=full_mask, cache=cache).logits
            if number % 8 == 0:
                readings.append(cache.footprint().device_bytes)
            fed = logits[:, -1:].argmax(-1)
            ids, full_mask = torch.cat([ids, fed], 1), torch.cat([full_mask, mask[:, -1:]], 1)
    readings.append(cache.footprint().device_bytes)
    again = replayed_bytes(
        zoomkv.make_cache(policy, model, **options), prompt, mask, ids[:, 9:].tolist(), pad_id=0
    )
    assert again == pytest.approx(sum(readings) / len(readings))
