"""The router learns what the frozen model needs, from contexts alone, and nothing else changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback, Trainer
from tests.bases import make_base
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from zoomkv.backbone.load import load_base
from zoomkv.backbone.teacher import continue_with, far_rows, read_context, teach
from zoomkv.data.asked import NeedleQuestions
from zoomkv.data.long_module import LongTextData
from zoomkv.data.long_stream import Stage
from zoomkv.export.from_checkpoint import METADATA
from zoomkv.losses.zoom import coverage_target
from zoomkv.training.router_distill import (
    LossOptions,
    MemoryOptions,
    RouterDistill,
    RouterOptions,
    SplitOptions,
)
from zoomkv.training.summary_sft import OptimizerOptions

SPLITTER = SplitOptions("fine", min_span=6, max_span=12, anchor_share=0.05)
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    # Open and closed spans alike, and gates that are neither 0 nor 1.
    "router": RouterOptions(width=8, rank=8, threshold=0.9),
    "splitter": SPLITTER,
    "memory": MemoryOptions(method="gram"),
    "rows": None,
}


def made(base: str, **options: Any) -> RouterDistill:
    module = RouterDistill(base, **(OPTIONS | options))
    module.configure_model()
    return module


def texts(batch: int = 2, context: int = 120, continuation: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 360, (batch, context + continuation), generator=generator)
    # Later rows matter less: unlike numbers in the rows of a batch.
    matters = torch.arange(continuation) < continuation - 5 * torch.arange(batch)[:, None]
    return {
        "context": ids[:, :context],
        "continuation": ids[:, context:],
        "supervised": matters,
        "id": [str(number) for number in range(batch)],
    }


@pytest.fixture(scope="module")
def module(base) -> RouterDistill:
    """A new one; tests leave it as it is."""
    return made(base)


def gradients(module: RouterDistill, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(module.router.named_parameters())
    found = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, materialize_grads=True
    )
    return dict(zip(parameters, found, strict=True))


def test_the_case_has_everything(module) -> None:
    outcome = module._outcome(texts())
    for lesson in outcome.lessons:
        valid = outcome.valid.expand_as(lesson.opens)
        for told in (lesson.opens[valid], lesson.needed[valid].float()):
            assert 0.02 < float(told.detach().mean()) < 0.98
    size = outcome.memories[0].spans.size
    assert len(outcome.divergence) == 27 and (size == 0).any() and len(set(size[0].tolist())) > 2
    assert float(outcome.divergence.detach().min()) > 1e-5


# What is learnt.


def test_each_loss_reaches_what_it_is_to_teach_and_nothing_else(module) -> None:
    losses = module._losses(module._outcome(texts()))
    rank_gate = {name for name, _ in module.router.named_parameters() if "rank_gate" in name}
    reached = {
        "kl": {"projection", "threshold_logit", *rank_gate},
        "zoom": {"projection"},
        "spectrum": rank_gate,
        "cost": {"projection", "threshold_logit", *rank_gate},
    }
    for name, wanted in reached.items():
        found = gradients(module, losses[name])
        assert {n for n, value in found.items() if value.any()} == wanted, name
        assert all(value.isfinite().all() for value in found.values())
        for heads in ("projection", "threshold_logit"):
            if heads in wanted:  # of every layer and head
                assert found[heads].flatten(2 if heads == "projection" else 1).any(-1).all()
    assert not any(value.requires_grad for value in module.model.parameters())


def test_the_cost_of_zooming_raises_every_threshold(module) -> None:
    beta = replace(module.loss, beta=0.0)
    outcome = module._outcome(texts())
    was, module.loss = module.loss, beta
    found = gradients(module, module._losses(outcome)["cost"])
    module.loss = was
    assert (found["threshold_logit"] < 0).all()


def test_steps_change_the_router_alone_and_lower_the_loss(fit, base) -> None:
    module, _, seen = fit(steps=24, loss=LossOptions(anneal=0.0))
    assert sum(seen.losses[-6:]) < 0.95 * sum(seen.losses[:6])
    fresh, _ = load_base(base)
    for name, value in fresh.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], value)
    begun = made(base).router.state_dict()
    assert all(not torch.equal(value, begun[n]) for n, value in module.router.state_dict().items())
    assert not module.model.training


def test_what_is_said_alone_teaches_which_spans_to_open(base) -> None:
    """It falls by half, with fewer spans open than an untrained router has."""

    def state(module: RouterDistill) -> tuple[Tensor, float]:
        outcome = module._outcome(batch)
        opened = [x.opens.detach()[outcome.valid.expand_as(x.opens)] for x in outcome.lessons]
        return outcome.divergence.mean(), float(torch.cat(opened).mean())

    batch = texts()
    module = made(base, router=RouterOptions(8, 8, threshold=0.95))
    optimizer = torch.optim.AdamW(module.router.parameters(), lr=0.02)
    begun, few = state(module)
    for _ in range(24):
        loss, _ = state(module)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss, opened = state(module)
    untrained, more = state(made(base, router=RouterOptions(8, 8, threshold=0.9)))
    assert few < opened < more
    assert float(loss.detach()) < 0.5 * float(begun.detach())
    assert float(loss.detach()) < 0.6 * float(untrained.detach())


def test_the_cost_closes_spans(fit) -> None:
    """Nothing else pulls: the share that is opened falls."""
    loss = LossOptions(zoom=0.0, spectrum=0.0, cost=5.0, anneal=0.0)
    _, trainer, _ = fit(steps=20, loss=loss)
    _, start, _ = fit(steps=1)
    opened = [t.callback_metrics["val/opened"] for t in (trainer, start)]
    assert opened[0] < 0.9 * opened[1]


def test_the_weight_of_the_cost_rises_in_the_first_half(fit) -> None:
    class Weights(Callback):
        seen: list[float] = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.seen.append(pl_module._cost_weight())

    weights = Weights()
    fit(weights, steps=8)
    assert weights.seen == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1])
    weights.seen.clear()
    fit(weights, steps=2, loss=LossOptions(anneal=0.0))
    assert weights.seen == [0.1, 0.1]


# What the student reads.


def test_with_all_open_and_exact_it_is_the_teacher(base) -> None:
    module = made(base, memory=MemoryOptions(recovery="exact"))
    batch = texts()
    with torch.no_grad():
        assert float(module._outcome(batch).divergence.max()) > 1e-4
        module.router.threshold_logit.fill_(-1e4)
        outcome = module._outcome(batch)
    assert all(lesson.opens.all() or not outcome.valid.all() for lesson in outcome.lessons)
    assert float(outcome.divergence.abs().max()) < 1e-6 and outcome.agreement.all()
    losses = module._losses(outcome)
    assert losses["spectrum"] == 0 and float(losses["cost"]) == 1


@pytest.mark.parametrize("rope", ["post", "pre"])
def test_with_all_open_at_full_rank_it_is_nearly_the_teacher(base, rope) -> None:
    router = RouterOptions(width=8, rank=16, threshold=0.9)
    module = made(base, router=router, memory=MemoryOptions(rho=9.0, rope=rope, method="gram"))
    with torch.no_grad():
        module.router.threshold_logit.fill_(-1e4)
        module.router.rank_gate.last.weight.zero_()
        module.router.rank_gate.last.bias.fill_(100)
        assert float(module._outcome(texts()).divergence.max()) < 1e-5


@torch.no_grad()
def by_hand(module: RouterDistill, ids: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """A text's next-token logits and decisions ``[L, H, Q, S]``, row by row and head by head."""
    router, config = module.router, module.model.config
    context = read_context(module.model, ids[None])
    spans = module.splitter.cut(context.surprisal, context.length)
    memories = module._memories(context, spans)
    heads, group = config.num_attention_heads, 2
    tokens = [(spans.number[0] == s).nonzero().flatten() for s in range(-1, int(spans.count[0]))]
    decisions = torch.zeros(len(memories), heads, len(said), len(tokens) - 1)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        memory, out = memories[layer], torch.zeros_like(query)
        assert memory.factors is not None
        keys, values = memory.rows(router.rank_gate(memory.factors.sigma, memory.coarse_keys))
        for h, i in itertools.product(range(heads), range(len(said))):
            g, q, project = h // group, query[0, h, i], router.projection[layer, h]
            alone = tokens[0]
            read = [(keys[0, g, alone], values[0, g, alone], 1)]
            for s, at in enumerate(tokens[1:]):
                mean_key, mean_value = (
                    x[0, g, s] for x in (memory.coarse_keys, memory.coarse_values)
                )
                similar = (project @ q) @ F.normalize(project @ mean_key, dim=0)
                gate = (similar / math.sqrt(router.shape.width) + math.log(len(at))).sigmoid()
                if gate > router.threshold_logit[layer, h].sigmoid():
                    decisions[layer, h, i, s] = 1
                    read.append((keys[0, g, at], values[0, g, at], 1))
                else:
                    read.append((mean_key[None], mean_value[None], len(at)))
            read.append((key[0, g, : i + 1], value[0, g, : i + 1], 1))
            logits = torch.cat([k @ q * scaling + math.log(n) for k, _, n in read])
            out[0, h, i] = logits.softmax(0) @ torch.cat([v for _, v, _ in read])
        return out

    hidden = continue_with(module.model, said[None], context.length, attend)
    return module.model.get_output_embeddings()(hidden)[0], decisions


def test_the_student_is_what_loops_say_and_rows_of_a_batch_are_alone(base) -> None:
    """Contexts of unlike span counts in one batch, against each of them by itself."""
    module, batch = made(base), texts(batch=2, context=60, continuation=8)
    outcome = module._outcome(batch)
    assert outcome.memories[0].spans.count.unique().numel() == 2
    divergence = []
    for number, (ids, said) in enumerate(zip(batch["context"], batch["continuation"], strict=True)):
        logits, decisions = by_hand(module, ids, said)
        with torch.no_grad():
            whole = module.model(torch.cat([ids, said])[None]).logits[0, 60:]
        teacher, student = (x.double().log_softmax(-1) for x in (whole, logits))
        rows = batch["supervised"][number]
        divergence.append((teacher.exp() * (teacher - student)).sum(-1)[rows])
        for lesson, told in zip(outcome.lessons, decisions[:, :, rows], strict=True):
            found = lesson.opens[number, :, : told.shape[1], : told.shape[2]]
            assert torch.equal(found, told)
    torch.testing.assert_close(
        outcome.divergence.double(), torch.cat(divergence), atol=1e-5, rtol=1e-3
    )


def test_nothing_of_the_continuation_is_in_the_memory(module) -> None:
    """What comes later changes neither the memory nor what is said before it."""
    batch = texts()
    other = dict(batch, continuation=batch["continuation"].clone())
    other["continuation"][:, 7:] = 5
    one, two = module._outcome(batch), module._outcome(other)
    for ours, theirs in zip(one.memories, two.memories, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.coarse_values, theirs.coarse_values)
        assert int(ours.spans.length.max()) == 120 == ours.keys.shape[2]
    for ours, theirs in zip(one.lessons, two.lessons, strict=True):
        torch.testing.assert_close(ours.logits[:, :, :7], theirs.logits[:, :, :7])
        assert torch.equal(ours.needed[:, :, :7], theirs.needed[:, :, :7])
    torch.testing.assert_close(one.divergence[:7], two.divergence[:7], atol=1e-6, rtol=1e-4)
    assert not torch.equal(one.divergence[8:16], two.divergence[8:16])


# Which rows, and what they need.


def test_rows_that_look_far_are_mined(base) -> None:
    module, batch = made(base, rows=5, far_window=20), texts()
    outcome = module._outcome(batch)
    context = read_context(module.model, batch["context"])
    spans = module.splitter.cut(context.surprisal, context.length)
    told = teach(module.model, context, spans, batch["continuation"], far_window=20)
    assert told.far is not None
    for number in range(2):
        matters = int(batch["supervised"][number].sum())
        rows = far_rows(told.far[number : number + 1, :matters], 5)[0]
        for layer in range(2):
            needed = coverage_target(
                told.span_mass[layer][number, :, rows],
                0.9,
                outside=told.outside[layer][number, :, rows],
            )
            assert torch.equal(outcome.lessons[layer].needed[number], needed)
    assert len(outcome.divergence) == 10 and outcome.valid.shape[2] == 5
    every = made(base)._outcome(batch)
    rows = far_rows(told.far[:1], 5)[0]
    torch.testing.assert_close(outcome.divergence[:5], every.divergence[rows])


def test_a_text_with_fewer_rows_counts_those_it_has(base) -> None:
    module, batch = made(base, rows=13), texts()
    outcome = module._outcome(batch)
    assert outcome.valid.any(-1)[:, 0].sum(1).tolist() == [13, 11]
    assert len(outcome.divergence) == 24


def test_the_losses_are_means_over_rows_that_matter(module) -> None:
    """One text, and the same text beside another of which nothing matters."""
    batch = texts(batch=2)
    batch["supervised"][1] = False
    alone = {name: part[:1] for name, part in batch.items()}
    one, two = (module._losses(module._outcome(b)) for b in (alone, batch))
    for name in ("kl", "zoom"):
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=1e-4)


# Awkward contexts.


@pytest.mark.parametrize("recovery", ["lowrank", "exact"])
@pytest.mark.parametrize("scheme", ["paper", "fine"])
@pytest.mark.parametrize("context", [1, 3, 5, 11, 40])
def test_a_context_that_is_shorter_than_a_span(base, fit, context, scheme, recovery) -> None:
    options = {"splitter": SplitOptions(scheme), "memory": MemoryOptions(recovery=recovery)}
    module = made(base, **options)
    outcome = module._outcome(texts(context=context))
    losses = module._losses(outcome)
    loss = sum(losses.values()) + 0 * sum(p.sum() for p in module.router.parameters())
    assert torch.isfinite(loss)
    for found in gradients(module, loss).values():
        assert found.isfinite().all()
    if context < 12:
        assert outcome.memories[0].spans.size.shape[1] == 0
        assert float(outcome.divergence.detach().abs().max()) < 1e-6


def test_a_batch_without_a_row_that_matters(base, fit) -> None:
    module, batch = made(base), texts()
    batch["supervised"][:] = False
    losses = module._losses(module._outcome(batch))
    assert losses["kl"] == losses["zoom"] == 0
    assert all(torch.isfinite(value) for value in losses.values())


def test_steps_without_spans_train_and_change_nothing(fit) -> None:
    module, trainer, seen = fit(
        steps=2, splitter=SplitOptions(min_span=5000, max_span=None), optimizer=PLAIN
    )
    assert seen.losses == pytest.approx([0, 0], abs=1e-6)
    assert float(trainer.callback_metrics["val/kl"]) == pytest.approx(0, abs=1e-6)
    assert "val/auroc" in trainer.callback_metrics  # of nothing; never NaN
    for value in module.router.parameters():
        assert value.grad is None or not value.grad.any()


# Precision and memory.


def test_half_precision_keeps_the_routers_maths_in_fp32(fit) -> None:
    module, trainer, seen = fit(steps=3, precision="bf16", trainer={"precision": "bf16-mixed"})
    assert module.model.dtype == torch.bfloat16
    assert all(math.isfinite(loss) for loss in seen.losses)
    with torch.autocast("cpu", torch.bfloat16):
        outcome = module._outcome(texts())
        losses = module._losses(outcome)
    for value in losses.values():
        assert value.dtype == torch.float32
    for lesson in outcome.lessons:
        assert lesson.logits.dtype == lesson.opens.dtype == torch.float32
        assert lesson.gates is not None and lesson.gates.dtype == torch.float32
        assert ((lesson.opens == 0) | (lesson.opens == 1)).all()
    for value in module.router.parameters():
        assert value.dtype == torch.float32
    assert 0 <= float(trainer.callback_metrics["val/kl"]) < 5


def test_no_weight_on_single_tokens_is_kept_for_the_backward_pass(base) -> None:
    module, context, count = made(base), 400, 48
    batch, kept = texts(batch=1, context=context, continuation=count), []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module._losses(module._outcome(batch))
    # Weights of 4 heads and 48 rows would be far more than anything that is kept.
    assert max(kept) < 4 * count * context // 2


# Checkpoints.


def test_stopping_and_going_on_is_not_stopping(fit, tmp_path) -> None:
    whole, first, seen = fit(steps=4)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Stop(2, tmp_path / "2.ckpt"), steps=4)
    resumed, second, rest = fit(steps=4, resume=tmp_path / "2.ckpt")
    assert first.global_step == second.global_step == 4
    assert rest.names == seen.names[2:]
    assert rest.losses == pytest.approx(seen.losses[2:], rel=1e-6)
    for name, value in whole.router.state_dict().items():
        torch.testing.assert_close(resumed.router.state_dict()[name], value, rtol=0, atol=1e-7)
    ours, theirs = (t.optimizers[0].state_dict()["param_groups"] for t in (first, second))
    assert ours == theirs


def test_a_checkpoint_holds_the_router_and_what_it_is_for(fit, tmp_path) -> None:
    module, trainer, _ = fit(steps=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    ours = {f"router.{name}": value for name, value in module.router.named_parameters()}
    assert saved["state_dict"].keys() == ours.keys()
    assert all(torch.equal(saved["state_dict"][name], ours[name]) for name in ours)
    told = saved[METADATA]
    assert (told["method"], told["form"], told["steps"]) == ("sekv", "paper", 2)
    assert told["router"] == {
        "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "width": 8, "rank": 8,
        "threshold": 0.9, "normalise": True,
    }  # fmt: skip
    assert told["splitter"]["scheme"] == "fine" and told["splitter"]["sinks"] == 4
    assert {"val/kl", "val/f1"} <= told["metrics"].keys()
    again = RouterDistill.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    for name, value in module.router.state_dict().items():
        assert torch.equal(again.router.state_dict()[name], value)
    assert again.hparams == module.hparams


@pytest.mark.parametrize(
    ("options", "resumed", "alone"),
    [
        (
            {"splitter": replace(SPLITTER, max_span=13)},
            r"model\.splitter\.max_span: 13 is given, but the checkpoint was made with 12",
            r"made with splitter\.max_span=12, here it is 13",
        ),
        (
            {"router": RouterOptions(width=4, rank=8, threshold=0.9)},
            r"model\.router\.width: 4 is given",
            r"made with router\.width=8, here it is 4",
        ),
        ({"seed": 3}, r"model\.seed: 3 is given", None),
        ({"loss": LossOptions(cost=0.2)}, r"model\.loss\.cost: 0.2 is given", None),
    ],
)
def test_another_splitter_or_shape_is_refused(fit, tmp_path, options, resumed, alone) -> None:
    _, trainer, _ = fit(steps=1)
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match=resumed):
        fit(steps=2, resume=tmp_path / "1.ckpt", **options)
    if alone is not None:
        with pytest.raises(ValueError, match=alone):
            RouterDistill.load_from_checkpoint(tmp_path / "1.ckpt", weights_only=True, **options)


def test_another_base_is_refused(fit, tmp_path) -> None:
    _, trainer, _ = fit(steps=1)
    path = tmp_path / "1.ckpt"
    trainer.save_checkpoint(path)
    other = make_base(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match="trained on another base: embeddings"):
        RouterDistill.load_from_checkpoint(path, weights_only=True, base=other)
    shaped = make_base(tmp_path / "shaped", num_key_value_heads=4)
    with pytest.raises(ValueError, match="trained on another base: architecture"):
        RouterDistill.load_from_checkpoint(path, weights_only=True, base=shaped)
    saved = torch.load(path, weights_only=True)
    for change, message in (
        (lambda c: c[METADATA].update(form="sketch"), "another training, form sketch, not paper"),
        (lambda c: c.pop(METADATA), "not one of zoomkv fit"),
        (lambda c: c["state_dict"].pop("router.projection"), "1 trained weights are missing"),
    ):
        changed = {**saved, METADATA: dict(saved[METADATA]), "state_dict": saved["state_dict"]}
        changed["state_dict"] = dict(saved["state_dict"])
        change(changed)
        torch.save(changed, path)
        with pytest.raises(ValueError, match=message):
            fit(steps=2, resume=path)


# What is measured.


def test_figures_are_those_of_the_decisions(fit) -> None:
    module, trainer, seen = fit(steps=2)
    opened, needed, gates, nats, same = [], [], [], [], []
    rank, error = [], []
    with torch.no_grad():
        for batch in seen.measured:
            outcome = module._outcome(batch)
            nats.append(outcome.divergence), same.append(outcome.agreement)
            for lesson, memory in zip(outcome.lessons, outcome.memories, strict=True):
                valid = outcome.valid.expand_as(lesson.opens)
                opened.append(lesson.opens[valid]), needed.append(lesson.needed[valid])
                gates.append(lesson.logits[valid].sigmoid())
                real = memory.spans.size[0] > 0
                rank.append(lesson.gates.sum(-1)[:, 0][..., real])
                kept = lesson.gates.where(lesson.gates >= 0.05, 0)
                error.append(memory.error(memory.rows(kept))[:, 0][..., real])
    told, wants = torch.cat(opened) > 0, torch.cat(needed)
    hits = float((told & wants).sum())
    figures = {
        "kl": torch.cat(nats).mean(),
        "agreement": torch.cat(same).mean(),
        "opened": told.float().mean(),
        "f1": 2 * hits / (float(told.sum()) + float(wants.sum())),
        "auroc": binary_auroc(torch.cat(gates), wants.long()),
        "rank": torch.cat([x.flatten() for x in rank]).mean(),
        "error": torch.cat([x.flatten() for x in error]).mean(),
    }
    for name, value in figures.items():
        found = float(trainer.callback_metrics[f"val/{name}"])
        # AUROC is measured at a grid of thresholds.
        assert found == pytest.approx(float(value), abs=0.02 if name == "auroc" else 1e-4), name
    assert {f"train/{name}" for name in ("loss", "kl", "zoom", "spectrum", "cost", "opened",
            "agreement")} <= trainer.callback_metrics.keys()  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SplitOptions("best"), r"splitter\.scheme='best'"),
        (lambda: SplitOptions("fine", max_span=None), r"splitter\.max_span"),
        (lambda: SplitOptions(min_span=16, max_span=20), "give min_span >= 1"),
        (lambda: RouterOptions(threshold=1.0), "threshold=1.0"),
        (lambda: RouterOptions(width=0), "width=0"),
        (lambda: MemoryOptions(rope="none"), r"memory\.rope='none'"),
        (lambda: MemoryOptions(recovery="none"), r"memory\.recovery='none'"),
        (lambda: MemoryOptions(method="none"), r"memory\.method='none'"),
        (lambda: MemoryOptions(rho=0), r"memory\.rho=0"),
        (lambda: LossOptions(rho=1.5), r"loss\.rho=1\.5"),
        (lambda: LossOptions(cost=-1), r"loss\.cost=-1"),
        (lambda: LossOptions(temperature=0), r"loss\.temperature=0"),
        (lambda: RouterDistill("/no/such", rows=0), r"model\.rows=0"),
    ],
)
def test_options_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Fitting.

PLAIN = OptimizerOptions(lr=0.02, warmup=0.1)


class Seen(Callback):
    """Losses and names of the batches that were learnt, and the batches that were measured."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.names: list[list[str]] = []
        self.measured: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"].detach()))
        self.names.append(batch["id"])

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self.measured.append(batch)


class Stop(Callback):
    """Saves after a number of batches, and ends there as a killed run would."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.fixture
def fit(base, tmp_path):
    """Fits the tiny base: ``module, trainer, seen = fit(steps=3)``."""

    def run(*callbacks, steps, resume=None, trainer=None, **options):
        seen = Seen()
        made_trainer = Trainer(
            callbacks=[seen, *callbacks],
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
            **(trainer or {}),
        )
        module = RouterDistill(base, **(OPTIONS | {"optimizer": PLAIN} | options))
        data = LongTextData(
            [NeedleQuestions(1, kinds=["single"], haystacks=["noise"])],
            [Stage(360), Stage(400)],
            steps,
            val=NeedleQuestions(2, kinds=["single"], haystacks=["noise"]),
            val_batches=2,
            continuation=240,
        )
        made_trainer.fit(module, data, ckpt_path=resume)
        return module, made_trainer, seen

    return run
