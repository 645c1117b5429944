"""Rows on the host and what of them the device holds, against dictionaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.caches.context_rows import ContextRows, HeldRows
from zoomkv.caches.tiers import Traffic, make_row_codec

HEADS, DIM = 2, 8
ROW_BYTES = 2 * DIM * 4  # of one head in fp32


def like(batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rows = torch.zeros(batch, HEADS, 3, DIM, dtype=dtype)
    return rows, rows.clone()


def host(
    batch: int, precision: str = "auto", dtype: torch.dtype = torch.float32
) -> tuple[ContextRows, Traffic]:
    keys, values = like(batch, dtype)
    traffic = Traffic()
    return ContextRows(keys, values, make_row_codec(precision, keys, values), traffic), traffic


def numbered(batch: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[n, Hkv, D]`` that say which they are; values are keys + 0.5."""
    head = torch.arange(HEADS)[:, None]
    number = batch[:, None, None] * 100_000 + head * 10_000 + position[:, None, None]
    rows = number + torch.arange(DIM) / 16
    return rows.float(), rows.float() + 0.5


def fill(rows: ContextRows, ends: list[int], first: list[int] | None = None) -> None:
    first = [0] * len(ends) if first is None else first
    pairs = [(b, p) for b, end in enumerate(ends) for p in range(first[b], end)]
    batch, position = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    rows.put(batch, position, *numbered(batch, position))


# The host.


def test_ragged_rows_come_back_as_they_went_in() -> None:
    rows, traffic = host(3)
    fill(rows, [5, 0, 9])
    fill(rows, [20, 7, 9], [5, 0, 9])
    fill(rows, [20, 700, 9], [20, 7, 9])  # the others keep theirs while it grows
    assert traffic.to_host == (20 + 700 + 9) * HEADS * ROW_BYTES
    ends = (20, 700, 9)
    where = [(b, h, p) for b, end in enumerate(ends) for h in range(HEADS) for p in range(end)]
    batch, head, position = torch.tensor(where)[torch.randperm(len(where))].unbind(1)
    keys, values = rows.take(batch, head, position)
    assert keys.shape == values.shape == (len(where), DIM)
    assert traffic.to_device == len(where) * ROW_BYTES
    every = numbered(batch, position)
    index = torch.arange(len(where))
    assert torch.equal(keys, every[0][index, head]) and torch.equal(values, every[1][index, head])


def test_a_position_may_be_written_anew() -> None:
    rows, _ = host(1)
    fill(rows, [6])
    at = torch.tensor([0]), torch.tensor([4])
    rows.put(*at, torch.full((1, HEADS, DIM), -1.0), torch.full((1, HEADS, DIM), -2.0))
    keys, values = rows.take(
        torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1]), torch.full((2,), 4)
    )
    assert (keys == -1).all() and (values == -2).all()
    neighbour, _ = rows.take(at[0], torch.tensor([1]), torch.tensor([5]))
    assert torch.equal(neighbour[0], numbered(at[0], torch.tensor([5]))[0][0, 1])


def test_nothing_can_be_put_and_taken() -> None:
    rows, traffic = host(2)
    fill(rows, [0, 0])
    none = torch.zeros(0, dtype=torch.int64)
    keys, values = rows.take(none, none, none)
    assert keys.shape == values.shape == (0, DIM)
    assert rows.keys(0).shape == (2, HEADS, 0, DIM)
    assert (traffic.to_host, traffic.to_device) == (0, 0)


@pytest.mark.parametrize("precision", ["auto", "int8", "nf4"])
def test_the_first_keys_are_not_counted_as_traffic(precision: str) -> None:
    rows, traffic = host(2, precision)
    fill(rows, [12, 300])
    before = traffic.to_device
    keys = rows.keys(12)
    assert keys.shape == (2, HEADS, 12, DIM) and traffic.to_device == before
    batch, position = torch.arange(2).repeat_interleave(12), torch.arange(12).repeat(2)
    expected = numbered(batch, position)[0].unflatten(0, (2, 12)).transpose(1, 2)
    tolerance = {"auto": 0.0, "int8": 0.01, "nf4": 0.2}[precision]
    torch.testing.assert_close(keys, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("precision", "number_bits", "scale"), [("int8", 8, 4), ("nf4", 4, 4)])
def test_a_quantised_host_is_smaller_and_near(
    precision: str, number_bits: int, scale: int, dtype: torch.dtype
) -> None:
    rows, traffic = host(2, precision, dtype)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 30, HEADS, DIM, dtype=dtype)
    batch, position = torch.arange(30) % 2, torch.arange(30) // 2
    rows.put(batch, position, keys, values)
    bytes_of_row = 2 * (DIM * number_bits // 8 + scale)
    assert traffic.to_host == 30 * HEADS * bytes_of_row
    got = rows.take(batch, torch.ones(30, dtype=torch.int64), position)
    assert traffic.to_device == 30 * bytes_of_row
    for back, row in zip(got, (keys[:, 1], values[:, 1]), strict=True):
        assert back.dtype == dtype
        largest = row.abs().amax(-1, keepdim=True).float()
        assert (
            (back.float() - row.float()).abs() <= largest / (50 if number_bits == 8 else 5)
        ).all()


def test_keys_and_values_may_differ_in_dtype() -> None:
    keys, values = torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, DIM).bfloat16()
    rows = ContextRows(keys, values, make_row_codec("auto", keys, values), Traffic())
    at = torch.zeros(1, dtype=torch.int64)
    rows.put(at, at, torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM).bfloat16())
    held = HeldRows(keys, values)
    held.resize(torch.tensor([1]))
    hold(held, torch.ones(1, HEADS, 1, dtype=torch.bool), rows)
    assert held.keys.dtype == torch.float32 and held.values.dtype == torch.bfloat16
    assert (held.keys == 1).all() and (held.values == 1).all()


# The device.


def hold(held: HeldRows, wanted: Tensor, rows: ContextRows) -> Tensor:
    """Positions in any order, some of which do not count."""
    there, position = wanted.to(torch.uint8).sort(dim=2)
    most = min(int(wanted.sum(2).max()) + 1, wanted.shape[2])
    there, position = there[..., -most:].bool(), position[..., -most:]
    return held.hold(position, there, wanted.shape[2], rows)


class Model:
    """What should be held: for each batch row and head, the position in each slot."""

    def __init__(self, batch: int) -> None:
        self.held = [[set[int]() for _ in range(HEADS)] for _ in range(batch)]
        self.slots = [0] * batch

    def check(self, held: HeldRows) -> None:
        for b, heads in enumerate(self.held):
            for h, want in enumerate(heads):
                slots = [n for n, p in enumerate(held.position[b, h].tolist()) if p >= 0]
                there = held.position[b, h, slots].long()
                assert sorted(there.tolist()) == sorted(want)  # and none twice
                assert all(slot < self.slots[b] for slot in slots)
                for slot, position in zip(slots, there, strict=True):
                    row = numbered(torch.tensor([b]), position[None])
                    assert torch.equal(held.keys[b, h, slot], row[0][0, h])
                    assert torch.equal(held.values[b, h, slot], row[1][0, h])


@settings(max_examples=60)
@given(data=st.data())
def test_slots_hold_what_is_wanted_and_fetch_what_is_missing(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), "batch")
    ends = data.draw(st.lists(st.integers(1, 12), min_size=batch, max_size=batch), "tokens")
    rows, traffic = host(batch)
    fill(rows, ends)
    held, model = HeldRows(*like(batch)), Model(batch)
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        if data.draw(st.booleans(), "resize"):
            sizes = st.lists(st.integers(0, 7), min_size=batch, max_size=batch)
            model.slots = data.draw(sizes, "slots")
            before = held.position.clone()
            held.resize(torch.tensor(model.slots))
            assert held.slots == max(model.slots)
            assert held.keys.shape == held.values.shape == (batch, HEADS, held.slots, DIM)
            for b, slots in enumerate(model.slots):  # what is in slots that stay, stays
                stays = before[b, :, :slots]
                assert torch.equal(held.position[b, :, : stays.shape[1]], stays)
                model.held[b] = [set(p for p in head.tolist() if p >= 0) for head in stays]
            model.check(held)
            continue
        wanted = torch.zeros(batch, HEADS, max(ends), dtype=torch.bool)
        for b in range(batch):
            for h in range(HEADS):
                most = min(model.slots[b], ends[b])
                chosen = data.draw(st.sets(st.integers(0, ends[b] - 1), max_size=most), "wanted")
                wanted[b, h, list(chosen)] = True
        moved = traffic.to_device
        fetched = hold(held, wanted, rows)
        new = [[0] * HEADS for _ in range(batch)]
        for b in range(batch):
            for h in range(HEADS):
                want = set(wanted[b, h].nonzero().squeeze(1).tolist())
                new[b][h] = len(want - model.held[b][h])
                model.held[b][h] = want
        assert fetched.tolist() == new
        assert traffic.to_device - moved == sum(map(sum, new)) * ROW_BYTES
        model.check(held)


def test_what_stays_does_not_move() -> None:
    """Rows that are asked for again are neither fetched nor copied to another slot."""
    rows, _ = host(1)
    fill(rows, [10])
    held = HeldRows(*like(1))
    held.resize(torch.tensor([4]))
    wanted = torch.zeros(1, HEADS, 10, dtype=torch.bool)
    wanted[..., [1, 4, 7, 8]] = True
    hold(held, wanted, rows)
    before = held.position.clone()
    wanted[..., 4] = False
    wanted[:, 0, 9] = True
    assert hold(held, wanted, rows).tolist() == [[1, 0]]
    expected = before.masked_fill(before == 4, -1)
    expected[0, 0][before[0, 0] == 4] = 9
    assert torch.equal(held.position, expected)


def test_a_context_that_grows_keeps_what_is_held() -> None:
    rows, _ = host(2)
    fill(rows, [6, 3])
    held = HeldRows(*like(2))
    held.resize(torch.tensor([3, 2]))
    wanted = torch.zeros(2, HEADS, 6, dtype=torch.bool)
    wanted[:, :, :2] = True
    assert hold(held, wanted, rows).tolist() == [[2, 2], [2, 2]]
    fill(rows, [600, 5], [6, 3])
    wanted = torch.zeros(2, HEADS, 600, dtype=torch.bool)
    wanted[0, :, 1], wanted[0, 1, 599], wanted[1, :, 4] = True, True, True
    assert hold(held, wanted, rows).tolist() == [[0, 1], [1, 1]]
    model = Model(2)
    model.slots, model.held = [3, 2], [[{1}, {1, 599}], [{4}, {4}]]
    model.check(held)


@pytest.mark.parametrize("chosen", [[1], [1, 0], [0, 0, 1]], ids=str)
def test_batch_rows_can_be_selected(chosen: list[int]) -> None:
    rows, _ = host(2)
    fill(rows, [6, 9])
    held = HeldRows(*like(2))
    held.resize(torch.tensor([2, 3]))
    wanted = torch.zeros(2, HEADS, 9, dtype=torch.bool)
    wanted[0, :, 5], wanted[1, :, 7:] = True, True
    hold(held, wanted, rows)
    keys, position = held.keys, held.position
    host_keys = rows.keys(9)
    held.select(torch.tensor(chosen))
    rows.select(torch.tensor(chosen))
    assert torch.equal(held.keys, keys[chosen]) and torch.equal(held.position, position[chosen])
    assert torch.equal(rows.keys(9), host_keys[chosen])
    assert hold(held, wanted[chosen], rows).sum() == 0


def test_all_tensors_are_reported() -> None:
    def owned(thing: Any) -> set[int]:
        return {id(x) for x in (getattr(thing, n) for n in dir(thing)) if isinstance(x, Tensor)}

    rows, _ = host(2)
    fill(rows, [6, 9])
    held = HeldRows(*like(2))
    held.resize(torch.tensor([2, 3]))
    assert {id(x) for x in held.tensors()} == owned(held)
    *parts, moved = rows.tensors()
    assert moved is rows.moved
    assert len(parts) == 2 and all(x.device.type == "cpu" and x.shape[2] >= 9 for x in parts)
