"""Taking rows out of key and value tensors."""

import torch
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:  # [B, Hkv, T, D], int -> [B, Hkv, T', D]
    """Copies chosen rows, whole rows at a time.

    ``torch.gather`` reads one index for each element, and is several times slower.

    Args:
        x: Keys or values ``[B, Hkv, T, D]``; views of larger buffers are fine.
        index: Row numbers in ``[0, T)``, ``[B, T']`` (shared by the heads) or ``[B, Hkv, T']``.

    Returns:
        A new contiguous tensor ``[B, Hkv, T', D]``.
    """
    batch, heads, rows, width = x.shape
    if index.dim() == 2:
        index = index[:, None].expand(-1, heads, -1)
    step_b, step_h, step_t, step_d = x.stride()
    if step_d != 1 or step_b % width or step_h % width or step_t % width or not x.numel():
        return torch.gather(x, 2, index[..., None].expand(-1, -1, -1, width))
    # Every row of x is a row of one flat [*, D] view of its storage.
    first = (
        torch.arange(batch, device=x.device)[:, None] * step_b
        + torch.arange(heads, device=x.device) * step_h
    )[..., None]
    last = (batch - 1) * step_b + (heads - 1) * step_h + (rows - 1) * step_t
    flat = x.as_strided((last // width + 1, width), (width, 1))
    chosen = (first + index * step_t) // width
    return flat.index_select(0, chosen.flatten()).view(batch, heads, -1, width)
