"""The divergence against a plain loop, its gradient, and half precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.losses.distillation import distillation, first_token_agreement


def plain(student: list[float], teacher: list[float], temperature: float) -> float:
    p, q = ([math.exp(x / temperature) for x in row] for row in (teacher, student))
    p, q = ([x / sum(row) for x in row] for row in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_equals_a_plain_loop(temperature) -> None:
    torch.manual_seed(0)
    student, teacher = 3 * torch.randn(2, 4, 7)
    loss = distillation(student, teacher, temperature)
    expected = [
        plain(s, t, temperature) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)
    ]
    torch.testing.assert_close(loss, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    swapped = distillation(teacher, student, temperature)
    assert not torch.allclose(loss, swapped, rtol=1e-2)


def test_gradient_goes_to_the_student_alone() -> None:
    torch.manual_seed(0)
    student = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: distillation(x, teacher.detach(), 0.7), student)
    loss = distillation(student, teacher)
    loss.sum().backward()
    assert teacher.grad is None
    torch.testing.assert_close(student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 20), st.floats(0.2, 5))
def test_no_less_than_zero_and_zero_for_equals(seed, spread, temperature) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = spread * torch.randn(2, 3, 11, generator=generator, dtype=torch.float64)
    assert (distillation(student, teacher, temperature) > -1e-12).all()
    # A constant on all logits says nothing.
    same = distillation(teacher + 5, teacher, temperature)
    torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-9, rtol=0)


def test_half_precision_is_widened_and_large_logits_are_finite() -> None:
    torch.manual_seed(0)
    student, teacher = (100 * torch.randn(2, 3, 50)).bfloat16()
    loss = distillation(student, teacher)
    assert loss.dtype == torch.float32 and loss.isfinite().all()
    assert torch.equal(loss, distillation(student.float(), teacher.float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss, distillation(student, teacher))


def test_tokens_that_are_ruled_out_count_nothing() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 6)
    expected = distillation(student[:, :4], teacher[:, :4])
    teacher[:, 4:] = -torch.inf
    student[:, 4:] = -torch.inf
    student.requires_grad_()
    loss = distillation(student, teacher)
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    assert student.grad is not None and student.grad.isfinite().all()
    # What the teacher would write and the student can't: infinitely far.
    assert distillation(teacher, torch.zeros(3, 6)).isinf().all()


def test_first_token_agreement() -> None:
    student = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    teacher = torch.tensor([[0.0, 9.0, 8.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    assert first_token_agreement(student, teacher).tolist() == [1.0, 0.0, 1.0]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"student are \(2, 3\), of the teacher \(2, 4\)"):
        distillation(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="give the same positions"):
        first_token_agreement(torch.zeros(2, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="temperature=0.0"):
        distillation(torch.zeros(2, 3), torch.zeros(2, 3), 0.0)
