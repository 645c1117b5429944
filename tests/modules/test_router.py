"""Routing against plain loops; its decision, its gradients, its beginnings."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.losses.cost import zoom_cost
from zoomkv.modules.router import MeanKeyRouter, Router, RouterShape

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 3


def router(**options) -> Router:
    arguments = {"layers": 2, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "rank": 4}
    generator = torch.Generator().manual_seed(0)
    return Router(**{**arguments, "width": WIDTH, "generator": generator, **options})


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    """Coarse keys, queries and sizes; the second row has two spans fewer."""
    torch.manual_seed(0)
    keys, query = torch.randn(2, KV_HEADS, 5, DIM), torch.randn(2, HEADS, 3, DIM)
    size = torch.tensor([[16, 1, 300, 24, 7], [12, 40, 16, 0, 0]])
    return keys.masked_fill((size == 0)[:, None, :, None], 0), query, size


def plain(module: Router, layer: int, keys: Tensor, query: Tensor, size: Tensor) -> Tensor:
    """The paper's logits in fp64, one span after the other."""
    out = torch.full((2, HEADS, 3, 5), -torch.inf, dtype=torch.float64)
    for batch in range(2):
        for head in range(HEADS):
            w = module.projection.detach()[layer, head].double()
            for span in range(5):
                n = int(size[batch, span])
                if not n:
                    continue
                k = w @ keys[batch, head // (HEADS // KV_HEADS), span].double()
                if module.shape.normalise:
                    k = k / k.norm()
                for at in range(3):
                    q = w @ query[batch, head, at].double()
                    out[batch, head, at, span] = q @ k / math.sqrt(len(w)) + math.log(n)
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
def test_logits_equal_plain_loops(case, normalise, layer) -> None:
    keys, query, size = case
    module = router(normalise=normalise)
    summaries = module.summaries(layer, keys)
    assert summaries.shape == (2, HEADS, 5, WIDTH) and summaries.dtype == torch.float32
    assert not summaries[1, :, 3:].any()
    lengths = summaries[size[:, None].expand(2, HEADS, 5) > 0].norm(dim=-1)
    assert torch.allclose(lengths, torch.ones_like(lengths)) == normalise
    logits = module.logits(layer, query, summaries, size)
    expected = plain(module, layer, keys, query, size).float()
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_the_summary_is_the_mean_of_projected_keys() -> None:
    torch.manual_seed(0)
    module = router(normalise=False)
    keys, weights = torch.randn(KV_HEADS, 6, DIM), torch.rand(6).softmax(0)
    mean = (weights[:, None] * keys).sum(1)[None, :, None]
    each = module.summaries(0, keys[None])  # [1, H, 6, width], a span of one token each
    torch.testing.assert_close(
        module.summaries(0, mean)[0, :, 0], (weights[:, None] * each[0]).sum(1)
    )


@pytest.mark.parametrize("module", [router(), MeanKeyRouter()], ids=["trained", "mean key"])
def test_rows_spans_and_queries_are_independent(case, module) -> None:
    keys, query, size = case
    logits = module.logits(1, query, module.summaries(1, keys), size)
    order, rows = torch.tensor([3, 0, 4, 2, 1]), torch.tensor([1, 0])
    again = module.logits(
        1,
        query[rows].flip(2),
        module.summaries(1, keys[rows][:, :, order]),
        size[rows][:, order],
    )
    torch.testing.assert_close(again, logits[rows].flip(2)[..., order])


@pytest.mark.parametrize("module", [router(), MeanKeyRouter()], ids=["trained", "mean key"])
def test_fp32_whatever_autocast_and_input(case, module) -> None:
    keys, query, size = case
    keys, query = keys.bfloat16(), query.bfloat16()
    expected = module.logits(0, query.float(), module.summaries(0, keys.float()), size)
    opened = module.opens(0, expected)
    with torch.autocast("cpu", torch.bfloat16):
        logits = module.logits(0, query, module.summaries(0, keys), size)
        assert torch.equal(logits, expected) and logits.dtype == torch.float32
        assert torch.equal(module.opens(0, logits), opened)


def test_parameters_cast_by_a_trainer_still_work(case) -> None:
    keys, query, size = case
    module = router().bfloat16()
    logits = module.logits(0, query, module.summaries(0, keys), size)
    assert logits.dtype == module.opens(0, logits).dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_opens_where_the_gate_exceeds_the_threshold(values, threshold) -> None:
    module = router(threshold=threshold)
    logits = torch.tensor([*values, -torch.inf]).expand(1, HEADS, 1, -1)
    opened, hard = module.opens(0, logits), module.opens_hard(0, logits)
    assert hard.dtype == torch.bool and torch.equal(opened, hard.float())
    tau = module.threshold_logit.detach()[0, 0].double().sigmoid()
    gate = logits.double().sigmoid()
    clear = (gate - tau).abs() > 1e-12  # fp64 rounds as well
    assert torch.equal(hard[clear], (gate > tau)[clear])
    assert not hard[..., -1].any()


def test_a_gate_at_the_threshold_stays_closed_and_large_logits_are_told_apart() -> None:
    module = router()
    with torch.no_grad():
        module.threshold_logit[0] = torch.tensor([-2.0, 0.0, 3.0, 20.0])
    at = module.threshold_logit.detach()[0].view(1, HEADS, 1, 1)
    assert not module.opens_hard(0, at).any()
    assert module.opens_hard(0, at.nextafter(torch.tensor(torch.inf))).all()
    assert module.thresholds(0).tolist() == at.flatten().sigmoid().tolist()


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_straight_through_gradient(temperature) -> None:
    torch.manual_seed(0)
    module, upstream = router(threshold=0.4), torch.randn(2, HEADS, 3, 5)
    logits = torch.randn(2, HEADS, 3, 5, requires_grad=True)
    (module.opens(1, logits, temperature) * upstream).sum().backward()

    free = logits.detach().double().requires_grad_()
    theta = module.threshold_logit.detach().double().requires_grad_()
    gap = free.sigmoid() - theta[1].sigmoid()[:, None, None]
    ((gap / temperature).sigmoid() * upstream).sum().backward()
    assert free.grad is not None and theta.grad is not None and logits.grad is not None
    torch.testing.assert_close(logits.grad, free.grad.float(), atol=1e-6, rtol=1e-4)
    got = module.threshold_logit.grad
    assert got is not None and not got[0].any()
    torch.testing.assert_close(got[1], theta.grad[1].float(), atol=1e-5, rtol=1e-4)


def test_entries_that_are_no_span_teach_nothing(case) -> None:
    keys, query, size = case
    module = router()
    logits = module.logits(0, query, module.summaries(0, keys), size)
    logits.retain_grad()
    module.opens(0, logits).masked_fill((size > 0)[:, None, None], 0).sum().backward()
    for tensor in (logits, module.projection, module.threshold_logit):
        assert tensor.grad is not None and not tensor.grad.any()  # neither NaN


def test_cost_and_outcome_reach_thresholds_and_projections(case) -> None:
    """Their cost teaches to close spans, what is read from them to open them."""
    keys, query, size = case
    for downstream in (False, True):
        module = router(threshold=0.9)
        logits = module.logits(1, query, module.summaries(1, keys), size)
        opened = module.opens(1, logits)
        if downstream:  # reading values through the decision
            ((opened @ keys.repeat_interleave(2, 1)) - 1).square().mean().backward()
        else:
            zoom_cost(opened, (size > 0)[:, None, None]).backward()
        for parameter in (module.projection, module.threshold_logit):
            grad = parameter.grad
            assert grad is not None and grad.isfinite().all()
            assert (grad[1] != 0).all() and not grad[0].any()
        if not downstream:  # descending raises every threshold
            assert module.threshold_logit.grad is not None
            assert (module.threshold_logit.grad[1] < 0).all()


def test_parameter_count_of_llama_3_8b() -> None:
    with torch.device("meta"):
        module = Router(32, 32, 8, 128, width=32, rank=32)
    parameters = dict(module.named_parameters())
    assert parameters["projection"].numel() == 4_194_304
    assert parameters["threshold_logit"].numel() == 1_024
    assert sum(p.numel() for p in module.rank_gate.parameters()) == 16_544
    assert sum(p.numel() for p in module.parameters()) == 4_211_872


def test_new_projections_keep_products() -> None:
    """Rows are orthogonal and the mean of W^T W is the identity, exactly if wide enough."""
    module = Router(8, 64, 8, 16, width=4, generator=torch.Generator().manual_seed(0))
    w = module.projection.detach()
    torch.testing.assert_close(w @ w.mT, (4 * torch.eye(4)).expand(8, 64, 4, 4))
    mean = (w.mT @ w).mean((0, 1))
    # 512 draws: entries have a standard error of about 0.04.
    torch.testing.assert_close(mean, torch.eye(16), atol=0.25, rtol=0)
    for width in (16, 24):
        w = Router(1, 2, 1, 16, width=width).projection.detach()
        torch.testing.assert_close(w.mT @ w, torch.eye(16).expand(1, 2, 16, 16))


def test_new_thresholds_and_the_generator() -> None:
    for threshold in (0.05, 0.5, 0.999):
        torch.testing.assert_close(
            router(threshold=threshold).thresholds(0), torch.full((HEADS,), threshold)
        )
    one, same = router().state_dict(), router().state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    other = router(generator=torch.Generator().manual_seed(1)).state_dict()
    assert not torch.equal(one["projection"], other["projection"])
    assert not torch.equal(one["rank_gate.last.weight"], other["rank_gate.last.weight"])


def test_the_shape_makes_its_like() -> None:
    module = router(threshold=0.3, normalise=False)
    assert module.shape == RouterShape(2, HEADS, KV_HEADS, DIM, WIDTH, 4, 0.3, False)
    again = Router(**asdict(module.shape))
    again.load_state_dict(module.state_dict())
    assert again.shape == module.shape and "width=3" in repr(module)
    with pytest.raises(FrozenInstanceError):
        module.shape.width = 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_heads": 3}, "heads=4 can't share kv_heads=3"),
        ({"width": 0}, "width=0; give at least 1"),
        ({"layers": 0}, "layers=0"),
        ({"rank": 0}, "rank=0"),
        ({"threshold": 0.0}, "threshold=0.0 is never or always passed"),
        ({"threshold": 1.0}, "threshold=1.0"),
        ({"threshold": math.nan}, "threshold=nan"),
    ],
)
def test_contradictions_are_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        router(**wrong)
    with pytest.raises(ValueError, match=message):
        replace(router().shape, **wrong)


def test_a_slope_needs_a_width() -> None:
    with pytest.raises(ValueError, match="temperature=0"):
        router().opens(0, torch.zeros(1, HEADS, 1, 1), temperature=0)


def test_mean_keys_score_like_coarse_entries_and_open_everything(case) -> None:
    keys, query, size = case
    module = MeanKeyRouter()
    summaries = module.summaries(0, keys)
    assert summaries.data_ptr() == keys.data_ptr()
    logits = module.logits(0, query, summaries, size)
    every = keys.repeat_interleave(HEADS // KV_HEADS, 1)
    expected = torch.einsum("bhqd,bhsd->bhqs", query, every) / DIM**0.5
    expected = expected + size.float().log()[:, None, None]
    torch.testing.assert_close(logits, expected)
    real = (size > 0)[:, None, None].expand_as(logits)
    assert torch.equal(module.opens_hard(0, logits), real)
    assert torch.equal(module.opens(0, logits), real.float())
    assert module.rank_gate is None


@pytest.mark.parametrize("module", [router(), MeanKeyRouter()], ids=["trained", "mean key"])
def test_no_span_at_all(module) -> None:
    summaries = module.summaries(0, torch.zeros(2, KV_HEADS, 0, DIM))
    size = torch.zeros(2, 0, dtype=torch.int64)
    logits = module.logits(0, torch.zeros(2, HEADS, 3, DIM), summaries, size)
    assert logits.shape == module.opens(0, logits).shape == (2, HEADS, 3, 0)
    assert module.opens_hard(0, logits).shape == (2, HEADS, 3, 0)
