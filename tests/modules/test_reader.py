"""One softmax over several parts against plain attention over all rows in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.modules import reader
from zoomkv.modules.reader import Entries, Part

B, KV, G, Q, D = 2, 3, 2, 4, 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def attention(query: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Attention over the concatenation in fp64: parts are keys, values and addends of logits."""
    keys, values = (torch.cat([part[i].double() for part in parts], 2) for i in (0, 1))
    addends = [bias.double().expand(*query.shape[:-1], part.shape[2]) for part, _, bias in parts]
    out = torch.zeros(query.shape, dtype=torch.float64)
    bias = torch.cat(addends, -1)
    for b, h, g, q in itertools.product(*(range(n) for n in query.shape[:-1])):
        logits = keys[b, h] @ query[b, h, g, q].double() + bias[b, h, g, q]
        out[b, h, g, q] = logits.softmax(0) @ values[b, h]
    return out


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, KV, count, D), torch.randn(B, KV, count, D)


def addends(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


def read(query: Tensor, parts: list[Part]) -> Tensor:
    return reader.read(query, parts, 1.0)


def test_parts_of_every_kind_equal_one_attention() -> None:
    query = torch.randn(B, KV, G, Q, D)
    plain, masked, biased = rows(5), rows(6), rows(7)
    mask = torch.rand(B, 1, 1, Q, 6) < 0.5
    bias = torch.randn(B, 1, 1, 1, 7).masked_fill(torch.rand(B, 1, 1, 1, 7) < 0.3, -torch.inf)
    entries = Entries.of(*rows(9), None)
    sizes = torch.rand(B, KV, G, Q, 9).log()
    parts = [
        Part(*plain),
        Part(*masked, mask),
        Part(*biased, bias),
        entries.part(sizes),
    ]
    got = read(query, parts)
    assert got.shape == (B, KV, G, Q, D) and got.dtype == torch.float32
    whole = [(*plain, torch.zeros(1)), (*masked, addends(mask)), (*biased, bias)]
    expected = attention(query, [*whole, (*entries.plain(), sizes)])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(["none", "bool", "bias", "int8"]), min_size=4, max_size=4),
    seed=st.integers(0, 10**6),
)
def test_any_parts_equal_one_attention(counts: list[int], kinds: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    query = 3 * torch.randn(B, KV, G, Q, D)
    first = rows(1)  # which each query reads
    parts, whole = [Part(*first)], [(*first, torch.zeros(1))]
    for count, kind in zip(counts, kinds, strict=False):
        keys, values = rows(count)
        mask = torch.rand(B, KV, G, Q, count) < 0.5
        bias = torch.where(mask, torch.randn(mask.shape), -torch.inf)
        if kind == "none":
            parts.append(Part(keys, values))
            bias = torch.zeros(1)
        elif kind == "bool":
            parts.append(Part(keys, values, mask))
            bias = addends(mask)
        elif kind == "bias":
            parts.append(Part(keys, values, bias))
        else:
            entries = Entries.of(keys, values, None)
            parts.append(entries.part(bias))
            keys, values = entries.plain()
        whole.append((keys, values, bias))
    expected = attention(query, whole)
    torch.testing.assert_close(read(query, parts).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_part_that_nobody_reads_changes_nothing() -> None:
    query, some, others = torch.randn(B, KV, G, Q, D), rows(5), rows(4)
    alone = read(query, [Part(*some)])
    nobody = torch.zeros(B, 1, 1, 1, 4, dtype=torch.bool)
    for closed in (
        Part(*others, nobody),
        Part(*others, addends(nobody)),
        Entries.of(*others, None).part(addends(nobody)),
        Part(*rows(0)),
    ):
        for parts in ([Part(*some), closed], [closed, Part(*some)]):
            torch.testing.assert_close(read(query, parts), alone, atol=1e-6, rtol=1e-6)


def test_weights_come_from_logits_that_need_not_be_small() -> None:
    query, one, two = 40 * torch.randn(B, KV, G, Q, D), rows(5), rows(4)
    got = read(query, [Part(*one), Part(*two)])
    assert got.isfinite().all()
    expected = attention(query, [(*one, torch.zeros(1)), (*two, torch.zeros(1))])
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=1e-3)


def test_a_size_counts_as_so_many_equal_rows() -> None:
    """An entry with log n beside it is read like n copies of itself."""
    query, some, (key, value) = torch.randn(B, KV, G, Q, D), rows(5), rows(2)
    sizes = torch.tensor([3.0, 5.0])
    got = read(query, [Part(*some), Part(key, value, sizes.log()[None, None, None, None])])
    copies = (x.repeat_interleave(torch.tensor([3, 5]), dim=2) for x in (key, value))
    torch.testing.assert_close(got, read(query, [Part(*some), Part(*copies)]))


@pytest.mark.parametrize("scaling", [0.25, 3.0])
def test_queries_are_scaled(scaling: float) -> None:
    query, some = torch.randn(B, KV, G, Q, D), rows(5)
    got = reader.read(query, [Part(*some)], scaling)
    torch.testing.assert_close(got, read(scaling * query, [Part(*some)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_in_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    query = torch.randn(B, KV, G, Q, D).to(dtype)
    some, others = ([x.bfloat16() for x in rows(count)] for count in (5, 4))
    entries = Entries.of(*others, None)
    sizes = torch.rand(1, 1, 1, 1, 4).log()
    got = read(query, [Part(*some), entries.part(sizes)])
    assert got.dtype == dtype
    expected = attention(query, [(*some, torch.zeros(1)), (*entries.plain(), sizes)])
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, atol=near, rtol=near)


def test_logits_of_one_part() -> None:
    query, (keys, values) = torch.randn(B, KV, G, Q, D), rows(5)
    mask = torch.rand(B, 1, 1, Q, 5) < 0.5
    part = Part(keys, values, mask)
    expected = torch.einsum("bhgqd,bhnd->bhgqn", query, keys)
    got = part.logits(query)
    assert torch.equal(got == -torch.inf, ~mask.expand_as(got))
    torch.testing.assert_close(got.where(mask, 0), expected.where(mask, 0), atol=1e-5, rtol=1e-5)


# Entries.


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]))
def test_an_8_bit_entry_is_off_by_half_a_step_at_most(seed: int, size: float) -> None:
    torch.manual_seed(seed)
    keys, values = (size * x for x in rows(6))
    keys[0, 0, 0] = 0
    entries = Entries.of(keys, values, None)
    assert entries.keys.dtype == entries.values.dtype == torch.int8
    assert entries.key_scale is not None and entries.value_scale is not None
    assert entries.key_scale.shape == (B, KV, 6) and entries.key_scale.dtype == torch.float32
    for x, back, scale in zip(
        (keys, values), entries.plain(), (entries.key_scale, entries.value_scale), strict=True
    ):
        assert back.dtype == torch.float32 and back.shape == x.shape
        step = (x.abs().amax(-1) / 127).clamp(min=1e-12)
        torch.testing.assert_close(scale, step)
        assert ((x - back).abs() <= 0.5001 * step[..., None]).all()
    assert not entries.plain()[0][0, 0, 0].any()


def test_what_is_stored_twice_stays() -> None:
    entries = Entries.of(*rows(6), None)
    again = Entries.of(*entries.plain(), None)
    assert torch.equal(again.keys, entries.keys) and torch.equal(again.values, entries.values)
    for one, two in zip(again.plain(), entries.plain(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_batch_rows_can_be_selected(dtype: torch.dtype | None) -> None:
    entries = Entries.of(*rows(6), dtype)
    assert len(entries.tensors()) == (4 if dtype is None else 2)
    chosen = entries.select(torch.tensor([1, 0, 1]))
    for one, two in zip(chosen.tensors(), entries.tensors(), strict=True):
        assert torch.equal(one, two[[1, 0, 1]])
    assert (chosen.key_scale is None) == (dtype is not None)
