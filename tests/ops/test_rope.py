"""Rotations against complex numbers in float64; rotate, unrotate and shift as one algebra."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.ops.rope import Rotary


def frequencies(rotary: int, base: float = 10000.0) -> Tensor:
    return base ** -(torch.arange(0, rotary, 2).float() / rotary)


def reference(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Every pair of coordinates as a complex number, turned by an angle rounded to fp32."""
    half = len(inv_freq)
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    angle = (positions[..., None].float() * inv_freq).double()
    turned = pairs * torch.polar(torch.full_like(angle, scaling), angle)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
SCALINGS = st.sampled_from([1.0, 1.1386294, 0.5])


@given(
    SHAPES,
    st.sampled_from([2, 8, 14]),
    st.integers(0, 5),
    SCALINGS,
    st.sampled_from([30, 131072]),
    st.integers(0, 2**20),
    st.sampled_from(["all", "heads", "rows", "time", "one"]),
)
def test_equal_to_complex_numbers(shape, rotary, rest, scaling, longest, seed, like) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, length = shape
    x = torch.randn(*shape, rotary + rest, generator=generator)
    form = {
        "all": shape,
        "heads": (heads, length),
        "rows": (batch, 1, length),
        "time": (length,),
        "one": (),
    }[like]
    positions = torch.randint(0, longest, form, generator=generator)
    rotary_ = Rotary(frequencies(rotary), scaling)
    got = rotary_.rotate(x, positions)
    assert got.shape == x.shape and got.dtype == x.dtype
    expected = reference(x, positions, frequencies(rotary), scaling)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(got[..., rotary:], x[..., rotary:])

    torch.testing.assert_close(rotary_.unrotate(got, positions), x, atol=1e-5, rtol=0)
    other = rotary_.unrotate(x, positions)
    torch.testing.assert_close(rotary_.rotate(other, positions), x, atol=1e-5, rtol=0)

    to = torch.randint(0, longest, form, generator=generator)
    shifted = rotary_.shift(got, positions, to)
    torch.testing.assert_close(shifted, rotary_.rotate(x, to), atol=1e-5, rtol=0)
    assert torch.equal(shifted[..., rotary:], x[..., rotary:])


def test_as_transformers_writes_it() -> None:
    """The layout of its ``apply_rotary_pos_emb``, to the last bit."""
    x, positions, inv_freq = torch.randn(2, 3, 7, 16), torch.arange(90, 97), frequencies(16)
    angle = torch.cat((positions[:, None].float() * inv_freq,) * 2, dim=-1)
    half = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    expected = x * (angle.cos() * 1.25) + half * (angle.sin() * 1.25)
    assert torch.equal(Rotary(inv_freq, 1.25).rotate(x, positions), expected)


def test_scores_depend_on_distance_alone() -> None:
    query, key = torch.randn(2, 1, 64)
    rotary = Rotary(frequencies(64))
    at = torch.tensor([3]), torch.tensor([11])
    later = at[0] + 500, at[1] + 500
    here = rotary.rotate(query, at[1]) @ rotary.rotate(key, at[0]).T
    there = rotary.rotate(query, later[1]) @ rotary.rotate(key, later[0]).T
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)
    assert (here - query @ key.T).abs() > 0.1


def test_shift_keeps_the_models_angles_far_out() -> None:
    """At 10**6 an angle's rounding to fp32 is 0.03; the model's own rounding is what counts."""
    rotary = Rotary(frequencies(16) * 0.9)
    x = torch.randn(4, 16)
    near, far = torch.tensor([3, 5, 7, 11]), torch.tensor([999_983, 999_979, 999_961, 999_959])
    got = rotary.shift(rotary.rotate(x, far), far, near)
    torch.testing.assert_close(got, rotary.rotate(x, near), atol=1e-5, rtol=0)
    back = rotary.shift(got, near, far)
    torch.testing.assert_close(back, rotary.rotate(x, far), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fp32_inside_whatever_the_dtype(dtype) -> None:
    x, rotary = torch.randn(2, 3, 5, 20).to(dtype), Rotary(frequencies(16), 1.3)
    a, b = torch.randint(0, 5000, (2, 2, 1, 5)).unbind(0)
    with torch.autocast("cpu", torch.bfloat16):
        got = rotary.rotate(x, a), rotary.unrotate(x, a), rotary.shift(x, a, b)
    wide = x.float()
    expected = rotary.rotate(wide, a), rotary.unrotate(wide, a), rotary.shift(wide, a, b)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype and torch.equal(one, other.to(dtype))


def test_gradients_pass() -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    with torch.inference_mode():  # what is remembered for a device must not spoil training
        rotary = Rotary(frequencies(8))
        rotary.rotate(x.detach(), torch.arange(4))
    weight = torch.randn(2, 4, 8)
    (rotary.rotate(x, torch.arange(4)) * weight).sum().backward()
    torch.testing.assert_close(x.grad, rotary.unrotate(weight, torch.arange(4)))


def test_shared_by_deepcopy_and_apart_from_the_model() -> None:
    buffer = frequencies(8)
    rotary = Rotary(buffer)
    assert copy.deepcopy({"policy": [rotary]})["policy"][0] is rotary
    buffer.zero_()
    assert torch.equal(rotary.inv_freq, frequencies(8))
    assert Rotary(frequencies(8).bfloat16()).inv_freq.dtype == torch.float32


def test_bad_input() -> None:
    for wrong in (torch.ones(2, 4), torch.arange(4)):
        with pytest.raises(ValueError, match=r"inv_freq is .*; give floats \[R / 2\]"):
            Rotary(wrong)
    with pytest.raises(ValueError, match="scaling is 0"):
        Rotary(frequencies(8), 0.0)
    rotary, x = Rotary(frequencies(8)), torch.randn(2, 3, 8)
    for positions in (torch.arange(4), torch.zeros(5, 2, 3), torch.zeros(2, 1, 3)):
        for call in (rotary.rotate, rotary.unrotate):
            with pytest.raises(ValueError, match=r"positions .* leading dims \[2, 3\] of x"):
                call(x, positions)
        with pytest.raises(ValueError, match=r"positions .* leading dims \[2, 3\] of x"):
            rotary.shift(x, torch.arange(3), positions)
    with pytest.raises(ValueError, match="x has 6 dims, fewer than the 8 rotary ones"):
        rotary.rotate(x[..., :6], torch.arange(3))
