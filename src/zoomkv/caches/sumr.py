"""``sumr``: past paragraphs are read as their summaries only (the baseline of the ZoomR paper)."""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import check_at_least
from zoomkv.caches.retrieving import RetrievingCache
from zoomkv.caches.vocabulary import of_vocabulary
from zoomkv.spans.boundaries import boundary_mask
from zoomkv.spans.thoughts import Delimiters
from zoomkv.spans.tracker import ThoughtTracker


class SumRCache(RetrievingCache):
    """Reads the prompt, the last tokens, the paragraph being written, and all summaries.

    What is read is chosen anew behind each sentence end or summary (``boundary``), and at the
    latest every ``max_interval`` tokens; tokens generated in between are always readable.

    Args:
        model: The causal LM that will use it.
        tokenizer: Of the model.
        delimiters: What begins and ends a summary; by default the tokenizer's special tokens.
        window: Newest tokens that are always readable, w.
        max_interval: Most tokens between two choices.
        open_cap: Newest tokens of the paragraph being written that stay readable; None: all.
        boundary: ``suffix`` takes tokens that end a sentence, ``exact`` only lone punctuation.
        residency: ``resident`` or ``streamed``, see ``RetrievingCache``.
        host_precision: ``auto``, ``int8`` or ``nf4``.

    Raises:
        ValueError: An option out of range, no tokenizer, or one without summary tokens.
    """

    name = "sumr"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        delimiters: Delimiters | None = None,
        *,
        window: int = 512,
        max_interval: int = 128,
        open_cap: int | None = None,
        boundary: str = "suffix",
        residency: str = "resident",
        host_precision: str = "auto",
    ) -> None:
        self._window_size = check_at_least("window", window, 1)
        check_at_least("max_interval", max_interval, 1)
        self._open_cap = None if open_cap is None else check_at_least("open_cap", open_cap, 1)
        shape = ModelShape.of(model)
        if delimiters is None:
            delimiters = of_vocabulary(tokenizer, "delimiters", Delimiters.special)
        mask = of_vocabulary(
            tokenizer,
            (shape.vocabulary, str(boundary)),
            lambda t: boundary_mask(t, shape.vocabulary, boundary),  # type: ignore[arg-type]
        )
        self.tracker = ThoughtTracker(delimiters, mask, max_interval)
        self._trace: list[list[dict[str, Any]]] = []
        super().__init__(shape, residency, host_precision)

    # -- what zoomr overrides -------------------------------------------------------------------

    def summarised(self, rows: Tensor) -> None:  # bool [B]
        """The last summary of the marked rows has been closed; its rows are archived."""

    def choose(self, rows: Tensor, step: Step) -> tuple[Tensor, Tensor]:  # 2 x bool [B, N]
        """Segments that the marked rows read in full, and those that they read as summaries."""
        count = self.tracker.table.count
        everything = torch.arange(int(count.max())) < count[:, None]
        return torch.zeros_like(everything), everything

    def entry(self, row: int, zoomed: Tensor, summarised: Tensor) -> dict[str, Any]:
        """What the trace says about a choice."""
        return {
            "zoomed": zoomed[row].nonzero().squeeze(1).tolist(),
            "summarised": summarised[row].nonzero().squeeze(1).tolist(),
        }

    # -- turns and steps ------------------------------------------------------------------------

    def prompt_read(self, added: Tensor) -> None:
        """See ``PolicyCache``."""
        if bool((self._lengths == added).all()):
            self._prompt = self._lengths
            self._trace = [[] for _ in added]
            self.tracker.start(self._lengths)
        else:
            self.tracker.extend(added)
        self.archive_rows()

    def decoded(self, step: Step, hidden: Tensor) -> None:
        """See ``PolicyCache``."""
        active = step.added > 0
        events = self.tracker.advance(step.ids[:, 0], active)
        if not bool(events.boundary.any()):
            return
        self.archive_rows()
        if bool(events.closed.any()):
            self.summarised(events.closed)
        self.update_reading(events.boundary, step)

    def update_reading(self, rows: Tensor, step: Step) -> None:  # bool [B]
        """Chooses anew what some rows read from the next step on."""
        zoomed, summarised = self.choose(rows, step)
        self.read_only(self.readable_with(zoomed, summarised), rows)
        for row in rows.nonzero().squeeze(1).tolist():
            self._trace[row].append(
                {
                    "row": row,
                    "column": self._seen,
                    "position": int(self._lengths[row]) - 1,
                    "rows_read": int(self.slots.count[row]),
                    **self.entry(row, zoomed, summarised),
                }
            )

    def readable_with(self, zoomed: Tensor, summarised: Tensor) -> Tensor:  # bool [B, T]
        """Positions that are readable with some choice of segments."""
        return self.tracker.table.readable(
            zoomed, summarised, self._lengths, self._prompt, self._window_size, self._open_cap
        )

    def trace(self) -> list[dict[str, Any]]:
        """What was chosen at each selection step, oldest first.

        Returns:
            For each choice and row: ``row``, ``column`` (columns fed by then), ``position`` (of
            the row's newest token), ``rows_read``, ``zoomed`` and ``summarised`` (numbers of
            segments); ``zoomr`` adds ``votes`` and ``agreeability`` (None with at most
            ``consensus`` summaries). After a reorder, a row's history is that of its beam.
        """
        entries = [{**entry, "row": row} for row, own in enumerate(self._trace) for entry in own]
        return sorted(entries, key=lambda entry: (entry["column"], entry["row"]))

    def mean_interval(self) -> float:
        """Mean tokens between selection steps; NaN before the first."""
        return self.tracker.mean_interval()

    # -- state ----------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        if len(self._prompt):
            self._prompt = self._prompt[rows]
            self.tracker.index_select(rows)
            self._trace = [list(self._trace[row]) for row in rows.tolist()]

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield self._prompt
        yield from tensors_in(self.tracker)

    def _clear(self) -> None:
        super()._clear()
        self._prompt = torch.zeros(0, dtype=torch.int64)
        self._trace = []
        self.tracker.start(self._prompt)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What kind each token of the vocabulary is says nothing about a sequence: it is shared.
        kinds = self.tracker._kind
        memo[id(kinds)] = kinds
        return super().__deepcopy__(memo)


def tensors_in(state: object) -> Iterator[Tensor]:
    """Tensors among an object's attributes, and among the attributes of those that have some."""
    for value in vars(state).values():
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "__dict__"):
            yield from tensors_in(value)
