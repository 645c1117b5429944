"""Trainings of a tiny base that take a second."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from zoomkv.data.module import SummaryData
from zoomkv.data.sources import LedgerSource
from zoomkv.training.summary_sft import (
    GenerationOptions,
    LoraOptions,
    OptimizerOptions,
    SummarySFT,
)


class Seen(Callback):
    """The ids of every batch that was learnt, its loss, and the modes of the modules."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.losses: list[float] = []
        self.modes: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        dropout = [m for n, m in pl_module.named_modules() if n.endswith("lora_dropout.default")]
        assert dropout
        self.modes.append(all(m.training for m in [pl_module, pl_module.model, *dropout]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch["input_ids"].tolist())
        self.losses.append(float(outputs["loss"].detach()))


class Fit:
    """One training of a tiny base in a folder."""

    kind = SummarySFT

    def __init__(self, base: str, folder: Path) -> None:
        self.base, self.folder = base, folder

    def module(self, **options: Any) -> SummarySFT:
        torch.manual_seed(0)  # adapters begin alike
        settings: dict[str, Any] = {
            "base": self.base,
            "lora": LoraOptions(r=4, alpha=8, dropout=0.0),
            "optimizer": OptimizerOptions(lr=0.01, warmup=0.2),
            "generation": GenerationOptions(max_new_tokens=12, batch_size=2),
        }
        return self.kind(**(settings | options))

    def data(self, **options: Any) -> SummaryData:
        settings: dict[str, Any] = {
            "train": [LedgerSource(14, 1, (3, 4))],
            "max_length": 600,
            "batch_size": 2,
            "packing": False,
        }
        return SummaryData(**(settings | options))

    def trainer(self, *callbacks: Callback, **options: Any) -> Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": self.folder,
        }
        return Trainer(callbacks=list(callbacks), **(settings | options))

    def __call__(
        self,
        *callbacks: Callback,
        module: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        resume: str | Path | None = None,
        **options: Any,
    ) -> tuple[SummarySFT, Trainer, Seen]:
        seen = Seen()
        trainer = self.trainer(seen, *callbacks, **options)
        made = self.module(**(module or {}))
        trainer.fit(made, self.data(**(data or {})), ckpt_path=resume)
        return made, trainer, seen


@pytest.fixture
def fit(base, tmp_path) -> Fit:
    """Fits the tiny base: ``module, trainer, seen = fit(max_steps=3)``."""
    return Fit(base, tmp_path)


def trained_weights(module: SummarySFT) -> dict[str, Any]:
    """Copies of all that is trained."""
    return {n: v.detach().clone() for n, v in module.named_parameters() if v.requires_grad}
