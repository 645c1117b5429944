"""What a teacher says and looks at, against the plain model on each whole text alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.backbone.test_replaced import in_double
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoomkv
from zoomkv.backbone import teacher
from zoomkv.backbone.replaced import Attend
from zoomkv.backbone.teacher import Context, continue_with, far_rows, read_context, teach
from zoomkv.spans.surprisal import Spans, fine_spans, paper_spans

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
PADS = [0, 5, 19]
COLUMNS, MORE = 40, 7
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(1, 128, (len(PADS), COLUMNS), generator=GENERATOR)
REAL = torch.arange(COLUMNS) >= torch.tensor(PADS)[:, None]
CONTINUATION = torch.randint(1, 128, (len(PADS), MORE), generator=GENERATOR)


def whole(row: int) -> Tensor:  # [1, T + Q]
    """A context without its pads, and what follows."""
    return torch.cat([IDS[row, PADS[row] :], CONTINUATION[row]])[None]


def read(model: Any) -> Context:
    return read_context(model, IDS.masked_fill(~REAL, 0), REAL, surprisal_chunk=11)


def spans_of(context: Context, kind: str = "paper") -> Spans:
    """Spans of unlike numbers in the rows, with anchors and exact runs between them."""
    if kind == "fine":
        return fine_spans(context.surprisal, context.length, 3, 6, anchor_share=0.1)
    return paper_spans(context.surprisal, context.length, 0.5, min_span=2)


def attentions(model: Any, row: int) -> list[Tensor]:
    """Weights of each layer ``[H, Q, T + Q]``, as the model itself gives them."""
    was = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(whole(row), output_attentions=True).attentions
    model.set_attn_implementation(was)
    return [layer[0, :, -MORE:] for layer in weights]


def over(context: Context, first_keys: Tensor | None = None) -> Attend:
    """Attention over a whole context, on paper, in the dtype of the model."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        stored = context.keys[layer] if layer or first_keys is None else first_keys
        out = torch.zeros_like(query)
        for row, length in enumerate(context.length.tolist()):
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                keys = torch.cat([stored[row, group, :length], key[row, group]])
                values = torch.cat([context.values[layer][row, group, :length], value[row, group]])
                future = torch.ones(query.shape[2], len(keys), dtype=torch.bool).triu(length + 1)
                scores = query[row, head] @ keys.T * scaling
                out[row, head] = scores.masked_fill(future, -torch.inf).softmax(-1) @ values
        return out

    return attend


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_context_is_what_it_is_alone(tiny, family, kv_heads) -> None:
    model = tiny(family, kv_heads=kv_heads)
    context = read(model)
    assert context.length.tolist() == [COLUMNS - pads for pads in PADS]
    assert len(context.keys) == len(context.values) == 2
    for row, length in enumerate(context.length.tolist()):
        plain = model(whole(row)[:, :length], use_cache=True)
        for layer, stored in enumerate(plain.cache.layers):
            for found, expected in (
                (context.keys[layer][row], stored.keys[0]),
                (context.values[layer][row], stored.values[0]),
            ):
                torch.testing.assert_close(found[:, :length], expected, atol=1e-4, rtol=1e-4)
                assert found.shape == (kv_heads, COLUMNS, 8) and not found[:, length:].any()
        logs = plain.logits[0, :-1].log_softmax(-1)
        nats = -logs.gather(1, whole(row)[0, 1:length, None]).squeeze(1)
        expected = torch.cat([torch.zeros(1), nats, torch.zeros(COLUMNS - length)])
        torch.testing.assert_close(context.surprisal[row], expected, atol=1e-4, rtol=1e-4)
        assert float(nats.max()) > 1  # else this shows nothing


def test_pads_may_stand_anywhere(tiny_llama) -> None:
    model = tiny_llama()
    plain = read_context(model, IDS[:, :9])
    ids, real = torch.zeros(3, 14, dtype=torch.int64), torch.zeros(3, 14, dtype=torch.int64)
    for row in range(3):
        where = torch.randperm(14, generator=GENERATOR)[:9].sort().values
        ids[row, where], real[row, where] = IDS[row, :9], 1  # a mask of numbers will do
    found = read_context(model, ids, real)
    assert torch.equal(found.surprisal, plain.surprisal)
    assert torch.equal(found.keys[1], plain.keys[1])


@pytest.mark.parametrize(
    ("attention", "kv_heads"),
    [("sdpa", 2), ("sdpa", 4), ("eager", 2), ("attached", 4), ("peft", 2)],
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_teacher_says_what_the_model_says(tiny, family, kv_heads, attention) -> None:
    model = tiny(family, kv_heads=kv_heads)
    if attention == "peft":
        from peft import LoraConfig, get_peft_model

        options = LoraConfig(target_modules=["q_proj", "k_proj"], r=2, init_lora_weights=False)
        model = get_peft_model(model, options).eval()
    elif attention == "attached":
        zoomkv.attach(model)
    else:
        model.set_attn_implementation(attention)
    context = read(model)
    hidden = teach(model, context, None, CONTINUATION).hidden
    student = continue_with(model, CONTINUATION, context.length, over(context))
    for row in range(len(PADS)):
        expected = model(whole(row)).logits[0, -MORE:]
        for states in (hidden, student):
            logits = model.get_output_embeddings()(states[row])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "chunk"), [("paper", 2**25), ("fine", 4 * 3 * (COLUMNS + MORE) * 2), ("paper", 1)]
)
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_masses_are_the_models_weights_summed(
    tiny, family, kv_heads, kind, chunk, monkeypatch
) -> None:
    monkeypatch.setattr(teacher, "_CHUNK", chunk)
    model = tiny(family, kv_heads=kv_heads)
    context = read(model)
    spans = spans_of(context, kind)
    assert spans.exact.any() or kind == "fine"
    assert spans.anchor[:, 4:].any() and len(set(spans.count.tolist())) > 1
    rows = torch.tensor([[0, 3, 6], [5, 1, 1], [6, 2, 4]])
    window = 8
    found = teach(model, context, spans, CONTINUATION, rows, far_window=window)
    assert found.far is not None and len(found.span_mass) == len(found.outside) == 2

    for row, length in enumerate(context.length.tolist()):
        weights = attentions(model, row)
        far = torch.zeros(3)
        for layer in range(2):
            inside = torch.zeros(4, 3, spans.size.shape[1])
            outside = torch.zeros(4, 3)
            for place, asked in enumerate(rows[row].tolist()):
                for token in range(length + asked + 1):
                    mass = weights[layer][:, asked, token]
                    number = int(spans.number[row, token]) if token < length else -1
                    if number >= 0:
                        inside[:, place, number] += mass
                    else:
                        outside[:, place] += mass
                    if length + asked - token > window:
                        far[place] += float(mass.mean()) / 2
            torch.testing.assert_close(found.span_mass[layer][row], inside, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.outside[layer][row], outside, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.far[row], far, atol=1e-4, rtol=1e-4)
    for inside, outside in zip(found.span_mass, found.outside, strict=True):
        assert inside.dtype == outside.dtype == torch.float32
        torch.testing.assert_close(inside.sum(-1) + outside, torch.ones(3, 4, 3))


def test_rows_are_all_by_default_or_the_same_for_all(tiny_llama) -> None:
    model = tiny_llama()
    context = read(model)
    spans = spans_of(context)
    every = teach(model, context, spans, CONTINUATION, far_window=3)
    some = teach(model, context, spans, CONTINUATION, torch.tensor([4, 2]), far_window=3)
    assert every.far is not None and some.far is not None
    assert torch.equal(some.hidden, every.hidden)
    torch.testing.assert_close(some.far, every.far[:, [4, 2]])
    for layer in range(2):
        torch.testing.assert_close(some.span_mass[layer], every.span_mass[layer][:, :, [4, 2]])
        torch.testing.assert_close(some.outside[layer], every.outside[layer][:, :, [4, 2]])
    only_far = teach(model, context, None, CONTINUATION, far_window=3)
    assert only_far.far is not None and torch.equal(only_far.far, every.far)
    assert only_far.span_mass == only_far.outside == []
    assert teach(model, context, spans, CONTINUATION).far is None


def test_a_context_without_spans(tiny_llama) -> None:
    model = tiny_llama()
    context = read_context(model, IDS[:, :5])
    spans = paper_spans(context.surprisal, context.length)
    assert spans.size.shape[1] == 0
    found = teach(model, context, spans, CONTINUATION[:, :1])
    assert found.span_mass[0].shape == (3, 4, 1, 0)
    torch.testing.assert_close(found.outside[1], torch.ones(3, 4, 1))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_summed_in_fp32(tiny_qwen3, autocast) -> None:
    model = tiny_qwen3() if autocast else tiny_qwen3().bfloat16()
    exact: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if layer == 0:  # of the row without pads
            keys = torch.cat([context.keys[0][0], key[0]], dim=1).double().repeat_interleave(2, 0)
            scores = query[0].double() @ keys.transpose(-1, -2) * scaling
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(COLUMNS + 1)
            exact.append(scores.masked_fill(future, -torch.inf).softmax(-1))
        return query

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        context = read(model)
        spans = spans_of(context)
        found = teach(model, context, spans, CONTINUATION, far_window=8)
        with torch.no_grad():
            continue_with(model, CONTINUATION, context.length, attend)
    assert found.far is not None and found.far.dtype == torch.float32
    assert context.surprisal.dtype == torch.float32 and found.hidden.isfinite().all()
    for inside, outside in zip(found.span_mass, found.outside, strict=True):
        assert inside.dtype == outside.dtype == torch.float32
        torch.testing.assert_close(inside.sum(-1) + outside, torch.ones_like(outside))
    for number in range(int(spans.count[0])):
        mass = exact[0][..., :COLUMNS][..., spans.number[0] == number].sum(-1).float()
        torch.testing.assert_close(found.span_mass[0][0, ..., number], mass, atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The most numbers that a tensor of floats had, of those that operators gave."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.size = max(self.size, one.numel())
        return out


def test_neither_all_logits_nor_all_weights_exist(tiny_llama, monkeypatch) -> None:
    model = tiny_llama(vocab_size=500)
    length, count = 200, 30
    ids = torch.randint(1, 500, (1, length + count), generator=GENERATOR)
    with Largest() as reading:
        context = read_context(model, ids[:, :length], surprisal_chunk=16)
    assert reading.size < length * length < length * 500
    spans = fine_spans(context.surprisal, context.length)
    monkeypatch.setattr(teacher, "_CHUNK", 2 * 4 * (length + count))  # two rows at a time
    with Largest() as teaching:
        teach(model, context, spans, ids[:, length:], far_window=10)
    keys = 4 * (length + count) * 8  # of a layer, repeated for its groups
    assert teaching.size <= keys < 4 * count * (length + count)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_agree_with_finite_differences(tiny, family, kv_heads) -> None:
    model = in_double(tiny(family, kv_heads=kv_heads)).requires_grad_(False)
    context = read_context(model, IDS[:2, :9], REAL[:2, :9])
    assert context.length.tolist() == [9, 4]

    def run(keys: Tensor) -> Tensor:
        attend = over(context, keys)
        return continue_with(model, CONTINUATION[:2, :3], context.length, attend)[..., :4]

    keys = context.keys[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (keys,), fast_mode=True)
    (gradient,) = torch.autograd.grad(run(keys).sum(), keys)
    assert gradient[0].any() and gradient[1, :, :4].any() and not gradient[1, :, 4:].any()


def test_a_checkpointed_student_is_recomputed_over_its_own_context(tiny_llama) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_llama().requires_grad_(False)
        if checkpointing:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        context = read(model)
        keys = context.keys[0].clone().requires_grad_()
        hidden = continue_with(model, CONTINUATION, context.length, over(context, keys))
        gradients += torch.autograd.grad(hidden.square().sum(), keys)
        assert model.training == checkpointing
        assert not teach(model, context, None, CONTINUATION).hidden.requires_grad
        assert model.config._attn_implementation == "sdpa"
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0])


@given(
    st.integers(1, 3).flatmap(
        lambda batch: st.integers(1, 12).flatmap(
            lambda rows: st.tuples(
                st.lists(
                    st.lists(st.integers(0, 4), min_size=rows, max_size=rows),
                    min_size=batch,
                    max_size=batch,
                ),
                st.integers(1, rows),
            )
        )
    )
)
def test_the_farthest_rows_are_kept(drawn: tuple[list[list[int]], int]) -> None:
    far, count = drawn
    found = far_rows(torch.tensor(far) / 4, count)
    for row, values in zip(found.tolist(), far, strict=True):
        best = sorted(range(len(values)), key=lambda place: (-values[place], place))
        assert row == sorted(best[:count])


def test_bad_input(tiny_llama) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="a row of the context has no token; leave it out"):
        read_context(model, IDS, REAL & (torch.arange(3)[:, None] != 1))
    with pytest.raises(ValueError, match="a row of the context has no token; leave it out"):
        read_context(model, IDS[:, :0])
    context = read(model)
    with pytest.raises(ValueError, match=r"a continuation of \[3, 0\] has no tokens"):
        continue_with(model, CONTINUATION[:, :0], context.length, over(context))
    with pytest.raises(ValueError, match="2 continuations of 3 contexts; give one each"):
        teach(model, context, None, CONTINUATION[:2])
    other = read_context(model, IDS[:, :30])
    with pytest.raises(ValueError, match=r"spans of \[3, 30\] tokens for a context of \[3, 40\]"):
        teach(model, context, spans_of(other), CONTINUATION)
    for rows in (torch.tensor([0, MORE]), torch.tensor([-1]), torch.tensor([]).long()):
        with pytest.raises(ValueError, match="the continuation has rows 0 to 6; supervise some"):
            teach(model, context, None, CONTINUATION, rows)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"{count} of 3 candidates are wanted"):
            far_rows(torch.zeros(2, 3), count)
