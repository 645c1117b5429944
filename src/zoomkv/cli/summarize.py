"""``zoomkv summarize IN OUT --model ID | --endpoint URL --model NAME``"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zoomkv.cli.parser import Parser, positive_int

if TYPE_CHECKING:
    from zoomkv.data.summarize import Summarizer


def main(argv: Sequence[str]) -> int:
    """Summarises a trace file; 1 if a paragraph could not be summarised."""
    arguments = _parser().parse_args(argv[1:])
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from zoomkv.data.summarize import summarize_file

    with Progress(
        "paragraphs",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=None)
        report = summarize_file(
            arguments.source,
            arguments.target,
            _summarizer(arguments),
            on_bad="skip" if arguments.skip_bad else "error",
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if report.read.dropped:
        print(report.read, file=sys.stderr)
    for failure in report.failed:
        print(failure, file=sys.stderr)
    if report.failed:
        print(
            f"{len(report.failed)} paragraphs have no summary; their rows are left out. "
            "The same command again asks for these alone.",
            file=sys.stderr,
        )
    print(f"{arguments.target}: {report.rows} rows, {report.summaries} new summaries")
    return 1 if report.failed else 0


def _parser() -> Parser:
    parser = Parser("summarize", "Adds a summary to every paragraph of a trace file.")
    parser.add_argument("source", metavar="IN", help="traces: .jsonl, .parquet, folder or hub id")
    parser.add_argument("target", metavar="OUT", help="the JSONL file to write")
    parser.add_argument(
        "--model",
        required=True,
        help="base model to run here (hub id, folder, GGUF file, smollm2-135m), "
        "or the model's name at --endpoint",
    )
    parser.add_argument(
        "--endpoint", help="OpenAI-compatible address, such as http://localhost:8000/v1"
    )
    parser.add_argument(
        "--parallel",
        type=positive_int,
        default=8,
        help="requests at once, or paragraphs in a batch (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        default=256,
        help="longest summary, in tokens (%(default)s)",
    )
    parser.add_argument(
        "--retries", type=positive_int, default=6, help="further tries of a request (%(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds to wait for an answer (%(default)s)"
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out rows that are no trace, and count them"
    )
    return parser


def _summarizer(arguments: Namespace) -> Summarizer:
    from zoomkv.data.summarize import EndpointSummarizer, LocalSummarizer

    if arguments.endpoint:
        return EndpointSummarizer(
            arguments.endpoint,
            arguments.model,
            concurrency=arguments.parallel,
            retries=arguments.retries,
            timeout=arguments.timeout,
            max_tokens=arguments.max_tokens,
        )
    from zoomkv.backbone.load import load_base

    return LocalSummarizer(
        *load_base(arguments.model),
        arguments.model,
        batch_size=arguments.parallel,
        max_tokens=arguments.max_tokens,
    )
