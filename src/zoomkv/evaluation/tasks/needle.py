"""Needles in a haystack, in RULER's formats (arXiv 2404.06654, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zoomkv.data.needles import Form, Kind, Needle, NeedleShape, haystack, needle
from zoomkv.evaluation.tasks.base import Question
from zoomkv.evaluation.tasks.string_match import StringMatchTask

_SHORTER = 4  # tokens by which a prompt may miss a length that no text comes out at


class NeedleTask(StringMatchTask):
    """Finds facts that are hidden in a text; kinds and depths take turns from question to question.

    Every kind comes at every depth once in ``len(kinds) * len(depths)`` questions.

    Args:
        haystack: ``noise``, ``needles``, ``book``, ``stdlib``, or a text file or folder.
        kinds: Of ``single``, ``multi-key``, ``multi-value`` and ``multi-query``. The last two ask
            for several needles, whose depths are drawn.
        depths: Where the needle that is asked for stands, in percent; none at all draws it.
        needles: How many are hidden, where the kind has several.
        keys: ``words``, ``numbers`` or ``uuids``.
        values: The same.

    Raises:
        ValueError: No such haystack or kind, or a depth out of range.
    """

    name = "needle"
    max_new_tokens = 128

    def __init__(
        self,
        haystack: str = "noise",
        kinds: Sequence[Kind] = ("single",),
        depths: Sequence[float] = (0, 25, 50, 75, 100),
        needles: int = 4,
        keys: Form = "words",
        values: Form = "numbers",
    ) -> None:
        if isinstance(kinds, str) or not kinds:
            raise ValueError(f"kinds={kinds!r}: give a list of at least one")
        self.kinds, self.depths = tuple(kinds), tuple(map(float, depths))
        self.needles, self.keys, self.values = needles, keys, values
        for place in range(len(self.kinds) * max(1, len(self.depths))):
            self._shape(place, 1)  # refuses what is out of range before anything is made
        self._haystack = _read(haystack)

    def question(
        self, place: int, number: int, length: int, count: Callable[[str], int]
    ) -> Question:
        """See ``StringMatchTask``. The length is met exactly wherever a text can be cut to it."""
        made = self._made(place, number, length, count)
        return Question(
            id=made.id,
            prompt=made.prompt,
            reference=list(made.answers),
            max_new_tokens=self.max_new_tokens,
            opening=made.opening,
            asked=made.question,
            length=length,
            depth=made.depths[0] / 100 if len(made.depths) == 1 else None,
            about={"kind": made.kind, "depths": list(made.depths)},
        )

    def _made(self, place: int, number: int, length: int, count: Callable[[str], int]) -> Needle:
        refused: ValueError | None = None
        for shorter in range(_SHORTER + 1):
            try:
                return needle(number, self._shape(place, length - shorter), self._haystack, count)
            except ValueError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _shape(self, place: int, length: int) -> NeedleShape:
        turn, kind = divmod(place, len(self.kinds))
        shape = NeedleShape(length, self.kinds[kind], self.needles, self.keys, self.values)
        if shape.asked > 1 or not self.depths:
            return shape
        depths = (self.depths[turn % len(self.depths)],)
        return NeedleShape(length, shape.kind, self.needles, self.keys, self.values, depths)


_read = haystack  # the option of the same name hides it
