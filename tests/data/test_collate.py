"""Packing: nothing lost, nothing seen across examples, the same batches after a stop."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_tiny

from zoomkv.data.collate import PackedBatches, collate, pack
from zoomkv.data.render import IGNORE, NOTHING, PROMPT, SOLUTION, THOUGHT
from zoomkv.losses.cross_entropy import token_nll


def examples(*lengths, seed=0):
    rng = random.Random(seed)
    return [
        {
            "input_ids": [rng.randrange(1, 128) for _ in range(length)],
            "kinds": [PROMPT] * min(2, length - 1) + [THOUGHT] * (length - min(2, length - 1)),
            "looks_up": [NOTHING] * length,
        }
        for length in lengths
    ]


def nll_of(model, batch):
    keys = ("input_ids", "position_ids")
    hidden = model.get_decoder()(
        use_cache=False, **{key: batch[key] for key in keys if key in batch}
    ).last_hidden_state
    return token_nll(hidden, batch["labels"], model.get_output_embeddings())[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_and_padded_batches_learn_what_each_example_alone_does(family, attention):
    model = make_tiny(family)
    model.set_attn_implementation(attention)
    rows = examples(3, 5, 9, 4)
    alone = torch.cat([nll_of(model, collate([[row]], 0, packed=False)) for row in rows])
    packed = nll_of(model, collate([rows[:2], rows[2:]], 0))
    torch.testing.assert_close(packed.sort().values, alone.sort().values, rtol=0, atol=1e-5)
    padded = nll_of(model, collate([[row] for row in rows], 0, packed=False))
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)
    leaking = collate([rows[:2], rows[2:]], 0)
    del leaking["position_ids"]
    assert (nll_of(model, leaking).sort().values - alone.sort().values).abs().max() > 1e-3


def test_labels_are_masked_by_length_not_by_id():
    kinds = [PROMPT, PROMPT, THOUGHT, SOLUTION, SOLUTION]
    row = {"input_ids": [5, 6, 7, 9, 9], "kinds": kinds, "looks_up": [NOTHING] * 4 + [1]}
    short = {"input_ids": [5, 9], "kinds": [PROMPT, SOLUTION], "looks_up": [NOTHING, 0]}
    batch = collate([[row], [short]], pad_id=9)
    assert batch["looks_up"].tolist() == [[NOTHING] * 4 + [1], [NOTHING, 0] + [NOTHING] * 3]
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, 7, 9, 9], [IGNORE, 9] + [IGNORE] * 3]
    assert batch["kinds"].tolist()[1] == [PROMPT, SOLUTION] + [PROMPT] * 3
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert batch["input_ids"][1].tolist() == [5, 9, 9, 9, 9]


def test_an_example_without_a_prompt_does_not_learn_its_first_token():
    row = {"input_ids": [4, 5], "kinds": [THOUGHT] * 2, "looks_up": [NOTHING] * 2}
    batch = collate([[row, row]], pad_id=0)
    assert batch["labels"].tolist() == [[IGNORE, 5, IGNORE, 5]]


def test_an_empty_row_is_padding_only():
    batch = collate([[]], pad_id=3)
    assert batch["input_ids"].tolist() == [[3]] and batch["labels"].tolist() == [[IGNORE]]


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=200)


@given(lengths)
def test_packing_loses_nothing_and_never_overflows(lengths):
    rows = pack(lengths, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 20 for row in rows)
    # First fit: no two of the last rows could share one.
    loads = [sum(lengths[index] for index in row) for row in rows[-30:]]
    assert all(a + b > 20 for n, a in enumerate(loads) for b in loads[:n])


@given(lengths, st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_training_batches_are_full_and_shared_out(lengths, size, world, packing, epoch):
    shares = []
    for rank in range(world):
        batches = PackedBatches(lengths, 20, size, 7, packing, True, rank, world)
        batches.set_epoch(epoch)
        shares.append(list(batches))
        assert len(shares[-1]) == len(batches)
    assert all(len(batch) == size for share in shares for batch in share)
    met = [index for share in shares for batch in share for row in batch for index in row]
    assert set(met) == set(range(len(lengths)))
    assert sum(map(len, shares)) * size - len(batches.rows) < size * world


@given(lengths, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_validation_meets_everything_once(lengths, size, world, packing):
    shares = [
        list(PackedBatches(lengths, 20, size, 7, packing, False, rank, world))
        for rank in range(world)
    ]
    met = [index for share in shares for batch in share for row in batch for index in row]
    assert sorted(met) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1


@given(lengths, st.integers(0, 50), st.integers(0, 2))
def test_a_stopped_epoch_goes_on_where_it_was(lengths, skip, epoch):
    whole = PackedBatches(lengths, 20, 2)
    whole.set_epoch(epoch)
    rest = PackedBatches(lengths, 20, 2)
    rest.epoch, rest.skip = epoch, skip
    assert list(rest) == list(whole)[skip:]
    assert list(rest) == list(whole)  # the next epoch is whole again


def test_epochs_differ_and_the_trainer_can_tell_them():
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from torch.utils.data import DataLoader

    batches = PackedBatches([3] * 40, 20, 2, packing=False)
    loader = DataLoader(range(40), batch_sampler=batches)
    first = list(batches)
    _set_sampler_epoch(loader, 1)
    assert batches.epoch == 1 and list(batches) != first
    _set_sampler_epoch(loader, 0)
    assert list(batches) == first


def test_like_lengths_meet():
    rng = random.Random(0)
    lengths = [rng.randrange(1, 500) for _ in range(400)]
    batches = list(PackedBatches(lengths, 500, 4, packing=False))
    longest = [max(lengths[row[0]] for row in batch) for batch in batches]
    assert sum(longest) * 4 < 1.2 * sum(lengths)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 3}, {"world": 2}, {"packing": False}]
)
def test_the_plan_tells_other_orders_apart(change):
    settings = {"lengths": [5, 9, 3], "max_length": 20, "batch_size": 2}
    assert PackedBatches(**settings).plan == PackedBatches(**settings).plan
    assert PackedBatches(**settings).plan != PackedBatches(**(settings | change)).plan
    assert PackedBatches(**settings).plan != PackedBatches(**(settings | {"lengths": [5, 9]})).plan


@given(lengths, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_processes_share_the_steps_of_one(lengths, size, world, packing, shuffle):
    one = PackedBatches(lengths, 20, size * world, 3, packing, shuffle)
    several = [
        PackedBatches(lengths, 20, size, 3, packing, shuffle, rank, world) for rank in range(world)
    ]
    for whole, *shares in zip(one, *several, strict=True):
        assert sorted(row for share in shares for row in share) == sorted(whole)
    assert {batches.plan for batches in several} == {one.plan}
