"""Picks the command before anything heavy is imported, and turns errors into one line.

Exit codes: 0 done, 2 bad usage or bad input, 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from zoomkv import __version__

COMMANDS = {
    "fit": ("zoomkv.training.cli", "train from a config file"),
    "validate": ("zoomkv.training.cli", "measure a training checkpoint on the validation data"),
    "test": ("zoomkv.training.cli", "measure a training checkpoint on the test data"),
    "predict": ("zoomkv.training.cli", "run a training checkpoint over the prediction data"),
    "summarize": ("zoomkv.cli.summarize", "add a summary to every paragraph of a trace file"),
    "export": ("zoomkv.cli.export", "turn a training checkpoint into a small artifact"),
    "generate": ("zoomkv.cli.generate", "stream the answer to a prompt, with any cache policy"),
    "inspect": ("zoomkv.cli.inspect", "show which queries of a text look far back, as pictures"),
    "evaluate": ("zoomkv.cli.evaluate", "compare policies on tasks under one memory budget"),
    "report": ("zoomkv.cli.report", "turn results into tables, pictures and a page"),
    "lens": ("zoomkv.cli.lens", "turn a traced answer into a page that shows what was held when"),
    "lm-eval": ("zoomkv.cli.lm_eval", "lm-eval's own command, with our model class in it"),
    "bench": ("zoomkv.cli.bench", "measure speed and memory"),
}
"""Name -> (module whose ``main(argv)`` runs it, what it does); ``argv[0]`` is the name."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of ``zoomkv ARGV``.

    ``--debug`` anywhere on the line, or ``ZOOMKV_DEBUG`` in the environment, adds the traceback to
    an error message.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or bool(os.environ.get("ZOOMKV_DEBUG"))
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"zoomkv {__version__}")
        return 0
    try:
        module, _ = COMMANDS[words[0]]
    except KeyError:
        near = get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see zoomkv --help"
        return _fail(f"no command {words[0]!r}: {hint}", 2)
    try:
        return import_module(module).main(words) or 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, ValueError | OSError | ArgumentError):
            return _fail(str(error), 2)
        return _fail(f"{type(error).__name__}: {error} (--debug shows where)", 1)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: zoomkv COMMAND ...",
            "",
            "Keeps the whole history on the host and, on the device, only what the query needs.",
            "",
            "commands:",
            *lines,
            "",
            "'zoomkv COMMAND --help' shows a command's options; --debug adds tracebacks to errors.",
        ]
    )


def _fail(message: str, code: int) -> int:
    print("zoomkv:", " ".join(message.split()), file=sys.stderr)
    return code
