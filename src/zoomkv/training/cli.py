"""The LightningCLI behind ``zoomkv fit | validate | test | predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from zoomkv.training.callbacks import StderrProgressBar, StepLog


class TrainingCLI(LightningCLI):
    """LightningCLI that refuses what a resumed checkpoint would silently swallow."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.config["subcommand"]]
        path = config.get("ckpt_path")
        if path and path not in ("last", "best", "hpc") and not Path(path).is_file():
            raise ValueError(f"--ckpt_path {path}: there is no such checkpoint")

    def _parse_ckpt_path(self) -> None:
        """Compares the configuration with the checkpoint's instead of replacing it.

        Lightning takes module hyper-parameters from the checkpoint here, so that an override on
        the command line is lost without a word.
        """
        subcommand = self.config["subcommand"]
        path = self.config[subcommand].get("ckpt_path")
        if not path or not Path(path).is_file():
            return
        saved = torch.load(path, weights_only=True, map_location="cpu").get("hyper_parameters", {})
        saved = {key: value for key, value in saved.items() if not key.startswith("_")}
        given = self.config[subcommand].model.init_args
        given = given.as_dict() if hasattr(given, "as_dict") else dict(given)
        for name in sorted(saved.keys() & given.keys()):
            if _plain(saved[name]) != _plain(given[name]):
                raise ValueError(
                    f"model.{name}: {_plain(given[name])} is given, but the checkpoint {path} was "
                    f"made with {_plain(saved[name])}; drop the override or train anew"
                )


def main(arguments: list[str]) -> None:
    """Runs one of the training commands.

    Args:
        arguments: What follows ``zoomkv``: the subcommand and its options.
    """
    TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=arguments,
        seed_everything_default=0,
        # Atomic: a killed run leaves the configuration of the one before or its own, whole.
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "callbacks": [StderrProgressBar(), StepLog()],
            # Batches are shared out by our own sampler.
            "use_distributed_sampler": False,
        },
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if not key.startswith("_")}
    return list(value) if isinstance(value, tuple) else value
