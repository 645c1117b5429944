"""Fine-tuning that teaches a model to summarise each paragraph of its reasoning."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from zoomkv.backbone.adapter import LINEAR_LAYERS, add_adapter, load_trained
from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import QUANTISED, Precision, load_base, load_tokenizer
from zoomkv.backbone.voters import AttentionInput, attention_inputs
from zoomkv.data.render import KINDS, NOTHING, SOLUTION, SUMMARY, THOUGHT
from zoomkv.export.from_checkpoint import read_checkpoint
from zoomkv.losses.cross_entropy import token_nll
from zoomkv.losses.votes import vote_loss
from zoomkv.spans.thoughts import Delimiters, parse
from zoomkv.training.checkpointing import trained_names
from zoomkv.training.partial_module import OptimizerOptions, PartialModule

LEARNT = (THOUGHT, SUMMARY, SOLUTION)
"""Kinds of tokens that are learnt, and measured apart."""


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
class GenerationOptions:
    """How validation answers problems."""

    max_new_tokens: int = 1024
    """Longest answer."""
    batch_size: int = 8
    """Problems answered together."""


class SummarySFT(PartialModule):
    """LoRA fine-tuning on traces with summaries (ZoomR section 3.2).

    Trained are the adapters and the embedding rows of the two delimiters (output rows too, where
    they are not tied). Checkpoints hold just these.

    Logged: ``train/loss`` (nats a token), ``val/perplexity_{thought,summary,solution}``,
    ``val/well_formed`` (answers all of whose delimiters pair up) and ``val/right`` (answers whose
    result is exactly right, among those that can be marked), the last two from greedy generations.

    Args:
        base: Hub id, local folder, GGUF file or ``smollm2-135m``.
        precision: Of the frozen weights: fp32, bf16, nf4 or int8.
        lora: The adapters.
        optimizer: The optimizer and its schedule.
        generation: Validation's generations.
        vote_weight: Weight, in tokens, of the heads' choice at each sentence end of a solution
            whose source says which paragraph it looks up (``vote_loss``). 0 trains on text alone,
            as the paper does.
        start: A checkpoint of the same adapters whose weights to start from.
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
        vote_weight: float = 0.0,
        start: str | None = None,
        gradient_checkpointing: bool = False,
        attention: str = "sdpa",
        seed: int = 0,
    ) -> None:
        super().__init__()
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
                "vote_weight": vote_weight,
                "start": start,
                "gradient_checkpointing": gradient_checkpointing,
                "attention": attention,
                "seed": seed,
            }
        )
        self.base, self.precision, self.attention = base, precision, attention
        self.lora, self.optimizer, self.generation = lora, optimizer, generation
        if vote_weight and gradient_checkpointing:
            raise ValueError("vote_weight: can't be had under gradient_checkpointing; choose one")
        self.vote_weight, self.start = vote_weight, start
        self.gradient_checkpointing, self.seed = gradient_checkpointing, seed
        self.tokenizer = load_tokenizer(base)
        self.delimiter_ids = add_to_tokenizer(self.tokenizer)
        self._window_tokens = 0
        self.nll = torch.nn.ModuleDict({KINDS[kind]: MeanMetric() for kind in LEARNT})
        self.well_formed, self.right = MeanMetric(), MeanMetric()

    def configure_model(self) -> None:
        """Loads the base and puts the adapters on it; every process does so once."""
        if self.model is not None:
            return
        model, tokenizer = load_base(self.base, self.precision, self._base_device(), self.attention)
        self.fingerprint = fingerprint(model)
        if self.precision in QUANTISED:
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = add_adapter(model, tokenizer, **asdict(self.lora))
        if self.start is not None:
            load_trained(self.model, read_checkpoint(Path(self.start))[1])
        self.model.train()
        # Now, since a strategy may wrap modules later and change the names.
        self.kept = trained_names(self)

    def on_fit_start(self) -> None:
        # from_pretrained gives a model in evaluation mode, and Lightning keeps what it finds.
        self.model.train()

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        # Dropout depends on the batch's number alone, so a resumed run repeats it exactly.
        step = self.trainer.fit_loop.total_batch_idx
        torch.manual_seed((self.seed * 1_000_003 + step) * 1_009 + self.global_rank)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        decoder = self.model.get_base_model().get_decoder()
        collecting: AbstractContextManager[list[AttentionInput]] = (
            attention_inputs(decoder) if self.vote_weight else nullcontext([])
        )
        with collecting as inputs:
            nll, where = self._nll(batch)
        self._window_tokens += len(where)
        if len(where):
            self.log("train/loss", nll.detach().mean(), prog_bar=True, batch_size=len(where))
        # A sum: on_before_optimizer_step divides by the tokens of the whole window.
        loss = nll.sum()
        if inputs and bool((batch["looks_up"] != NOTHING).any()):
            votes, first = self._votes(batch, inputs)
            self.log("train/votes", first.mean(), prog_bar=True, batch_size=len(first))
            loss = loss + self.vote_weight * votes.sum()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turns summed gradients into those of the mean over all tokens of the window.

        Lightning divides each batch's loss by the window's length and DDP averages over the
        processes, which would weigh tokens of short batches more.
        """
        tokens: Any = self.all_gather(torch.tensor(self._window_tokens, device=self.device))
        self._window_tokens = 0
        window = self.trainer.accumulate_grad_batches * self.trainer.world_size
        scale = window / tokens.sum().clamp(min=1)
        for group in optimizer.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad.mul_(scale)

    def validation_step(
        self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Measures examples (the first loader), or answers prompts and marks them (the second)."""
        if dataloader_idx == 0:
            self._measure(batch)
        elif not self.trainer.sanity_checking:
            self._answer(batch)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        measured = {f"val/perplexity_{name}": metric for name, metric in self.nll.items()}
        measured |= {"val/well_formed": self.well_formed, "val/right": self.right}
        for name, metric in measured.items():
            # Computed by every process, whatever it has seen itself: this is where they meet.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The ``compute`` method")
                value: Tensor = metric.compute()  # type: ignore[operator]
            metric.reset()  # type: ignore[operator]
            if not value.isnan():
                shown = value.exp() if "perplexity" in name else value
                self.log(name, shown, prog_bar="perplexity" not in name, sync_dist=False)

    def metadata(self) -> dict[str, Any]:
        """See ``PartialModule``."""
        return {
            "method": "zoomr",
            "lora": {**asdict(self.lora), "targets": list(self.lora.targets)},
            "delimiter_ids": list(self.delimiter_ids),
        }

    def _nll(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        inner = self.model.get_base_model()
        positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
        hidden = inner.get_decoder()(
            input_ids=batch["input_ids"], use_cache=False, **positions
        ).last_hidden_state
        return token_nll(hidden, batch["labels"], inner.get_output_embeddings())

    def _votes(
        self, batch: dict[str, Tensor], inputs: list[AttentionInput]
    ) -> tuple[Tensor, Tensor]:  # [n], [n]
        """What the heads vote for at each marked token: loss, and share of right first votes."""
        ids, looks_up = batch["input_ids"], batch["looks_up"]
        begin, end = self.delimiter_ids
        # Summaries are numbered through the batch, and through each example.
        begins = ids == begin
        number = begins.flatten().cumsum(0).view_as(ids) - 1
        example = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        if "position_ids" in batch:
            example = (batch["position_ids"] == 0).flatten().cumsum(0).view_as(ids)
        interior = (batch["kinds"] == SUMMARY) & ~begins & (ids != end)
        row, column = interior.nonzero(as_tuple=True)
        of = number[row, column]
        count = torch.bincount(of, minlength=int(begins.sum())).clamp(min=1)
        at, where = (looks_up != NOTHING).nonzero(as_tuple=True)
        owner = example[begins]  # [S]
        mine = owner[None] == example[at, where][:, None]  # [n, S]
        needed = mine.int().argmax(1) + looks_up[at, where]
        queries, means = [], []
        for layer in inputs:
            keys = layer.keys(row, column).float()
            zeros = keys.new_zeros(len(count), *keys.shape[1:])
            means.append(zeros.index_add(0, of, keys) / count[:, None, None])
            queries.append(layer.queries(at, where))
        return vote_loss(torch.stack(queries), torch.stack(means).transpose(1, 2), mine, needed)

    def _measure(self, batch: dict[str, Tensor]) -> None:
        nll, where = self._nll(batch)
        kinds = batch["kinds"].flatten()[where]
        for kind in LEARNT:
            chosen = nll[kinds == kind]
            if len(chosen):
                self.nll[KINDS[kind]].update(chosen.mean(), weight=len(chosen))  # type: ignore[operator]

    def _answer(self, batch: dict[str, Any]) -> None:
        prompt = batch["input_ids"]
        output = self.model.generate(
            input_ids=prompt,
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.generation.max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            # Sharded processes must run as many forwards as the slowest one.
            synced_gpus=self.trainer.world_size > 1,
        )
        delimiters = Delimiters.special(self.tokenizer)
        for mark, row in zip(batch["marks"], output[:, prompt.shape[1] :].tolist(), strict=True):
            if mark is None:
                continue
            self.well_formed.update(float(is_well_formed(row, delimiters)))
            right = mark(self.tokenizer.decode(row, skip_special_tokens=True))
            if right is not None:
                self.right.update(float(right))

    def _base_device(self) -> str:
        # A quantised base is placed once, on its process's own device; it can't be moved later.
        device = self.trainer.strategy.root_device if self._trainer is not None else "cpu"
        return str(device) if self.precision in QUANTISED else "cpu"


def is_well_formed(ids: list[int], delimiters: Delimiters) -> bool:
    """Whether a generated text has summaries, each begun and ended exactly once."""
    closed = sum(segment.closed for segment in parse(ids, delimiters))
    begun, ended = ids.count(delimiters.begin[0]), ids.count(delimiters.end[0])
    return closed == begun == ended > 0
