"""``zoomkv inspect TRACE``: where the queries of a text look, as pictures and numbers."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoomkv.cli.parser import Parser, positive_int

if TYPE_CHECKING:
    from zoomkv.evaluation.inspection import Inspection, Rules
    from zoomkv.evaluation.passages import Passage

_FIGURES = (
    "1a_attention_map",
    "1b_distances",
    "2_top_keys",
    "3_global_queries",
    "4a_similarity",
    "4b_plane",
    "6a_coverage",
)
_SUMMARY = "inspection.json"


def main(argv: Sequence[str]) -> None:
    """Writes the pictures and their numbers; a summary goes to stdout, progress to stderr."""
    arguments = _parser().parse_args(argv[1:])
    out = Path(arguments.out or f"inspect-{Path(arguments.trace).stem}")
    draw = _drawing()
    from zoomkv.evaluation.passages import read_source, tokenise

    source = read_source(arguments.trace, arguments.row, arguments.prompt)
    rules = _rules(arguments)
    out.mkdir(parents=True, exist_ok=True)  # tells of a place that can't be written to, early

    from zoomkv.evaluation.figure_numbers import figure_numbers
    from zoomkv.generation import load

    model, tokenizer = load(
        arguments.model, arguments.precision, arguments.device, base=arguments.base
    )
    limit = model.get_decoder().config.max_position_embeddings
    passage = tokenise(source, tokenizer, limit, arguments.trace, arguments.prompt)
    found = _inspect(model, passage, rules)
    figures, notes = figure_numbers(found, tokenizer.batch_decode([[i] for i in passage.ids]))
    notes = [*passage.notes, *notes]
    for note in notes:
        print(note, file=sys.stderr)

    for name in _FIGURES:
        if name in figures:
            _write(out / f"{name}.json", partial(_dump, figures[name]))
            _write(out / f"{name}.png", partial(draw, name, figures[name]))
        else:  # what an earlier run left would pass for this one's
            (out / f"{name}.json").unlink(missing_ok=True)
            (out / f"{name}.png").unlink(missing_ok=True)
    summary = _summary(arguments, found, list(figures), notes)
    _write(out / _SUMMARY, partial(_dump, summary))
    print(_report(found))
    print(f"{out}: {_SUMMARY} and, each as .png and .json, {', '.join(figures)}")


def _parser() -> Parser:
    parser = Parser(
        "inspect",
        "Shows which queries of a text look far back, in which heads, and how alike they are "
        "(BeaconKV's figures 1 to 4 and 6a). Positions count from 0, the prompt included.",
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="traces in .jsonl or .parquet, or a UTF-8 text")
    add("--row", type=_count, metavar="N", help="which trace, from 0 (the first)")
    add("--prompt", metavar="TEXT", help="what a plain text answers (nothing)")
    add("--model", default="smollm2-135m", help="an artifact, or a base model (%(default)s)")
    add("--base", help="where the artifact's base is now, if it was moved")
    add("--precision", default="fp32", help="of the base: fp32, bf16, nf4, int8 (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, or auto (%(default)s)")
    add("--out", metavar="DIR", help="folder to write to (inspect-NAME for NAME.jsonl)")
    add("--layer", type=_count, metavar="N", help="layer of figures 1a, 2 and 4, from 0")
    add(
        "--head",
        type=_count,
        metavar="N",
        help="query head of these (the one with the most global queries that are not the majority)",
    )
    pair: dict[str, Any] = {"nargs": 2, "type": _count, "metavar": ("START", "END")}
    add(
        "--tokens",
        **pair,
        help="stretch of figures 1a and 2 (32 tokens of the interval with both kinds of queries)",
    )
    add(
        "--interval",
        **pair,
        help="tokens of figures 3 and 4a, and after which 6a chooses (the last 128)",
    )
    add("--top-k", type=positive_int, default=16, metavar="K", help="keys of a query (%(default)s)")
    add(
        "--window",
        type=_count,
        default=256,
        metavar="N",
        help="a median distance up to this is local (%(default)s)",
    )
    add(
        "--fraction",
        type=_share,
        default=0.25,
        metavar="F",
        help="a larger one, and above this share of the position, is global (%(default)s)",
    )
    add("--seed", type=_count, default=0, metavar="N", help="of 6a's random set (%(default)s)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None


def _drawing() -> Callable[[str, Any, os.PathLike[str]], None]:
    try:
        from zoomkv.evaluation.figures import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError(
            "zoomkv inspect draws with matplotlib, which is not installed: "
            "pip install 'zoomkv[eval]'"
        ) from None
    return draw


def _rules(arguments: Namespace) -> Rules:
    from zoomkv.evaluation.inspection import Rules

    return Rules(
        top_k=arguments.top_k,
        window=arguments.window,
        fraction=arguments.fraction,
        layer=arguments.layer,
        head=arguments.head,
        interval=arguments.interval and tuple(arguments.interval),
        stretch=arguments.tokens and tuple(arguments.tokens),
        seed=arguments.seed,
    )


def _inspect(model: Any, passage: Passage, rules: Rules) -> Inspection:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from zoomkv.evaluation.inspection import inspect_tokens

    with Progress(
        "layers",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=None)
        return inspect_tokens(
            model,
            passage.ids,
            passage.prompt,
            rules,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _summary(
    arguments: Namespace, found: Inspection, figures: list[str], notes: list[str]
) -> dict[str, Any]:
    from zoomkv.evaluation.passages import is_trace_file

    start, end = found.interval
    given = found.rules.layer is not None and found.rules.head is not None
    return {
        "trace": arguments.trace,
        "row": (arguments.row or 0) if is_trace_file(arguments.trace) else None,
        "model": arguments.model,
        "precision": arguments.precision,
        "tokens": found.length,
        "prompt_tokens": found.prompt,
        "top_k": found.rules.top_k,
        "window": found.rules.window,
        "fraction": found.rules.fraction,
        "seed": found.rules.seed,
        "interval": [start, end],
        "stretch": list(found.stretch),
        "layer": found.head.layer,
        "head": found.head.head,
        "chosen": "as given"
        if given
        else "the most global queries, of heads where they are no majority if any",
        "global_queries_of_the_head": int(found.counts[found.head.layer, found.head.head]),
        "global_queries": int(found.counts.sum()),
        "queries": (end - start) * found.counts.numel(),
        "heads_with_global_queries": int((found.counts > 0).sum()),
        "heads": found.counts.numel(),
        "figures": figures,
        "notes": notes,
    }


def _report(found: Inspection) -> str:
    start, end = found.interval
    head, total, queries = found.head, int(found.counts.sum()), (end - start) * found.counts.numel()
    return "\n".join(
        [
            f"{found.length} tokens, {found.prompt} of them the prompt",
            f"tokens {start} to {end - 1}: {total} of {queries} queries are global "
            f"({100 * total / queries:.1f} %), in {int((found.counts > 0).sum())} of "
            f"{found.counts.numel()} heads",
            f"shown is layer {head.layer}, head {head.head}: "
            f"{int(found.counts[head.layer, head.head])} of its {end - start} queries are global",
        ]
    )


def _dump(numbers: dict[str, Any], path: Path) -> None:
    """One line for each value, so that a file with a matrix can still be read."""
    lines = [f"  {json.dumps(name)}: {_json(value)}" for name, value in numbers.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Lets a file appear whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
