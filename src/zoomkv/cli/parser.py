"""The argument parser of our commands: wrong usage becomes one line, like any other bad input."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
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


def policy(text: str, where: str = "--policy") -> tuple[str, dict[str, Any]]:
    """A policy's name, and the options of the file if ``text`` is one: ``NAME.yaml``.

    A file holds one option a line, as ``configs/policy/`` does. It is named after its policy, or
    has a line ``policy: NAME``.

    Args:
        text: A policy's name, or the path of a file.
        where: Is named in errors.

    Raises:
        ValueError: The file can't be read, or is not what such files look like.
    """
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        return text, {}
    from jsonargparse import get_loader

    if not path.is_file():
        raise ValueError(f"{where} {text}: there is no such file")
    try:
        found = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except Exception as error:  # PyYAML's errors have no base but this one
        raise ValueError(f"{where} {text}: can't be read ({error})") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{where} {text}: write NAME: VALUE lines, or {{}} for no options")
    return str(found.pop("policy", path.stem)), found
