"""The argument parser of our commands: wrong usage becomes one line, like any other bad input."""

from __future__ import annotations

import argparse
import ast
from typing import Any, NoReturn

_WORDS = {"true": "True", "false": "False", "null": "None"}


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` of ``zoomkv NAME`` that raises ``ValueError`` on wrong usage."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"zoomkv {name}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def literal(text: str) -> Any:
    """A Python literal (256, 0.1, None) or a word of YAML (true, null), or the text itself."""
    try:
        return ast.literal_eval(_WORDS.get(text, text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def option(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` as a pair.

    Raises:
        ValueError: There is no ``=``.
    """
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--option {text}: write NAME=VALUE, such as window=512")
    return name.replace("-", "_"), literal(value)
