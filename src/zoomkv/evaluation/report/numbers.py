"""The aggregated numbers of a report, as plain JSON values: its tables and figures show these."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from zoomkv import __version__
from zoomkv.evaluation.report.agreement import dynamics
from zoomkv.evaluation.report.curves import bin_width, mean_curve
from zoomkv.evaluation.report.estimates import mean_interval, ratio_interval
from zoomkv.evaluation.report.source import Source
from zoomkv.evaluation.results import CONDITION, condition_of, key_of, rows
from zoomkv.evaluation.settings import tuned_labels
from zoomkv.evaluation.statistics import wilson

Answer = Mapping[str, Any]
Numbers = dict[str, Any]

FORMAT = 1
_DEPTHS = 11  # rows of a heat map; more depths are put into tenths


def report_numbers(sources: Sequence[Source], command: str) -> Numbers:
    """Everything that a report shows.

    Args:
        sources: Results of one model and format.
        command: What asked for the report.

    Returns:
        ``rows``: one for each task, arm, budget, protocol and length, in the order of the table.
        ``needles``, ``agreeability`` and ``fidelity``: what a row has beyond one line, each with
        the row's place as ``row``. And ``model``, ``sources``, ``checks``, ``warnings``.

    Raises:
        ValueError: Results of different models or precisions, different tasks or policies under
            one name, the same answer twice with different content, or no answer at all.
    """
    fingerprints = _check_model(sources)
    warnings = [line for source in sources for line in source.warnings]
    answers = _answers(sources, warnings)
    if not answers:
        raise ValueError(f"{sources[0].path}: no answers yet, so there is nothing to report")
    timings = {key_of(timing): timing for source in sources for timing in source.timings}
    settings = [source.results.header.get("settings", {}) for source in sources]
    tuned = frozenset[str]().union(*map(tuned_labels, settings))
    groups: dict[tuple[str, ...], list[Answer]] = {}
    for answer in answers:
        groups.setdefault(condition_of(answer, tuned), []).append(answer)
    ordered = sorted(groups.values(), key=_order(answers))
    numbers: Numbers = {
        "format": FORMAT,
        "zoomkv": __version__,
        "command": command,
        "model": sources[0].results.header["model"],
        "fingerprint": fingerprints,
        "sources": [
            {
                "file": source.path.name,
                "zoomkv": source.results.header.get("zoomkv"),
                "answers": len(source.results.answers),
                "settings": source.results.header.get("settings", {}),
            }
            for source in sources
        ],
        "checks": [
            {name: check[name] for name in ("policy", "what", "ok", "detail")}
            for source in sources
            for check in source.results.checks
        ],
        "rows": [_row(group, timings, tuned) for group in ordered],
        "needles": _needles(ordered),
        "agreeability": _agreeability(ordered),
        "fidelity": _fidelity(ordered),
    }
    return {**_rounded(numbers), "warnings": warnings}


def _check_model(sources: Sequence[Source]) -> Numbers:
    """The fingerprints of all models by name; policies may have their own beside the run's."""
    first = sources[0]
    _check_settings(sources)
    seen: dict[str, tuple[Source, Answer]] = {}
    for other in sources:
        _check_same("model", first, first.results.header, other, other.results.header)
        prints = other.results.header.get("fingerprint", {})
        for name in prints:
            where, known = seen.setdefault(name, (other, prints))
            _check_same(name, where, known, other, prints)
    return {name: known[name] for name, (_, known) in seen.items()}


def _check_settings(sources: Sequence[Source]) -> None:
    """Refuses what would be pooled under one name though it was not asked, or run, alike."""
    seen: dict[str, tuple[Source, Answer]] = {}
    for source in sources:
        settings = source.results.header.get("settings", {})
        told = {"precision": settings.get("precision")}
        for task in settings.get("tasks", ()):
            names = ("task", "options", "max_new_tokens")
            told[f"task {task['name']!r}"] = {name: task.get(name) for name in names}
        for arm in settings.get("policies", ()):
            model = arm["model"] or settings["model"]
            one = {"policy": arm["policy"], "options": arm["options"], "model": model}
            told[f"policy {arm['label']!r}"] = one
        for what in told:
            where, known = seen.setdefault(what, (source, told))
            _check_same(what, where, known, source, told)


def _check_same(what: str, first: Source, one: Answer, second: Source, other: Answer) -> None:
    if one.get(what) != other.get(what):
        raise ValueError(
            f"{first.path} and {second.path} can't be in one report: {what} is "
            f"{json.dumps(one.get(what))} in the one, {json.dumps(other.get(what))} in the other"
        )


def _answers(sources: Sequence[Source], warnings: list[str]) -> list[Answer]:
    """All answers, each once; the order of the files stays."""
    found: dict[tuple[str, ...], tuple[Answer, Source]] = {}
    for source in sources:
        again = 0
        for answer in source.results.answers:
            known, where = found.setdefault(key_of(answer), (answer, source))
            if known is answer:
                continue
            if known != answer:
                raise ValueError(
                    f"{source.path}: task {answer['task']}, {answer['label']}, question "
                    f"{answer['id']} was answered otherwise in {where.path}: report one of them"
                )
            again += 1
        if again:
            warnings.append(f"{source.path}: {again} answers that stand twice count once")
    return [answer for answer, _ in found.values()]


def _order(answers: Iterable[Answer]) -> Callable[[Sequence[Answer]], tuple[Any, ...]]:
    """Tasks and arms as they come, then no budget, shares, rows; then protocol and length."""
    places: dict[tuple[str, str], int] = {}
    for answer in answers:
        for name in ("task", "label"):
            places.setdefault((name, answer[name]), len(places))

    def order(group: Sequence[Answer]) -> tuple[Any, ...]:
        one = group[0]
        budget = one["budget"]
        return (
            places["task", one["task"]],
            one["protocol"] or "",
            one["length"] or 0,
            places["label", one["label"]],
            budget is not None,
            isinstance(budget, int),
            budget or 0,
        )

    return order


def _row(
    group: Sequence[Answer], timings: Mapping[tuple[str, ...], Answer], tuned: Container[str]
) -> Numbers:
    judged = not _curves(group)
    timed = [
        (answer, timings[key]) for answer in group if judged and (key := key_of(answer)) in timings
    ]
    (row,) = rows(group, [timing for _, timing in timed], tuned)
    low, high = row.interval if judged else (None, None)
    _, score_low, score_high = mean_interval([answer["score"] for answer in group])
    speed: Sequence[float | None] = (None, None, None)
    if timed:
        speed = ratio_interval(
            [answer["tokens"] for answer, _ in timed],
            [timing["seconds"] / timing["batch"] for _, timing in timed],
        )
    agreed = [value for answer in group for value in answer["agreeability"] or ()]
    return {
        **{name: getattr(row, name) for name in (*CONDITION, "tuned", "policy")},
        "options": _options(group),
        "seeds": list(row.seeds),
        "n": row.n,
        "right": row.right / row.n if judged else None,
        "right_low": low,
        "right_high": high,
        "score": row.score,
        "score_low": max(0.0, score_low),
        "score_high": min(1.0, score_high),
        "extracted": row.extracted / row.n if judged else None,
        "truncated": row.truncated / row.n if judged else None,
        "tokens": row.tokens,
        "prompt_tokens": math.fsum(answer["prompt_tokens"] for answer in group) / row.n,
        "device_bytes_mean": row.device_bytes_mean,
        "device_bytes_peak": row.device_bytes_peak,
        "held": row.share,
        "host_bytes": row.host_bytes,
        "bytes_to_device": row.bytes_to_device,
        "bytes_to_host": row.bytes_to_host,
        "tokens_per_second": row.tokens_per_second,
        "tokens_per_second_low": speed[1],
        "tokens_per_second_high": speed[2],
        "timed": len(timed),
        "agreeability": math.fsum(agreed) / len(agreed) if agreed else None,
        "kl": None if judged else math.fsum(answer["about"]["kl"] for answer in group) / row.n,
    }


def _options(group: Sequence[Answer]) -> Numbers:
    """With the mean of an option that was tuned, such as a window: it may differ by seed."""
    found = {}
    for name, value in group[0]["options"].items():
        values = [answer["options"].get(name, value) for answer in group]
        alike = all(each == value for each in values)
        if not alike and not all(isinstance(each, int | float) for each in values):
            raise ValueError(f"{group[0]['label']}: {name} differs from answer to answer")
        found[name] = value if alike else math.fsum(values) / len(values)
    return found


def _curves(group: Sequence[Answer]) -> list[Any]:
    """Of answers that compare distributions: none of these is right or wrong."""
    return [answer["about"]["curve"] for answer in group if answer["about"].get("curve")]


def _needles(ordered: Sequence[Sequence[Answer]]) -> list[Numbers]:
    """Right answers by depth, for each row that has depths."""
    depths = {
        answer["depth"] for group in ordered for answer in group if answer["depth"] is not None
    }
    digits = 1 if len(depths) > _DEPTHS else 6
    found = []
    for row, group in enumerate(ordered):
        cells: dict[float, list[bool]] = {}
        for answer in group:
            if answer["depth"] is not None:
                cells.setdefault(round(answer["depth"], digits), []).append(answer["right"])
        if cells:
            found.append(
                {
                    "row": row,
                    "depth": sorted(cells),
                    "n": [len(cells[depth]) for depth in sorted(cells)],
                    "right": [sum(cells[depth]) for depth in sorted(cells)],
                    "interval": [
                        wilson(sum(cells[depth]), len(cells[depth])) for depth in sorted(cells)
                    ],
                }
            )
    return found


def _agreeability(ordered: Sequence[Sequence[Answer]]) -> list[Numbers]:
    found = []
    for row, group in enumerate(ordered):
        known = [answer for answer in group if answer["agreeability"]]
        if known:
            courses = {
                right: [answer["agreeability"] for answer in known if answer["right"] is right]
                for right in (True, False)
            }
            found.append({"row": row, **dynamics(courses[True], courses[False])})
    return found


def _fidelity(ordered: Sequence[Sequence[Answer]]) -> list[Numbers]:
    curves = {row: found for row, group in enumerate(ordered) if (found := _curves(group))}
    width = bin_width([curve for group in curves.values() for curve in group])
    return [
        {"row": row, "width": width, **mean_curve(group, width)} for row, group in curves.items()
    ]


def _rounded(value: Any) -> Any:
    """With seven significant digits: all that a figure can show, in half the bytes."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
