"""``zoomkv evaluate --config FILE``: policies side by side under one memory budget."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from zoomkv.cli.parser import Parser, literal, policy, positive_int
from zoomkv.evaluation.results import timing_path
from zoomkv.evaluation.settings import ArmSettings, Settings

if TYPE_CHECKING:
    from zoomkv.evaluation.runner import Watch
    from zoomkv.evaluation.sharding import Share


def main(argv: Sequence[str]) -> int:
    """Writes results and prints their table; progress goes to stderr.

    Returns:
        0, or 1 if a check failed.
    """
    arguments = _parser().parse_args(argv[1:])
    settings = _settings(arguments)
    out = Path(arguments.out or _default_out(arguments))
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: give a file that ends with .jsonl")
    check_place(out)

    from zoomkv.evaluation.runner import CheckFailed, evaluate

    share, device = _share(arguments)
    try:
        with _progress(share.rank == 0) as watch:
            evaluate(settings, out, device, share, watch)
    except CheckFailed as error:
        if share.rank == 0:
            print(f"zoomkv: {error}", file=sys.stderr)
        return 1
    if share.rank == 0:
        _report(out)
    return 0


def read_settings(path: str) -> Settings:
    """Settings from a YAML file.

    Raises:
        ValueError: It can't be read, or is not what settings look like.
    """
    from jsonargparse import get_loader

    try:
        found = get_loader("yaml")(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {path}: there is no such file") from None
    except Exception as error:  # the loader's errors are those of the library behind it
        raise ValueError(f"--config {path}: can't be read ({error})") from None
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"--config {path}: write NAME: VALUE lines")
    found, where = found or {}, f"--config {path}"
    if isinstance(given := found.get("policies"), list):
        found["policies"] = [policy_settings(each, f"{where}: policies:") for each in given]
    return Settings.of(found, where)


def policy_settings(given: Any, where: str) -> Any:
    """Settings of a policy in which a file, such as ``configs/policy/zoomr.yaml``, is filled in.

    The arm is named after its file, whose budget counts as a budget of the arm's own. Its
    ``count_prefix`` is left out: in an evaluation a budget bounds the prompt too. What stands
    beside the file wins over it.

    Args:
        given: As YAML has it: a name or a file, or a dictionary whose ``policy`` is one.
        where: Is named in errors.

    Raises:
        ValueError: The file can't be read, or is not what such files look like.
    """
    one = {"policy": given} if isinstance(given, str) else given
    if not isinstance(one, dict) or not isinstance(one.get("policy"), str):
        return given
    own = one.get("options", {})
    name, options = policy(one["policy"], where)
    if name == one["policy"] or not isinstance(own, dict):
        return given
    options.pop("count_prefix", None)
    budget = options.pop("budget", None)
    filled = {"label": Path(one["policy"]).stem, **one, "policy": name, "options": options | own}
    if budget is not None and "budget" not in own:
        filled.setdefault("budgets", [budget])
    return filled


def check_place(out: Path) -> None:
    """Raises, before models are loaded, where results can't be written.

    Raises:
        ValueError: A folder, one that can't be made or written to, or a file that can't be.
    """
    for path in (out, timing_path(out)):
        there = path
        try:
            there = next(each for each in (path, *path.absolute().parents) if each.exists())
            if there == path:
                with open(path, "ab"):
                    pass
            else:
                with TemporaryFile(dir=there):
                    pass
        except OSError as error:
            raise ValueError(
                f"--out {out}: {there} can't be written to ({error.strerror}): name another place"
            ) from None


def _parser() -> Parser:
    parser = Parser("evaluate", "Compares cache policies on tasks under one memory budget.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings in YAML, such as configs/eval/needle.yaml")
    add("--model", metavar="M", help="the artifact or base model that all policies run on")
    add(
        "--policies",
        type=_words,
        metavar="A,B",
        help="of the settings, by label, or any others: names, files such as "
        "configs/policy/zoomr.yaml, module:Class",
    )
    add("--budgets", type=_numbers, metavar="0.1,0.2", help="shares of full KV, or rows")
    add("--lengths", type=_counts, metavar="N,N", help="tokens of prompts, for tasks that have any")
    add("--tasks", type=_words, metavar="A,B", help="of the settings, by name, or any others")
    add("--n", type=positive_int, metavar="N", help="questions for each task, length and seed")
    add("--seeds", type=_counts, metavar="N,N", help="of the questions")
    add("--precision", metavar="P", help="of the base: fp32, bf16, nf4, int8")
    add("--out", metavar="FILE", help="results (runs/NAME.jsonl for NAME.yaml); they go on there")
    add("--device", default="auto", help="cpu, cuda, or auto (%(default)s)")
    add("--devices", type=positive_int, default=1, metavar="N", help="processes of each machine")
    add("--num-nodes", type=positive_int, default=1, metavar="M", help="machines")
    return parser


def _settings(arguments: Namespace) -> Settings:
    settings = read_settings(arguments.config) if arguments.config else Settings()
    if arguments.policies:
        settings = settings.with_policies([_policy(name) for name in arguments.policies])
    if arguments.tasks:
        settings = settings.with_tasks(arguments.tasks)
    if arguments.lengths:
        settings = settings.with_lengths(arguments.lengths)
    if arguments.budgets:
        settings = settings.with_budgets(arguments.budgets)
    if arguments.n:  # also for tasks that have a number of their own
        settings = replace(settings, tasks=tuple(replace(task, n=None) for task in settings.tasks))
    if arguments.model:
        settings = settings.with_model(arguments.model)
    given = {name: getattr(arguments, name) for name in ("n", "seeds", "precision")}
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def _policy(name: str) -> str | ArmSettings:
    """A label or a policy, or the arm of a file."""
    filled = policy_settings(name, "--policies")
    return name if filled == name else Settings.of({"policies": [filled]}).policies[0]


def _default_out(arguments: Namespace) -> str:
    return f"runs/{Path(arguments.config or 'evaluation').stem}.jsonl"


def _share(arguments: Namespace) -> tuple[Share, str]:
    from zoomkv.evaluation.sharding import ALONE, launch

    if arguments.devices == arguments.num_nodes == 1:
        return ALONE, arguments.device
    return launch(arguments.devices, arguments.num_nodes, arguments.device)


def _report(out: Path) -> None:
    from zoomkv.evaluation.results import empty_warning, read, read_timings, rows, table
    from zoomkv.evaluation.settings import tuned_labels

    results = read(out)
    tuned = tuned_labels(results.header["settings"])
    found = rows(results.answers, read_timings(out), tuned)
    if warning := empty_warning(found):
        print(f"zoomkv: warning: {warning}", file=sys.stderr)
    print(table(found))


@contextmanager
def _progress(shown: bool) -> Iterator[Watch]:
    """A line on stderr; without a terminal, one for each thing that is begun."""
    if not shown or not sys.stderr.isatty():
        said: list[str] = []

        def tell(what: str, answers: int) -> None:
            if shown and what not in said:
                said.append(what)
                print(what, file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    what = TextColumn("{task.description}", markup=False)  # a name may hold brackets
    columns: list[Any] = [SpinnerColumn(), what, TimeElapsedColumn()]
    counts: dict[str, int] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("loading", total=None)

        def watch(what: str, answers: int) -> None:
            counts[what] = counts.get(what, 0) + answers
            told = f"{what}: {counts[what]} answers" if counts[what] else what
            progress.update(bar, description=told)

        yield watch


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ArgumentTypeError(f"{text!r}: give names with commas between them")
    return words


def _numbers(text: str) -> tuple[int | float, ...]:
    numbers = tuple(literal(word) for word in _words(text))
    if not all(isinstance(number, int | float) for number in numbers):
        raise ArgumentTypeError(f"{text!r}: give numbers with commas between them")
    return numbers


def _counts(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() and int(word) < 2**63 for word in words):
        raise ArgumentTypeError(f"{text!r}: give whole numbers with commas between them")
    return tuple(map(int, words))
