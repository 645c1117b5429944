"""Prompts that are made as long as they may be: a text, and a question about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt in two parts, so that a question need not be known when the context is read."""

    context: str
    question: str
    """One line."""
    opening: str
    """How the answer begins, in the model's place."""
    answers: tuple[str, ...]
    """What the answer is to hold."""
    length: int
    """Tokens of ``prompt``."""
    id: str

    @property
    def prompt(self) -> str:
        """Both parts as one text."""
        return f"{self.context}\n{self.question}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def largest(tokens: Callable[[int], int], limit: int, least: int, most: int, what: str) -> int:
    """The largest size whose text is no longer than allowed, found in a few measurements.

    Sizes are tried along the line through the first and the latest measurement, then in growing
    steps to the other side; where tokens don't quite grow with the size, a size that fits is found
    all the same, if perhaps not the largest one.

    Args:
        tokens: Tokens at a size; about in proportion to what comes on top of ``least``.
        limit: Most tokens.
        least: Smallest size.
        most: Largest size.
        what: Is named in the error.

    Raises:
        ValueError: The smallest size is too long already.
    """
    first = tokens(least)
    if first > limit:
        raise ValueError(f"{what} length={limit}: the shortest prompt takes {first} tokens")
    fits, too_long, tried, nudge = least, most + 1, least + 16, 0
    while too_long - fits > 1:
        tried = min(max(tried, fits + 1), too_long - 1)
        found = tokens(tried)
        fits, too_long = (tried, too_long) if found <= limit else (fits, tried)
        along = least + (limit - first) * (tried - least) // max(found - first, 1)
        up, down = fits + 1 + nudge, too_long - 1 - nudge
        tried = max(along, up) if tried == fits else min(along, down)
        nudge = 2 * nudge + 1
    return fits
