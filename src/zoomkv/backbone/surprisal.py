"""How little a model expected each token that it read (SeKV, arXiv 2606.31145, section 3.1)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def surprisal(
    model: Any,
    hidden: Tensor,  # [B, T, hidden]
    ids: Tensor,  # [B, T]
    real: Tensor | None = None,  # bool [B, T]
    chunk: int = 256,
) -> Tensor:  # fp32 [B, T]
    """Nats of each token given those before it, -log p(x_t | x_<t), through the model's own head.

    Logits are made for ``chunk`` tokens at a time and never stored; the head is called, not read,
    so it may be tied, adapted or quantised. Its own dtype bounds the precision: bf16 logits near
    20 stand 1/8 apart.

    A prompt that is read in pieces: put each row's last state and id of the piece before in front,
    ``real`` only where there is one, and drop the first column of the result.

    Args:
        model: A causal LM whose logits are its head's output, as in all supported families; plain
            or wrapped by PEFT.
        hidden: What its decoder returns, after the final norm.
        ids: The tokens that the states belong to.
        real: False for padding, wherever it stands; all are real by default.
        chunk: Tokens whose logits are held together.

    Returns:
        Surprisals, at least 0; 0 for padding and for each row's first real token.

    Raises:
        ValueError: ``chunk`` below 1, shapes that differ, or a model without a head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; give a causal LM")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; give at least 1 token")
    if hidden.shape[:2] != ids.shape:
        raise ValueError(
            f"states of {list(hidden.shape[:2])} tokens for {list(ids.shape)} ids; give one each"
        )
    device = hidden.device
    ids = ids.to(device)
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.to(device)
    newest = torch.arange(ids.shape[1], device=device).where(real, -1).cummax(dim=1).values
    before = F.pad(newest[:, :-1], (1, 0), value=-1)  # the real column before each, -1: none
    row, column = (real & (before >= 0)).nonzero(as_tuple=True)
    states, targets = (row, before[row, column]), ids[row, column]

    parts = [hidden.new_zeros(0, dtype=torch.float32)]
    # Under autocast the head would be copied and its logits rounded to bf16.
    with torch.autocast(device.type, enabled=False):
        for rows, columns, target in zip(
            *(index.split(chunk) for index in (*states, targets)), strict=True
        ):
            logits = head(hidden[rows, columns]).float()
            chosen = logits.gather(-1, target[:, None]).squeeze(-1)
            parts.append(logits.logsumexp(-1) - chosen)
    out = hidden.new_zeros(ids.shape, dtype=torch.float32)
    out[row, column] = torch.cat(parts).clamp(min=0)
    return out
