"""From an artifact or a base model to text: ``load`` and ``Generator``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from zoomkv.backbone.adapter import load_adapter
from zoomkv.backbone.attach import attach, is_attached
from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.backbone.fingerprint import describe_mismatch, fingerprint
from zoomkv.backbone.load import QUANTISED, Precision, load_base
from zoomkv.caches.base import Footprint, PolicyCache
from zoomkv.caches.registry import make_cache, reads_summaries
from zoomkv.export.artifact import ADAPTER, is_artifact, read_artifact, read_router
from zoomkv.spans.thoughts import SUMMARY_INSTRUCTION, Delimiters

_SAMPLED_EVERY = 8  # decode steps between two readings of the footprint


def load(
    path: str,
    precision: Precision = "fp32",
    device: str = "auto",
    attention: str = "sdpa",
    base: str | None = None,
    merge: bool = True,
) -> tuple[Any, Any]:
    """A model that is ready for our caches, and its tokenizer.

    Args:
        path: An artifact's folder, or a base model: hub id, folder, GGUF file, ``smollm2-135m``.
        precision: Of the base: fp32, bf16, nf4 or int8.
        device: ``auto`` takes CUDA where there is one.
        attention: The transformers attention implementation.
        base: Where the artifact's base is now, if not where it was when it was trained.
        merge: Fold the adapter into an unquantised base, which decodes faster.

    Returns:
        ``(model, tokenizer)``, attached, in evaluation mode.

    Raises:
        ValueError: No such model, a broken artifact, a base that is not the artifact's own, or
            ``base`` without an artifact.
    """
    if not is_artifact(path):
        folder = Path(path)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ValueError(f"checkpoint {path}: neither an artifact of ours nor a model's folder")
        if base is not None:
            raise ValueError(f"base={base!r} goes with an artifact, and {path} is none")
        model, tokenizer = load_base(path, precision, device, attention)
        attach(model, tokenizer)
        return model, tokenizer
    artifact = read_artifact(path)
    model, tokenizer = load_base(base or artifact.base, precision, device, attention)
    if difference := describe_mismatch(artifact.fingerprint, fingerprint(model)):
        raise ValueError(f"checkpoint {path}: trained on another base: {difference}")
    if artifact.router:
        attach(model, tokenizer, read_router(path, artifact).to(model.device))
        return model.eval(), tokenizer
    model = load_adapter(model, tokenizer, Path(path) / ADAPTER)
    if add_to_tokenizer(tokenizer) != list(artifact.delimiters.values()):
        raise ValueError(f"checkpoint {path}: this tokenizer gives its delimiters other ids")
    if merge and precision not in QUANTISED:
        model = model.merge_and_unload()
    attach(model, tokenizer)
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Answer:
    """One generated text."""

    text: str
    """Without special tokens."""
    ids: list[int]
    """Generated ids, the end-of-text id included."""
    finished: bool
    """False if it was cut off by ``max_new_tokens``."""


@dataclass(frozen=True)
class Stats:
    """What one call of ``generate`` cost. Bytes are of the cache alone, from its storages."""

    tokens: int
    """Generated tokens, over all rows."""
    seconds: float
    """Prefill included."""
    tokens_per_second: float
    device_bytes_mean: float
    """Mean over decode steps (every eighth is read)."""
    device_bytes_peak: int
    host_bytes: int
    """At the end."""
    bytes_to_device: int
    bytes_to_host: int
    rows_mean: float
    """Rows that a query reads, mean over layers, batch rows and steps."""
    agreeability: float | None
    """Mean over the selection steps that have one (``zoomr``)."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Generator:
    """Answers prompts with a fresh cache of one policy for each call.

    Args:
        model: Attached or not; a causal LM of a supported family.
        tokenizer: Its tokenizer.
        policy: Name of a policy.
        system: System prompt; by default the chat template's own.
        textual_summaries: For a model that was not trained to summarise: asks it to, in the system
            prompt, and recognises the delimiters as text.
        chat: Put prompts into the chat template as user turns.
        **options: Options of the policy.

    Raises:
        ValueError: Unknown policy, options out of range, a system prompt without chat template, or
            ``textual_summaries`` for a policy that has no use for them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: str = "full",
        *,
        system: str | None = None,
        textual_summaries: bool = False,
        chat: bool = True,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.policy, self.options, self.chat = policy, options, chat
        self.system = system
        self._delimiters: Delimiters | None = None
        if not chat and (system or textual_summaries):
            raise ValueError("chat=False leaves no place for a system prompt: put it in the prompt")
        if textual_summaries:
            check_reads_summaries(policy)
            self.system = "\n\n".join(filter(None, (system, SUMMARY_INSTRUCTION)))
            self._delimiters = Delimiters.textual(tokenizer)
        if not is_attached(model):
            attach(model, tokenizer)
        self.new_cache()  # refuses bad options before anything is generated
        self.cache: PolicyCache | None = None
        self.stats: Stats | None = None
        self._history: tuple[Tensor, Tensor] | None = None

    def new_cache(self) -> PolicyCache:
        """An empty cache of this generator's policy."""
        return make_cache(self.policy, self.model, self.tokenizer, self._delimiters, **self.options)

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 512,
        follow: bool = False,
        streamer: Any = None,
        **settings: Any,
    ) -> list[Answer]:
        """The answers to a batch of prompts, in order.

        Args:
            prompts: One or several; they are padded on the left and masked by length.
            max_new_tokens: Longest answer.
            follow: The prompts are the next turn of the conversations of the call before, whose
                cache is used again. A turn that breaks off ends the conversation.
            streamer: A transformers streamer (batches of one).
            **settings: Anything ``model.generate`` takes: ``do_sample``, ``temperature``,
                ``num_beams``, ``num_return_sequences``...

        Returns:
            One answer for each prompt, or ``num_return_sequences`` for each, next to each other.
            ``self.stats`` and ``self.cache`` belong to this call.

        Raises:
            ValueError: An empty prompt, or nothing to follow.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        ids, mask = self._follow(texts) if follow else self._encode(texts)
        if not follow:
            self.cache, self._history = self.new_cache(), None
        cache, self.stats = self.cache, None
        assert cache is not None
        self._warn_if_long(ids.shape[1], max_new_tokens)
        eos = _as_list(settings.pop("eos_token_id", self._eos_ids()))
        pad = settings.pop("pad_token_id", self.tokenizer.pad_token_id)
        cache.set_eos(eos, pad)
        cache.expect_prompt(ids.shape[1])
        settings.setdefault("do_sample", False)
        if not settings["do_sample"]:
            # The model's own sampling defaults would only raise warnings.
            settings = dict.fromkeys(("temperature", "top_p", "top_k")) | settings
        before = cache.footprint()
        meter = _Meter(cache)
        criteria = StoppingCriteriaList([meter, *settings.pop("stopping_criteria", ())])
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                output = self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    cache=cache,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=eos,
                    pad_token_id=pad,
                    streamer=streamer,
                    stopping_criteria=criteria,
                    **settings,
                )
        except BaseException:
            if cache.seen != before.seen:
                self._history = None  # half a turn is in the cache
            raise
        seconds = time.perf_counter() - begun
        answers = [self._answer(row, set(eos)) for row in output[:, ids.shape[1] :].tolist()]
        self.stats = meter.stats(sum(len(answer.ids) for answer in answers), seconds, before)
        # Beams leave a cache with a row for each, and several returns no one text, to follow.
        one = settings.get("num_beams", 1) == settings.get("num_return_sequences", 1) == 1
        self._history = _told(output, mask, answers) if one else None
        return answers

    def stream(self, prompt: str, max_new_tokens: int = 512, **settings: Any) -> Iterator[str]:
        """The answer to one prompt, piece by piece, the delimiters of summaries included.

        A reader that stops early ends the generation at the next token.

        Raises:
            ValueError: As ``generate``; whatever the generation raises is raised here.
        """
        pieces: Queue[str | BaseException | None] = Queue()
        eos = _as_list(settings.get("eos_token_id", self._eos_ids()))
        streamer = _Pieces(self.tokenizer, pieces, set(eos))

        def work() -> None:
            try:
                self.generate(prompt, max_new_tokens, streamer=streamer, **settings)
                pieces.put(None)
            except BaseException as error:  # handed on to the reader
                pieces.put(error)

        worker = Thread(target=work, daemon=True)
        worker.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            streamer.abandoned = True  # a reader that has had enough ends the generation
            worker.join()

    def render(self, prompt: str) -> str:
        """A prompt as the model is to read it."""
        if not prompt.strip():
            raise ValueError("the prompt is empty: give it some text")
        if not self.chat:
            return prompt
        turns = [{"role": "user", "content": prompt}]
        if self.system:
            turns.insert(0, {"role": "system", "content": self.system})
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:  # 2 x [B, T]
        if not prompts:
            raise ValueError("there is no prompt: give at least one")
        return self._tokens([self.render(prompt) for prompt in prompts])

    def _tokens(
        self, texts: list[str], in_conversation: bool = False
    ) -> tuple[Tensor, Tensor]:  # 2 x [B, T]
        batch = self.tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            # A chat template writes its special tokens itself.
            add_special_tokens=not (self.chat or in_conversation),
        )
        if not bool(batch["attention_mask"].any(1).all()):
            raise ValueError("a prompt holds no token: give it some text")
        device = self.model.device
        return batch["input_ids"].to(device), batch["attention_mask"].to(device)

    def _follow(self, prompts: list[str]) -> tuple[Tensor, Tensor]:  # 2 x [B, T]
        if self._history is None:
            raise ValueError(
                "there is no conversation to follow, or its last turn broke off: generate a first "
                "turn, greedily or by sampling, with one answer a prompt"
            )
        ids, mask = self._history
        if len(prompts) != len(ids):
            raise ValueError(f"{len(prompts)} prompts can't follow {len(ids)} conversations")
        last = [row[told][-1] for row, told in zip(ids, mask.bool(), strict=True)]
        turns = [self._next_turn(prompt, int(id)) for prompt, id in zip(prompts, last, strict=True)]
        new_ids, new_mask = self._tokens(turns, in_conversation=True)
        return torch.cat([ids, new_ids], 1), torch.cat([mask, new_mask], 1)

    def _next_turn(self, prompt: str, last: int) -> str:
        """What the chat template puts between an answer, whose last id is given, and the next."""
        if not prompt.strip():
            raise ValueError("the prompt is empty: give it some text")
        if not self.chat:
            return prompt
        mark = "\u241f"
        turns = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": mark},
            {"role": "user", "content": prompt},
        ]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        following = text.rpartition(mark)[2]
        # An answer that was cut off lacks the end that the template expects.
        return following.removeprefix(self.tokenizer.decode([last]))

    def _answer(self, ids: list[int], eos: set[int]) -> Answer:
        end = next((at for at, token in enumerate(ids) if token in eos), None)
        ids = ids if end is None else ids[: end + 1]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(text, ids, finished=end is not None)

    def _eos_ids(self) -> list[int]:
        eos = self.model.generation_config.eos_token_id
        return _as_list(self.tokenizer.eos_token_id if eos is None else eos)

    def _warn_if_long(self, prompt: int, new: int) -> None:
        limit = self.model.config.max_position_embeddings
        if prompt + new > limit:
            warnings.warn(
                f"the prompt of {prompt} tokens and {new} new ones may exceed the model's "
                f"{limit} positions; its output may degrade there",
                stacklevel=3,
            )


def check_reads_summaries(policy: str) -> None:
    """Raises ValueError if a policy has no use for summaries that a model would be asked for."""
    if not reads_summaries(policy):
        raise ValueError(
            f"textual summaries: policy '{policy}' has no use for them; choose zoomr or sumr, or "
            "do without"
        )


def _told(output: Tensor, mask: Tensor, answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """Prompt and answers as they stand, and which of their tokens are no padding; [B, T] each."""
    told = torch.zeros_like(output)
    told[:, : mask.shape[1]] = mask
    for row, answer in zip(told[:, mask.shape[1] :], answers, strict=True):
        row[: len(answer.ids)] = 1
    return output, told


def _as_list(ids: int | Sequence[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids or [])


class _Abandoned(Exception):
    """Ends a generation whose reader has gone."""


class _Pieces(TextStreamer):
    """Puts text into a queue as soon as it is certain, without the end-of-text token."""

    def __init__(self, tokenizer: Any, pieces: Queue[Any], eos: set[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=False)
        self.abandoned = False
        self._queue, self._eos = pieces, eos

    def put(self, value: Tensor) -> None:
        if self.abandoned:
            raise _Abandoned
        if self.next_tokens_are_prompt or int(value) not in self._eos:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._queue.put(text)


class _Meter(StoppingCriteria):
    """Reads a cache's footprint while it generates; never stops anything."""

    def __init__(self, cache: PolicyCache) -> None:
        self.cache = cache
        self.steps = 0
        self.device_bytes: list[int] = []
        self.rows: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.steps % _SAMPLED_EVERY == 0:
            self._read()
        self.steps += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def stats(self, tokens: int, seconds: float, before: Footprint) -> Stats:
        self._read()
        end = self.cache.footprint()
        turn = (entry for entry in self.cache.trace() if entry["column"] > before.seen)
        agreed = [entry.get("agreeability") for entry in turn]
        known = [share for share in agreed if share is not None]
        return Stats(
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            device_bytes_mean=sum(self.device_bytes) / len(self.device_bytes),
            device_bytes_peak=max(self.device_bytes),
            host_bytes=end.host_bytes,
            bytes_to_device=end.bytes_to_device - before.bytes_to_device,
            bytes_to_host=end.bytes_to_host - before.bytes_to_host,
            rows_mean=sum(self.rows) / len(self.rows),
            agreeability=sum(known) / len(known) if known else None,
        )

    def _read(self) -> None:
        footprint = self.cache.footprint()
        self.device_bytes.append(footprint.device_bytes)
        self.rows.append(footprint.rows_mean)
