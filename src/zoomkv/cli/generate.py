"""``zoomkv generate CHECKPOINT_OR_BASE --policy NAME [--prompt TEXT | --file F | -]``"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoomkv.caches.registry import names
from zoomkv.cli.parser import Parser, literal, option, positive_int
from zoomkv.cli.parser import policy as policy_of

if TYPE_CHECKING:
    from zoomkv.generation import Stats

MIB = 1024 * 1024


def main(argv: Sequence[str]) -> None:
    """Streams one answer to stdout, and what it cost to stderr."""
    arguments = _parser().parse_intermixed_args(argv[1:])
    from zoomkv.backbone.embedded import check_spelling

    given, of_file = (None, {}) if arguments.policy is None else policy_of(arguments.policy)
    options = {**of_file, **_options(arguments)}
    sampling, prompt = _sampling(arguments), _prompt(arguments)
    check_spelling(arguments.model)
    import torch

    from zoomkv.caches.registry import check_options
    from zoomkv.evaluation.lens.recorder import TracingGenerator
    from zoomkv.evaluation.lens.trace_file import check_place, write_trace
    from zoomkv.export.artifact import is_artifact, read_artifact
    from zoomkv.generation import Generator, check_reads_summaries, load

    if arguments.trace is not None:
        check_place(arguments.trace)
    policy = given or "full"
    if is_artifact(arguments.model):
        artifact = read_artifact(arguments.model)
        policy = given or artifact.method
        if policy == artifact.method:
            options = {**artifact.options, **options}
    check_options(policy, options)  # wrong names are told before the model is loaded
    if arguments.textual_summaries:
        check_reads_summaries(policy)
    model, tokenizer = load(
        arguments.model, arguments.precision, arguments.device, base=arguments.base
    )
    kind = Generator if arguments.trace is None else TracingGenerator
    generator = kind(
        model,
        tokenizer,
        policy,
        system=arguments.system,
        textual_summaries=arguments.textual_summaries,
        **options,
    )
    torch.manual_seed(arguments.seed)
    for piece in generator.stream(prompt, arguments.max_new_tokens, **sampling):
        print(piece, end="", flush=True)
    print()
    if arguments.stats and generator.stats is not None:
        print(_report(generator.stats), file=sys.stderr)
    if isinstance(generator, TracingGenerator):
        write_trace(generator.trace(arguments.model), arguments.trace)


def _parser() -> Parser:
    parser = Parser("generate", "Streams the answer to a prompt, with any cache policy.")
    add = parser.add_argument
    add("model", metavar="CHECKPOINT_OR_BASE", help="an artifact, or a base model's name")
    add("stdin", nargs="?", choices=["-"], metavar="-", help="read the prompt from stdin")
    add("--prompt", metavar="TEXT", help="the prompt")
    add("--file", metavar="F", help="a UTF-8 file that holds the prompt")
    add("--system", metavar="TEXT", help="system prompt, if not the model's own")
    add(
        "--policy",
        metavar="NAME",
        help="cache policy, by default the artifact's own, or full; a file of its options, such as "
        f"configs/policy/zoomr.yaml; module:Class; or one of {', '.join(names())}",
    )
    add(
        "--budget",
        type=_number,
        metavar="N",
        help="rows, or a share of the full cache; what it counts, the policy says",
    )
    add(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the policy, such as window=512; can be repeated",
    )
    add(
        "--textual-summaries",
        action="store_true",
        help="ask a model that was not trained for it to summarise each paragraph",
    )
    add("--max-new-tokens", type=positive_int, default=512, metavar="N", help="(%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus of sampling (%(default)s)")
    add("--seed", type=_seed, default=0, metavar="N", help="of sampling (%(default)s)")
    add("--precision", default="fp32", help="of the base: fp32, bf16, nf4, int8 (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, or auto (%(default)s)")
    add("--base", help="where the artifact's base is now, if it was moved")
    add("--stats", action="store_true", help="end with speed and memory, on stderr")
    add("--trace", metavar="FILE", help="write what the cache held in each step, for zoomkv lens")
    return parser


def _number(text: str) -> int | float:
    number = literal(text)
    if not isinstance(number, int | float):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return number


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return int(text)


def _options(arguments: Namespace) -> dict[str, Any]:
    options = {} if arguments.budget is None else {"budget": arguments.budget}
    for name, value in map(option, arguments.option):
        if name in options:
            raise ValueError(f"the option '{name}' is given twice")
        options[name] = value
    return options


def _prompt(arguments: Namespace) -> str:
    given = [arguments.prompt, arguments.file, arguments.stdin]
    if sum(source is not None for source in given) != 1:
        raise ValueError("give one prompt: --prompt TEXT, --file F, or - to read it from stdin")
    source = arguments.file or ("stdin" if arguments.stdin else "--prompt")
    try:
        if arguments.prompt is not None:
            text = arguments.prompt
        elif arguments.file is not None:
            text = Path(arguments.file).read_text(encoding="utf-8-sig").strip()
        else:
            text = sys.stdin.read().strip()
        text.encode()  # Python hands on what the shell gave it, decodable or not
    except UnicodeError:
        raise ValueError(f"{source} is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"{source}: the prompt is empty, give it some text")
    return text


def _sampling(arguments: Namespace) -> dict[str, Any]:
    if not 0 <= arguments.temperature < inf or not 0 < arguments.top_p <= 1:
        raise ValueError("choose --temperature of at least 0 and --top-p in (0, 1]")
    if arguments.temperature == 0:
        if arguments.top_p < 1:
            raise ValueError("--top-p is for sampling: choose a --temperature above 0 with it")
        return {}
    return {
        "do_sample": True,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
    }


def _report(stats: Stats) -> str:
    agreed = "-" if stats.agreeability is None else f"{stats.agreeability:.2f}"
    figures = {
        "tokens": f"{stats.tokens}",
        "tokens a second": f"{stats.tokens_per_second:.1f}",
        "device KV, mean": f"{stats.device_bytes_mean / MIB:.2f} MiB",
        "device KV, peak": f"{stats.device_bytes_peak / MIB:.2f} MiB",
        "host KV": f"{stats.host_bytes / MIB:.2f} MiB",
        "moved to device": f"{stats.bytes_to_device / MIB:.2f} MiB",
        "moved to host": f"{stats.bytes_to_host / MIB:.2f} MiB",
        "rows read, mean": f"{stats.rows_mean:.1f}",
        "agreeability": agreed,
    }
    return "\n".join(f"{name:16} {figure:>12}" for name, figure in figures.items())
