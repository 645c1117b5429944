"""Atomic steps, prompt lengths around the budget, evicted positions, what inference mode leaves."""

from typing import Any

import pytest
import torch

import zoomkv
from zoomkv.caches.registry import make_cache

one_model = pytest.mark.one_model


@one_model
def test_a_forward_that_raises_leaves_the_cache_as_it_was(bench: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(2, 9), tools.scripted_ids(2, 50)
    expected, _ = tools.run(bench.model, bench.cache(), prompt, generated)

    cache, fail = bench.cache(), {"now": False}

    def break_off(module: Any, args: Any) -> None:
        if fail["now"]:
            raise KeyboardInterrupt

    bench.model.get_decoder().layers[1].mlp.register_forward_pre_hook(break_off)

    def feed(ids: torch.Tensor) -> torch.Tensor:
        fail["now"] = True
        wrong = (ids + 1).clamp(max=127)  # what is fed in vain must leave no trace
        with pytest.raises(KeyboardInterrupt):
            bench.model(wrong, cache=cache)
        fail["now"] = False
        return bench.model(ids, cache=cache).logits[:, -1]

    with torch.no_grad():
        cache.expect_prompt(9)
        logits = [feed(prompt)]
        logits += [feed(token) for token in generated.split(1, dim=1)]
    torch.testing.assert_close(torch.stack(logits, 1), expected, atol=1e-5, rtol=1e-5)
    assert cache.seen == 59 and cache.lengths.tolist() == [59, 59]


def test_an_interrupted_move_is_refused_until_reset(tiny_llama: Any, tools: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    cache = make_cache("streaming_llm", model, budget=8)
    working_set = cache.layers[1].working_set
    move, working_set.move = working_set.move, None  # breaks in the second layer
    with pytest.raises(TypeError):
        tools.run(model, cache, tools.prompt_ids(1, 12), tools.scripted_ids(1, 3))
    working_set.move = move
    with pytest.raises(ValueError, match="interrupted while it was changing.*reset"):
        model(tools.prompt_ids(1, 1), cache=cache)
    cache.reset()
    tools.run(model, cache, tools.prompt_ids(1, 12), tools.scripted_ids(1, 3))


@one_model
def test_a_first_forward_that_breaks_off_leaves_no_batch_size(bench: Any, tools: Any) -> None:
    cache, layers = bench.cache(), bench.model.get_decoder().layers
    with layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0), torch.no_grad():
        for rows, length in ((3, 30), (2, 9)):
            with pytest.raises(ZeroDivisionError):
                bench.model(tools.prompt_ids(rows, length), cache=cache)
    prompt, generated = tools.prompt_ids(1, 9), tools.scripted_ids(1, 30)
    logits, _ = tools.run(bench.model, cache, prompt, generated)
    expected, _ = tools.run(bench.model, bench.cache(), prompt, generated)
    assert torch.equal(logits, expected)


def test_a_step_that_breaks_off_while_it_is_committed_is_not_fed_twice(
    tiny_llama: Any, tools: Any, monkeypatch: Any
) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    cache = make_cache("zoomr", model, tools.TOKENIZER, tools.DELIMITERS, window=4)
    prompt, generated = tools.prompt_ids(1, 5), tools.scripted_ids(1, 15)

    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr("zoomkv.caches.zoomr.vote", out_of_memory)
        tools.run(model, cache, prompt, generated)
    with pytest.raises(ValueError, match="interrupted while it was changing.*reset"):
        model(generated[:, 13:14], cache=cache)
    cache.reset()
    tools.run(model, cache, prompt, generated)


@one_model
def test_inference_mode_leaves_a_usable_cache(bench: Any, tools: Any) -> None:
    prompt = tools.prompt_ids(2, 9)
    expected, _ = tools.run(bench.model, bench.cache(), prompt, tools.scripted_ids(2, 45))
    cache = bench.cache()
    with torch.inference_mode():
        bench.model(prompt, cache=cache)
        for token in tools.scripted_ids(2, 45)[:, :30].split(1, dim=1):
            bench.model(token, cache=cache)
        cache.reorder_cache(torch.tensor([0, 1]))
    for token in tools.scripted_ids(2, 45)[:, 30:].split(1, dim=1):
        logits = bench.model(token, cache=cache).logits[:, -1]  # gradients on, as by default
    torch.testing.assert_close(logits, expected[:, -1], atol=1e-5, rtol=1e-5)
    assert not any(t.requires_grad or t.is_inference() for t in cache.device_tensors())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 20])
def test_prompts_around_the_budget(tiny_llama: Any, tools: Any, length: int) -> None:
    model, dense = tiny_llama(), tiny_llama()
    zoomkv.attach(model)
    cache = make_cache("streaming_llm", model, budget=8, n_sink=2)
    prompt, generated = tools.prompt_ids(1, length), tools.scripted_ids(1, 12)
    logits, reads = tools.run(model, cache, prompt, generated)
    with torch.no_grad():
        full = dense(torch.cat([prompt, generated], 1)).logits[:, length - 1 :]
    exact = max(8 - length, 0) + 1  # while everything fits
    torch.testing.assert_close(logits[:, :exact], full[:, :exact], atol=1e-5, rtol=1e-5)
    newest = length + 12
    kept = cache.readable(0)[0, 0].nonzero().squeeze(1).tolist()
    everything = list(range(newest))
    assert kept == (everything if newest <= 8 else [0, 1, *everything[-6:]])


def test_a_share_of_full_kv(tiny_llama: Any, tools: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    cache = make_cache("streaming_llm", model, budget=0.25)
    with torch.no_grad():
        model(tools.prompt_ids(1, 100), cache=cache)
        for number, token in enumerate(tools.scripted_ids(1, 200).split(1, dim=1)):
            model(token, cache=cache)
            footprint = cache.footprint()
            row = 2 * 2 * 2 * 8 * 4  # layers, heads, K and V, head dim, fp32
            assert footprint.device_bytes <= 0.25 * (101 + number) * row
    assert footprint.rows_max == 64  # grows in steps of 32


def test_policies_are_active(tiny_llama: Any, tools: Any) -> None:
    """An arm that shows the full cache's scores may simply not be switched on."""
    model = tiny_llama()
    zoomkv.attach(model)
    prompt, generated = tools.prompt_ids(1, 20), tools.scripted_ids(1, 40)
    full, _ = tools.run(model, make_cache("full", model), prompt, generated)
    for budget, equal in ((1000, True), (5, False)):
        cache = make_cache("streaming_llm", model, budget=budget)
        logits, _ = tools.run(model, cache, prompt, generated)
        assert torch.allclose(logits, full, atol=1e-5) is equal
        assert (cache.evicted > 0) is not equal


def test_each_evictor_run_evicts(tiny_llama: Any, tools: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    cache = make_cache("streaming_llm", model, budget=8)
    for seed in (0, 1, 0):
        cache.reset()
        tools.run(model, cache, tools.prompt_ids(1, 20, seed), tools.scripted_ids(1, 10))
        assert cache.evicted == 22


def test_pads_are_never_kept(tiny_llama: Any, tools: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    prompt = tools.prompt_ids(1, 11)
    mask = torch.ones_like(prompt)
    mask[0, :6] = 0
    cache = make_cache("streaming_llm", model, budget=5, n_sink=1)
    tools.run(model, cache, prompt, tools.scripted_ids(1, 6), mask)
    alone = make_cache("streaming_llm", model, budget=5, n_sink=1)
    tools.run(model, alone, prompt[:, 6:], tools.scripted_ids(1, 6))
    assert torch.equal(cache.readable(0), alone.readable(0))
    kept = cache.columns()[0][cache.readable(0)[0, 0]]
    assert len(kept) == 5 and kept.min() >= 6


def test_nothing_touches_cuda(tiny_llama: Any, tools: Any, monkeypatch: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("CUDA was asked for")

    for name in ("Stream", "Event", "current_stream", "synchronize", "stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    model = tiny_llama()
    zoomkv.attach(model)
    for policy, options in (("full_offloaded", {}), ("zoomr", {"residency": "streamed"})):
        cache = make_cache(policy, model, tools.TOKENIZER, tools.DELIMITERS, **options)
        tools.run(model, cache, tools.prompt_ids(1, 9), tools.scripted_ids(1, 40))
