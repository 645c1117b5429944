"""Traces as token ids, with what each token is: prompt, thought, summary or solution."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from zoomkv.data.traces import Trace
from zoomkv.spans.boundaries import boundary_mask
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY

IGNORE = -100
NOTHING = -1
PROMPT, THOUGHT, SUMMARY, SOLUTION = range(4)
KINDS = ("prompt", "thought", "summary", "solution")
GAP = "\n\n"


@dataclass(frozen=True)
class Rendered:
    """One trace as a training example."""

    input_ids: list[int]
    kinds: list[int]
    """One of ``PROMPT``, ``THOUGHT``, ``SUMMARY``, ``SOLUTION`` for each token."""
    looks_up: list[int]
    """For each token the summary that a choice made there should zoom into, or ``NOTHING``."""

    @property
    def labels(self) -> list[int]:
        """The ids to learn: everything that the assistant says, its end included."""
        pairs = zip(self.input_ids, self.kinds, strict=True)
        return [token if kind != PROMPT else IGNORE for token, kind in pairs]


@dataclass
class RenderReport:
    """How many traces were rendered, cut or dropped, and why."""

    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))


class Renderer:
    """Renders traces with a model's chat template.

    A paragraph and its summary become ``paragraph \\n\\n <|begin_of_summary|>summary
    <|end_of_summary|> \\n\\n``; nothing is inserted in the solution (ZoomR section 3.2). The
    prompt is tokenised exactly as generation will tokenise it, so no token straddles the join.

    Args:
        tokenizer: With the two delimiters among its special tokens.
        max_length: Longest example in tokens. A longer trace is cut at the end of the last
            paragraph that fits, and loses its solution; one whose prompt leaves no room is dropped.
        thought_tags: Texts around the thought for models that use them, such as
            ``("<think>\\n", "</think>\\n\\n")``. An opening tag that the chat template already
            wrote is not repeated.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int = 2048,
        thought_tags: tuple[str, str] = ("", ""),
    ) -> None:
        if max_length < 2:
            raise ValueError(f"max_length={max_length}: an example needs at least two tokens")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.opening, self.closing = thought_tags
        # `all_special_tokens` lacks those that were added later, as our delimiters are.
        added = tokenizer.added_tokens_decoder.values()
        self.special = [token.content for token in added if token.special]
        self.boundary = boundary_mask(tokenizer, len(tokenizer)).tolist()
        self.report = RenderReport()

    def prompt(self, problem: str) -> str:
        """The problem as a user turn, up to where the assistant begins to write."""
        turn = [{"role": "user", "content": problem}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def __call__(self, trace: Trace) -> Rendered | None:
        """The trace as ids and kinds, or ``None`` when it had to be dropped (see ``report``)."""
        if not trace.segments and not trace.solution:
            self._drop("empty")
            return None
        texts = [trace.problem, trace.solution]
        texts += [text for part in trace.segments for text in (part.text, part.summary or "")]
        if any(special in text for text in texts for special in self.special):
            self._drop("special token in the text")
            return None
        prompt = self.prompt(trace.problem)
        ids = self._encode(prompt)["input_ids"]
        kinds = [PROMPT] * len(ids)
        pieces = self._pieces(trace, prompt)
        said, kinds_said, ends = self._tokens(pieces)
        room = self.max_length - len(ids)
        if len(said) > room:
            fitting = [end for end in ends if end <= room]
            if not fitting:
                self._drop("first paragraph does not fit")
                return None
            said, kinds_said = said[: fitting[-1]], kinds_said[: fitting[-1]]
            self.report.counts["cut at a paragraph"] += 1
        self.report.counts["rendered"] += 1
        ids, kinds = ids + said, kinds + kinds_said
        return Rendered(ids, kinds, self._looks_up(trace, ids, kinds))

    def _looks_up(self, trace: Trace, ids: list[int], kinds: list[int]) -> list[int]:
        """Marks the sentence ends of a solution that needs one segment's text."""
        if trace.needed is None or trace.segments[trace.needed].summary is None:
            return [NOTHING] * len(ids)
        before = trace.segments[: trace.needed]
        summary = sum(segment.summary is not None for segment in before)
        pairs = zip(ids, kinds, strict=True)
        marked = (kind == SOLUTION and self.boundary[token] for token, kind in pairs)
        return [summary if mark else NOTHING for mark in marked]

    def _pieces(self, trace: Trace, prompt: str) -> list[tuple[str, int, bool]]:
        """``(text, kind, a cut may follow)`` in the order in which the assistant writes them."""
        opening = "" if self.opening and prompt.endswith(self.opening) else self.opening
        pieces = [(opening, THOUGHT, False)]
        for segment in trace.segments:
            pieces.append((segment.text + GAP, THOUGHT, segment.summary is None))
            if segment.summary is not None:
                summary = f"{BEGIN_OF_SUMMARY}{segment.summary}{END_OF_SUMMARY}"
                pieces += [(summary, SUMMARY, False), (GAP, THOUGHT, True)]
        pieces.append((self.closing, THOUGHT, False))
        pieces.append((trace.solution + self.tokenizer.eos_token, SOLUTION, True))
        return [piece for piece in pieces if piece[0]]

    def _tokens(
        self, pieces: list[tuple[str, int, bool]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Ids, their kinds by offsets, and the token counts at which the text may be cut."""
        text = "".join(piece for piece, _, _ in pieces)
        encoded = self._encode(text, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        kinds: list[int] = []
        cuts: list[int] = []
        end = 0
        for piece, kind, may_cut in pieces:
            end += len(piece)
            while len(kinds) < len(starts) and starts[len(kinds)] < end:
                kinds.append(kind)
            if may_cut:
                cuts.append(len(kinds))
        return encoded["input_ids"], kinds, cuts

    def _encode(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=False, **options)

    def _drop(self, reason: str) -> None:
        self.report.counts[f"dropped: {reason}"] += 1
