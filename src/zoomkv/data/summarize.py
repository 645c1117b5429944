"""Adds a summary to every paragraph of a trace file: ``zoomkv summarize``.

A request holds the fixed instruction and one paragraph, nothing else. Each summary is appended to a
journal beside the output as soon as it is there, so a run that was killed goes on where it stopped;
the output itself appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Protocol

from zoomkv.data.segment import MIN_TOKENS, estimate_tokens
from zoomkv.data.traces import ReadReport, Trace, read_traces, write_traces

INSTRUCTION = (
    "You are given one paragraph of somebody's reasoning. Summarise it in one or two short "
    "sentences that keep what later steps may need: results, numbers, names, decisions and their "
    "reason. Don't continue the reasoning and don't add anything. Reply with the summary alone."
)


def messages(paragraph: str) -> list[dict[str, str]]:
    """The chat that asks for the summary of one paragraph."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": paragraph},
    ]


@dataclass(frozen=True)
class Failure:
    """Why one paragraph has no summary."""

    reason: str


class Summarizer(Protocol):
    """Summarises paragraphs; ``name`` tells its summaries from those of others."""

    name: str

    def summarize(self, paragraphs: Sequence[str]) -> Iterator[tuple[int, str | Failure]]:
        """The index of each paragraph with its summary, in the order they get ready."""
        ...


@dataclass
class SummaryReport:
    """What a run did."""

    rows: int = 0
    """Rows written, each with all its summaries."""
    summaries: int = 0
    """Paragraphs summarised by this run, not by an earlier one."""
    failed: list[str] = field(default_factory=list)
    """Paragraphs without a summary, ``file:line: paragraph N: reason``; their rows are left out."""
    read: ReadReport = field(default_factory=ReadReport)
    """What became of the input's rows."""


def summarize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    summarizer: Summarizer,
    *,
    on_bad: Literal["error", "skip"] = "error",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SummaryReport:
    """Writes the traces of ``source`` to ``target`` with a summary for every paragraph.

    Summaries that are there already stay. A last paragraph of fewer than ``MIN_TOKENS`` tokens gets
    none. Rows with a paragraph that failed are left out; the journal then stays, and the same call
    later asks for the missing paragraphs only.

    Args:
        source: What ``read_traces`` reads.
        target: A JSONL file.
        summarizer: An ``EndpointSummarizer`` or a ``LocalSummarizer``.
        on_bad: What to do about rows that are no trace, as in ``read_traces``.
        progress: Called with the paragraphs done and the paragraphs in all.

    Raises:
        ValueError: ``target`` is complete already, or a row is bad.
    """
    target = Path(target)
    journal_path = target.with_name(target.name + ".journal")
    if target.exists() and not journal_path.exists():
        raise ValueError(f"{target} exists already: remove it or choose another name")
    report = SummaryReport()
    rows = [(report.read.place, trace) for trace in read_traces(source, on_bad, report=report.read)]
    wanted = dict.fromkeys(
        trace.segments[index].text for _, trace in rows for index in _unsummarised(trace)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    failures: dict[str, Failure] = {}
    with Journal(journal_path, summarizer.name) as journal:
        pending = [text for text in wanted if text not in journal]
        progress(len(wanted) - len(pending), len(wanted))
        for index, reply in summarizer.summarize(pending):
            if isinstance(reply, Failure):
                failures[pending[index]] = reply
            else:
                journal.add(pending[index], reply)
                report.summaries += 1
            progress(len(wanted) - len(pending) + report.summaries + len(failures), len(wanted))
        complete = []
        for place, trace in rows:
            failed = [
                f"{place}: paragraph {index + 1}: {failures[trace.segments[index].text].reason}"
                for index in _unsummarised(trace)
                if trace.segments[index].text in failures
            ]
            report.failed += failed
            if not failed:
                complete.append(_summarised(trace, journal))
        write_traces(target, complete)
        report.rows = len(complete)
    if not report.failed:
        journal_path.unlink()
    return report


def _unsummarised(trace: Trace) -> list[int]:
    *_, last = trace.segments
    short = last.summary is None and estimate_tokens(last.text) < MIN_TOKENS
    until = len(trace.segments) - short
    return [index for index in range(until) if trace.segments[index].summary is None]


def _summarised(trace: Trace, journal: Journal) -> Trace:
    segments = list(trace.segments)
    for index in _unsummarised(trace):
        segments[index] = replace(segments[index], summary=journal[segments[index].text])
    return replace(trace, segments=tuple(segments))


class Journal:
    """Summaries by paragraph, kept in an append-only file that survives being killed.

    A summary counts for the summariser, the instruction and the paragraph that it was made with.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._summaries: dict[str, str] = {}

    def __enter__(self) -> Journal:
        self._file = self._path.open("a+b")
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # torn by a kill
            end += len(line)
            try:
                key, summary = json.loads(line)
            except ValueError:
                raise ValueError(f"{self._path} is damaged: remove it to start again") from None
            self._summaries[key] = summary
        self._file.truncate(end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def __contains__(self, paragraph: str) -> bool:
        return self._key(paragraph) in self._summaries

    def __getitem__(self, paragraph: str) -> str:
        return self._summaries[self._key(paragraph)]

    def add(self, paragraph: str, summary: str) -> None:
        """Keeps ``summary``, on disk before this returns."""
        key = self._key(paragraph)
        self._summaries[key] = summary
        self._file.write(json.dumps([key, summary]).encode() + b"\n")
        self._file.flush()

    def _key(self, paragraph: str) -> str:
        made_with = json.dumps([self._name, INSTRUCTION, paragraph])
        return hashlib.sha256(made_with.encode()).hexdigest()


class EndpointSummarizer:
    """Asks an OpenAI-compatible endpoint, several paragraphs at a time.

    Busy or failing answers (429, 5xx, time-outs) are tried again with growing pauses. The key is
    read from ``OPENAI_API_KEY``; local servers need none.

    Args:
        endpoint: Base address, such as ``http://localhost:8000/v1``.
        model: The model's name at the endpoint.
        concurrency: Requests under way at once.
        retries: Further tries of a request.
        timeout: Seconds to wait for one answer.
        max_tokens: Longest summary, in tokens.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        concurrency: int = 8,
        retries: int = 6,
        timeout: float = 120.0,
        max_tokens: int = 256,
    ) -> None:
        import openai  # takes a second to load

        self.name = model
        self._openai: Any = openai
        self._endpoint = endpoint
        self._concurrency = concurrency
        self._max_tokens = max_tokens
        self._client = openai.OpenAI(
            base_url=endpoint,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            max_retries=retries,
            timeout=timeout,
        )

    def summarize(self, paragraphs: Sequence[str]) -> Iterator[tuple[int, str | Failure]]:
        """The index of each paragraph with its summary, in the order they get ready.

        Raises:
            ValueError: The endpoint refuses the key or doesn't know the model.
            ConnectionError: Nothing answers at the endpoint.
        """
        todo: SimpleQueue[tuple[int, str]] = SimpleQueue()
        done: SimpleQueue[tuple[int, str | Failure | Exception]] = SimpleQueue()
        for item in enumerate(paragraphs):
            todo.put(item)

        def work() -> None:
            with suppress(Empty):
                while True:
                    index, paragraph = todo.get_nowait()
                    try:
                        done.put((index, self._ask(paragraph)))
                    except Exception as error:  # ends the run, so it is raised there
                        done.put((index, error))
                        return

        for _ in range(self._concurrency):  # daemons: an interrupt need not wait for answers
            Thread(target=work, daemon=True).start()
        try:
            for _ in paragraphs:
                index, reply = done.get()
                if isinstance(reply, Exception):
                    raise reply
                yield index, reply
        finally:
            with suppress(Empty):
                while True:
                    todo.get_nowait()

    def _ask(self, paragraph: str) -> str | Failure:
        errors = self._openai
        try:
            reply = self._client.chat.completions.create(
                model=self.name,
                messages=messages(paragraph),  # type: ignore[arg-type]
                max_tokens=self._max_tokens,
                temperature=0,
            )
            choice = reply.choices[0]
            text = choice.message.content
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            raise ValueError(
                f"{self._endpoint} refuses the key (status {error.status_code}): set OPENAI_API_KEY"
            ) from error
        except errors.NotFoundError as error:
            raise ValueError(
                f"{self._endpoint} doesn't know the address or the model {self.name!r}: "
                "check --endpoint and --model"
            ) from error
        except errors.APITimeoutError:
            return Failure("no answer in time")
        except errors.APIConnectionError as error:
            raise ConnectionError(
                f"nothing answers at {self._endpoint}: run the same command again to go on"
            ) from error
        except errors.APIStatusError as error:
            return Failure(f"status {error.status_code}")
        except (errors.APIError, AttributeError, IndexError, TypeError):
            return Failure("the reply is no chat completion")
        if choice.finish_reason == "length":
            return Failure(f"the summary is longer than {self._max_tokens} tokens")
        return _tidy(text)


class LocalSummarizer:
    """Generates summaries with a chat model, several paragraphs in a batch, greedily.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer, which has a chat template and pads on the left.
        name: What to call the model in the journal.
        batch_size: Paragraphs generated together.
        max_tokens: Longest summary, in tokens.

    Raises:
        ValueError: The tokenizer has no chat template.
    """

    def __init__(
        self, model: Any, tokenizer: Any, name: str, *, batch_size: int = 8, max_tokens: int = 256
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(f"{name} has no chat template: choose an instruction-tuned model")
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._max_tokens = max_tokens

    def summarize(self, paragraphs: Sequence[str]) -> Iterator[tuple[int, str | Failure]]:
        """The index of each paragraph with its summary, a batch of like lengths at a time."""
        order = sorted(range(len(paragraphs)), key=lambda index: len(paragraphs[index]))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            yield from zip(batch, self._generate([paragraphs[i] for i in batch]), strict=True)

    def _generate(self, paragraphs: list[str]) -> list[str | Failure]:
        inputs = self._tokenizer.apply_chat_template(
            [messages(paragraph) for paragraph in paragraphs],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        ).to(self._model.device)
        generated = self._model.generate(
            **inputs,
            max_new_tokens=self._max_tokens,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        replies = generated[:, inputs["input_ids"].shape[1] :]
        return [self._reply(ids) for ids in replies.tolist()]

    def _reply(self, ids: list[int]) -> str | Failure:
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        end = next((index for index, token in enumerate(ids) if token in ends), None)
        if end is None:
            return Failure(f"the summary is longer than {self._max_tokens} tokens")
        return _tidy(self._tokenizer.decode(ids[:end], skip_special_tokens=True))


def _tidy(reply: str | None) -> str | Failure:
    return (reply or "").strip() or Failure("the summary is empty")
