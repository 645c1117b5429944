"""The DataModule of summary fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from datasets import Dataset, Features, List, Value
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from zoomkv.data.collate import PackedBatches, collate
from zoomkv.data.render import Rendered, Renderer, RenderReport
from zoomkv.data.sources import TraceSource
from zoomkv.data.standing import check_sampler, standing
from zoomkv.data.traces import Segment, Trace

_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "kinds": List(Value("int8")),
        "looks_up": List(Value("int32")),
        "length": Value("int32"),
        "fates": List(Value("string")),
    }
)

Mark = Callable[[str], bool | None]
"""Whether a generated text is right; None if that can't be told."""


class SummaryData(LightningDataModule):
    """Traces with summaries as batches of ids, labels and kinds.

    The tokenizer is the model's own, taken from the LightningModule at set-up.

    Validation has two loaders: examples like those of training, and prompts to answer.

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
        num_workers: Worker processes of the training loader.
        num_proc: Processes that render the traces before training.
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
        num_proc: int = 1,
    ) -> None:
        super().__init__()
        if not train:
            raise ValueError("data.train: name at least one source of traces")
        for name, value in (("batch_size", batch_size), ("num_proc", num_proc)):
            if value < 1:
                raise ValueError(f"data.{name}={value}: choose at least 1")
        self.sources, self.val_source = train, val
        self.prompts, self.max_length, self.batch_size = prompts, max_length, batch_size
        self.packing, self.thought_tags, self.seed = packing, thought_tags, seed
        self.num_workers, self.num_proc = num_workers, num_proc
        self._train: Dataset | None = None
        self._val: Dataset | None = None
        self._prompts: list[tuple[str, Mark]] = []
        self._order: PackedBatches | None = None
        self._standing: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        self.tokenizer, self.answers_at_once = module.tokenizer, module.generation.batch_size
        renderer = Renderer(self.tokenizer, self.max_length, self.thought_tags)
        if stage == "fit" and self._train is None:
            traces = [trace for source in self.sources for trace in self._traces(source)]
            self._train = _rendered(renderer, traces, "training", self.num_proc)
        if self.val_source is not None and self._val is None:
            traces = self._traces(self.val_source)
            self._val = _rendered(renderer, traces, "validation", self.num_proc)
            self._prompts = [
                (renderer.prompt(trace.problem), partial(self.val_source.is_right, trace))
                for trace in traces[: self.prompts]
            ]

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None and self.trainer is not None
        self._order = self._batches(self._train, shuffle=True)
        self._take_up()
        return DataLoader(
            _Rows(self._train),  # type: ignore[arg-type]
            batch_sampler=self._order,
            collate_fn=self._collate(),
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> list[DataLoader[Any]]:
        if self._val is None:
            return []
        examples: DataLoader[Any] = DataLoader(
            _Rows(self._val),  # type: ignore[arg-type]
            batch_sampler=self._batches(self._val, shuffle=False),
            collate_fn=self._collate(),
        )
        return [examples, self._prompt_loader()] if self._prompts else [examples]

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands: the epoch, its batches that were learnt, and their order.

        Lightning keeps it in checkpoints.
        """
        trainer = self.trainer
        if trainer is None or self._order is None:
            return {}
        at = standing(trainer)
        return {**at, "plan": self._order.plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes a resumed training begin at the batch that it would have seen next.

        Raises:
            ValueError: The data or their order are others than when the checkpoint was made.
        """
        self._standing = state
        if self._order is not None:
            self._take_up()

    def _take_up(self) -> None:
        assert self._order is not None
        if not self._standing:
            return
        if self._standing["plan"] != self._order.plan:
            raise ValueError(
                "data: the examples, batch size, seed or number of processes are not those that "
                "the checkpoint was made with; drop the override or train anew"
            )
        self._order.epoch, self._order.skip = self._standing["epoch"], self._standing["skip"]
        self._standing = {}

    def _prompt_loader(self) -> DataLoader[Any]:
        """Batches ``{"input_ids", "attention_mask", "marks"}``; each process has its share.

        Processes must generate equally often, so those with fewer prompts answer one again, for
        which they have no mark.
        """
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        share: list[tuple[str, Mark | None]] = [*self._prompts[rank::world]]
        share += [(self._prompts[0][0], None)] * (-(-len(self._prompts) // world) - len(share))

        def together(prompts: list[tuple[str, Mark | None]]) -> dict[str, Any]:
            batch = self.tokenizer(
                [text for text, _ in prompts],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            )
            return {**batch, "marks": [mark for _, mark in prompts]}

        return DataLoader(share, batch_size=self.answers_at_once, collate_fn=together)  # type: ignore[arg-type]

    def _batches(self, examples: Dataset, shuffle: bool) -> PackedBatches:
        trainer = self.trainer
        assert trainer is not None
        check_sampler(trainer)
        return PackedBatches(
            examples["length"],
            self.max_length,
            self.batch_size,
            self.seed,
            self.packing,
            shuffle,
            trainer.global_rank,
            trainer.world_size,
        )

    def _collate(self) -> Callable[..., Any]:
        return partial(collate, pad_id=self.tokenizer.pad_token_id, packed=self.packing)

    def _traces(self, source: TraceSource) -> list[Trace]:
        def count_tokens(text: str) -> int:
            return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return list(source.traces(count_tokens))


class _Rows:
    """A map-style data set whose items are packed rows: lists of examples."""

    def __init__(self, examples: Dataset) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: list[int]) -> list[dict[str, Any]]:
        return [self.examples[index] for index in row]


def _rendered(renderer: Renderer, traces: list[Trace], what: str, num_proc: int) -> Dataset:
    """Examples of the traces that could be rendered, in order; reports what became of the rest."""
    raw = Dataset.from_dict({"trace": [json.dumps(asdict(trace)) for trace in traces]})
    several = min(num_proc, len(traces))
    examples = raw.map(
        partial(_example, renderer=renderer),
        remove_columns="trace",
        features=_FEATURES,
        num_proc=several if several > 1 else None,
        keep_in_memory=True,
        new_fingerprint=f"{what}-rendered",  # not to be found again: nothing to hash it by
        desc=f"rendering {what} traces",
    )
    report = RenderReport()
    report.counts.update(fate for fates in examples["fates"] for fate in fates)
    rank_zero_info(f"{what}: {report}")
    kept = [number for number, length in enumerate(examples["length"]) if length]
    if not kept:
        raise ValueError(f"{what}: no trace is left to learn from ({report})")
    return examples.remove_columns("fates").select(kept)


def _example(row: dict[str, str], renderer: Renderer) -> dict[str, Any]:
    """One trace as an example, empty where it was dropped, and what became of it."""
    given = json.loads(row["trace"])
    given["segments"] = tuple(Segment(**segment) for segment in given["segments"])
    renderer.report.counts.clear()
    made = renderer(Trace(**given)) or Rendered([], [], [])
    return {
        "input_ids": made.input_ids,
        "kinds": made.kinds,
        "looks_up": made.looks_up,
        "length": len(made.input_ids),
        "fates": list(renderer.report.counts),
    }
