"""The file that ``zoomkv generate --trace`` writes: one answer, and what the cache held meanwhile.

Step k writes token ``prompt + k``. Its query is that of the token before, which reads itself and
what the cache shows it of all tokens before; the first step is the end of the prompt, which is read
whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zoomkv.evaluation.lens.series import Series

KIND, FORMAT = "zoomkv trace", 1
LEVELS = 15
"""A share is told in at most so many parts."""


@dataclass(frozen=True)
class View:
    """What the query of one step could read of each of ``n`` tokens."""

    marks: np.ndarray
    """uint8 ``[n]``, see ``holdings``: what a token's own row is read as."""
    exact: np.ndarray
    """Share of the pairs of a layer and a KV head that read its own row, ``[groups, n]``."""
    coarse: np.ndarray
    """Share of those that read it in a mean alone, ``[groups, n]``."""


@dataclass(frozen=True)
class Trace:
    """One answer and its cache, step by step."""

    policy: str
    options: dict[str, Any]
    model: str
    prompt: int
    """Tokens of the prompt; the others are the answer, one for each step."""
    tokens: list[str]
    """What each token adds to the text."""
    layers: int
    kv_heads: int
    groups: list[list[int]]
    """First layer and one past the last of each group whose shares are told together. A single
    group of all layers means that all of them read the same."""
    levels: list[int]
    """In how many parts the shares of each group are told."""
    unread: str
    """Where a token is that nobody reads: on the ``host``, or ``gone``."""
    row_bytes: int
    """Of one token in a full cache."""
    device_bytes: list[int]
    """What the cache held in each step, from its storages."""
    host_bytes: list[int]
    spans: list[dict[str, list[int]]]
    """Paragraphs that were summarised: ``paragraph`` and ``summary``, first and one past the last
    token."""
    choices: list[dict[str, Any]]
    """``step`` from which a choice held, the numbers of the spans ``zoomed`` and ``summarised``,
    and for ``zoomr`` ``votes`` by span and ``agreeability``."""
    fetches: list[list[int]]
    """For ``sekv``: tokens that all heads of all layers asked for in each step, and how many of
    these came from the host. Empty for others."""
    states: dict[str, str]
    """See ``Series``: of a table with a row of marks, then one for each group of what share reads
    a token itself, then one for each of what share reads it in a mean alone. A column is a token;
    a new one is plain, and read itself by all."""

    @property
    def steps(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt

    def views(self) -> Callable[[int], View]:
        """Decodes the states, and gives what tells a step's view."""
        decoded, columns = self.decoded(), len(self.tokens)
        initial = np.array([0, *self.levels, *([0] * len(self.groups))], np.uint8)
        initial, parts = np.repeat(initial[:, None], columns, 1), np.array(self.levels)[:, None]

        def view(step: int) -> View:
            table = decoded.at(step, initial)[:, : self.prompt + step]
            exact, coarse = np.split(table[1:], 2)
            return View(table[0], exact / parts, coarse / parts)

        return view

    def decoded(self) -> Series:
        """The states.

        Raises:
            ValueError: They are none, or not of these tokens and steps.
        """
        rows = 1 + 2 * len(self.groups)
        return Series.decoded(self.states, rows * len(self.tokens), self.steps)


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace file, whole or not at all."""
    record = {"kind": KIND, "format": FORMAT, **asdict(trace)}
    lines = [f"{json.dumps(name)}: {_json(value)}" for name, value in record.items()]
    write_whole(Path(path), "{\n" + ",\n".join(lines) + "\n}\n")


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises, before an answer is paid for, where a trace can't be written.

    Raises:
        ValueError: The folder is not there, the path is a folder itself, or something is there
            already: a trace cost an answer.
    """
    if not Path(path).parent.is_dir():
        raise ValueError(f"--trace {path}: the folder {Path(path).parent} is not there; make it")
    if Path(path).is_dir():
        raise ValueError(f"--trace {path}: a folder; name a file in it")
    if Path(path).exists():
        raise ValueError(f"--trace {path}: is there already; remove it, or name another file")


def write_whole(path: Path, text: str) -> None:
    """Lets a text file appear whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace file and checks that all of it fits together.

    Raises:
        ValueError: Torn, of another kind or format, or of parts that contradict each other.
        OSError: It can't be read.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a trace (not UTF-8); {_MAKE}") from None
    except ValueError as error:
        raise ValueError(f"{path}: torn, or no JSON ({error}); {_MAKE}") from None
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(f"{path}: not a trace; {_MAKE}")
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{path}: a trace of format {record.get('format')!r}, and this version reads {FORMAT}; "
            "trace the answer anew"
        )
    names = [field.name for field in fields(Trace)]
    if missing := [name for name in names if name not in record]:
        raise ValueError(f"{path}: the trace lacks {', '.join(missing)}; {_MAKE}")
    trace = Trace(**{name: record[name] for name in names})
    try:
        _check(trace)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a whole trace: {error}; {_MAKE}") from None
    return trace


_MAKE = "make one with zoomkv generate --trace FILE"


def _check(trace: Trace) -> None:
    """Raises where a part is not what it must be."""
    tokens, groups = trace.tokens, trace.groups
    _must(_all(str, tokens), "its tokens are no texts")
    _must(_count(trace.prompt) and 0 < trace.prompt < len(tokens), "prompt is out of range")
    _must(all(map(_count, (trace.layers, trace.kv_heads, trace.row_bytes))), "sizes are no counts")
    edges = [0, *(end for _, end in groups)]
    _must(_all(int, edges) and edges[-1] == trace.layers, "its groups are not its layers")
    _must([list(pair) for pair in pairwise(edges)] == groups, "its groups are not its layers")
    _must(_all(int, trace.levels) and len(trace.levels) == len(groups), "levels are missing")
    _must(all(0 < level <= LEVELS for level in trace.levels), "levels are out of range")
    _must(trace.unread in ("host", "gone"), f"unread is {trace.unread!r}")
    for name in ("device_bytes", "host_bytes"):
        series = getattr(trace, name)
        _must(_all(int, series) and len(series) == trace.steps, f"{name} is not of every step")
    _must(isinstance(trace.options, dict), "options are no table")
    for pair in (span[part] for span in trace.spans for part in ("paragraph", "summary")):
        _must(_all(int, pair) and len(pair) == 2, "a span has no two ends")
        _must(0 <= pair[0] <= pair[1] <= len(tokens), "a span is out of range")
    for choice in trace.choices:
        _must(_count(choice["step"]), "a choice has no step")
        for span in (*choice["zoomed"], *choice["summarised"]):
            _must(_count(span) and span < len(trace.spans), "a choice names no span")
        _must(_all(int, choice.get("votes") or []), "votes are no counts")
    _must(not trace.fetches or len(trace.fetches) == trace.steps, "fetches are not of every step")
    _must(all(_all(int, pair) and len(pair) == 2 for pair in trace.fetches), "a fetch has no pair")
    trace.decoded()


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _all(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
