"""Following variables from assignment to assignment (RULER, arXiv 2404.06654, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable

from zoomkv.data.variable_tracking import VariableShape, variables
from zoomkv.evaluation.tasks.base import Question
from zoomkv.evaluation.tasks.string_match import StringMatchTask


class VariableTrackingTask(StringMatchTask):
    """Names all variables that have one value, most of them through other variables.

    Args:
        chains: Of variables; the first is asked for.
        hops: Assignments of each chain after its first.
        example: Put RULER's example before the task, about 400 tokens.

    Raises:
        ValueError: A number out of range.
    """

    name = "variable_tracking"
    max_new_tokens = 30

    def __init__(self, chains: int = 1, hops: int = 4, example: bool = True) -> None:
        self.chains, self.hops, self.example = chains, hops, example
        self._shape(1)

    def question(
        self, place: int, number: int, length: int, count: Callable[[str], int]
    ) -> Question:
        """See ``StringMatchTask``."""
        made = variables(number, self._shape(length), count)
        return self.asking(made, length, {"chains": self.chains, "hops": self.hops})

    def _shape(self, length: int) -> VariableShape:
        return VariableShape(length, self.chains, self.hops, self.example)
