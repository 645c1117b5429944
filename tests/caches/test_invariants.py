"""What must hold for every policy, driven by the case table in conftest.py."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoomkv.caches.registry import names
from zoomkv.ops.rope import Rotary

one_model = pytest.mark.one_model


def test_every_registered_policy_is_in_the_table(tools: Any) -> None:
    assert {policy.name for policy in tools.TABLE} == set(names())


# 1. Settings that bind nothing.


@one_model
def test_loose_settings_give_the_full_caches_tokens_and_logits(bench: Any, tools: Any) -> None:
    prompt = tools.prompt_ids(2, 9)
    tokens = bench.generate(prompt, cache=bench.cache(loose=True))
    plain = bench.generate(prompt)
    assert torch.equal(tokens, plain)
    assert len(set(plain[:, 9:].flatten().tolist())) > 8  # varied enough to tell something

    generated = plain[:, 9:]
    logits, _ = tools.run(bench.model, bench.cache(loose=True), prompt, generated)
    with torch.no_grad():
        full = bench.dense(plain).logits[:, 8:]
    torch.testing.assert_close(logits, full, atol=1e-5, rtol=1e-5)


# 2. The masked-dense oracle.


def test_logits_equal_a_dense_model_that_sees_the_reported_rows(bench: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(1, 7), tools.scripted_ids(1, 90)
    logits, reads = tools.run(bench.model, bench.cache(), prompt, generated)
    ids = torch.cat([prompt, generated], dim=1)[0]
    dense = tools.masked_dense(bench, ids, 7, [[mask[0] for mask in step] for step in reads])
    torch.testing.assert_close(logits[0], dense[6:], atol=1e-4, rtol=1e-4)
    if bench.policy.binding:
        assert not reads[-1][0].all(), "nothing was left out: the comparison says nothing"


@one_model
def test_oracle_with_padding(bench: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(2, 8), tools.scripted_ids(2, 60)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    prompt[1, :5] = 0
    logits, reads = tools.run(bench.model, bench.cache(), prompt, generated, mask)
    for row, pads in ((0, 0), (1, 5)):
        ids = torch.cat([prompt[row, pads:], generated[row]])
        steps = [[mask[row] for mask in step] for step in reads]
        dense = tools.masked_dense(bench, ids, 8 - pads, steps)
        torch.testing.assert_close(logits[row], dense[7 - pads :], atol=1e-4, rtol=1e-4)


# 3. Storage within the budget. Policies without one have nothing to show here.


@one_model
def test_storage_stays_within_the_budget(bench: Any, tools: Any) -> None:
    budget = bench.policy.binding.get("budget")
    if budget is None:
        pytest.skip("no budget")
    cache, shape = bench.cache(), bench.cache().shape
    if not getattr(cache, "counts_everything", True):
        pytest.skip("its budget is for the output's rows alone; another row of the table has all")
    row_bytes, batch = 2 * shape.head_dim * 4, 1 if bench.policy.ragged else 2
    limit = budget * shape.layers * shape.kv_heads * batch * row_bytes
    prompt, generated = tools.prompt_ids(batch, 24), tools.scripted_ids(batch, 90)
    sizes = []
    commit = cache.commit

    def spy(step: Any, hidden: Tensor) -> None:
        commit(step, hidden)
        sizes.append(cache.footprint().device_bytes)

    cache.commit = spy
    with torch.no_grad():
        cache.expect_prompt(24)
        bench.model(prompt, cache=cache)
        for token in generated.split(1, dim=1):
            bench.model(token, cache=cache)
    full = 114 * shape.layers * shape.kv_heads * batch * row_bytes
    assert max(sizes) <= limit < full
    assert max(sizes) > limit // 2  # and the budget is put to use


# 4. Columns, positions, seen tokens.


class PositionSpy:
    """Records the position ids that reach the first layer."""

    def __init__(self, model: Any) -> None:
        self.seen: list[Tensor] = []
        layer: nn.Module = model.get_decoder().layers[0]
        layer.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen.append(kwargs["position_ids"])

    def row(self, row: int) -> list[int]:
        return torch.cat([ids.expand(2, -1) for ids in self.seen], dim=1)[row].tolist()


@one_model
def test_positions_over_two_turns(bench: Any, tools: Any) -> None:
    spy = PositionSpy(bench.model)
    prompt = tools.prompt_ids(2, 9)
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    cache = bench.cache()
    first = bench.generate(prompt, mask, cache=cache, max_new_tokens=30)
    assert spy.row(0) == list(range(38))
    assert spy.row(1) == [0, 0, 0, *range(35)]
    assert (cache.seen, cache.get_seq_length(), cache.lengths.tolist()) == (38, 38, [38, 35])

    spy.seen.clear()
    question = torch.cat([first, tools.prompt_ids(2, 5, seed=7)], dim=1)
    mask = torch.cat([mask, mask.new_ones(2, 35)], dim=1)
    second = bench.generate(question, mask, cache=cache, max_new_tokens=20)
    assert spy.row(0) == list(range(38, 63))  # only what is new was fed
    assert spy.row(1) == list(range(35, 60))
    assert second.shape == (2, 64)
    assert [columns[-1].item() for columns in cache.columns()] == [62, 62]
    assert cache.columns()[1][0] == 3  # the three pads have no position


@one_model
def test_positions_in_a_plain_loop(bench: Any, tools: Any) -> None:
    spy = PositionSpy(bench.model)
    cache = bench.cache()
    tools.run(bench.model, cache, tools.prompt_ids(2, 9), tools.scripted_ids(2, 30))
    tools.run(bench.model, cache, tools.prompt_ids(2, 4), tools.scripted_ids(2, 10))
    assert spy.row(0) == list(range(53))
    assert cache.seen == 53


@one_model
def test_second_turn_equals_a_fresh_run_when_nothing_binds(bench: Any, tools: Any) -> None:
    cache = bench.cache(loose=True)
    first = bench.generate(tools.prompt_ids(1, 9), cache=cache, max_new_tokens=20)
    question = torch.cat([first, tools.prompt_ids(1, 5, seed=7)], dim=1)
    again = bench.generate(question, cache=cache)
    assert torch.equal(again, bench.generate(question))


@one_model
def test_second_turn_is_deterministic_when_something_binds(bench: Any, tools: Any) -> None:
    answers = []
    for _ in range(2):
        cache = bench.cache()
        first = bench.generate(tools.prompt_ids(1, 9), cache=cache)
        question = torch.cat([first, tools.prompt_ids(1, 5, seed=7)], dim=1)
        answers.append(bench.generate(question, cache=cache))
    assert torch.equal(*answers)


# 5. Rows are independent.


@one_model
def test_left_padding_gives_the_tokens_of_each_row_alone(bench: Any, tools: Any) -> None:
    prompt = tools.prompt_ids(4, 9)
    mask = torch.ones_like(prompt)
    for row, pads in enumerate((0, 1, 3, 6)):
        mask[row, :pads] = 0
        prompt[row, :pads] = 0
    together = bench.generate(prompt, mask, cache=bench.cache())
    for row, pads in enumerate((0, 1, 3, 6)):
        alone = bench.alone(prompt[row : row + 1, pads:])
        assert torch.equal(together[row, pads:], alone[0]), f"{pads} pads"
    swapped = bench.generate(prompt.flip(0), mask.flip(0), cache=bench.cache())
    assert torch.equal(swapped.flip(0), together)


@one_model
def test_rows_out_of_step_are_as_alone(bench: Any, tools: Any) -> None:
    """Rows of unequal length whose sentences and summaries end in different steps."""
    if "max_interval" in bench.policy.binding:  # it looks for sentences and summaries
        prompt, generated = tools.prompt_ids(2, 16), tools.scripted_ids(2, 84)
        later = tools.scripted_ids(1, 40)[0]
        generated[1] = torch.cat([generated[1, :4], later, generated[1, :40]])
    else:  # equal tokens would score alike, and rounding would choose between them
        prompt, generated = tools.distinct_ids(2, 100).split((16, 84), dim=1)
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    shares = [{"budget": 0.5}] if "budget" in bench.policy.binding else []
    for options in ({}, *shares):
        cache = bench.cache(**options)
        together, _ = tools.run(bench.model, cache, prompt, generated, mask)
        for row, pads in enumerate((0, 7)):
            single = bench.cache(**options)
            ids = prompt[row : row + 1, pads:], generated[row : row + 1]
            alone, _ = tools.run(bench.model, single, *ids)
            torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)
            own = [entry for entry in cache.trace() if entry["row"] == row]
            expected = [
                entry | {"row": row, "column": entry["column"] + pads} for entry in single.trace()
            ]
            assert own == expected
            assert torch.equal(
                cache.readable(0)[row, :, : 100 - pads], single.readable(0)[0, :, : 100 - pads]
            )


@one_model
def test_a_row_that_ends_early_does_not_disturb_the_other(bench: Any, tools: Any) -> None:
    for seed in range(5):  # until only the first row says something that can end it
        prompt = tools.prompt_ids(2, 9, seed)
        alone = [bench.alone(row[None])[0] for row in prompt]
        said, other = alone[0][14:40].tolist(), alone[1].tolist()
        if ends := [token for token in said if token > 20 and token not in other]:
            break
    eos = ends[0]
    cache = bench.cache()
    cache.set_eos(eos, pad_id=0)
    together = bench.generate(prompt, cache=cache, eos_token_id=eos)
    end = alone[0].tolist().index(eos, 9) + 1
    assert torch.equal(together[0, :end], alone[0][:end])
    assert not together[0, end:].any()
    assert torch.equal(together[1], alone[1])
    assert cache.lengths.tolist() == [end, 48]
    # The next turn of the ended row goes on behind its last real token.
    question = torch.cat([together, tools.prompt_ids(2, 3, seed=5)], dim=1)
    mask = torch.ones_like(question)
    mask[0, end:49] = 0
    cache.set_eos(None)
    bench.generate(question, mask, cache=cache, max_new_tokens=5)
    assert cache.lengths.tolist() == [end + 7, 56]


# 6. Everything of a sequence moves together.


def _tensors(value: Any, found: dict[int, Tensor], seen: set[int]) -> None:
    """Every tensor that is reachable from an object; rotary tables and modules are shared."""
    if id(value) in seen or isinstance(value, Rotary | nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[value.untyped_storage().data_ptr()] = value
    elif isinstance(value, dict):
        for item in value.values():
            _tensors(item, found, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _tensors(item, found, seen)
    elif type(value).__module__.startswith("zoomkv") or type(value).__module__.endswith("_example"):
        names = getattr(type(value), "__slots__", ()) or vars(value)
        for name in names:
            _tensors(getattr(value, name, None), found, seen)


def tensors_of(cache: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    _tensors(cache, found, set())
    return {pointer: tensor for pointer, tensor in found.items() if tensor.numel()}


def stored_rows(layer: Any) -> list[Tensor]:  # each [Hkv, T, 2 D]
    """Keys beside values of the rows that are stored, by position, for each batch row."""
    both = torch.cat(layer.stored(), dim=-1)
    found = []
    for rows, positions, count in zip(
        both, layer.slots.positions, layer.slots.count.tolist(), strict=True
    ):
        order = positions[:, :count].argsort(dim=-1).expand(len(rows), -1)
        found.append(rows[:, :count].gather(1, order[..., None].expand(-1, -1, rows.shape[-1])))
    return found


@one_model
def test_a_copy_is_independent(bench: Any, tools: Any) -> None:
    cache = bench.cache()
    prefix = bench.generate(tools.prompt_ids(1, 9), cache=cache)
    before = {pointer: t.clone() for pointer, t in tensors_of(cache).items()}
    answers = []
    for seed in (3, 4):
        mine = copy.deepcopy(cache)
        shared = tensors_of(mine).keys() & tensors_of(cache).keys()
        assert all(tensors_of(cache)[pointer].shape == (128,) for pointer in shared)  # vocabulary
        question = torch.cat([prefix, tools.prompt_ids(1, 6, seed=seed)], dim=1)
        answers.append(bench.generate(question, cache=mine))
    for pointer, tensor in tensors_of(cache).items():
        assert torch.equal(tensor, before[pointer])
    question = torch.cat([prefix, tools.prompt_ids(1, 6, seed=3)], dim=1)
    assert torch.equal(bench.generate(question, cache=cache), answers[0])
    assert not torch.equal(answers[0], answers[1])


@one_model
def test_reset_leaves_nothing_behind(bench: Any, tools: Any) -> None:
    cache = bench.cache()
    first, other = tools.prompt_ids(2, 9), tools.prompt_ids(3, 12, seed=5)
    a = bench.generate(first, cache=cache)
    size = cache.footprint()
    cache.reset()
    empty = cache.footprint()
    assert (empty.device_bytes, empty.seen, empty.rows_max, empty.bytes_to_host) == (0, 0, 0, 0)
    bench.generate(other, cache=cache)
    cache.reset()
    assert torch.equal(bench.generate(first, cache=cache), a)
    assert cache.footprint() == size


@one_model
def test_batch_operations_equal_running_the_rows_that_they_give(bench: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(3, 7), tools.scripted_ids(3, 45)
    more = tools.scripted_ids(3, 30, seed=9)
    if "max_interval" not in bench.policy.binding:  # equal tokens would score alike
        prompt, generated, more = tools.distinct_ids(3, 82).split((7, 45, 30), dim=1)
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    far = 3e-4 if bench.policy.merges else 1e-4  # means of means round again and again

    def after(operation: Any, rows: list[int]) -> None:
        cache = bench.cache()
        tools.run(bench.model, cache, prompt, generated, mask)
        operation(cache)
        again = bench.cache()
        tools.run(bench.model, again, prompt[rows], generated[rows], mask[rows])
        for layer in range(len(cache)):
            assert torch.equal(cache.readable(layer), again.readable(layer))
            for mine, theirs in zip(
                stored_rows(cache.layers[layer]), stored_rows(again.layers[layer]), strict=True
            ):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        feed = torch.stack([more[row].roll(place) for place, row in enumerate(rows)])
        with torch.no_grad():
            for token in feed.split(1, dim=1):
                one = bench.model(token, cache=cache).logits
                two = bench.model(token, cache=again).logits
                torch.testing.assert_close(one, two, atol=far, rtol=far)

    after(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
    after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])
    after(lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2])
    after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])


@one_model
def test_keys_and_values_are_never_mixed_up(bench: Any, tools: Any) -> None:
    """Keys live in [0, 1), values in [10, 11): any slip shows."""

    def sentinels(module: nn.Module, args: Any, kwargs: Any) -> None:
        cache = kwargs["cache"]
        if not hasattr(cache, "_real_update"):
            cache._real_update = cache.update

            def update(k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
                return cache._real_update(
                    torch.rand_like(k), 10 + torch.rand_like(v), *rest, **named
                )

            cache.update = update

    cache = bench.cache()
    for layer in bench.model.get_decoder().layers:
        layer.self_attn.register_forward_pre_hook(sentinels, with_kwargs=True)
    tools.run(bench.model, cache, tools.prompt_ids(2, 7), tools.scripted_ids(2, 60))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    for layer in cache.layers:
        for rows in stored_rows(layer):
            keys, values = rows.chunk(2, dim=-1)
            assert keys.shape[0] == values.shape[0] == cache.shape.kv_heads
            assert keys.min() >= 0 and keys.max() < 1
            assert values.min() >= 10 and values.max() < 11
        if hasattr(layer, "archive"):
            every = (torch.zeros(20, dtype=torch.long), slice(None), torch.arange(20))
            keys, values = layer.archive.codec.decode(layer.archive.take(every))
            assert keys.shape[1] == cache.shape.kv_heads
            assert keys.max() < 1 and values.min() >= 10


@one_model
def test_beams_and_several_returns(bench: Any, tools: Any) -> None:
    prompt = tools.prompt_ids(2, 9)
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 30}
    loose = bench.generate(prompt, mask, cache=bench.cache(loose=True), **beams)
    assert torch.equal(loose, bench.generate(prompt, mask, use_cache=False, **beams))
    bound = bench.generate(prompt, mask, cache=bench.cache(), **beams)
    for row, pads in ((0, 0), (1, 4)):
        alone = bench.generate(prompt[row : row + 1, pads:], cache=bench.cache(), **beams)
        assert torch.equal(bound[2 * row : 2 * row + 2, pads:], alone)

    sampled = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20}
    torch.manual_seed(0)
    one = bench.generate(prompt, mask, cache=bench.cache(), **sampled)
    torch.manual_seed(0)
    assert torch.equal(one, bench.generate(prompt, mask, cache=bench.cache(), **sampled))


# 7. Chunked prefill.


@one_model
def test_chunked_prefill_reads_and_keeps_the_same(bench: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(2, 33), tools.scripted_ids(2, 20)
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    whole, reads = tools.run(bench.model, bench.cache(), prompt, generated, mask)
    for chunk in (4, 16, 32):  # the last chunk holds one token
        logits, again = tools.run(bench.model, bench.cache(), prompt, generated, mask, chunk)
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
        for one, two in zip(reads, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    tokens = bench.generate(prompt, mask, cache=bench.cache())
    chunked = bench.generate(prompt, mask, cache=bench.cache(), prefill_chunk_size=5)
    assert torch.equal(tokens, chunked)


@one_model
def test_prefill_is_dense_and_causal_whatever_the_budget(bench: Any, tools: Any) -> None:
    prompt = tools.prompt_ids(1, 64)
    changed = prompt.clone()
    changed[0, 63] += 1 if changed[0, 63] < 127 else -1
    with torch.no_grad():
        logits = bench.model(prompt, cache=bench.cache()).logits
        other = bench.model(changed, cache=bench.cache()).logits
        full = bench.dense(prompt).logits
    torch.testing.assert_close(logits, full, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits[:, :63], other[:, :63])
    assert not torch.equal(logits[:, 63], other[:, 63])


# 8. The footprint.


@one_model
def test_footprint_equals_the_summed_storages(bench: Any, tools: Any) -> None:
    cache = bench.cache()
    tools.run(bench.model, cache, tools.prompt_ids(2, 9), tools.scripted_ids(2, 70))
    footprint = cache.footprint()
    everything = sum(t.untyped_storage().nbytes() for t in tensors_of(cache).values())
    assert footprint.device_bytes + footprint.host_bytes == everything
    rows = [layer.stored()[0] for layer in cache.layers]
    stored = sum(2 * keys.numel() * keys.element_size() for keys in rows)
    if "streamed" not in str(bench.policy.binding) and bench.policy.name != "full_offloaded":
        assert footprint.device_bytes >= stored
    assert footprint.to_dict()["seen"] == 79


# 9. Dtypes.


@one_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_dtypes_are_kept_and_all_is_finite(bench: Any, tools: Any, dtype: str) -> None:
    returned = []
    cache = bench.cache()
    update = cache.update

    def spy(k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        keys, values = update(k, v, *rest, **named)
        returned.append((k.dtype, v.dtype, keys.dtype, values.dtype, keys, values))
        return keys, values

    cache.update = spy
    if dtype == "bfloat16":
        bench.model.to(torch.bfloat16)
    prompt = tools.prompt_ids(2, 9)
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        logits, _ = tools.run(bench.model, cache, prompt, tools.scripted_ids(2, 50), mask)
    assert logits.isfinite().all()
    for k_in, v_in, k_out, v_out, keys, values in returned:
        assert (k_in, v_in) == (k_out, v_out)
        assert keys.isfinite().all() and values.isfinite().all()


@one_model
def test_eager_and_sdpa_choose_the_same_rows(bench: Any, tools: Any) -> None:
    import zoomkv

    prompt, generated = tools.prompt_ids(2, 9), tools.scripted_ids(2, 60)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    logits, reads = tools.run(bench.model, bench.cache(), prompt, generated, mask)
    bench.dense.set_attn_implementation("eager")
    zoomkv.attach(bench.dense)
    assert bench.dense.config._attn_implementation == "zoomkv_eager"
    eager, again = tools.run(bench.dense, bench.cache(), prompt, generated, mask)
    torch.testing.assert_close(logits, eager, atol=1e-4, rtol=1e-4)
    for one, two in zip(reads, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
