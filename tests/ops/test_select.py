"""Gathered rows against indexing row by row, for every layout a cache meets."""

import pytest
import torch

from zoomkv.ops.select import gather_rows


def layouts() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 3, 9, 4)
    return {
        "contiguous": x,
        "buffer slice": torch.randn(2, 3, 15, 4)[:, :, 2:11],
        "layer of a stack": torch.randn(5, 2, 3, 9, 4)[3],
        "heads behind tokens": torch.randn(2, 9, 3, 4).transpose(1, 2),
        "expanded": torch.randn(1, 1, 9, 4).expand(2, 3, 9, 4),
        "every other row": torch.randn(2, 3, 18, 4)[:, :, ::2],
        "columns first": torch.randn(2, 3, 4, 9).transpose(2, 3),
        "part of the columns": torch.randn(2, 3, 9, 6)[..., 1:5],
        "bf16": x.bfloat16(),
        "int8": (x * 10).to(torch.int8),
    }


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("wanted", [0, 1, 12])
def test_rows(name, per_head, wanted) -> None:
    x = layouts()[name]
    index = torch.randint(0, 9, (2, 3, wanted) if per_head else (2, wanted))
    got = gather_rows(x, index)
    assert got.shape == (2, 3, wanted, 4) and got.dtype == x.dtype and got.is_contiguous()
    for b in range(2):
        for h in range(3):
            row = index[b, h] if per_head else index[b]
            assert torch.equal(got[b, h], x[b, h][row])


def test_nothing_to_gather_from() -> None:
    got = gather_rows(torch.zeros(2, 3, 0, 4), torch.zeros(2, 0, dtype=torch.int64))
    assert got.shape == (2, 3, 0, 4)


def test_result_owns_its_memory() -> None:
    x = torch.randn(1, 2, 50, 4)
    got = gather_rows(x, torch.tensor([[3, 1]]))
    assert got.untyped_storage().nbytes() == 2 * 2 * 4 * 4
    x.zero_()
    assert got.abs().sum() > 0
