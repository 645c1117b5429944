"""The DataModule of router distillation: long contexts, and what is written or asked after them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from zoomkv.data.asked import AskedText
from zoomkv.data.long_stream import LongBatches, Passages, Source, Stage, Steps
from zoomkv.data.long_text import TextSource
from zoomkv.data.sources import TraceSource
from zoomkv.data.standing import check_sampler, standing
from zoomkv.data.turns import Turns

_TRIED = 8  # documents with questions that are built before a training begins


class LongTextData(LightningDataModule):
    """Contexts and continuations of one length each, from running text and from asked documents.

    A batch is ``{"context": [B, T], "continuation": [B, Q], "supervised": [B, Q], "id": [B]}``:
    token ids (int64), which tokens of the continuation matter (bool), and names. Running text goes
    on in the continuation, all of which matters. An asked document (``AskedText``) is followed by
    questions and answers, which were not known when the context was read; what else fills the
    continuation up does not matter.

    Documents are read lazily. Longer contexts go on where shorter ones stopped, a resumed training
    where the other was stopped, and several processes share the batches of one.

    The tokenizer is the model's own, taken from the LightningModule at set-up.

    Args:
        train: Sources of training documents. One that ends is begun again.
        stages: Lengths of the contexts, one stage after the other (the paper's curriculum).
        steps: Batches of one process in an epoch of training, which the stages share. A further
            epoch goes on with the last stage, and where the documents are.
        weights: How many rows are drawn from each source, in proportion; by default equally many.
        val: Source of validation documents. The same batches are had every time.
        val_context: Tokens of a validation context; by default those of the last stage.
        val_batches: Validation batches of one process.
        continuation: Tokens that follow a context.
        batch_size: Rows in a batch of one process.
        chat: Put asked documents into the model's chat template, if it has one.
        cross_documents: Let windows of running text go on from one document to the next, with the
            end-of-text token between them.
        seed: Decides which source each row is drawn from.
        num_workers: Processes that make batches ahead. Each reads past the others' batches, so one
            is mostly enough.

    Raises:
        ValueError: No source, or an option out of range.
    """

    def __init__(
        self,
        train: list[TextSource | AskedText],
        stages: list[Stage],
        steps: int,
        weights: list[float] | None = None,
        val: TextSource | AskedText | None = None,
        val_context: int | None = None,
        val_batches: int = 8,
        continuation: int = 128,
        batch_size: int = 1,
        chat: bool = True,
        cross_documents: bool = False,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if not train:
            raise ValueError("data.train: name at least one source of documents")
        weights = [1.0] * len(train) if weights is None else weights
        if len(weights) != len(train) or min(weights) <= 0:
            raise ValueError(
                f"data.weights={weights}: give one above 0 for each of the {len(train)} sources"
            )
        if not stages or min(min(stage.context, stage.share) for stage in stages) <= 0:
            raise ValueError("data.stages: name at least one, with a context and a share above 0")
        val_context = stages[-1].context if val_context is None else val_context
        for name, value in (
            ("steps", steps),
            ("val_context", val_context),
            ("val_batches", val_batches),
            ("continuation", continuation),
            ("batch_size", batch_size),
        ):
            if value < 1:
                raise ValueError(f"data.{name}={value}: choose at least 1")
        self.sources, self.weights, self.val_source = train, weights, val
        self.stages, self.steps, self.continuation = stages, steps, continuation
        self.val_context, self.val_batches, self.batch_size = val_context, val_batches, batch_size
        self.chat, self.cross_documents, self.seed = chat, cross_documents, seed
        self.num_workers = num_workers
        self._train: LongBatches | None = None
        self._val: list[dict[str, Any]] | None = None
        self._order = Steps(steps)
        self._standing: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        """Makes the validation batches, and tries each training source.

        Raises:
            ValueError: Documents that are no text or too short, for the longest stage too; too few
                for validation; or a continuation that has no room for an answer.
        """
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        turns = Turns(module.tokenizer, self.chat)
        if stage == "fit" and self._train is None:
            self._try(turns)
            self._train = self._batches(
                self.sources, self.weights, turns, self.stages, self.steps, name="data.train"
            )
        if self.val_source is not None and self._val is None:
            self._val = self._fixed(turns)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None
        self._take_up()
        return _Loader(
            self._train, sampler=self._order, batch_size=None, num_workers=self.num_workers
        )

    def val_dataloader(self) -> list[DataLoader[Any]]:
        if self._val is None:
            return []
        return [DataLoader(self._val, batch_size=None)]  # type: ignore[arg-type]

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self.left_out:
            rank_zero_info(
                f"training: {self.left_out} times a document was left out, being shorter than a "
                "window"
            )

    @property
    def left_out(self) -> int:
        """How often training came by a document that was shorter than its window."""
        if self._train is None:
            return 0
        newest = self._train.positions[max(self._train.positions)]
        return sum(skipped for *_, skipped in newest.values())

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands: the epoch, its batches that were learnt, and the readers.

        Lightning keeps it in checkpoints.
        """
        trainer = self.trainer
        if trainer is None or self._train is None:
            return {}
        at = standing(trainer)
        learnt = at["epoch"] * self.steps + at["skip"]
        step = max(known for known in self._train.positions if known <= learnt)
        return {
            **at,
            "plan": self.plan,
            "readers": {"step": step, "positions": self._train.positions[step]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes a resumed training begin at the batch that it would have seen next.

        Raises:
            ValueError: The sources or their order are others than when the checkpoint was made.
        """
        self._standing = state
        if self._train is not None:
            self._take_up()

    @property
    def plan(self) -> str:
        """A digest of all that decides which documents meet in which step."""
        assert self.trainer is not None
        decides = (
            [_described(source) for source in self.sources],
            self.weights,
            [asdict(stage) for stage in self.stages],
            (self.steps, self.continuation, self.batch_size * self.trainer.world_size),
            (self.chat, self.cross_documents, self.seed),
        )
        return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]

    def _take_up(self) -> None:
        assert self._train is not None
        if not self._standing:
            return
        if self._standing["plan"] != self.plan:
            raise ValueError(
                "data: the sources, stages, steps, lengths, batch size, seed or number of "
                "processes are not those that the checkpoint was made with; drop the override or "
                "train anew"
            )
        self._order.epoch, self._order.skip = self._standing["epoch"], self._standing["skip"]
        self._train.remember(**self._standing["readers"])
        self._standing = {}

    def _batches(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        turns: Turns,
        stages: Sequence[Stage],
        steps: int,
        **options: Any,
    ) -> LongBatches:
        trainer = self.trainer
        assert trainer is not None
        check_sampler(trainer)
        return LongBatches(
            sources,
            weights,
            turns,
            stages,
            steps,
            self.continuation,
            self.batch_size,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            self.cross_documents,
            **options,
        )

    def _try(self, turns: Turns) -> None:
        """Finds out before a training, not within it, what the sources can't give."""
        shortest, *_, longest = sorted(stage.context for stage in [*self.stages, *self.stages])
        for number, source in enumerate(self.sources):
            name = f"data.train[{number}]"
            if isinstance(source, TextSource):
                reader = Passages(source, turns, self.cross_documents, name)
                reader.window(longest + self.continuation)
                continue
            for document in range(_TRIED):
                made = turns.framed(source, document, shortest, self.continuation)
                if not made.answered:
                    raise ValueError(
                        f"data.continuation={self.continuation}: no room for a question and its "
                        f"answer ({name}, {made.id}); choose more"
                    )

    def _fixed(self, turns: Turns) -> list[dict[str, Any]]:
        assert self.val_source is not None
        batches = self._batches(
            [self.val_source],
            [1.0],
            turns,
            [Stage(self.val_context)],
            self.val_batches,
            name="data.val",
            mirrored=True,
        )
        made = []
        for step in range(self.val_batches):
            batch = batches[step]
            _, positions = batch.pop("next")
            if any(passes for passes, *_ in positions.values()):
                raise ValueError(
                    f"data.val: its documents give no more than {step} batches, "
                    f"val_batches={self.val_batches}; choose fewer, or a shorter val_context"
                )
            made.append(batch)
        return made


class _Loader(DataLoader[dict[str, Any]]):
    """Notes, in the main process, where the readers stand after each batch."""

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        assert isinstance(self.dataset, LongBatches)
        for batch in super().__iter__():
            self.dataset.remember(*batch.pop("next"))
            yield batch


def _described(value: Any) -> Any:
    """What decides the documents of a source, in plain values."""
    if isinstance(value, list | tuple):
        return [_described(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return repr(value)
    if isinstance(value, TextSource | AskedText | TraceSource):
        parts = {name: part for name, part in vars(value).items() if not name.startswith("_")}
        return [type(value).__qualname__, {name: _described(parts[name]) for name in sorted(parts)}]
    return value if isinstance(value, str | int | float | None) else type(value).__qualname__
