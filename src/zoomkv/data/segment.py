"""Cuts a thought into the paragraphs that each get one summary (ZoomR, training data)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

MIN_TOKENS = 40
"""Paragraphs shorter than this (a bare equation, a list item) join the next one."""

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
_UNCUT = re.compile(
    r"^[ \t]*(?P<fence>```+|~~~+)[^`\n]*\n(?:.*\n)*?[ \t]*(?P=fence)[`~]*[ \t\r]*$"  # code
    r"|\$\$[^$]*(?:\$(?!\$)[^$]*)*\$\$",  # display maths
    re.MULTILINE,
)


def estimate_tokens(text: str) -> int:
    """About how many tokens ``text`` has: four bytes of UTF-8 each, rounded up."""
    return -(-len(text.encode()) // 4)


def segment_thought(
    text: str,
    count_tokens: Callable[[str], int] = estimate_tokens,
    min_tokens: int = MIN_TOKENS,
) -> list[str]:
    """The paragraphs of ``text``, in order; joined together they are ``text`` again.

    Cuts stand after blank lines, never inside a code fence or ``$$...$$`` (one that is never closed
    protects nothing). A paragraph of fewer than ``min_tokens`` tokens is joined to the next one, so
    only the last one returned can be shorter.

    Args:
        text: A whole thought. Each paragraph keeps the blank lines that follow it.
        count_tokens: Tokens of a piece of text, a tokenizer's own count where there is one.
        min_tokens: Shortest paragraph that stands alone, in tokens; 0 merges nothing.
    """
    paragraphs: list[str] = []
    pending = ""
    for paragraph in _split(text):
        pending += paragraph
        if not pending.isspace() and count_tokens(pending.strip()) >= min_tokens:
            paragraphs.append(pending)
            pending = ""
    if pending.isspace() and paragraphs:
        paragraphs[-1] += pending
    elif pending:
        paragraphs.append(pending)
    return paragraphs


def _split(text: str) -> Iterator[str]:
    masked = _UNCUT.sub(lambda match: "x" * len(match[0]), text)  # hides the blank lines within
    start = 0
    for blank in _BLANK_LINES.finditer(masked):
        yield text[start : blank.end()]
        start = blank.end()
    if start < len(text):
        yield text[start:]
