"""The DataModule of summary fine-tuning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from zoomkv.data.collate import PackedBatches, collate
from zoomkv.data.render import Renderer
from zoomkv.data.sources import TraceSource
from zoomkv.data.traces import Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A problem to generate an answer to, and the source that can mark it."""

    text: str
    trace: Trace
    source: TraceSource


class SummaryData(LightningDataModule):
    """Traces with summaries as batches of ids, labels and kinds.

    The tokenizer is the model's own, taken from the LightningModule at set-up.

    Args:
        train: Sources of training traces, mixed and shuffled.
        val: Source of validation traces.
        prompts: So many validation problems are answered by generation.
        max_length: Tokens of the longest example (and of a packed row).
        batch_size: Rows in a batch of one process.
        packing: Let short examples share a row. Off, batches are made of examples of like length
            and need no mask at all, which is quicker on a CPU.
        thought_tags: Texts around the thought, for models that use them.
        seed: Decides the order.
        num_workers: Worker processes of the loaders.
        num_proc: Processes that render; ``None`` renders in this one.
    """

    def __init__(
        self,
        train: list[TraceSource],
        val: TraceSource | None = None,
        prompts: int = 16,
        max_length: int = 2048,
        batch_size: int = 2,
        packing: bool = True,
        thought_tags: tuple[str, str] = ("", ""),
        seed: int = 0,
        num_workers: int = 0,
        num_proc: int | None = None,
    ) -> None:
        super().__init__()
        if not train:
            raise ValueError("data.train: name at least one source of traces")
        self.sources, self.val_source = train, val
        self.prompts, self.max_length, self.batch_size = prompts, max_length, batch_size
        self.packing, self.thought_tags, self.seed = packing, tuple(thought_tags), seed
        self.num_workers, self.num_proc = num_workers, num_proc
        self._train: Dataset | None = None
        self._val: Dataset | None = None

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.tokenizer = self.trainer.lightning_module.tokenizer
        if stage == "fit" and self._train is None:
            traces = [trace for source in self.sources for trace in self._traces(source)]
            self._train = self._rendered(traces, "training")
        if self.val_source is not None and self._val is None:
            self._val_traces = self._traces(self.val_source)
            self._val = self._rendered(self._val_traces, "validation")

    def validation_prompts(self) -> list[Prompt]:
        """The problems that validation answers by generating."""
        if self.val_source is None:
            return []
        renderer = Renderer(self.tokenizer, self.max_length, self.thought_tags)  # type: ignore[arg-type]
        return [
            Prompt(renderer.prompt(trace.problem), trace, self.val_source)
            for trace in self._val_traces[: self.prompts]
        ]

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None
        return self._loader(self._train)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._loader(self._val) if self._val is not None else []

    def _loader(self, examples: Dataset) -> DataLoader[Any]:
        trainer = self.trainer
        assert trainer is not None
        batches = PackedBatches(
            examples["length"],
            self.max_length,
            self.batch_size,
            self.seed,
            self.packing,
            trainer.global_rank,
            trainer.world_size,
        )
        together = partial(collate, pad_id=self.tokenizer.pad_token_id, packed=self.packing)
        return ResumableLoader(
            _Rows(examples),  # type: ignore[arg-type]
            trainer=trainer,
            batch_sampler=batches,
            collate_fn=together,
            num_workers=self.num_workers,
        )

    def _traces(self, source: TraceSource) -> list[Trace]:
        def count_tokens(text: str) -> int:
            return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return list(source.traces(count_tokens))

    def _rendered(self, traces: list[Trace], what: str) -> Dataset:
        renderer = Renderer(self.tokenizer, self.max_length, self.thought_tags)  # type: ignore[arg-type]
        examples = renderer.all(traces)
        log.info("%s: %s", what, renderer.report)
        if not examples:
            raise ValueError(f"{what}: no trace is left to learn from ({renderer.report})")
        return Dataset.from_dict(
            {
                "input_ids": [example.input_ids for example in examples],
                "kinds": [example.kinds for example in examples],
                "length": [len(example.input_ids) for example in examples],
            }
        )


class ResumableLoader(DataLoader):
    """A loader that a resumed training takes up at the batch that it would have seen next.

    Lightning stores and restores the state of such loaders. What counts is what was learnt, not
    what workers have fetched, so the state is read off the trainer's progress.
    """

    def __init__(self, *args: Any, trainer: Trainer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer = trainer

    def state_dict(self) -> dict[str, int]:
        """``epoch``, and how many of its batches went into an optimizer step already."""
        loop = self._trainer.fit_loop
        learnt = loop.epoch_loop.batch_progress.current.processed
        epoch = loop.epoch_progress.current.started - 1
        if learnt >= self._trainer.num_training_batches:
            return {"epoch": epoch + 1, "skip": 0}
        return {"epoch": epoch, "skip": learnt - learnt % self._trainer.accumulate_grad_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Called before the first batch of a resumed training is fetched."""
        batches = self.batch_sampler
        assert isinstance(batches, PackedBatches)
        batches.epoch, batches.skip = state["epoch"], state["skip"]


class _Rows:
    """A map-style data set whose items are packed rows: lists of examples."""

    def __init__(self, examples: Dataset) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: list[int]) -> list[dict[str, Any]]:
        return [self.examples[index] for index in row]
