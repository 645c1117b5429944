"""``zoomkv`` as a model of lm-eval: its tasks under any cache policy, and what the caches held.

This module needs lm-eval (``pip install 'zoomkv[eval]'``); nothing but ``zoomkv lm-eval`` imports
it, and importing it registers nothing.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.utils import logging as bars

from zoomkv import __version__
from zoomkv.caches.base import PolicyCache
from zoomkv.caches.registry import make_cache, options_of, policy_class
from zoomkv.evaluation.lm_memory import Memory, Meter
from zoomkv.evaluation.lm_stopping import StopStrings, without_summaries
from zoomkv.export.artifact import is_artifact, read_artifact
from zoomkv.generation import load
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, SUMMARY_INSTRUCTION, Delimiters

_log = logging.getLogger("lm_eval.zoomkv")  # shown wherever lm-eval shows its own
_OF_HF = {  # options of lm-eval's own class that have another name here
    "dtype": "precision=bf16",
    "load_in_4bit": "precision=nf4",
    "load_in_8bit": "precision=int8",
    "attn_implementation": "attention=sdpa",
    "parallelize": "device=cuda:0",
    "peft": "pretrained=ARTIFACT",
}


class ZoomKVLM(HFLM):
    """A model for lm-eval that answers with a fresh cache of one policy for each batch.

    Requests of a task are sorted by length, so the prompts of a batch need little padding. Answers
    are generated with the task's own sampling settings and stop strings; a row that has ended
    stores nothing more. ``results["config"]["zoomkv"]`` gets what the caches held, by task.

    Args:
        pretrained: An artifact's folder, or a base model: hub id, folder, GGUF file,
            ``smollm2-135m``.
        policy: Name of a policy; by default the artifact's own, or ``full``.
        precision: Of the base: fp32, bf16, nf4 or int8.
        base: Where the artifact's base is now, if it was moved.
        attention: The transformers attention implementation.
        device: cpu, cuda, cuda:N or auto; CUDA devices that aren't there become the CPU, since
            lm-eval asks for ``cuda:0`` unless told otherwise.
        batch_size: Rows of a batch.
        max_batch_size: For ``batch_size=auto``, which is refused.
        textual_summaries: For a model that was not trained to summarise: adds the instruction to
            the system prompt, and recognises the delimiters as text. Needs chat templates.
        keep_summaries: Leave summaries in the answers.
        max_length: Positions of prompt and answer together; by default the model's.
        add_bos_token: Whether prompts begin with the begin-of-text token; by default as the
            tokenizer has it.
        prefix_token_id: What stands for an empty context.
        think_end_token: Text or id behind which the answer of a thinking model begins.
        enable_thinking: Handed to the chat template.
        chat_template_args: Further arguments of the chat template.
        **options: Options of the policy; an artifact's own serve where it is its policy.

    Raises:
        ValueError: Unknown policy or option, before the model is loaded; no such model; a value
            out of range; ``batch_size=auto``; more than one process.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str | None = None,
        *,
        precision: Any = "fp32",
        base: str | None = None,
        attention: str = "sdpa",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        textual_summaries: bool = False,
        keep_summaries: bool = False,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options = {name: _typed(value) for name, value in options.items()}
        artifact = read_artifact(pretrained) if is_artifact(pretrained) else None
        self.policy = policy or (artifact.method if artifact else "full")
        _check_names(self.policy, options)
        _check_batches(batch_size, max_batch_size)
        for name, value in (
            ("textual_summaries", textual_summaries),
            ("keep_summaries", keep_summaries),
        ):
            if not isinstance(value, bool):  # any text, such as "no", would count as true
                raise ValueError(f"--model_args {name}={value}: write true or false")
        self.options = options
        if artifact and self.policy == artifact.method:
            self.options = {**artifact.options, **options}
        model, tokenizer = load(pretrained, precision, _device(device), attention, base)
        with _quiet():  # its warnings are about models that it didn't load itself
            super().__init__(
                model,
                backend="causal",
                tokenizer=tokenizer,
                max_length=max_length,
                batch_size=int(batch_size),
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
                think_end_token=think_end_token,
                enable_thinking=enable_thinking,
                chat_template_args=chat_template_args,
            )
        self.precision = precision
        self.textual_summaries = textual_summaries
        self._delimiters: Delimiters | None = None
        if textual_summaries:
            self._delimiters = Delimiters.textual(tokenizer)
        elif BEGIN_OF_SUMMARY in tokenizer.get_vocab():
            self._delimiters = Delimiters.special(tokenizer)
        self._removed = None if keep_summaries else self._delimiters
        self._memory: dict[str, Memory] = {}
        self._task = ""
        shape = self.new_cache().shape  # refuses bad values before anything is generated
        numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
        self._row_bytes = numbers * model.dtype.itemsize

    def new_cache(self) -> PolicyCache:
        """An empty cache of this model's policy."""
        given = self._delimiters if self.textual_summaries else None
        return make_cache(self.policy, self.model, self.tokenizer, given, **self.options)

    # -- what a task asks for -------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to ``(context, settings)`` requests, in order.

        Raises:
            ValueError: An answer that leaves no room for its prompt, settings that contradict each
                other, or ``textual_summaries`` without a chat template.
        """
        for request in requests:
            self._check_request(request)
        generate = super().generate_until
        return self._task_by_task(requests, lambda part: generate(part, disable_tqdm))

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one.

        The context is read as a prompt, so the policy compresses it; then the continuation is fed
        token by token, as if it had been generated. With ``full`` that is what lm-eval's own class
        computes in one forward.

        Raises:
            ValueError: A policy that only drops what the model itself has summarised.
        """
        from zoomkv.caches.sumr import SumRCache

        if issubclass(policy_class(self.policy), SumRCache):
            raise ValueError(
                f"{_named(requests)}: policy '{self.policy}' drops nothing but what the model has "
                "summarised itself, so it can't score a given continuation: choose tasks that "
                "generate, or another policy"
            )
        score = super().loglikelihood
        scores = self._task_by_task(requests, lambda part: score(part, disable_tqdm))
        whole = all(self._memory[_task(request)].whole for request in requests)
        if whole and not policy_class(self.policy).keeps_everything:
            _log.warning(
                "policy '%s' left all contexts whole: these scores are those of the full cache "
                "(a smaller budget, or count_prefix=true where there is one, would bind)",
                self.policy,
            )
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        """Refused: a text without a prompt leaves a policy nothing to compress before it is scored.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{_named(requests)}: the perplexity of a whole text (loglikelihood_rolling) has no "
            "prompt that a cache policy could compress: use --model hf for it"
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model is to read it, told to summarise if it must be told."""
        turns = list(chat_history)
        if self.textual_summaries:
            told = SUMMARY_INSTRUCTION
            if turns and turns[0]["role"] == "system":
                told = f"{turns.pop(0)['content']}\n\n{told}"
            turns.insert(0, {"role": "system", "content": told})
        return super().apply_chat_template(turns, add_generation_prompt)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """Generated ids as text, without summaries unless they are to be kept."""
        decode = super().tok_decode
        if self._removed is None or isinstance(tokens, int):
            return decode(tokens, skip_special_tokens)
        return without_summaries(
            list(tokens), self._removed, lambda ids: decode(ids, skip_special_tokens)
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into ``results["config"]``; ours is under ``zoomkv``."""
        memory = {task: memory.to_dict() for task, memory in self._memory.items()}
        for task, figures in memory.items():
            _log.info(
                "%s: cache %.2f MiB on the device (mean of decode steps, %.1f %% of full), peak "
                "%.2f MiB; %d of %d answers cut off",
                task,
                figures["device_bytes_mean"] / 2**20,
                100 * figures["share_of_full"],
                figures["device_bytes_peak"] / 2**20,
                figures["truncated"],
                figures["answers"],
            )
        return super().get_model_info() | {
            "zoomkv": {
                "version": __version__,
                "policy": self.policy,
                "options": self.options,
                "precision": self.precision,
                "summaries": "kept" if self._removed is None else "removed",
                "memory": memory,
            }
        }

    # -- one batch ------------------------------------------------------------------------------

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> Tensor:  # [B, T] -> [B, T + new]
        mask = settings.pop("attention_mask")
        rows, prompt = context.shape
        eos, pad = self._eos_ids(), self.tokenizer.pad_token_id
        if not settings.get("do_sample"):
            # The model's own sampling defaults would only raise warnings.
            settings |= dict.fromkeys(("temperature", "top_p", "top_k", "min_p"))
        cache, memory = self.new_cache(), self._memory[self._task]
        # A row that a stop string has ended is fed the padding id: that ends it here too.
        cache.set_eos([*eos, pad], pad)
        cache.expect_prompt(prompt)
        texts = [text for text in stop if text != self.tokenizer.eos_token]
        stops = StopStrings(self.tokenizer, texts, eos, prompt, rows, self._visible())
        output = self.model.generate(
            input_ids=context,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=max_length - prompt,
            eos_token_id=eos,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([Meter(memory, cache), stops]),
            **settings,
        )
        memory.finish(cache)
        memory.answers += rows
        memory.truncated += stops.lengths.count(None)
        memory.prompt_tokens += int(mask.sum())
        new = output.shape[1] - prompt
        memory.tokens += sum(new if length is None else length for length in stops.lengths)
        return output

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        # Neighbours share their context, which is then read once.
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i][0]))
        scores: dict[int, tuple[float, bool]] = {}
        size = override_bs or self.batch_size
        with bars.tqdm(total=len(pairs), disable=disable_tqdm, desc="Scoring") as bar:
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                for index, score in zip(batch, self._score([pairs[i] for i in batch]), strict=True):
                    scores[index] = score
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], score)
                bar.update(len(batch))
        return [scores[index] for index in range(len(pairs))]

    @torch.inference_mode()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Reads the different contexts of a batch once, then feeds all continuations in step."""
        contexts = list(dict.fromkeys(tuple(context) for context, _ in pairs))
        which = torch.tensor([contexts.index(tuple(context)) for context, _ in pairs])
        ids, mask = self._padded(contexts, left=True)
        targets, given = self._padded([continuation for _, continuation in pairs], left=False)
        cache, memory = self.new_cache(), self._memory[self._task]
        cache.set_eos([])  # a continuation may hold one and go on
        cache.expect_prompt(ids.shape[1])
        logits = self.model(ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits
        if len(contexts) < len(pairs):
            cache.batch_select_indices(which)
        which = which.to(self.device)
        logits, mask = logits[which], mask[which]
        total = torch.zeros(len(pairs), dtype=torch.float64, device=self.device)
        greedy = torch.ones(len(pairs), dtype=torch.bool, device=self.device)
        for step in range(targets.shape[1]):
            if step:  # rows that are scored to their end are fed padding
                mask = torch.cat([mask, given[:, step, None]], 1)
                token = targets[:, step - 1, None]
                logits = self.model(token, attention_mask=mask, cache=cache).logits
            memory.read(cache)
            chances = logits[:, -1].float().log_softmax(-1)
            real, target = given[:, step].bool(), targets[:, step]
            total += chances.gather(1, target[:, None])[:, 0].double() * real
            greedy &= (chances.argmax(-1) == target) | ~real
        memory.finish(cache)
        memory.answers += len(pairs)
        memory.prompt_tokens += sum(map(len, contexts))
        memory.tokens += int(given.sum())
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    # -- within ---------------------------------------------------------------------------------

    def _task_by_task(
        self, requests: list[Instance], run: Callable[[list[Instance]], list[Any]]
    ) -> list[Any]:
        """What ``run`` makes of each task's requests, in their order, measured by task."""
        numbers: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            numbers.setdefault(_task(request), []).append(number)
        answers: dict[int, Any] = {}
        for task, mine in numbers.items():
            self._task = task
            self._memory.setdefault(task, Memory(self._row_bytes))
            answers.update(zip(mine, run([requests[number] for number in mine]), strict=True))
        return [answers[number] for number in range(len(requests))]

    def _check_request(self, request: Instance) -> None:
        context, settings = request.args
        settings = normalize_gen_kwargs(settings, self.max_gen_toks)
        task, new = _task(request), settings["max_gen_toks"]
        if new >= self.max_length:
            raise ValueError(
                f"task '{task}' asks for {new} new tokens, and the model has {self.max_length} "
                "positions for prompt and answer: choose fewer with --gen_kwargs max_gen_toks=N"
            )
        if settings.get("do_sample") and not settings.get("temperature", 1.0) > 0:
            raise ValueError(f"task '{task}': do_sample=true goes with a temperature above 0")
        if settings.get("num_beams", 1) != 1 or settings.get("num_return_sequences", 1) != 1:
            raise ValueError(f"task '{task}': one answer a prompt, greedy or sampled; no beams")
        if self.textual_summaries and SUMMARY_INSTRUCTION not in context:
            raise ValueError(
                "textual_summaries=true puts its instruction into the system prompt: add "
                "--apply_chat_template"
            )

    def _visible(self) -> Callable[[list[int]], str] | None:
        """Generated ids as the text in which stop strings count: a summary is no answer's end."""
        if self._removed is None:
            return None
        return lambda ids: self.tok_decode(ids, skip_special_tokens=False)

    def _eos_ids(self) -> list[int]:
        own = self.model.generation_config.eos_token_id
        own = [own] if isinstance(own, int) else list(own or [])
        return list(dict.fromkeys([*own, self.tokenizer.eos_token_id]))

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """A pair whose context has lost its beginning if both together were too long."""
        room = self.max_length + 1 - len(continuation)  # the last token is scored, not read
        if room < 1 or not continuation:
            raise ValueError(
                f"task '{self._task}': a continuation of {len(continuation)} tokens can't be "
                f"scored with the {self.max_length} positions of the model"
            )
        return context[-room:], continuation

    def _padded(
        self, rows: Sequence[Sequence[int]], left: bool
    ) -> tuple[Tensor, Tensor]:  # 2 x [B, T]
        size = max(map(len, rows))
        ids = torch.full((len(rows), size), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(rows), size, dtype=torch.int64)
        for number, row in enumerate(rows):
            place = slice(size - len(row), size) if left else slice(len(row))
            ids[number, place] = torch.tensor(row)
            mask[number, place] = 1
        return ids.to(self.device), mask.to(self.device)


def _task(request: Instance) -> str:
    return request.task_name or ""


def _named(requests: Sequence[Instance]) -> str:
    return "task " + ", ".join(sorted({f"'{_task(request)}'" for request in requests}))


def _typed(value: Any) -> Any:
    """A value as ``zoomkv generate`` types it; lm-eval has done all but YAML's null."""
    return None if value == "null" else value


def _check_names(policy: str, options: dict[str, Any]) -> None:
    known = options_of(policy)
    own = [
        name
        for name, parameter in inspect.signature(ZoomKVLM.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name in known:
            continue
        near = get_close_matches(name, [*known, *own], n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        if name in _OF_HF:
            hint = f"write {_OF_HF[name]}; "
        listed = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"--model_args {name}: no option of policy '{policy}' nor of the model: {hint}"
            f"(the policy has: {listed}; the model: {', '.join(own)})"
        )


def _check_batches(batch_size: int | str, max_batch_size: int | None) -> None:
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise ValueError(
            f"--batch_size {batch_size}: give a whole number of at least 1; 'auto' is not "
            "supported, since it would try plain forwards and not this policy's caches"
        )
    if max_batch_size is not None:
        raise ValueError("--max_batch_size goes with --batch_size auto, which is not supported")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--model zoomkv runs in one process: start it without a launcher")


def _device(device: str | None) -> str:
    if device is None:
        return "auto"
    if device.startswith("cuda") and not torch.cuda.is_available():
        _log.info("there is no CUDA device: using the CPU")
        return "cpu"
    return device


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
