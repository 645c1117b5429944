"""The answers of one task, length and seed: in which order they come, and how each is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from zoomkv.caches.registry import make_cache
from zoomkv.evaluation.answering import Reply, answer, full_cache_bytes, split_prompt
from zoomkv.evaluation.budgets import Arm, matching, tuned_option
from zoomkv.evaluation.recording import record
from zoomkv.evaluation.replay import replayed_bytes
from zoomkv.evaluation.settings import Protocol, TaskSettings
from zoomkv.evaluation.tasks.base import Mark, Measure, Question, Task
from zoomkv.generation import Generator

Line = dict[str, Any]
Answered = tuple[Line, Line]
"""An answer and its timing."""


@dataclass(frozen=True)
class Unit:
    """What one process answers without stopping in between, given the lines that are there."""

    keys: list[Line]
    """What identifies each line that it writes, in order."""
    answers: Callable[[int], Iterator[list[Answered]]]
    """Given how many lines are there already: the others, some at a time."""


@dataclass(frozen=True)
class Job:
    """A policy under a budget and a protocol."""

    arm: Arm
    budget: int | float | None
    protocol: Protocol | None


@dataclass(frozen=True)
class Prompt:
    """A question as the model gets it."""

    question: Question
    context: list[int]
    """Tokens that can be compressed before the rest comes; none if all come at once."""
    rest: list[int]

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self.context + self.rest

    def parts(self, protocol: Protocol | None) -> list[list[int]]:
        """What is read before each compression."""
        return [self.context, self.rest] if protocol == "unknown" else [self.ids]


@dataclass
class Cell:
    """One task, length and seed with one model.

    Args:
        given: The task's settings.
        task: The task.
        length: Tokens of the prompts, or None.
        seed: Of the questions.
        n: Questions.
        batch_size: Prompts that are answered together, where they are not read once for all.
        protocols: When the question comes.
        arms: Of this model, those without a budget first and those that are tuned last.
        model: Attached.
        tokenizer: Its tokenizer.
    """

    given: TaskSettings
    task: Task | Measure
    length: int | None
    seed: int
    n: int
    batch_size: int
    protocols: Sequence[Protocol]
    arms: Sequence[Arm]
    model: Any
    tokenizer: Any
    tuned: dict[str, int] = field(default_factory=dict)
    """By label, the value that brings an arm to its reference's bytes."""

    @property
    def name(self) -> str:
        """How messages name it."""
        length = "" if self.length is None else f", length {self.length}"
        return f"{self.given.name}{length}, seed {self.seed}"

    def generator(
        self, policy: str = "full", options: Mapping[str, Any] | None = None
    ) -> Generator:
        """Answers prompts under a policy, as they are where the model has no chat template."""
        chat = self.tokenizer.chat_template is not None
        return Generator(self.model, self.tokenizer, policy, chat=chat, **(options or {}))

    @cached_property
    def prompts(self) -> list[Prompt]:
        """All questions, the shortest first where they are answered in batches."""
        prompts = []
        for question in self.questions:
            asked = question.asked if "unknown" in self.protocols else ""
            context, rest = split_prompt(self._full, question.prompt, asked, question.opening)
            prompts.append(Prompt(question, context, rest))
        if self.reads_once(prompts):
            return prompts
        return sorted(prompts, key=lambda one: (one.question.max_new_tokens, len(one.ids)))

    @cached_property
    def questions(self) -> list[Question]:
        """Of the task."""
        questions = self.task.questions(self.n, self.length, self.seed, self._count)
        if (longest := self.given.max_new_tokens) is None:
            return questions
        return [replace(question, max_new_tokens=longest) for question in questions]

    def try_one(self) -> None:
        """Makes one question, so that a length that the task can't have is told early.

        Raises:
            ValueError: See ``Task``.
        """
        self.task.questions(1, self.length, self.seed, self._count)

    def _count(self, text: str) -> int:
        told = self._full.render(text)
        return len(self.tokenizer(told, add_special_tokens=not self._full.chat)["input_ids"])

    def reads_once(self, prompts: Sequence[Prompt]) -> bool:
        """Whether each prompt is read once for all policies, and answered alone."""
        if self.given.batch_size is not None or self.batch_size == 1:
            return self.batch_size == 1
        longest = sum(one.question.max_new_tokens for one in prompts)
        return sum(len(one.ids) for one in prompts) >= longest

    def units(self) -> Iterator[Unit]:
        """All of it, in order."""
        for tuned in (False, True):
            arms = [arm for arm in self.arms if (arm.reference is not None) == tuned]
            if arms:
                yield from self._units(arms)

    def _units(self, arms: Sequence[Arm]) -> Iterator[Unit]:
        if isinstance(self.task, Measure):
            jobs = [Job(arm, budget, None) for arm in arms for budget in arm.budgets]
            for question in self.questions:
                yield self._measured(question, jobs)
            return
        prompts = self.prompts
        jobs = [
            Job(arm, budget, protocol)
            for protocol in self._protocols(prompts)
            for arm in arms
            for budget in arm.budgets
        ]
        if self.reads_once(prompts):
            for prompt in prompts:
                yield self._read_once(prompt, jobs)
            return
        for job in jobs:
            for batch in self._batches(prompts):
                yield self._batched(batch, job)

    def _protocols(self, prompts: Sequence[Prompt]) -> Sequence[Protocol | None]:
        return self.protocols if any(one.question.asked for one in prompts) else (None,)

    def _batches(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        size = 1 if self.reads_once(prompts) else self.batch_size
        return [prompts[at : at + size] for at in range(0, len(prompts), size)]

    def first_ids(self) -> list[int]:
        """Tokens of the first question's prompt."""
        question = self.questions[0]
        return split_prompt(self._full, question.prompt, "", question.opening)[1]

    def remember(self, line: Line) -> None:
        """Takes from an answer that is there what its policy was tuned to."""
        arm = next((arm for arm in self.arms if arm.label == line["label"]), None)
        if arm is not None and arm.reference is not None:
            option = tuned_option(arm.policy)
            self.tuned[arm.label] = line["budget"] or line["options"][option]

    # -- how answers are made -------------------------------------------------------------------

    def _read_once(self, prompt: Prompt, jobs: Sequence[Job]) -> Unit:
        def answers(done: int) -> Iterator[list[Answered]]:
            ids = torch.tensor([prompt.ids], device=self.model.device)
            recording = record(self.model, ids) if len(prompt.ids) > 1 else None
            for job in jobs[done:]:
                with _named(self, job):
                    generator, budget = self._of(job)
                    parts = [[part] for part in prompt.parts(job.protocol)]
                    limit = prompt.question.max_new_tokens
                    [reply] = answer(generator, parts, limit, recording)
                yield [self._answered(prompt.question, job, budget, reply, 1)]

        return Unit([self._key(prompt.question, job) for job in jobs], answers)

    def _batched(self, batch: Sequence[Prompt], job: Job) -> Unit:
        def answers(done: int) -> Iterator[list[Answered]]:
            with _named(self, job):
                generator, budget = self._of(job)
                replies = self._replies(generator, batch, job.protocol)
            yield [
                self._answered(prompt.question, job, budget, reply, len(batch))
                for prompt, reply in zip(batch, replies, strict=True)
            ][done:]

        return Unit([self._key(prompt.question, job) for prompt in batch], answers)

    def _replies(
        self, generator: Generator, batch: Sequence[Prompt], protocol: Protocol | None
    ) -> list[Reply]:
        parts = list(zip(*(prompt.parts(protocol) for prompt in batch), strict=True))
        return answer(generator, parts, [one.question.max_new_tokens for one in batch])

    def _measured(self, question: Question, jobs: Sequence[Job]) -> Unit:
        assert isinstance(self.task, Measure)
        measure = self.task

        def answers(done: int) -> Iterator[list[Answered]]:
            prepared = measure.prepared(question, self._full)
            for job in jobs[done:]:
                with _named(self, job):
                    generator, budget = self._of(job)
                    mark, reply = _measure(measure, prepared, generator)
                yield [self._told(question, job, budget, reply, mark, 1)]

        return Unit([self._key(question, job) for job in jobs], answers)

    # -- lines ----------------------------------------------------------------------------------

    def _key(self, question: Question, job: Job) -> Line:
        key = {
            "task": self.given.name,
            "label": job.arm.label,
            "protocol": job.protocol,
            "length": self.length,
            "seed": self.seed,
            "id": question.id,
        }
        return key if job.arm.reference is not None else {**key, "budget": job.budget}

    def _answered(
        self, question: Question, job: Job, budget: int | float | None, reply: Reply, batch: int
    ) -> Answered:
        assert not isinstance(self.task, Measure)
        return self._told(question, job, budget, reply, self.task.mark(question, reply.text), batch)

    def _told(
        self,
        question: Question,
        job: Job,
        budget: int | float | None,
        reply: Reply,
        mark: Mark,
        batch: int,
    ) -> Answered:
        key = {**self._key(question, job), "budget": budget}
        options = job.arm.options
        if budget is None and job.arm.label in self.tuned:
            options = {**options, tuned_option(job.arm.policy): self.tuned[job.arm.label]}
        line = {
            "kind": "answer",
            "task": self.given.name,
            "policy": job.arm.policy,
            "label": job.arm.label,
            "options": options,
            "budget": budget,
            "protocol": job.protocol,
            "length": self.length,
            "depth": question.depth,
            "seed": self.seed,
            "id": question.id,
            "score": mark.score,
            "right": mark.right,
            "extracted": mark.extracted,
            "truncated": not reply.finished,
            "tokens": len(reply.ids),
            "prompt_tokens": reply.prompt_tokens,
            "device_bytes_mean": reply.device_bytes_mean,
            "device_bytes_peak": reply.device_bytes_peak,
            "host_bytes": reply.host_bytes,
            "bytes_to_device": reply.bytes_to_device,
            "bytes_to_host": reply.bytes_to_host,
            "full_bytes": reply.full_bytes,
            "agreeability": reply.agreeability,
            "about": {**question.about, **mark.about},
            "text": reply.text,
        }
        timing = {"kind": "timing", **key, "seconds": reply.seconds * batch, "batch": batch}
        return line, timing

    # -- policies -------------------------------------------------------------------------------

    @cached_property
    def _full(self) -> Generator:
        return self.generator()

    def _of(self, job: Job) -> tuple[Generator, int | float | None]:
        """The policy, and the budget that it has."""
        if job.arm.reference is None:
            return self.generator(job.arm.policy, job.arm.at(job.budget)), job.budget
        option = tuned_option(job.arm.policy)
        value = self._tuned(job.arm)
        generator = self.generator(job.arm.policy, {**job.arm.options, option: value})
        return generator, value if option == "budget" else None

    def _tuned(self, arm: Arm) -> int:
        """The value of an option at which an arm takes the bytes of the one that it is tuned to.

        Measured on what that one says to the questions in the middle, of middling length.
        """
        if arm.label not in self.tuned:
            reference = next(each for each in self.arms if each.label == arm.reference)
            prompts, answers, target = self._sample(reference)
            option = tuned_option(arm.policy)

            def measure(value: int) -> float:
                generator = self.generator(arm.policy, {**arm.options, option: value})
                return self._replayed(generator, prompts, answers)

            def possible(value: int) -> int:
                """The least value from this one on that the policy can do with."""
                for _ in range(40):
                    try:
                        measure(value)
                    except ValueError:
                        value += max(1, value // 8)
                    else:
                        break
                return value

            shape, dtype = self._full.new_cache().shape, self.model.dtype
            row = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
            guess = max(1, round(target / row))
            found = matching(lambda value: measure(possible(value)), target, guess)
            self.tuned[arm.label] = possible(found)
        return self.tuned[arm.label]

    def _sample(self, arm: Arm) -> tuple[list[list[int]], list[list[int]], float]:
        """Prompts, an arm's answers, and its mean device bytes for one of them."""
        generator = self.generator(arm.policy, arm.at(arm.budgets[0]))
        if isinstance(self.task, Measure):
            question = self.questions[len(self.questions) // 2]
            prepared = self.task.prepared(question, self._full)
            _, reply = _measure(self.task, prepared, generator)
            told = prepared.reference
            return [told["prompt"]], [told["answer"]], reply.device_bytes_mean
        batches = self._batches(self.prompts)
        batch = batches[len(batches) // 2]
        replies = self._replies(generator, batch, self._protocols(batch)[-1])
        target = sum(reply.device_bytes_mean for reply in replies) / len(replies)
        return [one.ids for one in batch], [reply.ids for reply in replies], target

    def _replayed(
        self, generator: Generator, prompts: list[list[int]], answers: list[list[int]]
    ) -> float:
        pad = self.tokenizer.pad_token_id
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        cache = generator.new_cache()
        total = replayed_bytes(cache, ids, mask, answers, pad, self.model.dtype)
        return total / len(prompts)


class _named:
    """Says in which cell and under which policy something was refused."""

    def __init__(self, cell: Cell, job: Job) -> None:
        budget = "" if job.budget is None else f", budget {job.budget}"
        self._where = f"{cell.name}, {job.arm.label}{budget}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self._where}: {error}") from error


def _measure(task: Measure, question: Question, generator: Generator) -> tuple[Mark, Reply]:
    """What a measure says of a policy, and what the policy's cache held meanwhile."""
    cache = make_cache(generator.policy, generator.model, generator.tokenizer, **generator.options)
    readings, longest = [], []

    def watch(done: int, of: int) -> None:
        readings.append(cache.footprint())
        longest.append(int(cache.lengths.max()))

    begun = time.perf_counter()
    mark = task.measure(question, generator.model, cache, watch)
    seconds = time.perf_counter() - begun
    device = [reading.device_bytes for reading in readings]
    agreed = [entry["agreeability"] for entry in cache.trace() if "agreeability" in entry]
    reply = Reply(
        text="",
        ids=question.reference["answer"],
        finished=True,
        prompt_tokens=len(question.reference["prompt"]),
        device_bytes_mean=sum(device) / len(device),
        device_bytes_peak=max(device),
        host_bytes=max(reading.host_bytes for reading in readings),
        bytes_to_device=readings[-1].bytes_to_device,
        bytes_to_host=readings[-1].bytes_to_host,
        full_bytes=full_cache_bytes(cache.shape, generator.model.dtype, 1, longest),
        agreeability=[share for share in agreed if share is not None] or None,
        seconds=seconds,
    )
    return mark, reply
