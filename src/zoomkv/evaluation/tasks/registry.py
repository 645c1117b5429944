"""Tasks by name. Listing them imports none of them.

To add one: write its file, add a line to ``TASKS``, add a row to the case table of the tests.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from zoomkv.evaluation.tasks.base import Measure, Task

TASKS: dict[str, str] = {
    "common_words": "zoomkv.evaluation.tasks.common_words:CommonWordsTask",
    "fidelity": "zoomkv.evaluation.tasks.fidelity:FidelityTask",
    "frequent_words": "zoomkv.evaluation.tasks.frequent_words:FrequentWordsTask",
    "ledger": "zoomkv.evaluation.tasks.ledger:LedgerTask",
    "needle": "zoomkv.evaluation.tasks.needle:NeedleTask",
    "variable_tracking": "zoomkv.evaluation.tasks.variable_tracking:VariableTrackingTask",
    "word_problems": "zoomkv.evaluation.tasks.word_problems:WordProblemsTask",
}
"""Name of each task and where its class is, as ``module:Class``."""


def names() -> list[str]:
    """The registered tasks, sorted."""
    return sorted(TASKS)


def options_of(name: str) -> dict[str, Any]:
    """The options of a task and their defaults.

    Raises:
        ValueError: If there is none of that name; says which one may be meant.
    """
    parameters = list(inspect.signature(_class(name).__init__).parameters.values())[1:]
    return {each.name: each.default for each in parameters}


def task(name: str, **options: Any) -> Task | Measure:
    """A task, ready to be asked for questions.

    Args:
        name: One of ``names()``.
        **options: The task's own options.

    Returns:
        A ``Task``, whose answers are generated and marked, or a ``Measure``, which generates none.

    Raises:
        ValueError: Unknown task, unknown option, or a value out of range or of the wrong kind.
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"task '{name}' has no option '{option}'{_hint(option, known)}")
    try:
        return _class(name)(**options)
    except ValueError as error:
        raise ValueError(f"task '{name}': {error}") from error
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ValueError(f"task '{name}': {given}: one is of the wrong kind ({error})") from error


def _class(name: str) -> Any:
    if name not in TASKS:
        raise ValueError(f"unknown task '{name}'{_hint(name, TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(import_module(module), attribute)


def _hint(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listed = f"there are: {', '.join(known)}" if known else "it has none"
    return f": did you mean '{near[0]}'? ({listed})" if near else f"; {listed}"
