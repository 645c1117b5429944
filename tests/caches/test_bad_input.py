"""Faults that users hit, each with its one clear line."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zoomkv
from zoomkv.caches.evicting import EvictingCache
from zoomkv.caches.registry import (
    POLICIES,
    make_cache,
    names,
    options_of,
    policy_class,
    reads_summaries,
    register,
)

PROMPT = torch.arange(20, 31)[None]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("zomr", {}, "unknown policy 'zomr': did you mean 'zoomr'"),
        ("xyz", {}, "there are: .*full, full_offloaded, .*streaming_llm, sumr"),
        ("streaming_llm", {"budgt": 3}, "no option 'budgt': did you mean 'budget'"),
        ("full", {"budget": 3}, "no option 'budget'; it has none"),
        ("streaming_llm", {"budget": 0}, "budget=0: this policy needs at least 5 rows"),
        ("streaming_llm", {"budget": -4}, "budget=-4"),
        ("streaming_llm", {"budget": 4}, "at least 5 rows"),
        ("streaming_llm", {"budget": 1.5}, r"budget=1.5: a share of full KV lies in \(0, 1\]"),
        ("streaming_llm", {"budget": 0.0}, "budget=0.0"),
        ("streaming_llm", {"budget": True}, "budget=True"),
        ("streaming_llm", {"n_sink": -1}, "n_sink=-1: give a whole number of at least 0"),
        ("sumr", {"window": 0}, "window=0: give a whole number of at least 1"),
        ("sumr", {"max_interval": 0}, "max_interval=0"),
        ("sumr", {"open_cap": 0}, "open_cap=0"),
        ("sumr", {"boundary": "prefix"}, "'prefix' is unknown"),
        ("sumr", {"boundary": [1]}, "is unknown"),
        ("zoomr", {"window": "x", "budget": 100}, "window='x'"),
        ("sumr", {"residency": "remote"}, "residency='remote': choose one of resident, streamed"),
        ("zoomr", {"host_precision": "int4"}, "host_precision='int4': choose one of auto"),
        ("full_offloaded", {"host_precision": "fp8"}, "host_precision='fp8'"),
        ("zoomr", {"consensus": -1}, "consensus=-1"),
        ("zoomr", {"top_k": 0}, "top_k=0"),
        ("zoomr", {"top_k": 1.5}, "top_k=1.5"),
        ("zoomr", {"vote_heads": "all"}, "vote_heads='all': choose one of query, kv_mean"),
        ("zoomr", {"window": 8, "budget": 8}, "budget=8: this policy needs at least 9 rows"),
    ],
)
def test_options_out_of_range(
    model: Any, tools: Any, policy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_cache(policy, model, tools.TOKENIZER, tools.DELIMITERS, **options)
    assert "\n" not in str(caught.value)


def test_summary_policies_need_a_tokenizer_with_summary_tokens(model: Any, tools: Any) -> None:
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        make_cache("zoomr", model)
    with pytest.raises(ValueError, match="no token"):
        make_cache("zoomr", model, tokenizer=tools.TOKENIZER)
    zoomkv.attach(model, tools.TOKENIZER)
    assert make_cache("zoomr", model, delimiters=tools.DELIMITERS).name == "zoomr"


def test_registry() -> None:
    for name in names():
        assert policy_class(name).name == name
    with pytest.raises(ValueError, match="'full' is registered already"):
        register("full", "somewhere:Else")
    with pytest.raises(ValueError, match="not of the form module:Class"):
        register("mine", "somewhere.Else")
    register("mine", "somewhere:Else")
    assert POLICIES.pop("mine") == "somewhere:Else"


def test_a_policy_by_where_its_class_is(model: Any) -> None:
    target = "value_norm_example:ValueNormCache"
    assert options_of(target) == options_of("value_norm")
    cache = make_cache(target, model, budget=300)
    assert type(cache) is policy_class("value_norm") and cache.name == "value_norm"
    with pytest.raises(ValueError, match="has no option 'budgt': did you mean 'budget'"):
        make_cache(target, model, budgt=100)
    with pytest.raises(ValueError, match="ValueNormLayer of value_norm_example is no PolicyCache"):
        make_cache("value_norm_example:ValueNormLayer", model)
    assert reads_summaries("zoomr") and reads_summaries("sumr") and not reads_summaries(target)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "policy").glob("*.yaml")), ids=str)
def test_policy_files_are_the_constructors_arguments(
    tiny_llama: Any, tools: Any, path: Path
) -> None:
    model = tiny_llama(head_dim=16)  # as wide as the defaults need
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert options == options_of(path.stem)  # the files show the defaults
    make_cache(path.stem, model, tools.TOKENIZER, tools.DELIMITERS, **options)


def test_every_policy_has_a_file(tools: Any) -> None:
    files = {path.stem for path in (ROOT / "configs" / "policy").glob("*.yaml")}
    assert files == set(names()) - set(tools.EXAMPLES)


@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_empty_prompts(model: Any, policy: str) -> None:
    cache = make_cache(policy, model)
    with pytest.raises(ValueError, match="holds no token"):
        model(PROMPT[:, :0], cache=cache)
    with pytest.raises(ValueError, match="holds no token"):
        model(PROMPT[:0], cache=cache)
    ids = PROMPT.expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match="row 1 of the batch holds no token"):
        model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=3)


def test_over_long_prompts_warn_once(tiny_llama: Any) -> None:
    import warnings

    model = tiny_llama(max_position_embeddings=12)
    zoomkv.attach(model)
    for length, expected in ((11, 0), (12, 0), (13, 1), (20, 1)):
        cache = make_cache("full", model)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for token in torch.arange(20, 20 + length)[None].split(1, dim=1):
                model(token, cache=cache)
        ours = [str(w.message) for w in caught if "positions that the model" in str(w.message)]
        assert len(ours) == expected
        assert all("13 columns exceed the 12 positions" in message for message in ours)


def test_a_cached_prompt_is_not_fed_again(model: Any) -> None:
    cache = make_cache("full", model)
    with torch.no_grad():
        model(PROMPT, cache=cache)
    with pytest.raises(ValueError, match="row 0 continues at position 11, but the input says 0"):
        model.generate(PROMPT, cache=cache, max_new_tokens=3)
    longer = torch.cat([PROMPT, PROMPT[:, :1]], dim=1)  # one new token: fine
    assert model.generate(longer, cache=cache, max_new_tokens=3, do_sample=False).shape == (1, 15)


@pytest.mark.parametrize("policy", ["full", "streaming_llm", "snapkv", "sekv"])
def test_a_prompt_that_is_padded_on_the_right(model: Any, policy: str) -> None:
    ids, mask = PROMPT.repeat(2, 1), torch.ones(2, 11, dtype=torch.int64)
    mask[1, 8:] = 0
    options = {"max_new_tokens": 3, "do_sample": False}
    own = {"width": 8} if policy == "sekv" else {}
    cache = make_cache(policy, model, **own)
    with pytest.raises(ValueError, match="row 1 of the prompt ends in padding.*pad on the left"):
        model.generate(ids, attention_mask=mask, cache=cache, **options)
    # Who picks the right logits by hand may go on.
    cache = make_cache(policy, model, **own)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, cache=cache).logits[[0, 1], [10, 7]]
        tokens = [logits.argmax(-1)]
        for _ in range(2):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            logits = model(tokens[-1][:, None], attention_mask=mask, cache=cache).logits[:, -1]
            tokens.append(logits.argmax(-1))
    alone = model.generate(ids[1:, :8], cache=make_cache(policy, model, **own), **options)
    assert torch.stack(tokens, 1)[1].tolist() == alone[0, 8:].tolist()


def test_a_cache_that_holds_another_text(model: Any) -> None:
    options = {"max_new_tokens": 5, "do_sample": False}
    cache = make_cache("full", model)
    model.generate(PROMPT, cache=cache, **options)  # 15 columns
    for other in (PROMPT[:, :4], PROMPT, torch.arange(20, 35)[None], PROMPT.repeat(2, 1)):
        with pytest.raises(ValueError, match=r"holds a text of 15 columns: for another .* new cac"):
            model.generate(other, cache=cache, **options)
    cache.reset()
    other = torch.arange(40, 50)[None]
    expected = model.generate(other, **options)
    assert torch.equal(model.generate(other, cache=cache, **options), expected)


@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_a_cache_that_is_not_to_be_used(model: Any, policy: str) -> None:
    cache = make_cache(policy, model)
    for call in (model, partial(model.generate, max_new_tokens=3)):
        with pytest.raises(ValueError, match="^use_cache=False contradicts the .*Cache that was g"):
            call(PROMPT, cache=cache, use_cache=False)
    assert cache.seen == 0
    assert model.generate(PROMPT, use_cache=False, max_new_tokens=3).shape == (1, 14)


def test_masks_that_contradict_the_cache(model: Any) -> None:
    cache = make_cache("streaming_llm", model, budget=6)
    ids = PROMPT.expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
        for row, column, was in ((0, 4, "a token"), (1, 1, "padding")):
            wrong = torch.cat([mask, mask.new_ones(2, 2)], dim=1)
            wrong[row, column] ^= 1
            with pytest.raises(ValueError, match=f"row {row}, column {column}.*was {was}"):
                model(ids[:, :2], attention_mask=wrong, cache=cache)
        with pytest.raises(ValueError, match="pass a 2D mask over all 13"):
            model(ids[:, :2], attention_mask=mask.new_ones(2, 2), cache=cache)
        with pytest.raises(ValueError, match="pass a 2D mask"):
            model(ids[:, :2], attention_mask=torch.ones(2, 1, 2, 13), cache=cache)
        right = torch.cat([mask, mask.new_ones(2, 2)], dim=1)
        model(ids[:, :2], attention_mask=right, cache=cache)  # still usable
    assert cache.lengths.tolist() == [13, 10]


def test_a_cached_prompt_must_be_repeated_for_beams(model: Any) -> None:
    cache = make_cache("full", model)
    with torch.no_grad():
        model(PROMPT[:, :-1], cache=cache)
    options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False}
    with pytest.raises(ValueError, match=r"batch_repeat_interleave\(n\)"):
        model.generate(PROMPT, cache=cache, **options)
    cache.batch_repeat_interleave(3)
    plain = model.generate(PROMPT, **options)
    assert torch.equal(model.generate(PROMPT, cache=cache, **options), plain)


def test_announced_prompt_ends(model: Any) -> None:
    cache = make_cache("streaming_llm", model, budget=6)
    cache.expect_prompt(8)
    with pytest.raises(ValueError, match="announced to end at column 8.*reaches column 11"):
        model(PROMPT, cache=cache)
    with torch.no_grad():
        model(PROMPT[:, :8], cache=cache)
    with pytest.raises(ValueError, match="the cache has seen 8"):
        cache.expect_prompt(8)


def test_assisted_decoding_and_crop(model: Any, tiny_llama: Any) -> None:
    options = {"assistant_model": tiny_llama(seed=1), "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    for policy in ("full", "full_offloaded"):
        out = model.generate(PROMPT, cache=make_cache(policy, model), **options)
        assert torch.equal(out, plain)
    cache = make_cache("streaming_llm", model, budget=6)
    with pytest.raises(ValueError, match="can be cropped"):
        model.generate(PROMPT, cache=cache, **options)
    with pytest.raises(ValueError, match="the 'streaming_llm' cache drops or moves rows"):
        cache.crop(-1)

    cache = make_cache("full", model)
    with torch.no_grad():
        before = model(PROMPT, cache=cache).logits[:, -3]
        cache.crop(0)
        cache.crop(-3)
        assert cache.seen == 8 and cache.footprint().rows_max == 8
        again = model(PROMPT[:, 8:9], cache=cache).logits[:, -1]
    torch.testing.assert_close(before, again, atol=1e-5, rtol=1e-5)
    for wrong in (2, -10):
        with pytest.raises(ValueError, match="minus the number of columns"):
            cache.crop(wrong)


def test_pad_id_inside_the_prompt_is_an_ordinary_token(tiny_llama: Any) -> None:
    ids = PROMPT.clone()
    ids[0, 4] = 0
    outs = []
    for pad in (0, 127):
        model = tiny_llama()
        model.generation_config.pad_token_id = pad
        zoomkv.attach(model)
        cache = make_cache("streaming_llm", model, budget=8)
        outs.append(
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                max_new_tokens=20,
                do_sample=False,
            )
        )
        assert cache.seen == 30 and cache.lengths.tolist() == [30]
    assert torch.equal(*outs)


@pytest.mark.parametrize("given", [64, 0.1, "64"])
def test_an_option_in_the_tokenizers_place_is_told(model: Any, given: Any) -> None:
    with pytest.raises(ValueError, match=r"streaming_llm.*is no tokenizer; name options"):
        make_cache("streaming_llm", model, given)


def enough(error: pytest.ExceptionInfo[ValueError]) -> int:
    """What a refusal says is enough."""
    found = re.search(r"needs at least (\d+) rows", str(error.value))
    assert found is not None and "\n" not in str(error.value)
    return int(found[1])


@pytest.mark.one_model
def test_the_smallest_budget_serves_and_less_is_refused_at_once(bench: Any, tools: Any) -> None:
    if "budget" not in options_of(bench.policy.name):
        pytest.skip("without a budget")
    with pytest.raises(ValueError, match="needs at least") as told:
        bench.cache(budget=0)
    rows = enough(told)
    with pytest.raises(ValueError, match=f"budget={rows - 1}: this policy needs at least {rows} "):
        bench.cache(budget=rows - 1)
    cache = bench.cache(budget=rows)
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[1, :11] = 0
    logits, _ = tools.run(
        bench.model, cache, tools.prompt_ids(2, 30), tools.scripted_ids(2, 40), mask
    )
    assert logits.isfinite().all()
    if isinstance(cache, EvictingCache) and cache.counts_everything:
        shape = cache.shape
        row = 2 * shape.head_dim * shape.element_bytes * shape.kv_heads * shape.layers
        assert cache.footprint().device_bytes <= 2 * rows * row


def test_a_budget_is_weighed_again_with_the_keys_as_they_are(model: Any, tools: Any) -> None:
    """Under autocast values are half as large as the weights, and what indexes them is not."""
    options = {"recent": 4, "window": 4, "kernel": 3, "n_sink": 2, "count_prefix": True}

    def run(rows: int) -> None:
        cache = make_cache("snapkv", model, budget=rows, **options)
        with torch.autocast("cpu", torch.bfloat16):
            tools.run(model, cache, tools.prompt_ids(1, 40), tools.scripted_ids(1, 4))

    with pytest.raises(ValueError, match="needs at least") as told:
        make_cache("snapkv", model, budget=0, **options)
    least = enough(told)
    with pytest.raises(ValueError, match="needs at least") as told:
        run(least)
    more = enough(told)
    assert more > least
    run(more)
    with pytest.raises(ValueError, match=f"needs at least {more} rows"):
        run(more - 1)
