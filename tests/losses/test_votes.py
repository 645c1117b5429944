"""The vote loss equals a plain loop, and falls to zero when every head is right."""

from __future__ import annotations

import torch

from zoomkv.losses.votes import vote_loss


def plain(queries, mean_keys, candidates, needed):
    layers, count, heads, width = queries.shape
    kv_heads = mean_keys.shape[1]
    loss, first = torch.zeros(count), torch.zeros(count)
    for number in range(count):
        allowed = candidates[number].nonzero().flatten().tolist()
        for layer in range(layers):
            for head in range(heads):
                keys = mean_keys[layer, head // (heads // kv_heads)]
                scores = torch.stack([queries[layer, number, head] @ keys[i] for i in allowed])
                at = allowed.index(int(needed[number]))
                loss[number] -= (scores / width**0.5).log_softmax(0)[at]
                first[number] += float(scores.argmax() == at)
    return loss / (layers * heads), first / (layers * heads)


def test_equals_plain_loops() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 2, 5, 8)
    candidates = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    needed = torch.tensor([1, 2, 4])
    for fast, slow in zip(
        vote_loss(queries, keys, candidates, needed),
        plain(queries, keys, candidates, needed),
        strict=True,
    ):
        torch.testing.assert_close(fast, slow)


def test_gradients_reach_queries_and_keys_and_no_foreign_summary() -> None:
    torch.manual_seed(0)
    queries = torch.randn(1, 1, 2, 4, requires_grad=True)
    keys = torch.randn(1, 1, 3, 4, requires_grad=True)
    candidates = torch.tensor([[True, True, False]])
    loss, _ = vote_loss(queries, keys, candidates, torch.tensor([0]))
    loss.sum().backward()
    assert queries.grad is not None and bool(queries.grad.abs().sum() > 0)
    assert keys.grad is not None and bool((keys.grad[0, 0, 2] == 0).all())
    assert bool((keys.grad[0, 0, :2] != 0).any(1).all())


def test_zero_when_all_heads_are_certain() -> None:
    keys = 100 * torch.eye(3)[None, None]
    queries = 10 * torch.eye(3)[None, :1, None].expand(1, 1, 2, 3)
    candidates = torch.ones(1, 3, dtype=torch.bool)
    loss, first = vote_loss(queries, keys, candidates, torch.tensor([0]))
    assert float(loss) < 1e-6 and float(first) == 1.0


def test_autocast_does_not_round_the_scores() -> None:
    torch.manual_seed(1)
    arguments = (
        torch.randn(2, 2, 4, 8),
        torch.randn(2, 2, 5, 8),
        torch.ones(2, 5, dtype=torch.bool),
        torch.tensor([0, 3]),
    )
    plain_loss, _ = vote_loss(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast, _ = vote_loss(*arguments)
    assert torch.equal(plain_loss, under_autocast)
