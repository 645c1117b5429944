"""Reasoning traces: a problem, a thought cut into summarised paragraphs, a solution.

One JSON object a line, in UTF-8::

    {"problem": ..., "thought": ... | "segments": [{"text": ..., "summary": ...}, ...],
     "solution": ..., "answer": ..., "id": ..., "needed": ...}

``answer``, ``id`` and ``needed`` (the segment that the solution looks up, from 0) may be missing;
so may a summary. Rows in the Bespoke-Stratos layout (a
``conversations`` list whose reply holds tagged thought and solution) are read as well.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zoomkv.data.segment import estimate_tokens, segment_thought

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_STRATOS_REPLY = re.compile(
    r"\s*<\|begin_of_thought\|>(?P<thought>.*)<\|end_of_thought\|>"
    r"\s*<\|begin_of_solution\|>(?P<solution>.*)<\|end_of_solution\|>\s*",
    re.DOTALL,
)
_LINE_SEPARATORS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})


@dataclass(frozen=True)
class Segment:
    """One paragraph of a thought, and its summary where it has one."""

    text: str
    summary: str | None = None


@dataclass(frozen=True)
class Trace:
    """One problem, worked in the open."""

    problem: str
    segments: tuple[Segment, ...]
    solution: str
    answer: str | None = None
    """What the solution should come to, where it can be checked."""
    id: str | None = None
    needed: int | None = None
    """Number of the segment whose text the solution looks up, where that is known."""


@dataclass
class ReadReport:
    """What became of the rows of one source."""

    read: int = 0
    """Rows that became a trace."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    first: dict[str, str] = field(default_factory=dict)
    """Where each reason was met first, ``file:line``."""
    place: str = ""
    """Where the row stands that was read last."""

    def __str__(self) -> str:
        lines = [f"{self.read} rows read, {self.dropped.total()} dropped"]
        lines += [
            f"  {count} x {reason} (first at {self.first[reason]})"
            for reason, count in self.dropped.most_common()
        ]
        return "\n".join(lines)


class _BadRow(ValueError):
    """Why a row can't be a trace."""


def read_traces(
    source: str | os.PathLike[str],
    on_bad: Literal["error", "skip"] = "error",
    *,
    report: ReadReport | None = None,
    count_tokens: Callable[[str], int] = estimate_tokens,
) -> Iterator[Trace]:
    """The traces of a file, a folder of files, or a data set on the hub, one at a time.

    Args:
        source: A ``.jsonl`` or ``.parquet`` file, a folder that holds such files, or a hub id such
            as ``bespokelabs/Bespoke-Stratos-17k`` (its ``train`` split).
        on_bad: ``error`` stops at the first row that is no trace; ``skip`` leaves it out.
        report: Is filled in while rows are read.
        count_tokens: Measures the paragraphs of a thought that is not cut into segments yet.

    Raises:
        ValueError: There is no such source, or, at ``on_bad="error"``, a row is no trace; the
            message names file and line.
    """
    if on_bad not in ("error", "skip"):
        raise ValueError(f"on_bad={on_bad!r}: choose 'error' or 'skip'")
    report = ReadReport() if report is None else report
    for place, row in _rows(source):
        try:
            trace = _parse(_load_json(row) if isinstance(row, bytes) else row, count_tokens)
        except _BadRow as bad:
            if on_bad == "error":
                raise ValueError(f"{place}: {bad}") from None
            report.dropped[str(bad)] += 1
            report.first.setdefault(str(bad), place)
        else:
            report.read += 1
            report.place = place
            yield trace


def write_traces(path: str | os.PathLike[str], traces: Iterable[Trace]) -> None:
    """Writes ``traces`` to a JSONL file that appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for trace in traces:
                line = json.dumps(_row(trace), ensure_ascii=False)
                file.write(line.translate(_LINE_SEPARATORS) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _row(trace: Trace) -> dict[str, Any]:
    segments = [
        {"text": segment.text, **({} if segment.summary is None else {"summary": segment.summary})}
        for segment in trace.segments
    ]
    row = {"problem": trace.problem, "segments": segments, "solution": trace.solution}
    optional = {"answer": trace.answer, "id": trace.id, "needed": trace.needed}
    return row | {name: value for name, value in optional.items() if value is not None}


# Where rows come from: a place to name in messages, and the row, as bytes of JSON where it still
# has to be parsed (so that a broken line is skipped or reported like any other bad row).

_Rows = Iterator[tuple[str, Any]]


def _rows(source: str | os.PathLike[str]) -> _Rows:
    path = Path(source)
    if path.is_file():
        return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    if path.is_dir():
        return _folder_rows(path)
    if _HUB_ID.fullmatch(str(source)) and path.suffix not in (".jsonl", ".parquet"):
        return _hub_rows(str(source))
    raise ValueError(f"{source}: no such file or folder, and not a hub id like owner/name")


def _folder_rows(folder: Path) -> _Rows:
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".jsonl", ".parquet"))
    if not files:
        raise ValueError(f"{folder}: the folder holds no .jsonl or .parquet file")
    for file in files:
        yield from _rows(file)


def _jsonl_rows(path: Path) -> _Rows:
    with path.open("rb") as file:  # bytes: only \n ends a line, whatever a string may hold
        for number, line in enumerate(file, start=1):
            line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if line:
                yield f"{path}:{number}", line


def _parquet_rows(path: Path) -> _Rows:
    import pyarrow.parquet  # comes with datasets, takes a while to load

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{path}:row {number}", row
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from None


def _hub_rows(name: str) -> _Rows:
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name}: no such file, and not to be had from the hub ({reason})"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{name}:row {number}", row


# What a row says.


def _load_json(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 (byte {line[error.start]:#04x})") from None
    except (ValueError, RecursionError):
        raise _BadRow("not valid JSON") from None


def _parse(row: Any, count_tokens: Callable[[str], int]) -> Trace:
    if not isinstance(row, dict):
        raise _BadRow("not a JSON object")
    if row.get("conversations") is not None:
        row = row | _from_conversation(row["conversations"])
    if row.get("segments") is not None:
        segments = _segments(row["segments"])
    else:
        thought = _text(row, "thought")
        segments = tuple(
            Segment(piece.strip("\r\n").rstrip())
            for piece in segment_thought(thought, count_tokens)
        )
    return Trace(
        problem=_text(row, "problem"),
        segments=segments,
        solution=_text(row, "solution"),
        answer=_label(row, "answer"),
        id=_label(row, "id"),
        needed=_number(row, "needed", len(segments)),
    )


def _number(row: dict[str, Any], name: str, below: int) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise _BadRow(f"{name!r} is not the number of a segment")
    return value


def _segments(rows: Any) -> tuple[Segment, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _BadRow("'segments' is not a list of objects")
    if not rows:
        raise _BadRow("'segments' is empty")
    return tuple(Segment(_text(row, "text"), _label(row, "summary")) for row in rows)


def _from_conversation(turns: Any) -> dict[str, str]:
    try:
        spoken = [turn for turn in map(_turn, turns) if turn[0] != "system"]
        (asker, problem), (replier, reply) = spoken
    except (TypeError, KeyError, ValueError):
        raise _BadRow("'conversations' is not one question and one reply") from None
    if (asker, replier) not in (("user", "assistant"), ("human", "gpt")):
        raise _BadRow("'conversations' is not one question and one reply")
    found = _STRATOS_REPLY.fullmatch(reply) if isinstance(reply, str) else None
    if found is None:
        raise _BadRow("the reply has no tagged thought followed by a tagged solution")
    return {"problem": problem, **{name: text.strip() for name, text in found.groupdict().items()}}


def _turn(turn: dict[str, Any]) -> tuple[str, Any]:
    return (turn["from"], turn["value"]) if "from" in turn else (turn["role"], turn["content"])


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise _BadRow(f"{name!r} is missing")
    if not isinstance(value, str):
        raise _BadRow(f"{name!r} is not a string")
    if not value.strip():
        raise _BadRow(f"{name!r} is empty")
    return _encodable(value, name)


def _label(row: dict[str, Any], name: str) -> str | None:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise _BadRow(f"{name!r} is neither a string nor a number")
    return _encodable(value, name) if value and value.strip() else None


def _encodable(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadRow(f"{name!r} holds half a character (a lone surrogate)") from None
    return value
