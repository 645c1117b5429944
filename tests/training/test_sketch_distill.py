"""The sketch learns what the frozen model looks at, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from torch import Tensor

from zoomkv.data.asked import NeedleQuestions
from zoomkv.data.long_module import LongTextData
from zoomkv.data.long_stream import Stage
from zoomkv.export.from_checkpoint import METADATA, export_checkpoint
from zoomkv.generation import load
from zoomkv.losses.attention import candidate_loss, captured
from zoomkv.training.partial_module import OptimizerOptions
from zoomkv.training.sketch_distill import SketchDistill


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"].detach()))


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
    def run(*callbacks, steps=6, resume=None, **options) -> tuple[SketchDistill, Trainer, Losses]:
        losses = Losses()
        trainer = Trainer(
            callbacks=[losses, *callbacks],
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
        )
        settings: dict[str, Any] = {
            "base": base,
            "precision": "fp32",
            "width": 4,
            "window": 8,
            "rows": 12,
            "fetched": 12,
            "calibration": 2,
            "optimizer": OptimizerOptions(lr=0.02, warmup=0.1),
        }
        module = SketchDistill(**(settings | options))
        data = LongTextData(
            [NeedleQuestions(1, kinds=["multi-key"], haystacks=["noise"])],
            [Stage(420), Stage(520)],
            steps,
            val=NeedleQuestions(2, kinds=["multi-key"], haystacks=["noise"]),
            val_batches=1,
            continuation=240,
        )
        trainer.fit(module, data, ckpt_path=resume)
        return module, trainer, losses

    return run


def test_steps_lower_the_loss_on_other_documents_and_change_the_sketch_alone(fit):
    class Scramble(Callback):
        """What the moments give is nearly as good as it gets, where keys are random."""

        def on_train_start(self, trainer, pl_module):
            for value in (pl_module.query_turn, pl_module.key_turn):
                torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(0))

    _, start, _ = fit(Scramble(), steps=1, optimizer=OptimizerOptions(lr=1e-9))
    module, trainer, _ = fit(Scramble(), steps=24)
    assert trainer.callback_metrics["val/loss"] < 0.8 * start.callback_metrics["val/loss"]
    _, fitted, _ = fit(steps=1, optimizer=OptimizerOptions(lr=1e-9))
    assert fitted.callback_metrics["val/loss"] < trainer.callback_metrics["val/loss"]
    assert 0 < trainer.callback_metrics["val/captured"] <= 1
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert trained == {"query_turn", "key_turn"}


def test_every_map_gets_a_gradient(fit):
    class Grads(Callback):
        found: dict[int, Tensor] = {}

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            trained = (pl_module.query_turn, pl_module.key_turn)
            self.found = {number: value.grad.clone() for number, value in enumerate(trained)}

    grads = Grads()
    fit(grads, steps=1)
    for gradient in grads.found.values():
        assert gradient.flatten(2).abs().amax(-1).gt(0).all()


@pytest.mark.parametrize("stop", [1, 3])
def test_stopping_and_going_on_is_not_stopping(fit, tmp_path, stop):
    whole, _, seen = fit(steps=4)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Stop(stop, tmp_path / "half.ckpt"), steps=4)
    resumed, _, rest = fit(steps=4, resume=tmp_path / "half.ckpt")
    assert rest.seen == pytest.approx(seen.seen[stop:], rel=1e-5)
    for layer in range(2):
        for ours, theirs in zip(resumed.maps(layer), whole.maps(layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"model\.width"):
        fit(steps=4, resume=tmp_path / "half.ckpt", width=6)


def test_exported_and_loaded_it_is_the_same(fit, tmp_path):
    module, trainer, _ = fit(steps=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert not any(name.startswith("model.") for name in saved["state_dict"])
    assert saved[METADATA]["steps"] == 2
    export_checkpoint(tmp_path / "last.ckpt", tmp_path / "artifact")
    model, _ = load(str(tmp_path / "artifact"))
    from zoomkv.backbone.attach import attached_router

    loaded = attached_router(model)
    for layer in range(2):
        for ours, theirs in zip(loaded.of(layer), module.maps(layer), strict=True):
            assert torch.equal(ours, theirs)


def slow(estimate: Tensor, true: Tensor, present: Tensor, others: Tensor, count: int):
    """Query by query, head by head, in float64."""
    loss, got, best = 0.0, 0.0, 0.0
    batch, kv_heads, group, queries, _ = true.shape
    for b in range(batch):
        at = present[b].nonzero().squeeze(1)
        for h in range(kv_heads):
            for q in range(queries):
                shares, guesses = [], []
                for g in range(group):
                    whole = torch.cat([true[b, h, g, q, at], others[b, h, g, q]]).double()
                    share = whole.softmax(0)[: len(at)]
                    guess = estimate[b, h, g, q, at].double().softmax(0)
                    own = share / share.sum()
                    loss += float(share.sum() * (own * (own.log() - guess.log())).sum())
                    shares.append(share)
                    guesses.append(guess * share.sum())
                all_shares, all_guesses = torch.stack(shares), torch.stack(guesses)
                chosen = all_guesses.amax(0).topk(count).indices
                ideal = all_shares.amax(0).topk(count).indices
                got += float(all_shares[:, chosen].sum())
                best += float(all_shares[:, ideal].sum())
    return loss / (batch * kv_heads * group * queries), got / best


def test_losses_are_what_loops_say():
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, 3, 4)
    estimate, true = (torch.randn(*shape, 9, generator=generator) * 2 for _ in range(2))
    others = torch.randn(*shape, 5, generator=generator)
    others[..., 3] = -torch.inf
    present = torch.tensor([[False] * 2 + [True] * 6 + [False], [True] * 9])
    loss, share = slow(estimate, true, present, others, 3)
    assert float(candidate_loss(estimate, true, present, others)) == pytest.approx(loss, rel=1e-5)
    assert float(captured(estimate, true, present, others, 3)) == pytest.approx(share, rel=1e-5)
    shifted = estimate + torch.randn(*shape, 1, generator=generator)
    assert float(candidate_loss(shifted, true, present, others)) == pytest.approx(loss, rel=1e-5)
    assert float(candidate_loss(true, true, present, others)) == pytest.approx(0, abs=1e-6)
    assert float(captured(true, true, present, others, 3)) == 1
