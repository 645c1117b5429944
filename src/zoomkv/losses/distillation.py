"""How far a student's next token is from its teacher's (SeKV, arXiv 2606.31145, L_distill)."""

from __future__ import annotations

import torch
from torch import Tensor


def distillation(
    student: Tensor,  # [N, V]
    teacher: Tensor,  # [N, V]
    temperature: float = 1.0,
) -> Tensor:  # [N]
    """KL divergence of the student from the teacher, KL(teacher || student), at each position.

    Args:
        student: Logits.
        teacher: Logits with the full cache; constants, no gradient reaches them. Tokens that it
            rules out (-inf) count nothing.
        temperature: Both are divided by it. The result is not multiplied by its square.

    Returns:
        Nats, in fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: Logits of different shapes, or a temperature not above 0.
    """
    _check(student, teacher)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: give a number above 0")
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q = (student.to(wide) / temperature).log_softmax(-1)
    log_p = (teacher.detach().to(wide) / temperature).log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).where(p > 0, 0).sum(-1)


def first_token_agreement(student: Tensor, teacher: Tensor) -> Tensor:  # [N, V] twice -> fp32 [N]
    """1 where both would write the same token, else 0; of equal logits the smallest id counts.

    Raises:
        ValueError: Logits of different shapes.
    """
    _check(student, teacher)
    return (student.argmax(-1) == teacher.argmax(-1)).float()


def _check(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits of the student are {tuple(student.shape)}, of the teacher "
            f"{tuple(teacher.shape)}; give the same positions and vocabulary"
        )
