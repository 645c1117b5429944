"""Sketches of keys: the projection against its optimum, the codes against a loop over numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoomkv.modules.sketch import (
    LEVELS,
    Codes,
    Projections,
    Sketch,
    check_width,
    encode,
    estimate,
    fit,
    fit_whitened,
    image_of,
    logits,
)

SHRINKAGE = 0.01  # of the mean eigenvalue, added to all of them
REACH = 5.0  # standard deviations that the levels cover to each side


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# The projection.


def moments(*lead: int, dim: int = 12, decay: float = 1.0) -> Tensor:
    """Second moments of rows whose directions matter less and less."""
    scale = torch.arange(1, dim + 1) ** -decay
    rows = torch.randn(*lead, 200, dim) * scale @ torch.linalg.qr(torch.randn(*lead, dim, dim)).Q
    return rows.mT @ rows


def shrunk(matrix: Tensor) -> Tensor:
    """As ``fit`` takes moments: a little of every direction, in fp64."""
    matrix = matrix.double()
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return matrix + SHRINKAGE * mean[..., None, None] * torch.eye(matrix.shape[-1])


def error(maps: Projections, keys: Tensor, queries: Tensor) -> Tensor:
    """Expected square of q.k - (q A).(k B): the trace of M' Q M K with M = I - A B'."""
    left = torch.eye(keys.shape[-1]) - maps.query.double() @ maps.key.double().mT
    product = left.mT @ queries.double() @ left @ keys.double()
    return product.diagonal(dim1=-2, dim2=-1).sum(-1)


def optimum(keys: Tensor, queries: Tensor, width: int) -> Tensor:
    """Energy of the tail of Q^1/2 K^1/2, from the eigenvalues of Q K."""
    energy = torch.linalg.eigvals(queries.double() @ keys.double()).real.sort(-1).values
    return energy[..., : energy.shape[-1] - width].sum(-1)


@pytest.mark.parametrize("width", [2, 4, 10, 12])
def test_fit_reaches_the_optimum(width: int) -> None:
    keys, queries = moments(3, 2), moments(3, 2, decay=0.5)
    found = fit(keys, queries, width)
    assert found.query.shape == found.key.shape == (3, 2, 12, width)
    k, q = shrunk(keys), shrunk(queries)
    all_of_it = error(Projections(torch.zeros(12, 2), torch.zeros(12, 2)), k, q)
    lost, least = error(found, k, q), optimum(k, q, width)
    torch.testing.assert_close(lost / all_of_it, least / all_of_it, atol=1e-6, rtol=1e-4)
    # Against the moments as they are, the little that is added to them costs little.
    true, possible = error(found, keys, queries), optimum(keys, queries, width)
    assert (true - possible <= 0.02 * error(Projections(*[torch.zeros(12, 2)] * 2), k, q)).all()


@pytest.mark.parametrize("width", [2, 6])
def test_no_other_maps_of_this_rank_do_better(width: int) -> None:
    keys, queries = moments(), moments(decay=0.5)
    found, k, q = fit(keys, queries, width), shrunk(keys), shrunk(queries)
    least = error(found, k, q)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            near = (x + scale * x.abs().mean() * torch.randn_like(x) for x in found)
            assert error(Projections(*near), k, q) >= least * (1 - 1e-5)
    for _ in range(50):  # any subspace of the keys, with the best that queries can make of it
        key = torch.randn(12, width, dtype=torch.float64)
        query = k @ key @ torch.linalg.inv(key.mT @ k @ key)
        assert error(Projections(query, key), k, q) >= least * (1 - 1e-5)


def test_at_full_width_products_of_images_are_products() -> None:
    keys, queries = torch.randn(500, 12), torch.randn(40, 12)
    found = fit(keys.mT @ keys, queries.mT @ queries, 12)
    images = (queries @ found.query) @ (keys @ found.key).mT
    torch.testing.assert_close(images, queries @ keys.mT, atol=1e-4, rtol=1e-4)


def test_images_of_keys_have_equal_variance() -> None:
    keys = moments(2, decay=0.3)
    image = fit(keys, moments(2), 6).key.double()
    spread = image.mT @ shrunk(keys) @ image
    torch.testing.assert_close(spread, torch.eye(6).double().expand(2, 6, 6), atol=1e-4, rtol=0)


def test_scales_of_the_moments_do_not_matter() -> None:
    keys, queries = moments(), moments(decay=0.5)
    one, other = fit(keys, queries, 4), fit(1e4 * keys, 1e-3 * queries, 4)
    product, again = (maps.query @ maps.key.mT for maps in (one, other))
    torch.testing.assert_close(product, again, atol=1e-5, rtol=1e-4)


def test_moments_of_nothing_give_finite_maps() -> None:
    nothing, few = torch.zeros(2, 8, 8), torch.zeros(2, 8, 8)
    few[:, 0, 0] = 3.0
    for keys, queries in ((nothing, nothing), (few, nothing), (nothing, few), (few, few)):
        assert all(x.isfinite().all() for x in fit(keys, queries, 4))


def test_what_queries_never_ask_for_is_left_out() -> None:
    """Keys differ most along the first half of their numbers, queries look at the second."""
    keys = torch.diag(torch.tensor([100.0] * 4 + [1.0] * 4))
    queries = torch.diag(torch.tensor([0.0] * 4 + [1.0] * 4))
    found = fit(keys, queries, 4)
    assert found.key[4:].norm() > 10 * found.key[:4].norm()


def test_factors_of_the_maps_make_directions_alike() -> None:
    keys, queries = moments(2, decay=2.0), moments(2)
    (query, key), turn = fit_whitened(keys, queries, 4)
    assert query.shape == key.shape == (2, 12, 12)
    assert turn.query.shape == turn.key.shape == (2, 12, 4)
    found, one = fit(keys, queries, 4), torch.eye(12).double().expand(2, 12, 12)
    assert torch.equal(query @ turn.query, found.query)
    assert torch.equal(key @ turn.key, found.key)
    for whitened, moment in ((key, shrunk(keys)), (query, shrunk(queries))):
        spread = whitened.mT.double() @ moment @ whitened.double()
        spread = spread / spread.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        torch.testing.assert_close(spread, one, atol=1e-3, rtol=0)
    assert float(turn.query.norm(dim=1).max()) == pytest.approx(1, rel=1e-4)


def test_factors_are_fp32_under_autocast() -> None:
    keys, queries = moments(), moments()
    with torch.autocast("cpu", torch.bfloat16):
        inside = fit_whitened(keys, queries, 4)
    for one, two in zip(inside, fit_whitened(keys, queries, 4), strict=True):
        assert all(map(torch.equal, one, two))


def test_fit_is_fp32_under_autocast() -> None:
    keys, queries = moments(), moments()
    with torch.autocast("cpu", torch.bfloat16):
        inside = fit(keys, queries, 4)
    assert all(map(torch.equal, inside, fit(keys, queries, 4)))


# Codes.


def some(batch: int = 2, heads: int = 3, tokens: int = 40, dim: int = 8, width: int = 6):
    """Keys far from zero, a projection and who is there."""
    keys = torch.randn(batch, heads, tokens, dim) + 3 * torch.randn(batch, heads, 1, dim)
    return keys, torch.randn(heads, dim, width), torch.rand(batch, tokens) < 0.8


def number(codes: Codes, b: int, h: int, i: int, t: int) -> float:
    """What one number of a key's code stands for: the middle of its level."""
    half = codes.packed.shape[2]
    byte = int(codes.packed[b, h, i % half, t])
    level = byte >> 4 if i >= half else byte & 15
    return (level - (LEVELS - 1) / 2) * float(codes.step[b, h, i])


def looped(query: Tensor, codes: Codes, maps: Tensor, length: int) -> Tensor:
    """``logits`` number by number in fp64; maps ``[B, Hkv, G, D, W]``."""
    batch, heads, group, rows, _ = query.shape
    out = torch.zeros(batch, heads, group, rows, length, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys = [
                [number(codes, b, h, i, t) for i in range(maps.shape[-1])] for t in range(length)
            ]
            for g in range(group):
                for r in range(rows):
                    q = query[b, h, g, r].double()
                    image = (q @ maps[b, h, g].double()).tolist()
                    base = float(q @ codes.mean[b, h].double())
                    for t, key in enumerate(keys):
                        out[b, h, g, r, t] = base + sum(
                            x * y for x, y in zip(image, key, strict=True)
                        )
    return out


def check_logits(got: Tensor, query: Tensor, codes: Codes, maps: Tensor) -> None:
    """As the loop says, to the rounding of what is added up: two numbers of a byte at once."""
    expected = looped(query, codes, maps, got.shape[-1])
    image = query[..., None, :] @ maps[:, :, :, None].expand(*query.shape, maps.shape[-1])
    terms = 255 * (image.abs() * codes.step[:, :, None, None, None]).sum(-1)
    assert ((got - expected).abs() <= 1e-6 * terms + 1e-5).all()


def nothing(length: int, batch: int = 2) -> Tensor:
    """Added to the logits of so many tokens."""
    return torch.zeros(batch, length)


@pytest.mark.parametrize("length", [40, 17, 0])
def test_logits_equal_a_loop_over_numbers(length: int) -> None:
    keys, projection, present = some()
    codes = encode(keys, projection, present)
    query, maps = torch.randn(2, 3, 2, 4, 8), torch.randn(2, 3, 2, 8, 6)
    image = image_of(query, maps)
    assert image.shape == (2, 3, 2, 4, 6) and image.dtype == torch.float32
    got = logits(query, image, codes, nothing(length))
    assert got.shape == (2, 3, 2, 4, length) and got.dtype == torch.float32
    check_logits(got, query, codes, maps)


def test_maps_that_heads_or_rows_share_broadcast() -> None:
    keys, projection, present = some()
    codes, query = encode(keys, projection, present), torch.randn(2, 3, 2, 4, 8)
    maps = torch.randn(1, 3, 1, 8, 6)
    shared = logits(query, image_of(query, maps), codes, nothing(9))
    check_logits(shared, query, codes, maps.expand(2, 3, 2, 8, 6))


def test_each_token_has_its_bias() -> None:
    keys, projection, present = some()
    codes, query = encode(keys, projection, present), torch.randn(2, 3, 2, 4, 8)
    image = image_of(query, torch.randn(1, 3, 1, 8, 6))
    bias = 5 * torch.randn(2, 40)
    expected = logits(query, image, codes, nothing(40)) + bias[:, None, None, None]
    torch.testing.assert_close(logits(query, image, codes, bias), expected, atol=1e-4, rtol=1e-4)


def test_what_is_stored() -> None:
    keys, projection, present = some()
    codes = encode(keys, projection, present)
    assert codes.packed.shape == (2, 3, 3, 40) and codes.packed.dtype == torch.uint8
    assert codes.step.shape == (2, 3, 6) and codes.step.dtype == torch.float32
    assert codes.mean.shape == (2, 3, 8) and codes.mean.dtype == torch.float32
    assert {id(x) for x in codes.tensors()} == {id(codes.packed), id(codes.step), id(codes.mean)}
    weight = present[:, None, :, None].double()
    mean = (keys.double() * weight).sum(2) / weight.sum(2)
    torch.testing.assert_close(codes.mean.double(), mean, atol=1e-5, rtol=1e-5)
    image = (keys.double() - mean[:, :, None]) @ projection.double()
    step = 2 * REACH / LEVELS * ((image.square() * weight).sum(2) / weight.sum(2)).sqrt()
    torch.testing.assert_close(codes.step.double(), step, atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), width=st.sampled_from([2, 4, 8]), tails=st.booleans())
def test_a_number_is_off_by_half_a_step_at_most_within_reach(
    seed: int, width: int, tails: bool
) -> None:
    torch.manual_seed(seed)
    keys, projection, _ = some(1, 2, 30, 8, width)
    if tails:
        keys = keys * torch.distributions.StudentT(2.0).sample((1, 2, 30, 1))
    present = torch.ones(1, 30, dtype=torch.bool)
    codes = encode(keys, projection, present)
    image = (keys - codes.mean[:, :, None]).double() @ projection.double()
    for h in range(2):
        for i in range(width):
            step = float(codes.step[0, h, i])
            for t in range(30):
                true, kept = float(image[0, h, t, i]), number(codes, 0, h, i, t)
                if abs(true) < LEVELS / 2 * step:
                    assert abs(true - kept) <= step * (0.5 + 1e-4)
                else:  # beyond the outermost levels: the nearest of them
                    edge = (LEVELS - 1) / 2 * step
                    assert kept == pytest.approx(edge if true > 0 else -edge, rel=1e-6)


def test_later_keys_join_with_the_levels_of_the_first() -> None:
    keys, projection, present = some(tokens=60)
    keys[:, :, 40:] = 5 * keys[:, :, 40:] + 2  # others than the first: their own levels would be
    first = encode(keys[:, :, :40], projection, present[:, :40])
    later = encode(keys[:, :, 40:], projection, present[:, 40:], first)
    assert torch.equal(later.step, first.step) and torch.equal(later.mean, first.mean)
    assert later.packed.shape[3] == 20
    own = encode(keys[:, :, 40:], projection, present[:, 40:])
    assert not torch.equal(later.packed, own.packed)
    # What a code stands for depends on the key alone.
    again = encode(keys[:, :, :40], projection, present[:, :40], first)
    assert torch.equal(again.packed, first.packed)


def test_absent_tokens_do_not_matter() -> None:
    keys, projection, present = some()
    codes = encode(keys, projection, present)
    changed = keys.clone()
    changed.mT.masked_scatter_(~present[:, None, None], 1e3 * torch.randn(changed.numel()))
    assert not torch.equal(changed, keys)
    again = encode(changed, projection, present)
    torch.testing.assert_close(again.mean, codes.mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again.step, codes.step, atol=1e-6, rtol=1e-5)
    for row in range(2):  # and the others are as without them
        there = present[row].nonzero().squeeze(1)
        alone = encode(keys[row : row + 1, :, there], projection, present[row : row + 1, there])
        torch.testing.assert_close(alone.step[0], codes.step[row], atol=1e-6, rtol=1e-5)


def test_batch_rows_are_independent_and_can_be_selected() -> None:
    keys, _, present = some()
    projection = torch.randn(2, 3, 8, 6)  # a batch row may have its own
    codes = encode(keys, projection, present)
    for row in range(2):
        one = slice(row, row + 1)
        alone = encode(keys[one], projection[one], present[one])
        for mine, theirs in zip(
            codes.select(torch.tensor([row])).tensors(), alone.tensors(), strict=True
        ):
            assert torch.equal(mine, theirs)
    both = codes.select(torch.tensor([1, 0, 1]))
    assert all(
        torch.equal(x, y[[1, 0, 1]]) for x, y in zip(both.tensors(), codes.tensors(), strict=True)
    )


def test_rows_with_nothing_and_keys_that_agree_are_finite() -> None:
    keys, projection, present = some()
    present[1] = False
    keys[0] = keys[0, :, :1]
    codes, query = encode(keys, projection, present), torch.randn(2, 3, 1, 2, 8)
    got = logits(query, image_of(query, torch.randn(1, 3, 1, 8, 6)), codes, nothing(40))
    assert got.isfinite().all()
    expected = query[0] @ keys[0, :, None].mT
    torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_change_nothing(dtype: torch.dtype) -> None:
    keys, projection, present = some()
    keys = keys.to(dtype)
    codes = encode(keys.float(), projection, present)
    with torch.autocast("cpu", torch.bfloat16):
        inside = encode(keys, projection, present)
    for one, two in zip(codes.tensors(), inside.tensors(), strict=True):
        assert torch.equal(one, two) and one.dtype == two.dtype
    query, maps = torch.randn(2, 3, 2, 4, 8).to(dtype), torch.randn(1, 3, 1, 8, 6).to(dtype)
    plain = query.float(), maps.float()
    expected = logits(plain[0], image_of(*plain), codes, nothing(40))
    assert torch.equal(logits(query, image_of(query, maps), codes, nothing(40)), expected)


def test_products_with_codes_are_fp32_under_autocast() -> None:
    keys, projection, present = some()
    codes, query = encode(keys, projection, present), torch.randn(2, 3, 2, 4, 8)
    maps = torch.randn(1, 3, 1, 8, 6)
    expected = logits(query, image_of(query, maps), codes, nothing(40))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(query, image_of(query, maps), codes, nothing(40)), expected)


def test_products_of_fitted_sketches_are_near_the_true_ones() -> None:
    """The whole way: keys with a few strong directions, as those of a model have."""
    scale = 3 * torch.arange(1, 33) ** -1.0
    keys = torch.randn(1, 2, 400, 32) * scale + 2 * torch.randn(1, 2, 1, 32)
    query = torch.randn(1, 2, 2, 30, 32) * scale.sqrt()
    present = torch.ones(1, 400, dtype=torch.bool)
    centred = keys - keys.mean(2, keepdim=True)
    flat = query.flatten(2, 3)
    maps = fit(centred.mT @ centred, flat.mT @ flat, 16)
    codes = encode(keys, maps.key, present)
    got = logits(query, image_of(query, maps.query[:, :, None]), codes, nothing(400, 1))
    true = query @ keys[:, :, None].mT
    off = (got - true).var(-1) / true.var(-1)
    rounding = (2 * REACH / LEVELS) ** 2 / 12  # of a uniform quantiser
    assert 0.9 * rounding < float(off.mean()) < 1.2 * rounding
    coarse = encode(keys, maps.key[..., :2], present)
    worse = logits(query, image_of(query, maps.query[:, :, None, :, :2]), coarse, nothing(400, 1))
    assert ((worse - true).var(-1) / true.var(-1)).mean() > 2 * off.mean()


# Trained projections.


def test_a_trained_sketch_gives_each_layer_its_maps() -> None:
    sketch = Sketch(layers=3, heads=6, kv_heads=2, head_dim=8, width=4)
    assert sketch.width == 4
    for parameter in sketch.parameters():
        torch.nn.init.normal_(parameter)
    maps = sketch.of(1)
    assert maps.query.shape == (2, 3, 8, 4) and maps.key.shape == (2, 8, 4)
    for head in range(6):  # consecutive query heads share a KV head
        assert torch.equal(maps.query[head // 3, head % 3], sketch.query[1, head])
    assert torch.equal(maps.key, sketch.key[1])


def some_maps() -> Projections:
    torch.manual_seed(5)
    return Projections(torch.randn(3, 2, 8, 6), torch.randn(3, 8, 6))


def test_an_estimate_is_what_codes_give_up_to_one_number_for_each_query() -> None:
    keys, _, present = some()
    query, maps = torch.randn(2, 3, 2, 4, 8), some_maps()
    codes = encode(keys, maps.key, present)
    expected = logits(query, image_of(query, maps.query[None]), codes, nothing(40))
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = estimate(maps, query, keys, present)
        assert got.shape == expected.shape and got.dtype == torch.float32
        difference = got - expected
        constant = difference.mean(-1, keepdim=True).expand_as(difference)
        torch.testing.assert_close(difference, constant, atol=1e-3, rtol=1e-4)


def test_rounding_passes_gradients_on() -> None:
    """Of a sum that is linear in the images of keys, they are those without rounding."""
    keys, _, present = some()
    query, weight = torch.randn(2, 3, 2, 4, 8), torch.randn(2, 3, 2, 4, 40)
    one, two = (Projections(*(x.clone().requires_grad_() for x in some_maps())) for _ in range(2))
    (estimate(one, query, keys, present) * weight).sum().backward()
    there = present[:, None, :, None]
    image = (keys - (keys * there).sum(2, True) / there.sum(2, True)) @ two.key
    ((query @ two.query) @ image[:, :, None].mT * weight).sum().backward()
    torch.testing.assert_close(one.key.grad, two.key.grad, atol=1e-3, rtol=1e-4)
    # Of the query's map they are those of what codes hold.
    codes = encode(keys, two.key.detach(), present)
    level = torch.cat([codes.packed & 15, codes.packed >> 4], 2).mT - (LEVELS - 1) / 2
    held = level * codes.step[:, :, None]
    again = two.query.detach().requires_grad_()
    ((query @ again) @ held[:, :, None].mT * weight).sum().backward()
    torch.testing.assert_close(one.query.grad, again.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (3, "width=3: give an even number"),
        (0, "width=0: give an even number"),
        (-2, "width=-2"),
        (True, "width=True"),
        (4.0, "width=4.0"),
        (10, "width=10: the model's keys have only 8 numbers"),
    ],
)
def test_bad_widths_are_refused(width: object, message: str) -> None:
    for make in (
        lambda: check_width(width, 8),  # type: ignore[arg-type]
        lambda: Sketch(1, 2, 2, 8, width),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
    assert check_width(8, 8) == 8


def test_heads_that_form_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 query heads don't share 2 KV heads evenly"):
        Sketch(1, 5, 2, 8, 4)
