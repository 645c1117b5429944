"""Writes down, while an answer is generated, how its cache holds each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import PolicyCache, bookkeeping
from zoomkv.caches.sekv import SeKVCache
from zoomkv.caches.sumr import SumRCache
from zoomkv.evaluation.lens.holdings import PLAIN, drops_for_good, heads_of, marks_of
from zoomkv.evaluation.lens.pieces import pieces_of
from zoomkv.evaluation.lens.series import Log, Series
from zoomkv.evaluation.lens.trace_file import LEVELS, Trace
from zoomkv.generation import Answer, Generator

_MOST = 1_400_000  # letters that states may take, if telling layers together can help it


class Recorder:
    """Watches a cache answer one prompt.

    Each decode step is looked at when its forward is over and nothing of it has been committed:
    then the cache still tells what this step's query could read.

    Args:
        cache: An empty one. Its ``commit`` is watched from now on; it must not be copied.
    """

    def __init__(self, cache: PolicyCache) -> None:
        self.cache = cache
        self.ids: list[int] = []
        """Tokens fed so far."""
        self.prompt = 0
        self._log = self._new_log()
        self._alike = True  # so far, all layers
        self._device_bytes: list[int] = []
        self._host_bytes: list[int] = []
        self._fetches: list[list[int]] = []
        self._row_bytes = 0
        self._steps = 0
        self._commit = cache.commit
        cache.commit = self._watch  # type: ignore[method-assign]

    def trace(
        self, tokens: Sequence[str], policy: str, options: dict[str, Any], model: str
    ) -> Trace:
        """What has been seen, for the text that has been read and written.

        Args:
            tokens: The text, one piece for each token that was fed and one for the last, which
                was only written.
            policy: As the trace is to call it, like what follows.
            options: Of the policy.
            model: The model's name.

        Raises:
            ValueError: Nothing was generated, or the pieces are not those of the tokens.
        """
        if not self._steps:
            raise ValueError("nothing was generated, so there is nothing to trace")
        if len(tokens) != len(self.ids) + 1:
            raise ValueError(
                f"{len(tokens)} pieces, but {len(self.ids)} tokens were fed and one was not"
            )
        groups, levels, states = self._told()
        return Trace(
            policy=policy,
            options={name: _plain(value) for name, value in options.items()},
            model=model,
            prompt=self.prompt,
            tokens=list(tokens),
            layers=self.cache.shape.layers,
            kv_heads=self.cache.shape.kv_heads,
            groups=groups,
            levels=levels,
            unread="gone" if drops_for_good(self.cache) else "host",
            row_bytes=self._row_bytes,
            device_bytes=self._device_bytes,
            host_bytes=self._host_bytes,
            spans=self._spans(),
            choices=self._choices(),
            fetches=self._fetches,
            states=states,
        )

    # -- within ---------------------------------------------------------------------------------

    @bookkeeping
    def _watch(self, step: Step, hidden: Tensor) -> None:
        cache = self.cache
        if len(cache.lengths) != 1:
            raise ValueError("a trace follows one sequence: give one prompt, without beams")
        if step.in_prompt and self._steps > 1:
            raise ValueError("a trace follows one turn: give it a cache of its own")
        if step.in_prompt:
            self._look_at_prompt(step, hidden)
        else:
            self._look(step)
        real = step.ids[0] if step.real is None else step.ids[0][step.real[0]]
        self.ids += real.tolist()
        asked = self._asked()
        self._commit(step, hidden)
        if isinstance(cache, SeKVCache):
            now = [after - before for before, after in zip(asked, self._asked(), strict=True)]
            self._fetches[-1] = now if not step.in_prompt else [0, 0]

    def _look_at_prompt(self, step: Step, hidden: Tensor) -> None:
        """The prompt is one step, however many forwards read it: the last of them counts."""
        shape = self.cache.shape
        self._row_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * hidden.element_size()
        self.prompt = int(self.cache.lengths[0] + step.added[0])
        for series in (self._device_bytes, self._host_bytes, self._fetches):
            series.clear()
        self._log = self._new_log()
        self._measure()
        self._log.add(np.repeat(self._log.initial[:, None], self.prompt, axis=1))
        self._steps = 1

    def _look(self, step: Step) -> None:
        cache = self.cache
        heads = [heads_of(cache, layer) for layer in range(len(cache))]
        by_layer = [torch.stack(counts).numpy() for counts in zip(*heads, strict=True)]
        marks = marks_of(cache)
        first = np.full_like(by_layer[0][:1], PLAIN) if marks is None else marks.numpy()[None]
        table = np.concatenate([first, *by_layer]).astype(np.uint8)
        self._log.add(np.concatenate([table, self._log.initial[:, None]], axis=1))  # and itself
        self._alike = self._alike and all(bool((n == n[:1]).all()) for n in by_layer)
        self._steps += 1
        self._measure()

    def _new_log(self) -> Log:
        """Marks, and of each layer the heads that read a row itself, and those in a mean alone."""
        shape = self.cache.shape
        every, nobody = [shape.kv_heads] * shape.layers, [0] * shape.layers
        return Log([PLAIN, *every, *nobody])

    def _told(self) -> tuple[list[list[int]], list[int], dict[str, str]]:
        """Groups of layers, as small as they may be, in how many parts each tells its shares, and
        the shares."""
        layers, size = self.cache.shape.layers, 1
        if self._alike:  # then one layer tells it all
            levels, states = self._grouped([[0, 1]])
            return [[0, layers]], levels, states
        while True:
            groups = [[at, min(at + size, layers)] for at in range(0, layers, size)]
            levels, states = self._grouped(groups)
            if size >= layers or sum(map(len, states.values())) <= _MOST:
                return groups, levels, states
            size = -(-3 * size // 2)

    def _grouped(self, groups: list[list[int]]) -> tuple[list[int], dict[str, str]]:
        log, shape = self._log, self.cache.shape
        columns = log.columns + 1  # the last token is only written
        pairs = [(end - first) * shape.kv_heads for first, end in groups]
        levels = [min(count, LEVELS) for count in pairs]

        def shares(group: int, row: int) -> np.ndarray:  # [columns, steps]
            first, end = groups[group]
            total = log.row(row + first, columns).astype(np.int64)
            for layer in range(first + 1, end):
                total += log.row(row + layer, columns)
            return in_parts(total, pairs[group], levels[group])

        def rows() -> Iterator[tuple[int, np.ndarray]]:
            yield PLAIN, log.row(0, columns)
            for group, level in enumerate(levels):
                yield level, shares(group, 1)
            for group, level in enumerate(levels):
                coarse = shares(group, 1 + shape.layers)
                # Two that are rounded up may exceed the whole: what is read exactly is told.
                yield 0, np.minimum(coarse, level - shares(group, 1)) if coarse.any() else coarse

        return levels, Series.of_rows(rows()).encoded()

    def _measure(self) -> None:
        footprint = self.cache.footprint()
        self._device_bytes.append(footprint.device_bytes)
        self._host_bytes.append(footprint.host_bytes)
        if isinstance(self.cache, SeKVCache):
            self._fetches.append([0, 0])

    def _asked(self) -> list[int]:
        """Tokens that were asked for and fetched so far, over all layers and heads."""
        if not isinstance(self.cache, SeKVCache):
            return []
        told = self.cache.trace()
        return [sum(sum(entry[name]) for entry in told) for name in ("asked", "fetched")]

    def _spans(self) -> list[dict[str, list[int]]]:
        if not isinstance(self.cache, SumRCache):
            return []
        table = self.cache.tracker.table
        bounds = torch.stack([table.regular_start, table.regular_end, table.summary_end], dim=-1)
        closed = bounds[0, : int(table.count[0])].tolist()
        return [{"paragraph": [a, b], "summary": [b, c]} for a, b, c in closed]

    def _choices(self) -> list[dict[str, Any]]:
        """Those that some step of this answer has read by."""
        if not isinstance(self.cache, SumRCache):
            return []
        told = []
        for entry in self.cache.trace():
            # The choice is made behind its newest token, for the query of the one that follows.
            step = entry["position"] + 2 - self.prompt
            if step < self._steps:
                names = ("zoomed", "summarised", "votes", "agreeability")
                told.append({"step": step, **{n: entry[n] for n in names if n in entry}})
        return told


class TracingGenerator(Generator):
    """A ``Generator`` that records how the cache of its last answer held each token."""

    recorder: Recorder | None = None
    answer: Answer | None = None

    def new_cache(self) -> PolicyCache:
        """See ``Generator``."""
        cache = super().new_cache()
        self.recorder, self.answer = Recorder(cache), None
        return cache

    def generate(self, *arguments: Any, **settings: Any) -> list[Answer]:
        """See ``Generator``: one prompt, one answer, one turn."""
        answers = super().generate(*arguments, **settings)
        (self.answer,) = answers
        return answers

    def trace(self, model: str) -> Trace:
        """The last answer's trace.

        Args:
            model: What to call the model.

        Raises:
            ValueError: There is no answer yet.
        """
        if self.recorder is None or self.answer is None:
            raise ValueError("nothing was generated, so there is nothing to trace")
        recorder = self.recorder
        ids = recorder.ids[: recorder.prompt] + self.answer.ids
        tokens = pieces_of(self.tokenizer, ids)
        return recorder.trace(tokens, self.policy, self.options, model)


def in_parts(counts: np.ndarray, pairs: int, levels: int) -> np.ndarray:
    """Counts of some pairs in fewer parts, uint8: none and all stay exactly that."""
    parts = np.rint(counts * levels / pairs).astype(np.int64)
    some = (counts > 0) & (counts < pairs)
    return np.where(some, parts.clip(1, max(levels - 1, 1)), parts).astype(np.uint8)


def _plain(value: Any) -> Any:
    """An option as JSON can say it."""
    known = value is None or isinstance(value, str | int | float | bool)
    return value if known else type(value).__name__
