"""Fine-tuning that teaches a model to summarise each paragraph of its reasoning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from zoomkv.backbone.adapter import LINEAR_LAYERS, add_adapter
from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import Precision, load_base, load_tokenizer
from zoomkv.data.module import Prompt, SummaryData
from zoomkv.data.render import KINDS, SOLUTION, SUMMARY, THOUGHT
from zoomkv.export.from_checkpoint import METADATA
from zoomkv.losses.cross_entropy import token_nll
from zoomkv.spans.thoughts import Delimiters, parse
from zoomkv.training.checkpointing import check_trained, keep_trained, rewind_to_step
from zoomkv.training.schedules import cosine_with_warmup


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters on every linear layer of the decoder."""

    r: int = 16
    """Rank."""
    alpha: int = 32
    """Scale; updates are multiplied by alpha / r."""
    dropout: float = 0.05
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] = LINEAR_LAYERS
    """Names of the linear layers that get an adapter."""


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


@dataclass(frozen=True)
class GenerationOptions:
    """How validation answers problems."""

    max_new_tokens: int = 1024
    """Longest answer."""
    batch_size: int = 8
    """Problems answered together."""


class SummarySFT(LightningModule):
    """LoRA fine-tuning on traces with summaries (ZoomR section 3.2).

    Trained are the adapters and the embedding rows of the two delimiters (output rows too, where
    they are not tied). Checkpoints hold just these.

    Logged: ``train/loss`` (nats a token), ``val/perplexity_{thought,summary,solution}``,
    ``val/well_formed`` (answers all of whose delimiters pair up) and ``val/right`` (answers whose
    result is exactly right), the last two from greedy generations.

    Args:
        base: Hub id, local folder, GGUF file or ``smollm2-135m``.
        precision: Of the frozen weights: fp32, bf16, nf4 or int8.
        lora: The adapters.
        optimizer: The optimizer and its schedule.
        generation: Validation's generations.
        gradient_checkpointing: Recompute activations in the backward pass.
        attention: The transformers attention implementation.
        seed: Decides dropout, together with the number of the batch.
    """

    def __init__(
        self,
        base: str = "smollm2-135m",
        precision: Precision = "fp32",
        lora: LoraOptions = LoraOptions(),  # noqa: B008 (frozen)
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008
        generation: GenerationOptions = GenerationOptions(),  # noqa: B008
        gradient_checkpointing: bool = False,
        attention: str = "sdpa",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.strict_loading = False  # checkpoints lack the frozen weights: see check_trained
        # Plain types, so that a checkpoint can be read with weights_only.
        lora = LoraOptions(**lora) if isinstance(lora, dict) else lora
        optimizer = OptimizerOptions(**optimizer) if isinstance(optimizer, dict) else optimizer
        generation = GenerationOptions(**generation) if isinstance(generation, dict) else generation
        self.save_hyperparameters(
            {
                "base": base,
                "precision": precision,
                "lora": asdict(lora),
                "optimizer": asdict(optimizer),
                "generation": asdict(generation),
                "gradient_checkpointing": gradient_checkpointing,
                "attention": attention,
                "seed": seed,
            }
        )
        self.base, self.precision, self.attention = base, precision, attention
        self.lora, self.optimizer, self.generation = lora, optimizer, generation
        self.gradient_checkpointing, self.seed = gradient_checkpointing, seed
        self.tokenizer = load_tokenizer(base)
        self.delimiter_ids = add_to_tokenizer(self.tokenizer)
        self.model: Any = None
        self.fingerprint: dict[str, str | None] = {}
        self._window_tokens: Tensor | float = 0.0
        kinds = (THOUGHT, SUMMARY, SOLUTION)
        self.nll = torch.nn.ModuleDict({KINDS[kind]: MeanMetric() for kind in kinds})
        self.well_formed, self.right = MeanMetric(), MeanMetric()

    def configure_model(self) -> None:
        """Loads the base and puts the adapters on it; every process does so once."""
        if self.model is not None:
            return
        model, _ = load_base(self.base, self.precision, self._base_device(), self.attention)
        self.fingerprint = fingerprint(model)
        if self.precision in ("nf4", "int8"):
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        self.model = add_adapter(model, self.tokenizer, self.delimiter_ids, **asdict(self.lora))
        self.model.train()

    def on_fit_start(self) -> None:
        # from_pretrained gives a model in evaluation mode, and Lightning keeps what it finds.
        self.model.train()

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        # Dropout depends on the batch's number alone, so a resumed run repeats it exactly.
        step = self.trainer.fit_loop.total_batch_idx
        torch.manual_seed((self.seed * 1_000_003 + step) * 1_009 + self.global_rank)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nll, where = self._nll(batch)
        self._window_tokens = self._window_tokens + len(where)
        self.log("train/loss", nll.detach().mean(), prog_bar=True, batch_size=len(where))
        # A sum: on_before_optimizer_step divides by the tokens of the whole window.
        return nll.sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turns summed gradients into those of the mean over all tokens of the window.

        Lightning divides each batch's loss by the window's length and DDP averages over the
        processes, which would weigh tokens of short batches more.
        """
        tokens = self.all_gather(torch.tensor(float(self._window_tokens), device=self.device)).sum()
        self._window_tokens = 0.0
        world = self.trainer.world_size
        scale = self.trainer.accumulate_grad_batches * world / tokens.clamp(min=1)
        for group in optimizer.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad.mul_(scale)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        nll, where = self._nll(batch)
        kinds = batch["kinds"].flatten()[where]
        for kind in (THOUGHT, SUMMARY, SOLUTION):
            chosen = nll[kinds == kind]
            if len(chosen):
                self.nll[KINDS[kind]].update(chosen.mean(), weight=len(chosen))

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.nll.items():
            if metric.update_called:
                self.log(f"val/perplexity_{name}", metric.compute().exp(), sync_dist=False)
            metric.reset()
        if not self.trainer.sanity_checking:
            self._validate_by_generating()

    def configure_optimizers(self) -> Any:
        options = self.optimizer
        trained = [value for value in self.parameters() if value.requires_grad]
        settings: dict[str, Any] = {
            "lr": options.lr,
            "betas": tuple(options.betas),
            "weight_decay": options.weight_decay,
        }
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self, checkpoint)
        rewind_to_step(checkpoint, self.trainer.accumulate_grad_batches)
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint[METADATA] = {
            "method": "zoomr",
            "base": self.base,
            "precision": self.precision,
            "fingerprint": dict(self.fingerprint),
            "lora": {**asdict(self.lora), "targets": list(self.lora.targets)},
            "delimiter_ids": list(self.delimiter_ids),
            "steps": self.trainer.global_step,
            "metrics": metrics,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_trained(self, checkpoint)

    def _nll(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        inner = self.model.get_base_model()
        positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
        hidden = inner.get_decoder()(
            input_ids=batch["input_ids"], use_cache=False, **positions
        ).last_hidden_state
        return token_nll(hidden, batch["labels"], inner.get_output_embeddings())

    def _validate_by_generating(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        prompts = data.validation_prompts() if isinstance(data, SummaryData) else []
        mine = prompts[self.trainer.global_rank :: self.trainer.world_size]
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        size = self.generation.batch_size
        for start in range(0, len(mine), size):
            self._mark(mine[start : start + size])
        for module, training in modes.items():
            module.training = training
        for name, metric in (("well_formed", self.well_formed), ("right", self.right)):
            if prompts:
                self.log(f"val/{name}", metric.compute(), prog_bar=True, sync_dist=False)
            metric.reset()

    def _mark(self, prompts: list[Prompt]) -> None:
        texts = [prompt.text for prompt in prompts]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(self.device)
        output = self.model.generate(
            **inputs,
            max_new_tokens=self.generation.max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        delimiters = Delimiters.special(self.tokenizer)
        for prompt, row in zip(prompts, output[:, inputs["input_ids"].shape[1] :], strict=True):
            ids = row.tolist()
            self.well_formed.update(float(is_well_formed(ids, delimiters)))
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            self.right.update(float(prompt.source.is_right(prompt.trace, text)))

    def _base_device(self) -> str:
        # A quantised base is placed once, on its process's own device; it can't be moved later.
        device = self.trainer.strategy.root_device if self._trainer is not None else "cpu"
        return str(device) if self.precision in ("nf4", "int8") else "cpu"


def is_well_formed(ids: list[int], delimiters: Delimiters) -> bool:
    """Whether a generated text has summaries, each begun and ended exactly once."""
    closed = sum(segment.closed for segment in parse(ids, delimiters))
    begun, ended = ids.count(delimiters.begin[0]), ids.count(delimiters.end[0])
    return closed == begun == ended > 0


