"""What a checkpoint holds, and which ones are refused."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.bases import make_base
from tests.training.conftest import Fit, trained_weights

from zoomkv.export.from_checkpoint import METADATA
from zoomkv.training.summary_sft import SummarySFT


@pytest.fixture
def saved(fit, tmp_path):
    module, trainer, _ = fit(
        ModelCheckpoint(tmp_path, "one", every_n_train_steps=2), max_steps=2, max_epochs=-1
    )
    return tmp_path / "one.ckpt", module


def test_holds_the_trained_weights_alone_and_plain_types(saved):
    path, module = saved
    checkpoint = torch.load(path, weights_only=True)
    ours = trained_weights(module)
    assert checkpoint["state_dict"].keys() == ours.keys()
    assert all(torch.equal(checkpoint["state_dict"][name], ours[name]) for name in ours)
    assert checkpoint["hyper_parameters"]["lora"]["r"] == 4
    assert checkpoint[METADATA]["steps"] == 2


def test_is_small(tmp_path):
    # At a hidden size of 64 adapters are large for their base, so this one is wider.
    base = make_base(tmp_path / "wide", hidden_size=256, intermediate_size=1024, head_dim=64)
    Fit(base, tmp_path)(
        ModelCheckpoint(tmp_path, "one", every_n_train_steps=1), max_steps=1, max_epochs=-1
    )
    full = (Path(base) / "model.safetensors").stat().st_size
    assert (tmp_path / "one.ckpt").stat().st_size < 0.25 * 3 * full  # weights and two moments


def edited(path, change):
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def lose(checkpoint):
    state = checkpoint["state_dict"]
    del state[next(name for name in state if "lora_A" in name)]


def forge(checkpoint):
    checkpoint["state_dict"]["model.typo"] = torch.zeros(1)


def from_elsewhere(checkpoint):
    checkpoint[METADATA]["fingerprint"]["embeddings"] = "0" * 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose, "1 trained weights are missing, 0 are unknown"),
        (forge, "0 trained weights are missing, 1 are unknown, first model.typo"),
        (from_elsewhere, "trained on another base: embeddings"),
        (lambda checkpoint: checkpoint.pop(METADATA), "not one of zoomkv fit"),
    ],
)
def test_one_that_does_not_fit_is_refused(saved, fit, change, message):
    path = edited(saved[0], change)
    with pytest.raises(ValueError, match=message):
        fit(resume=path, max_steps=4, max_epochs=-1)
    with pytest.raises(ValueError, match=message):
        SummarySFT.load_from_checkpoint(path, weights_only=True)


def test_loads_without_a_trainer(saved):
    path, module = saved
    again = SummarySFT.load_from_checkpoint(path, weights_only=True)
    ours, theirs = trained_weights(again), trained_weights(module)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.hparams == module.hparams
