"""Stopping and going on gives the weights, the batches and the losses of not stopping."""

import pytest
import torch
from lightning import Callback
from tests.training.conftest import trained_weights

from zoomkv.training.summary_sft import LoraOptions, OptimizerOptions


class Stop(Callback):
    """Saves after a number of batches, and ends there as a killed run would."""

    def __init__(self, after: int, path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def interrupted(fit, stop, **options):
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(stop, **options)


DROPOUT = {"lora": LoraOptions(r=4, alpha=8, dropout=0.3)}


@pytest.mark.parametrize(
    ("stop", "accumulate", "learnt", "workers"),
    [
        (1, 1, 1, 0),
        (3, 1, 3, 0),
        (3, 1, 3, 2),
        (7, 1, 7, 0),  # the last batch of the first epoch
        (9, 1, 9, 0),  # in the second epoch
        (9, 1, 9, 2),
        (5, 2, 4, 0),  # inside a window of accumulation
        (4, 2, 4, 0),
        (10, 3, 10, 0),  # the second window of the second epoch ends there
        (11, 3, 10, 2),
    ],
)
def test_the_same_as_without_a_stop(fit, tmp_path, stop, accumulate, learnt, workers):
    options = {
        "module": DROPOUT,
        "data": {"num_workers": workers},
        "max_epochs": 2,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 1.0,
    }
    whole, _, seen = fit(**options)
    path = tmp_path / "stopped.ckpt"
    interrupted(fit, Stop(stop, path), **options)
    resumed, trainer, rest = fit(resume=path, **options)
    assert len(seen.batches) == 14
    assert rest.batches == seen.batches[learnt:]
    assert rest.losses == pytest.approx(seen.losses[learnt:], rel=1e-6)
    assert seen.batches[:7] != seen.batches[7:]
    ours, theirs = trained_weights(resumed), trained_weights(whole)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def test_three_and_three_steps_are_six(fit, tmp_path):
    whole, first, _ = fit(max_steps=6, max_epochs=-1)
    interrupted(fit, Stop(3, tmp_path / "3.ckpt"), max_steps=6, max_epochs=-1)
    resumed, second, _ = fit(resume=tmp_path / "3.ckpt", max_steps=6, max_epochs=-1)
    assert second.global_step == first.global_step == 6
    ours, theirs = trained_weights(resumed), trained_weights(whole)
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in theirs)
    state, other = first.optimizers[0].state_dict(), second.optimizers[0].state_dict()
    assert state["param_groups"] == other["param_groups"]


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        ({"optimizer": OptimizerOptions(lr=0.02, warmup=0.2)}, {}, "model.optimizer.lr: 0.02 is"),
        ({"lora": LoraOptions(r=8, alpha=8, dropout=0.0)}, {}, "model.lora.r: 8 is given"),
        ({"seed": 3}, {}, "model.seed: 3 is given, but the checkpoint was made with 0"),
        ({}, {"batch_size": 1}, "data: the examples, batch size, seed or number of processes"),
        ({}, {"seed": 9}, "data: the examples"),
    ],
)
def test_what_a_resumed_run_would_swallow_is_refused(fit, tmp_path, module, data, message):
    path = tmp_path / "1.ckpt"
    interrupted(fit, Stop(1, path))
    with pytest.raises(ValueError, match=message):
        fit(resume=path, module=module, data=data)


def test_what_changes_no_weight_may_change(fit, tmp_path):
    path = tmp_path / "6.ckpt"
    interrupted(fit, Stop(6, path))
    fit(resume=path, module={"gradient_checkpointing": True, "attention": "eager"})
