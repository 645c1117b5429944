"""A recorded prompt is to a cache what the model's own forward is."""

from typing import Any

import pytest
import torch

import zoomkv
from zoomkv.caches.registry import make_cache
from zoomkv.evaluation.recording import record


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("full", {}),
        ("streaming_llm", {"budget": 20}),
        ("snapkv", {"budget": 20, "recent": 4, "window": 4, "count_prefix": True}),
        ("sekv", {"budget": 40, "window": 6, "slack": 6, "min_span": 4, "max_span": 9, "width": 4}),
    ],
)
@torch.no_grad()
def test_it_is_as_if_the_model_had_read_it(tiny: Any, policy: str, options: Any) -> None:
    model = tiny("llama")
    zoomkv.attach(model)
    ids = torch.randint(20, 128, (1, 60), generator=torch.Generator().manual_seed(0))
    recording = record(model, ids)
    for stop, end in ((50, 50), (50, 60)):  # all of the prompt, or all but its last ten
        own, told = (make_cache(policy, model, **options) for _ in range(2))
        for cache in (own, told):
            cache.expect_prompt(end)
        model(ids[:, :stop], cache=own)
        recording.feed(told, stop)
        for token in ids[:, stop:].split(1, dim=1):
            ours, theirs = (model(token, cache=cache).logits for cache in (own, told))
            torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
        assert own.footprint() == told.footprint()
        for layer in range(len(own)):
            assert torch.equal(own.readable(layer), told.readable(layer))
