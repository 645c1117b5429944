"""A trace or a plain text of the user's own, as the tokens that a model would have seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from zoomkv.data.render import PROMPT, Renderer
from zoomkv.data.traces import Trace, read_traces
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY


@dataclass(frozen=True)
class Passage:
    """A prompt and what was written after it."""

    ids: list[int]
    prompt: int
    """Tokens of the prompt, which come first."""
    source: str
    """File and line, or file."""
    notes: tuple[str, ...] = ()
    """What was left out, in words."""


def is_trace_file(path: str | os.PathLike[str]) -> bool:
    """Whether a source is read as traces, by its name; anything else is plain text."""
    return Path(path).suffix in (".jsonl", ".parquet")


def read_source(
    path: str | os.PathLike[str], row: int | None = None, prompt: str | None = None
) -> Trace | str:
    """The trace or the text that a file holds.

    Args:
        path: A ``.jsonl`` or ``.parquet`` file of traces, or any other file, of UTF-8 text.
        row: Which trace, from 0; the first by default.
        prompt: What the text answers; a trace has its own.

    Raises:
        ValueError: Not such a file, no such row, an empty text, or an option that does not go
            with the kind of file.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    if is_trace_file(path):
        if prompt is not None:
            raise ValueError(f"{path}: a trace has its own prompt, leave out --prompt")
        return _nth(read_traces(path), row or 0, path)
    if row is not None:
        raise ValueError(f"{path}: --row is for traces in .jsonl or .parquet, this is plain text")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        (prompt or "").encode()
    except UnicodeError:
        raise ValueError(f"{path}: the text or its prompt is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"{path}: the text is empty")
    return text


def tokenise(
    source: Trace | str, tokenizer: Any, limit: int, path: str, prompt: str | None = None
) -> Passage:
    """The tokens of what ``read_source`` gave.

    A trace keeps its summaries if the tokenizer knows their delimiters, as those of trained
    artifacts do; else they are left out. What is longer than the model's context is cut.

    Args:
        source: Trace or text.
        tokenizer: Of the model. Prompts go into its chat template.
        limit: Most tokens.
        path: Named in messages.
        prompt: What a text answers.

    Raises:
        ValueError: The trace can't be rendered, or the prompt alone fills the context.
    """
    if isinstance(source, Trace):
        return _rendered(source, tokenizer, limit, path)
    before: list[int] = []
    if prompt:
        chat = bool(tokenizer.chat_template)
        if chat:
            turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    ids = before + tokenizer(source, add_special_tokens=not before)["input_ids"]
    if len(before) >= limit:
        raise ValueError(f"{path}: the prompt alone fills the model's {limit} tokens")
    notes = (f"cut from {len(ids)} to the model's {limit} tokens",) if len(ids) > limit else ()
    return Passage(ids[:limit], len(before), path, notes)


def _rendered(trace: Trace, tokenizer: Any, limit: int, path: str) -> Passage:
    if not tokenizer.chat_template:
        raise ValueError(f"{path}: the model has no chat template to put a trace into; give text")
    notes = []
    known = tokenizer.get_vocab()
    if not {BEGIN_OF_SUMMARY, END_OF_SUMMARY} <= known.keys():
        if any(segment.summary is not None for segment in trace.segments):
            notes.append("summaries left out: the model knows no delimiters for them")
        bare = tuple(replace(segment, summary=None) for segment in trace.segments)
        trace = replace(trace, segments=bare)
    renderer = Renderer(tokenizer, max_length=limit)
    rendered = renderer(trace)
    if rendered is None:
        raise ValueError(f"{path}: the trace can't be rendered, {renderer.report}")
    if renderer.report.counts["cut at a paragraph"]:
        notes.append(f"cut at a paragraph to fit the model's {limit} tokens")
    prompt = rendered.kinds.count(PROMPT)
    return Passage(rendered.input_ids, prompt, path, tuple(notes))


def _nth(traces: Iterator[Trace], row: int, path: str | os.PathLike[str]) -> Trace:
    for trace in islice(traces, row, None):
        return trace
    raise ValueError(f"{path}: there is no row {row} (they count from 0)")
