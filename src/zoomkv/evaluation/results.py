"""Results files: one JSON object a line, and the figures that a table makes of them.

The first line is a header; then come the checks, then the answers. Timings stand in a file beside
it, ``NAME.timing.jsonl``, so that the same settings give the same bytes.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoomkv.evaluation.statistics import wilson

FORMAT = 1
CONDITION = ("task", "label", "budget", "protocol", "length")
"""What the answers of one row of a table have in common."""
ONE = (*CONDITION, "seed", "id")
"""What tells one answer of a file from all others."""
_MIB = 1024 * 1024
_FIELDS = {
    "header": ("model",),
    "check": ("policy", "what", "ok", "detail"),
    "answer": (
        *("task", "policy", "label", "options", "budget", "protocol", "length", "depth", "seed"),
        *("id", "score", "right", "extracted", "truncated", "tokens", "prompt_tokens"),
        *("device_bytes_mean", "device_bytes_peak", "host_bytes", "bytes_to_device"),
        *("bytes_to_host", "full_bytes", "agreeability", "about", "text"),
    ),
    "timing": (*ONE, "seconds", "batch"),
}
"""What is read of each kind of line."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """What a results file holds."""

    header: dict[str, Any]
    checks: list[dict[str, Any]]
    answers: list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """The answers of one task, policy, budget, protocol and length, over all seeds."""

    task: str
    policy: str
    label: str
    budget: int | float | None
    tuned: float | None
    """Mean budget in rows of an arm that is tuned to another's bytes, for each seed anew; it has no
    other budget."""
    protocol: str | None
    length: int | None
    seeds: tuple[int, ...]
    n: int
    score: float
    """Mean."""
    right: int
    interval: tuple[float, float]
    """95 % Wilson interval of the share of right answers."""
    extracted: int
    """Answers that could be read out of the text."""
    truncated: int
    """Texts that were cut off."""
    empty: int
    """Texts that hold nothing, and were to."""
    tokens: float
    """Mean length of the answers."""
    device_bytes_mean: float
    """Mean over the answers."""
    device_bytes_peak: float
    """Largest of all."""
    share: float
    """Peak device bytes over those of the full cache, summed over the answers."""
    host_bytes: float
    """Largest of all."""
    bytes_to_device: float
    """Mean."""
    bytes_to_host: float
    """Mean."""
    tokens_per_second: float | None
    """Of the answers that were timed; None where distributions are compared, which takes the full
    cache's time too."""
    judged: bool
    """Whether answers are right or wrong; where distributions are compared, nothing is."""

    @property
    def not_extracted(self) -> int:
        """Answers that could not be read."""
        return self.n - self.extracted


def timing_path(path: Path) -> Path:
    """Where the timings of a results file stand."""
    return path.with_name(f"{path.stem}.timing.jsonl")


def dump(line: Line) -> bytes:
    """A line of a file."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def whole_lines(data: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a file, and how many bytes they take; what is torn off at the end is no line.

    Raises:
        ValueError: A line that is no object of this format.
    """
    size = data.rfind(b"\n") + 1
    found = []
    for number, text in enumerate(data[:size].split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or "kind" not in line:
            raise ValueError(f"{path}:{number}: this is no line of a results file")
        found.append(line)
    return found, size


def read(path: Path) -> Results:
    """A results file. A torn last line is left out with a warning.

    Raises:
        ValueError: It is no results file, of another format, or a line lacks a field.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such results file") from None
    lines, size = whole_lines(data, path)
    if size < len(data):
        warnings.warn(f"{path}:{len(lines) + 1}: the last line is torn: left out", stacklevel=2)
    header = header_of(lines, path)
    check_fields(lines, path)
    return Results(
        header,
        [line for line in lines if line["kind"] == "check"],
        [line for line in lines if line["kind"] == "answer"],
    )


def check_fields(lines: Iterable[Line], path: Path) -> None:
    """Refuses lines that were written by hand, or by others, and lack what is read of them.

    Raises:
        ValueError: Names the line and the field.
    """
    for number, line in enumerate(lines, 1):
        for name, part, fields in _parts(line):
            if not isinstance(part, dict):
                raise ValueError(f"{path}:{number}: {name} of this {line['kind']} is no object")
            lacking = next((field for field in fields if field not in part), None)
            if lacking is not None:
                lacking = f"{name}.{lacking}" if name else lacking
                raise ValueError(f"{path}:{number}: this {line['kind']} lacks the field {lacking}")


def _parts(line: Line) -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Each object of a line that is looked into: its name, itself, and the fields it must have."""
    yield "", line, _FIELDS.get(str(line["kind"]), ())
    if line["kind"] == "answer":
        yield "options", line["options"], ()
        yield "about", line["about"], ()
        if curve := line["about"].get("curve"):
            yield "about", line["about"], ("kl",)
            yield "about.curve", curve, ("position", "kl", "top1")
    if line["kind"] == "header":
        settings = line.get("settings", {})
        yield "settings", settings, ()
        if settings.get("policies"):
            yield "settings", settings, ("model",)
        for number, arm in enumerate(settings.get("policies") or ()):
            yield f"settings.policies[{number}]", arm, ("policy", "options", "label", "model")
        for number, task in enumerate(settings.get("tasks") or ()):
            yield f"settings.tasks[{number}]", task, ("name",)


def header_of(lines: Sequence[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The header, which must come first and be of this format."""
    if not lines or lines[0]["kind"] != "header":
        raise ValueError(f"{path}: no results of zoomkv evaluate: its first line is no header")
    if lines[0].get("format") != FORMAT:
        raise ValueError(
            f"{path}: format {lines[0].get('format')}, and this version reads {FORMAT}"
        )
    return lines[0]


def read_timings(path: Path) -> list[dict[str, Any]]:
    """The timings beside a results file, as far as there are any.

    Raises:
        ValueError: A line lacks a field.
    """
    beside = timing_path(path)
    if not beside.exists():
        return []
    lines, _ = whole_lines(beside.read_bytes(), beside)
    check_fields(lines, beside)
    return lines


def key_of(line: Line, names: Sequence[str] = ONE) -> tuple[str, ...]:
    """What identifies an answer; a budget of 1 row is not one of 1.0, the whole."""
    return tuple(repr(line[name]) for name in names)


def condition_of(answer: Line, tuned: Container[str]) -> tuple[str, ...]:
    """What the answers of one row have in common.

    An arm that is tuned to another's bytes comes out at a slightly other budget for each seed, and
    is one arm all the same.
    """
    free = answer["label"] in tuned
    return key_of({**answer, "budget": None} if free else answer, CONDITION)


def rows(
    answers: Iterable[Line], timings: Iterable[Line] = (), tuned: Container[str] = ()
) -> list[Row]:
    """The figures of a table, in the order in which task, length, protocol and arm first come.

    Args:
        answers: Of results files.
        timings: Of the files beside them; of two for one answer the last counts.
        tuned: The labels of arms that are tuned to another's bytes.
    """
    seconds = {key_of(timing): timing["seconds"] / timing["batch"] for timing in timings}
    groups: dict[tuple[str, ...], list[Line]] = {}
    places: dict[tuple[str, str], int] = {}
    for answer in answers:
        groups.setdefault(condition_of(answer, tuned), []).append(answer)
        for name in CONDITION:
            places.setdefault((name, repr(answer[name])), len(places))

    def order(group: list[Line]) -> tuple[int, ...]:
        names = ("task", "length", "protocol", "label", "budget")
        return tuple(places[name, repr(group[0][name])] for name in names)

    return [
        _row(group, seconds, group[0]["label"] in tuned)
        for group in sorted(groups.values(), key=order)
    ]


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| task | length | question | policy | budget | n | seeds | score | right (95 %) | read "
        "| not read | cut off | tokens | KV mean | KV peak | of full | host | to device | to host "
        "| tokens/s |",
        "|---|--:|---|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    lines += [
        "",
        "read, not read: answers that could and could not be read out of the text. KV: device "
        "bytes of the cache for one answer, host, to device, to host: all in MiB.",
    ]
    return "\n".join(lines)


def empty_warning(rows: Sequence[Row]) -> str | None:
    """One line, if some model or policy said nothing at all."""
    silent = sorted((row for row in rows if row.empty), key=lambda row: row.empty / row.n)
    if not silent:
        return None
    worst, total = silent[-1], sum(row.empty for row in silent)
    where = ", ".join(filter(None, (worst.task, worst.label, _budget(worst))))
    return (
        f"{total} of {sum(row.n for row in rows)} answers are empty, most of them in {where}: "
        f"{worst.empty} of {worst.n}"
    )


def _row(group: list[Line], seconds: Mapping[tuple[str, ...], float], tuned: bool) -> Row:
    n, one = len(group), group[0]
    budgets = [answer["budget"] for answer in group if answer["budget"] is not None]
    judged = not any(answer["about"].get("curve") for answer in group)
    right = sum(answer["right"] for answer in group)
    timed = [answer for answer in group if judged and key_of(answer) in seconds]
    taken = math.fsum(seconds[key_of(answer)] for answer in timed)

    def mean(name: str) -> float:
        return math.fsum(answer[name] for answer in group) / n

    full = mean("full_bytes")
    return Row(
        **{name: one[name] for name in ("task", "policy", "label", "protocol", "length")},
        budget=None if tuned else one["budget"],
        tuned=math.fsum(budgets) / len(budgets) if tuned and budgets else None,
        seeds=tuple(sorted({answer["seed"] for answer in group})),
        n=n,
        score=mean("score"),
        right=right,
        interval=wilson(right, n),
        extracted=sum(answer["extracted"] for answer in group),
        truncated=sum(answer["truncated"] for answer in group),
        empty=sum(not answer["extracted"] and not answer["text"].strip() for answer in group),
        tokens=mean("tokens"),
        device_bytes_mean=mean("device_bytes_mean"),
        device_bytes_peak=max(answer["device_bytes_peak"] for answer in group),
        share=mean("device_bytes_peak") / full if full else math.nan,
        host_bytes=max(answer["host_bytes"] for answer in group),
        bytes_to_device=mean("bytes_to_device"),
        bytes_to_host=mean("bytes_to_host"),
        tokens_per_second=sum(answer["tokens"] for answer in timed) / taken if taken else None,
        judged=judged,
    )


def _cells(row: Row) -> list[str]:
    low, high = row.interval
    judged = row.judged
    return [
        row.task.replace("|", "\\|"),
        "" if row.length is None else str(row.length),
        row.protocol or "",
        row.label.replace("|", "\\|"),
        _budget(row),
        str(row.n),
        ", ".join(map(str, row.seeds)),
        f"{row.score:.3f}",
        f"{row.right} ({100 * low:.0f} to {100 * high:.0f} %)" if judged else "",
        str(row.extracted) if judged else "",
        str(row.not_extracted) if judged else "",
        str(row.truncated) if judged else "",
        f"{row.tokens:.0f}",
        _mib(row.device_bytes_mean),
        _mib(row.device_bytes_peak),
        f"{100 * row.share:.1f} %",
        _mib(row.host_bytes),
        _mib(row.bytes_to_device),
        _mib(row.bytes_to_host),
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
    ]


def budget_text(budget: int | float | None, tuned: float | None) -> str | None:
    """A budget as a reader sees it: a share of full KV in percent, or rows.

    Args:
        budget: Of a ``Row``.
        tuned: Of a ``Row``.
    """
    if tuned is not None:
        return f"{tuned:,.1f} rows".replace(".0 ", " ") + ", tuned"
    if budget is None:
        return None
    return f"{100 * budget:.4g} %" if isinstance(budget, float) else f"{budget:,} rows"


def _budget(row: Row) -> str:
    return budget_text(row.budget, row.tuned) or ""


def _mib(count: float) -> str:
    return f"{count / _MIB:.2f}"
