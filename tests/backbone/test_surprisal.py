"""Surprisal against log-probabilities of whole logits in float64, each row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoomkv.backbone.surprisal import surprisal

PADS = [0, 3, 6]
COLUMNS = 20


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Ids and mask of rows with 0, 3 and 6 pads on the left."""
    ids = torch.randint(1, 128, (len(PADS), COLUMNS), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(COLUMNS) >= torch.tensor(PADS)[:, None]
    return ids.masked_fill(~mask, 0), mask


def states(model, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What a hook behind the decoder sees."""
    seen = []
    handle = model.get_decoder().register_forward_hook(lambda *call: seen.append(call[-1][0]))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=None if mask is None else mask.long())
    handle.remove()
    return seen[0]


def expected(model, ids: Tensor, pads: int = 0) -> Tensor:  # [T] -> fp64 [T]
    """One row, from the model's own logits."""
    with torch.no_grad():
        logits = model(input_ids=ids[None, pads:]).logits[0].double()
    out = torch.zeros(len(ids), dtype=torch.float64)
    for t in range(pads + 1, len(ids)):
        out[t] = -logits[t - 1 - pads].log_softmax(-1)[ids[t]]
    return out


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_each_row_is_what_it_is_alone(tiny, batch, family, tied) -> None:
    model = tiny(family, tied=tied)
    ids, mask = batch
    got = surprisal(model, states(model, ids, mask), ids, mask, chunk=7)
    assert got.dtype == torch.float32 and not got.requires_grad
    for row, pads in enumerate(PADS):
        alone = expected(model, ids[row], pads)
        assert float(alone.max()) > 1  # else this shows nothing
        torch.testing.assert_close(got[row].double(), alone, atol=1e-4, rtol=1e-4)
    assert not got[~mask].any() and not got[range(3), PADS].any()


def test_chunks_change_nothing(tiny_llama, batch) -> None:
    model, (ids, mask) = tiny_llama(), batch
    hidden = states(model, ids, mask)
    whole = surprisal(model, hidden, ids, mask, chunk=1000)
    for chunk in (1, 5, 51):
        torch.testing.assert_close(surprisal(model, hidden, ids, mask, chunk), whole)


def test_prompt_in_pieces(tiny_llama, batch) -> None:
    model, (ids, mask) = tiny_llama(), batch
    hidden = states(model, ids, mask)
    whole = surprisal(model, hidden, ids, mask)
    got = surprisal(model, hidden[:, :5], ids[:, :5], mask[:, :5])  # one row is nothing but pads
    for start, end in ((5, 6), (6, COLUMNS)):
        part = (x[:, start - 1 : end] for x in (hidden, ids, mask))
        got = torch.cat([got, surprisal(model, *part)[:, 1:]], dim=1)
    torch.testing.assert_close(got, whole)


def test_pads_may_stand_anywhere(tiny_llama, batch) -> None:
    model, (ids, _) = tiny_llama(), batch
    hidden = states(model, ids)
    real = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    got = surprisal(model, hidden.masked_fill(~real[..., None], torch.nan), ids, real)
    for row in range(len(ids)):
        where = real[row].nonzero().squeeze(1)
        dense = surprisal(model, hidden[row : row + 1, where], ids[row : row + 1, where])
        torch.testing.assert_close(got[row, where], dense[0])
    assert not got[~real].any()


def test_one_token_and_no_token(tiny_llama) -> None:
    model, hidden = tiny_llama(), torch.randn(2, 3, 32)
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert not surprisal(model, hidden[:, :1], ids[:, :1]).any()
    real = torch.tensor([[False, True, False], [False] * 3])
    assert not surprisal(model, hidden, ids, real).any()


@pytest.mark.parametrize("autocast", [False, True])
def test_neither_all_logits_nor_a_second_head(tiny_llama, autocast) -> None:
    model = tiny_llama(vocab_size=500)
    ids = torch.randint(0, 500, (2, 100), generator=torch.Generator().manual_seed(0))
    hidden, weight = states(model, ids), model.lm_head.weight
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.data_ptr() != weight.data_ptr():
                largest = max(largest, out.numel())
            return out

    plain = surprisal(model, hidden, ids, chunk=8)
    with Watch(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = surprisal(model, hidden, ids, chunk=8)
    assert largest == hidden.numel() or largest == 8 * 500, largest
    assert largest < weight.numel() < 199 * 500
    assert torch.equal(got, plain)


def test_half_precision_is_summed_in_fp32(tiny_llama, batch) -> None:
    model, (ids, _) = tiny_llama().bfloat16(), batch
    hidden = states(model, ids)
    got = surprisal(model, hidden, ids)
    logits = model.lm_head(hidden)[:, :-1].double()  # rounded to bf16 by the head alone
    exact = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(got[:, 1:].double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_adapted_heads(tiny_llama, batch, tied) -> None:
    """Under PEFT the head is what the adapter makes of it: here with new rows, and low-rank."""
    from peft import LoraConfig, get_peft_model

    names = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    options = [{"trainable_token_indices": {name: [5, 9] for name in names}}]
    if not tied:
        options.append({"target_modules": ["q_proj", "lm_head"]})
    ids, _ = batch
    for chosen in options:
        chosen = {"target_modules": ["q_proj"], "r": 2, **chosen}
        model = get_peft_model(tiny_llama(tied=tied), LoraConfig(**chosen)).eval()
        base = expected(model, ids[0])
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_" in name or "trainable_tokens_delta" in name:
                    value.add_(0.3)
        alone = expected(model, ids[0])
        assert not torch.allclose(alone, base, atol=0.1)
        got = surprisal(model, states(model, ids), ids)
        torch.testing.assert_close(got[0].double(), alone, atol=1e-4, rtol=1e-4)


class ByteHead(nn.Module):
    """Eight bits a weight, a scale for each row, and nothing called ``weight``."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.scale = head.weight.detach().abs().amax(1, keepdim=True) / 127
        self.codes = (head.weight.detach() / self.scale).round().to(torch.int8)

    def forward(self, states: Tensor) -> Tensor:
        return states @ (self.codes * self.scale).T


def test_quantised_head(tiny_llama, batch) -> None:
    model, (ids, _) = tiny_llama(), batch
    model.lm_head = ByteHead(model.lm_head)
    got = surprisal(model, states(model, ids), ids)
    torch.testing.assert_close(got[0].double(), expected(model, ids[0]), atol=1e-4, rtol=1e-4)


def test_bad_input(tiny_llama, batch) -> None:
    model, (ids, _) = tiny_llama(), batch
    hidden = states(model, ids)
    with pytest.raises(ValueError, match="chunk is 0; give at least 1 token"):
        surprisal(model, hidden, ids, chunk=0)
    with pytest.raises(ValueError, match=r"states of \[3, 20\] tokens for \[3, 19\] ids"):
        surprisal(model, hidden, ids[:, 1:])
    with pytest.raises(ValueError, match="LlamaModel has no output head; give a causal LM"):
        surprisal(model.model, hidden, ids)
