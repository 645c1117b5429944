"""Grouped attention against the reference, and the reference against torch."""

import pytest
import torch
import torch.nn.functional as F

from zoomkv.ops.attention import attention_weights, grouped_attention
from zoomkv.ops.attention_reference import attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [(2, 4, 2), (1, 9, 3), (2, 3, 3), (1, 4, 1)]  # B, H, Hkv: GQA, odd groups, MHA, MQA


def states(batch, heads, kv_heads, length, rows, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return (
        normal(batch, heads, length, 16),
        normal(batch, kv_heads, rows, 16),
        normal(batch, kv_heads, rows, 16),
    )


def lower_right(length: int, rows: int) -> torch.Tensor:
    return torch.arange(rows) <= torch.arange(length)[:, None] + rows - length


def some_rows(*shape: int) -> torch.Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0] = True
    return mask


def test_reference_is_attention() -> None:
    query, key, value = states(2, 4, 2, 5, 9)
    mask, bias = some_rows(2, 1, 5, 9), torch.randn(2, 2, 1, 9)
    wide = (bias.repeat_interleave(2, 1) + torch.zeros(2, 4, 5, 9)).masked_fill(
        ~mask, float("-inf")
    )
    expected = F.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), wide, scale=0.3
    )
    got = attention_reference(query, key, value, mask, bias, scale=0.3)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per KV head"])
def test_masked(shape, length, per_head, dtype) -> None:
    batch, heads, kv_heads = shape
    query, key, value = states(*shape, length, 11, dtype)
    mask = some_rows(batch, kv_heads if per_head else 1, length, 11)
    expected = attention_reference(query, key, value, mask)
    additive = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    for form in (mask, additive):
        got = grouped_attention(query, key, value, form)
        assert got.dtype == dtype and got.shape == query.shape
        torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_weights_are_those_of_the_output(shape, masked, dtype) -> None:
    query, key, value = states(*shape, 1, 11, dtype)
    mask = some_rows(shape[0], 1, 1, 11) if masked else None
    output, weights = attention_weights(query, key, value, mask, scale=0.3)
    expected = attention_reference(query, key, value, mask, scale=0.3)
    assert output.dtype == dtype and weights.dtype == torch.float32
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=0)
    every = weights.flatten(1, 2)[..., None, :]  # [B, H, 1, T]
    spread = value.float().repeat_interleave(shape[1] // shape[2], 1)
    torch.testing.assert_close(every @ spread, expected, atol=TOLERANCE[dtype], rtol=0)
    if mask is not None:
        assert bool((every.masked_select(~mask) == 0).all())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 4, 11])
@pytest.mark.parametrize("form", ["none", "bool", "additive"])
def test_causal_stands_at_the_last_row(form, length, dtype) -> None:
    query, key, value = states(2, 4, 2, length, 11, dtype)
    readable = lower_right(length, 11)
    mask = None
    if form != "none":
        mask = some_rows(2, 1, length, 11)
        readable = readable & mask
    if form == "additive":
        assert mask is not None
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    got = grouped_attention(query, key, value, mask, causal=True)
    expected = attention_reference(query, key, value, readable)
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("length", [1, 3])
def test_scale(length, scale) -> None:
    query, key, value = states(1, 4, 2, length, 6)
    got = grouped_attention(query, key, value, scale=scale)
    torch.testing.assert_close(got, attention_reference(query, key, value, scale=scale))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_query_that_may_read_nothing_gives_zeros(length, causal, dtype) -> None:
    query, key, value = states(2, 4, 2, length, 6, dtype)
    mask = torch.ones(2, 1, length, 6, dtype=torch.bool)
    mask[0, :, 0] = False
    forms = [mask, torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))]
    readable = mask & lower_right(length, 6) if causal else mask
    for form in forms:
        got = grouped_attention(query, key, value, form, causal=causal)
        assert got.isfinite().all() and (got[0, :, 0] == 0).all()
        expected = attention_reference(query, key, value, readable)
        torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("length", [1, 3])
def test_autocast_gives_the_query_dtype(length) -> None:
    """Rotary turns queries and keys into fp32 under autocast; values stay in bf16."""
    query, key, value = states(2, 4, 2, length, 6)
    expected = attention_reference(query, key, value.bfloat16(), lower_right(length, 6))
    with torch.autocast("cpu", torch.bfloat16):
        got = grouped_attention(query, key, value.bfloat16(), causal=True)
        same = attention_reference(query, key, value.bfloat16(), lower_right(length, 6))
    assert got.dtype == torch.float32 and torch.equal(same, expected)
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=0)


@pytest.mark.parametrize("length", [1, 5])
def test_gradients_reach_all_inputs(length) -> None:
    inputs = [x.requires_grad_() for x in states(1, 4, 2, length, 6)]
    got = torch.autograd.grad(grouped_attention(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(attention_reference(*inputs).square().sum(), inputs)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_views_of_a_larger_buffer() -> None:
    query, key, value = states(2, 4, 2, 1, 20)
    got = grouped_attention(query, key[:, :, 3:9], value[:, :, 3:9])
    expected = attention_reference(query, key[:, :, 3:9].clone(), value[:, :, 3:9].clone())
    torch.testing.assert_close(got, expected)
