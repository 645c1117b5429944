"""Needle prompts are those of a search that counts the whole text at each step, and cost less."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data import needles
from zoomkv.data.needles import NEEDLES, NOISE, Haystack, NeedleShape, needle
from zoomkv.data.segment import estimate_tokens

STORY = Haystack(
    tuple(
        sentence
        for n in range(40)
        for sentence in (f'Here "sentence {n} ends."', f"It has {n * n} in it! Why", "Oh?")
    )
)
HAYSTACKS = {"noise": NOISE, "needles": NEEDLES, "story": STORY}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class SlowLayout(needles._Layout):
    """The search by bisection alone."""

    def fitted(self, length: int) -> str:
        high = 1
        while self._tokens(self._first(high)) <= length:
            high *= 2
        whole = bisect_right(range(high), length, key=lambda n: self._tokens(self._first(n))) - 1
        if whole < 0:
            raise ValueError("the shortest prompt")
        if self._tokens(self._first(whole)) == length:
            return self._context(self._first(whole))
        for kept in range(whole, max(whole - 3, -1), -1):
            for last in self.cuts(kept, length):
                if self._tokens([*self._first(kept), last]) == length:
                    return self._context([*self._first(kept), last])
        raise ValueError("no text comes out")

    def cuts(self, kept: int, length: int) -> Iterator[str]:
        follows = self.filler or " ".join(self._first(kept + 4)[kept:])
        near = bisect_right(
            range(1, len(follows) + 1),
            length,
            key=lambda size: self._tokens([*self._first(kept), follows[:size]]),
        )
        for step in range(needles._CUTS_TRIED):
            for size in {near - step, near + step + 1}:
                if 0 < size <= len(follows):
                    yield follows[:size]


@pytest.fixture(scope="module")
def counters(tokenizer: Any) -> dict[str, Callable[[str], int]]:
    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return {
        "tokens": tokens,
        "chat": lambda text: tokens(CHAT.format(text)),
        "bytes": estimate_tokens,
        "letters": len,
        "words": lambda text: len(text.split()),
        "pairs": lambda text: 2 * estimate_tokens(text),  # odd lengths can't be met
    }


def outcome(*given: Any) -> Any:
    try:
        return needle(*given)
    except ValueError as error:
        return next(
            text for text in ("the shortest prompt", "no text comes out") if text in str(error)
        )


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(60, 1500),
    kind=st.sampled_from(["single", "multi-key", "multi-value", "multi-query"]),
    among=st.sampled_from(sorted(HAYSTACKS)),
    counter=st.sampled_from(["tokens", "chat", "bytes", "letters", "words", "pairs"]),
    depth=st.sampled_from([None, 0.0, 37.5, 99.0, 100.0]),
)
@settings(max_examples=150)
def test_the_prompts_are_those_of_the_slow_search(
    counters: Any, seed: int, length: int, kind: Any, among: str, counter: str, depth: Any
) -> None:
    shape = NeedleShape(length, kind, 3)
    if depth is not None:
        shape = NeedleShape(length, kind, 3, depths=(depth,) * shape.asked)
    words = (seed, shape, HAYSTACKS[among], counters[counter])
    found = outcome(*words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needles, "_Layout", SlowLayout)
        assert found == outcome(*words)


@pytest.mark.parametrize("among", sorted(HAYSTACKS))
def test_a_long_text_is_counted_a_few_times_only(counters: Any, among: str) -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return counters["tokens"](text)

    for seed in range(3):
        counted.clear()
        one = needle(seed, NeedleShape(6000, keys="uuids"), HAYSTACKS[among], count)
        assert sum(counted) < 12 * len(one.prompt)
