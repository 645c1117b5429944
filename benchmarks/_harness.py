"""What the benchmarks share: scripted thoughts, caches filled without a model, timing, reports."""

import argparse
import gc
import json
import os
import platform
import random
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from zoomkv.caches.base import ModelShape, PolicyCache
from zoomkv.caches.tiers import HostRows, storage_bytes
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY

# -- what is fed -----------------------------------------------------------------------------------


class BareTokenizer:
    """As much of a tokenizer as scripted ids need, for models with random weights."""

    texts = ("<eos>", BEGIN_OF_SUMMARY, END_OF_SUMMARY, ".", " the")
    all_special_ids = [0, 1, 2]
    eos_token_id = 0

    def get_vocab(self) -> dict[str, int]:
        """Ids by text."""
        return {text: number for number, text in enumerate(self.texts)}

    def batch_decode(self, ids: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Texts of sequences of one id each."""
        return [self.texts[sequence[0]] for sequence in ids]

    def encode(self, text: str, **options: Any) -> list[int]:
        """Ids of a text that is one token."""
        return [self.texts.index(text)]


class Script:
    """Token ids of an endless thought: paragraphs of sentences, each followed by a summary.

    ``[paragraph tokens] <begin> [summary tokens] <end>``, over and over; a paragraph ends with a
    full stop and has others at even distances of about ``sentence`` tokens.
    """

    def __init__(
        self, tokenizer: Any, paragraph: int = 250, summary: int = 20, sentence: int = 35
    ) -> None:
        ids = tokenizer.get_vocab()
        (word,) = tokenizer.encode(" the", add_special_tokens=False)
        (stop,) = tokenizer.encode(".", add_special_tokens=False)
        sentences = max(1, round(paragraph / sentence))
        stops = [round(paragraph * n / sentences) - 1 for n in range(1, sentences + 1)]
        cycle = torch.full((paragraph + summary + 2,), word)
        cycle[stops] = stop
        cycle[paragraph], cycle[-1] = ids[BEGIN_OF_SUMMARY], ids[END_OF_SUMMARY]
        self.word = word
        self._cycle = cycle
        ends = torch.zeros(len(cycle), dtype=torch.int64)
        ends[[*stops, len(cycle) - 1]] = 1
        self._choices_before = ends.cumsum(0) - ends

    @property
    def period(self) -> int:
        """Tokens of a paragraph with its summary."""
        return len(self._cycle)

    @property
    def choices(self) -> int:
        """Selection steps in a period: sentence ends, and the end of the summary."""
        return int(self._choices_before[-1]) + 1

    def token(self, number: int, phases: Tensor | None = None) -> Tensor:  # [B] -> [B, 1]
        """The generated token ``number``, for rows that are ``phases`` tokens ahead."""
        phases = torch.zeros(1, dtype=torch.int64) if phases is None else phases
        return self._cycle[(number + phases) % self.period][:, None]

    def interval(self, number: int) -> int:
        """The selection interval that generated token ``number`` falls into."""
        cycles, place = divmod(number, self.period)
        return cycles * self.choices + int(self._choices_before[place])


# -- caches filled without a model -----------------------------------------------------------------


class Feeder:
    """Drives caches as an attached model does (begin, update, commit), with random tensors.

    Args:
        shape: Of the model.
        dtype: Of keys, values and queries.
        device: Where they come to be.
        batch: Rows.
        hidden: Width of the decoder's states, where a cache looks at them.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: str = "cpu",
        batch: int = 1,
        hidden: int = 0,
    ) -> None:
        self.shape, self.batch, self.hidden = shape, batch, hidden
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._generator = torch.Generator(device)

    def read_prompt(self, cache: Any, length: int, word: int) -> None:
        """Feeds a prompt of one forward; also to a plain transformers cache.

        The random numbers begin anew, so that all caches are fed the same.
        """
        self._generator.manual_seed(0)
        if isinstance(cache, PolicyCache):
            cache.expect_prompt(length)
        self.read(cache, length, word)

    def read(
        self,
        cache: Any,
        length: int,
        word: int,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Feeds some of a prompt, one word again and again.

        ``watch`` is called in each layer with the keys and values that it attends to.
        """
        step = None
        if isinstance(cache, PolicyCache):
            ids = torch.full((self.batch, length), word, device=self._options["device"])
            step = cache.begin(ids, None, None)
        each = self.shape.heads // self.shape.kv_heads
        for layer in range(self.shape.layers):
            read, value = cache.update(self._random(length), self._random(length), layer)
            if watch is not None:
                watch(read, value)
            if step is not None and step.observer is not None:
                query = self._random(length * each).view(self.batch, self.shape.heads, length, -1)
                step.observations.append(step.observer(step, layer, query, read))
        if step is not None:
            cache.commit(step, self._states(length))

    def decode(self, cache: PolicyCache, token: Tensor) -> None:  # [B, 1]
        """Feeds one token to a cache whose prompt has been read."""
        shape = self.shape
        step = cache.begin(token, None, None)
        rows = self._random(2 * shape.layers)
        queries = self._random(shape.layers * (shape.heads // shape.kv_heads))
        queries = queries.view(self.batch, shape.heads, shape.layers, -1)
        for layer in range(shape.layers):
            keys, values = rows[:, :, 2 * layer], rows[:, :, 2 * layer + 1]
            read, value = cache.update(keys[:, :, None], values[:, :, None], layer)
            query = queries[:, :, layer : layer + 1]
            if step.observer is not None:
                step.observations.append(step.observer(step, layer, query, read))
            if step.reader is not None:
                step.reader(layer, query, read, value, shape.head_dim**-0.5)
        cache.commit(step, self._states(1))

    def think(
        self,
        cache: PolicyCache,
        script: Script,
        start: int,
        stop: int,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Generates the scripted tokens ``[start, stop)``; ``watch`` is called after each."""
        for number in track(range(start, stop), f"filling {cache.name}"):
            self.decode(cache, script.token(number).expand(self.batch, 1))
            if watch is not None:
                watch()

    def _states(self, length: int) -> Tensor:  # [B, length, hidden]
        size = (self.batch, length, self.hidden)
        return torch.randn(size, generator=self._generator, **self._options)

    def _random(self, length: int) -> Tensor:  # [B, Hkv, length, D]
        size = (self.batch, self.shape.kv_heads, length, self.shape.head_dim)
        return torch.randn(size, generator=self._generator, **self._options)


@contextmanager
def nothing_loaded() -> Iterator[None]:
    """Streamed caches don't bring rows to the device, so what they return must not be looked at.

    What is stored, chosen and moved between the host's stores is the same as ever.
    """
    with mock.patch.object(HostRows, "load", lambda *arguments: None):
        yield


def index_bytes(cache: PolicyCache) -> int:
    """Device bytes of a cache that are not the keys and values of its layers."""
    layers = (tensor for layer in cache.layers for tensor in layer.device_tensors())
    return storage_bytes(cache.device_tensors()) - storage_bytes(layers)


def quiet() -> None:
    """Hides the warning that a benchmark goes beyond the positions that a model was made for."""
    warnings.filterwarnings("ignore", message=".*positions that the model was made for.*")


# -- timing ----------------------------------------------------------------------------------------


@dataclass
class Contender:
    """Something whose decode steps are timed."""

    name: str
    step: Callable[[int], None]
    """Decodes the token of one round."""
    every: int = 1
    """Takes part in every so many rounds."""


class Timings:
    """Seconds of each contender in each round; NaN where it did not take part.

    Args:
        seconds: By name, ``[rounds]``.
        intervals: Selection interval of each round ``[rounds]``: steps of one interval differ (its
            last one chooses), whole intervals are alike.
    """

    def __init__(self, seconds: dict[str, Tensor], intervals: Tensor) -> None:
        self._seconds = seconds
        self._intervals = [intervals == number for number in intervals.unique()]

    def milliseconds(self, name: str) -> float:
        """Mean of a step."""
        return 1e3 * float(self._seconds[name].nanmean())

    def ratio(self, name: str, base: str) -> tuple[float, float]:
        """Mean step over another's mean step, and its standard error over the intervals."""
        one, other = self._seconds[name], self._seconds[base]
        total = float(one.nanmean() / other.nanmean())
        each = [one[part].nanmean() / other[part].nanmean() for part in self._intervals]
        known = torch.stack(each)
        known = known[known.isfinite()]
        error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else float("nan")
        return total, error


def take_turns(
    contenders: Sequence[Contender], start: int, stop: int, script: Script, warm_up: int = 2
) -> Timings:
    """Times contenders in turn, one decode step each, so that noise hits all alike.

    The first rounds are not counted. The order is drawn anew in each round: whoever ran just
    before left the processor's caches as they are.

    Args:
        contenders: With what one step of each does.
        start: First generated token that counts.
        stop: One past the last.
        script: Says where selection intervals end.
        warm_up: Rounds before ``start``.
    """
    seconds = {c.name: torch.full((stop - start,), torch.nan) for c in contenders}
    gc.collect()
    gc.disable()
    try:
        for number in track(range(start - warm_up, stop), "timing"):
            for contender in random.Random(number).sample(contenders, len(contenders)):
                if number >= start and (number - start) % contender.every:
                    continue
                begun = time.perf_counter()
                contender.step(number)
                if number >= start:
                    seconds[contender.name][number - start] = time.perf_counter() - begun
    finally:
        gc.enable()
    return Timings(seconds, torch.tensor([script.interval(n) for n in range(start, stop)]))


def track(items: range, label: str) -> Iterator[int]:
    """Yields the items, and says on stderr every few seconds how far it is."""
    begun = said = time.monotonic()
    for number in items:
        yield number
        now = time.monotonic()
        if now - said > 10:
            said = now
            done = number + 1 - items.start
            left = (now - begun) / done * (len(items) - done)
            print(f"{label}: {done} of {len(items)}, {left:.0f} s left", file=sys.stderr)


# -- reports ---------------------------------------------------------------------------------------


@dataclass
class Figure:
    """A measured number and what it should be."""

    name: str
    value: float
    relation: str
    """``<=`` or ``>=``."""
    target: float
    error: float | None = None
    """Standard error, if known."""

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target if self.relation == "<=" else self.value >= self.target


@dataclass
class Report:
    """Tables and figures of one benchmark, for the eye and for machines.

    Args:
        arguments: Parsed by a parser of ``options``.
        judged: False where sizes are too small for the targets to mean anything.
    """

    arguments: argparse.Namespace
    judged: bool = True
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table; its first column holds names."""
        self.tables.append((title, list(columns), [[_cell(c) for c in row] for row in rows]))

    def check(
        self, name: str, value: float, relation: str, target: float, error: float | None = None
    ) -> None:
        """Adds a figure with its target."""
        self.figures.append(Figure(name, value, relation, target, error))

    def finish(self) -> None:
        """Prints everything to stdout and writes the JSON file, if one was asked for."""
        if self.figures:
            rows = [
                [f.name, f.value, _error(f.error), f"{f.relation} {f.target:.4g}", self._verdict(f)]
                for f in self.figures
            ]
            self.table("Targets", ["figure", "measured", "±", "target", "met"], rows)
        markdown = self.arguments.markdown
        print(f"```\n{command()}\n```\n\n{machine()}" if markdown else f"{command()}\n{machine()}")
        for title, columns, lines in self.tables:
            print(f"\n**{title}**\n" if markdown else f"\n{title}")
            print(_lines(columns, lines, markdown))
        if self.arguments.out is not None:
            write_json(self.arguments.out, self._as_dict())

    def _verdict(self, figure: Figure) -> str:
        if not self.judged:
            return "not judged"
        return "yes" if figure.met else "NO"

    def _as_dict(self) -> dict[str, Any]:
        figures = [{**asdict(f), "met": f.met if self.judged else None} for f in self.figures]
        names = ("title", "columns", "rows")
        tables = [dict(zip(names, table, strict=True)) for table in self.tables]
        return {
            "command": command(),
            "machine": machine(),
            "figures": figures,
            "tables": tables,
            "details": self.details,
        }


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"zoomkv bench {Path(sys.argv[0]).stem}", description=description, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    return parser


def command() -> str:
    """The command line that runs this benchmark again."""
    words = [word for word in sys.argv[1:] if word != "--markdown"]
    return shlex.join(["zoomkv", "bench", Path(sys.argv[0]).stem, *words])


def machine() -> str:
    """What it ran on, in a line."""
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {device}"
    return f"{device}; torch {torch.__version__}, transformers {transformers.__version__}"


def write_json(path: Path, content: dict[str, Any], indent: int | None = 1) -> None:
    """Writes a file as a whole or not at all; without ``indent`` in one line, as records are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=indent)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _lines(columns: list[str], rows: list[list[str]], markdown: bool) -> str:
    """The first column to the left, the others to the right."""
    table = [columns, *rows]
    widths = [max(len(row[number]) for row in table) for number in range(len(columns))]
    between, outside = (" | ", ("| ", " |")) if markdown else ("  ", ("", ""))

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return outside[0] + between.join(padded) + outside[1]

    rule = ["-" * width if not n or not markdown else "-" * (width - 1) + ":"
            for n, width in enumerate(widths)]  # fmt: skip
    return "\n".join([line(columns), line(rule), *map(line, rows)])
