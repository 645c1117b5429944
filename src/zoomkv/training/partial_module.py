"""What every training here has in common: few weights learn, beside a base that stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning import LightningModule
from torch.optim import AdamW, Optimizer

from zoomkv.backbone.fingerprint import describe_mismatch
from zoomkv.backbone.load import Precision
from zoomkv.export.from_checkpoint import METADATA
from zoomkv.training.checkpointing import (
    check_options,
    check_trained,
    keep_trained,
    rewind_to_step,
)
from zoomkv.training.schedules import cosine_with_warmup


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with a cosine schedule."""

    lr: float = 1e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup: float = 0.03
    """Share of the steps that warm up linearly."""
    floor: float = 0.0
    """Share of the peak that is left at the end."""
    eight_bit: bool = False
    """Keep the moments in 8 bits (bitsandbytes)."""


class PartialModule(LightningModule):
    """Base: optimizer, and checkpoints that hold what was trained and say what of.

    Attributes:
        base: Hub id, local folder, GGUF file or embedded model whose weights are frozen.
        precision: Of these weights.
        fingerprint: Of these weights, once they are loaded.
        optimizer: The optimizer and its schedule.
        kept: Names of the state that goes into a checkpoint.
    """

    base: str
    precision: Precision
    optimizer: OptimizerOptions

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False  # checkpoints lack the frozen weights: see check_trained
        self.model: Any = None
        self.fingerprint: dict[str, str | None] = {}
        self.kept: set[str] = set()

    def metadata(self) -> dict[str, Any]:
        """What export has to know; ``method`` at least, and ``form`` where there are several."""
        raise NotImplementedError

    def check_metadata(self, told: dict[str, Any]) -> None:
        """Refuses what a checkpoint tells of its training, if it is not as this one.

        Raises:
            ValueError: Says in what it differs.
        """

    def configure_optimizers(self) -> Any:
        options = self.optimizer
        trained = [value for value in self.parameters() if value.requires_grad]
        settings: dict[str, Any] = {
            "lr": options.lr,
            "betas": tuple(options.betas),
            "weight_decay": options.weight_decay,
        }
        optimizer: Optimizer
        if options.eight_bit:
            from bitsandbytes.optim import AdamW8bit

            optimizer = AdamW8bit(trained, **settings)
        else:
            optimizer = AdamW(trained, **settings)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = cosine_with_warmup(optimizer, steps, options.warmup, options.floor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """As Lightning does, but for FSDP, where only the sharded root knows the whole norm."""
        root: Any = self.trainer.strategy.model
        if gradient_clip_val and hasattr(root, "clip_grad_norm_"):
            root.clip_grad_norm_(gradient_clip_val)
        else:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self.kept, checkpoint)
        rewind_to_step(checkpoint, self.trainer.accumulate_grad_batches)
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint[METADATA] = {
            **self.metadata(),
            "base": self.base,
            "precision": self.precision,
            "fingerprint": dict(self.fingerprint),
            "steps": self.trainer.global_step,
            "metrics": metrics,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint that does not fit.

        Raises:
            ValueError: Of another training, base or other weights; or, where a training is
                resumed, made with other options, which the optimizer's state would override.
        """
        if METADATA not in checkpoint:
            raise ValueError("checkpoint: not one of zoomkv fit")
        told, ours = checkpoint[METADATA], self.metadata()
        for name in ("method", "form"):
            if told.get(name) != ours.get(name):
                raise ValueError(
                    f"checkpoint: of another training, {name} {told.get(name)}, not "
                    f"{ours.get(name)}"
                )
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_options(dict(self.hparams), checkpoint)
        if difference := describe_mismatch(told["fingerprint"], self.fingerprint):
            raise ValueError(f"checkpoint: trained on another base: {difference}")
        self.check_metadata(told)
        check_trained(self.kept, checkpoint)
