"""The LightningCLI behind ``zoomkv fit | validate | test | predict``."""

from __future__ import annotations

import warnings
from argparse import ArgumentError
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from zoomkv.training.callbacks import StderrProgressBar, StepLog

_NOT_OURS = (
    "LightningCLI's args parameter",  # the command line is just what we hand on
    "`is_gradient_checkpointing` is deprecated",  # peft's use of transformers
    "Precision .* is not supported by the model summary",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # lightning's use of torch
    ".*does not have many workers",
)
"""Warnings that no user of ours can act on."""

SUBCOMMANDS = ("fit", "validate", "test", "predict")
_JARGON = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "Given value",
    "- Problem with",
)


class TrainingCLI(LightningCLI):
    """LightningCLI whose configuration is what runs, and which keeps stdout free."""

    def before_instantiate_classes(self) -> None:
        path = self.config[self.config["subcommand"]].get("ckpt_path")
        if not path or path in ("last", "best", "hpc"):
            return
        if not Path(path).is_file():
            raise ValueError(f"--ckpt_path {path}: there is no such checkpoint")
        if not is_zipfile(path):
            raise ValueError(f"--ckpt_path {path}: not a checkpoint, or only the beginning of one")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds callbacks that report on stderr; Lightning's own write to stdout."""
        settings = self._get(self.config_init, "trainer", default={})
        callbacks: list[Callback] = [StepLog()]
        if settings.get("enable_progress_bar") is not False:
            callbacks.append(StderrProgressBar())
        if settings.get("enable_model_summary") is not False:
            callbacks.append(ModelSummary())
        self.trainer_defaults["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Leaves the configuration alone.

        Lightning takes module options from the checkpoint here, so that an override on the command
        line is lost without a word. ``SummarySFT`` compares the two instead, and refuses.
        """


def main(arguments: list[str]) -> None:
    """Runs one of the training commands.

    Args:
        arguments: What follows ``zoomkv``: the subcommand and its options.

    Raises:
        ValueError: Bad usage, options or input.
    """
    for message in _NOT_OURS:
        warnings.filterwarnings("ignore", message=message)
    raising = {"exit_on_error": False}
    try:
        TrainingCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=arguments,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            # Batches are shared out by our own sampler.
            trainer_defaults={"use_distributed_sampler": False},
            parser_kwargs={**raising, **{name: raising for name in SUBCOMMANDS}},
        )
    except (ArgumentError, ValueError, MisconfigurationException) as error:
        raise ValueError(_brief(str(error))) from error


def _brief(message: str) -> str:
    """A parser's error without its account of all types that were tried."""
    lines = [line.strip() for line in message.splitlines()]
    telling = [line.removeprefix("- ") for line in lines if not line.startswith(_JARGON)]
    return " ".join(telling)
