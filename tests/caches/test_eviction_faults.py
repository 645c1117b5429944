"""Faults that once were: each is a kind, and stays cured."""

from typing import Any

import pytest
import torch

import zoomkv
from zoomkv.caches.registry import make_cache

SCORING = ("snapkv", "rpc", "r_kv", "chunkkv", "pyramidkv")


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


@pytest.mark.parametrize("policy", ["snapkv", "streaming_llm", "h2o", "beacon_kv"])
@pytest.mark.parametrize("value", ["no", "off", None, 2])
def test_only_true_and_false_are_flags(model: Any, policy: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"count_prefix=.*: give true or false"):
        make_cache(policy, model, count_prefix=value)


@pytest.mark.parametrize("policy", SCORING)
def test_a_window_as_large_as_the_budget_is_refused(model: Any, policy: str) -> None:
    with pytest.raises(ValueError, match="must exceed the queries that score, window=64"):
        make_cache(policy, model, budget=64, window=64, recent=4)


@pytest.mark.parametrize("budget", [2**31, 2**60, 2**63])
def test_numbers_beyond_any_cache_are_refused(model: Any, budget: int) -> None:
    with pytest.raises(ValueError, match="no cache holds more"):
        make_cache("streaming_llm", model, budget=budget)
    with pytest.raises(ValueError, match="give at most"):
        make_cache("snapkv", model, budget=0.5, recent=budget)


@torch.no_grad()
def test_a_row_that_has_ended_keeps_its_rows(model: Any) -> None:
    prompt = torch.arange(20, 32).repeat(2, 1)
    for policy, options in (("streaming_llm", {"n_sink": 2}), ("keydiff", {"recent": 2})):
        cache = make_cache(policy, model, budget=12, count_prefix=True, **options)
        cache.set_eos(1, 0)
        model(prompt, cache=cache)
        model(torch.tensor([[30], [1]]), cache=cache)
        ended = cache.readable(0)[1]
        for token in range(40, 60):
            model(torch.tensor([[token], [0]]), cache=cache)
        assert torch.equal(cache.readable(0)[1, :, : ended.shape[-1]], ended)
        assert not torch.equal(cache.readable(0)[0, :, : ended.shape[-1]], ended)


@pytest.mark.parametrize("options", [{}, {"count_prefix": True}])
@pytest.mark.parametrize("policy", ["streaming_llm", "keydiff", "snapkv"])
def test_a_share_of_one_drops_nothing(model: Any, policy: str, options: dict[str, Any]) -> None:
    cache = make_cache(policy, model, budget=1.0, **options)
    prompt = torch.arange(20, 60)[None]
    tokens = model.generate(prompt, cache=cache, max_new_tokens=30, do_sample=False)
    assert cache.evicted == 0 and cache.readable(0).all()
    assert torch.equal(tokens, model.generate(prompt, max_new_tokens=30, do_sample=False))


def test_scores_are_taken_where_the_keys_are(tiny_llama: Any) -> None:
    """A single KV head's index lies on the host; here ``meta`` stands for a device."""
    model = tiny_llama(kv_heads=1)
    zoomkv.attach(model)
    options = {"budget": 40, "recent": 4, "beacons": 3, "recent_queries": 2}
    cache = make_cache("beacon_kv", model, **options)
    model.generate(torch.arange(20, 40)[None], cache=cache, max_new_tokens=10, do_sample=False)
    layer = cache.layers[0]
    keys, values = (rows.to("meta") for rows in layer.stored())
    query, when = (t.to("meta") for t in layer.queries.of(0))
    layer.queries.of = lambda number: (query, when)
    positions = layer.slots.positions[:, :, : layer.slots.length]
    assert positions.device.type == "cpu"
    assert layer.score(keys, values, positions).device.type == "meta"
