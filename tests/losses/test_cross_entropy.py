"""Token-wise cross-entropy against the plain one over all logits."""

import pytest
import torch
import torch.nn.functional as F

from zoomkv.losses.cross_entropy import token_nll


def plain(hidden, labels, head):
    logits = head(hidden)[:, :-1].float()
    targets = labels[:, 1:]
    nll = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
    chosen = targets != -100
    return nll[chosen], chosen


@pytest.fixture
def case():
    torch.manual_seed(0)
    hidden = torch.randn(3, 9, 8, requires_grad=True)
    head = torch.nn.Linear(8, 11, bias=False)
    labels = torch.randint(0, 11, (3, 9))
    labels[torch.rand(3, 9) < 0.4] = -100
    labels[0, 0] = 3  # has nothing before it: never counts
    return hidden, labels, head


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_values_places_and_gradients(case, chunk):
    hidden, labels, head = case
    wanted, chosen = plain(hidden, labels, head)
    grads = torch.autograd.grad(wanted.sum(), [hidden, head.weight], retain_graph=True)
    nll, where = token_nll(hidden, labels, head, chunk=chunk)
    torch.testing.assert_close(nll, wanted)
    flat = F.pad(chosen, (1, 0)).flatten()
    assert where.tolist() == flat.nonzero().squeeze(1).tolist()
    ours = torch.autograd.grad(nll.sum(), [hidden, head.weight])
    torch.testing.assert_close(ours, grads)


def test_only_labelled_states_pass_the_head_and_no_more_than_a_chunk(case):
    hidden, labels, head = case
    sizes = []

    def counting(part):
        sizes.append(len(part))
        return head(part)

    nll, _ = token_nll(hidden, labels, counting, chunk=5)
    assert sum(sizes) == len(nll) and max(sizes) == 5
    # Logits are made anew in the backward pass, not kept.
    nll.sum().backward()
    assert sum(sizes) == 2 * len(nll)


def test_nothing_to_learn_is_no_nan(case):
    hidden, _, head = case
    nll, where = token_nll(hidden, torch.full((3, 9), -100), head)
    assert nll.shape == where.shape == (0,)
    nll.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_half_precision_logits_are_summed_in_fp32(case):
    hidden, labels, head = case
    nll, _ = token_nll(hidden.bfloat16(), labels, head.bfloat16())
    assert nll.dtype == torch.float32
