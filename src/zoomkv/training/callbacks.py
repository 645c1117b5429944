"""Progress on stderr, so that stdout stays for results."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StderrProgressBar(RichProgressBar):
    """Lightning's progress bar, which writes to stdout, on stderr."""

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate, console_kwargs={"stderr": True})


class StepLog(Callback):
    """A line on stderr every few steps where no terminal shows the progress bar.

    Args:
        every: Optimizer steps between two lines.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self._last = 0
        self._begun = (0.0, 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step
        self._begun = (time.monotonic(), trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if sys.stderr.isatty() or not trainer.is_global_zero or step < self._last + self.every:
            return
        self._last = step
        seconds = (time.monotonic() - self._begun[0]) / (step - self._begun[1])
        loss = trainer.callback_metrics.get("train/loss")
        print(
            f"step {step}/{trainer.estimated_stepping_batches:.0f}  "
            f"loss {float('nan') if loss is None else float(loss):.4f}  {seconds:.1f} s a step",
            file=sys.stderr,
            flush=True,
        )
