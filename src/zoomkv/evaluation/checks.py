"""What must hold before any figure: the full cache is sane, and every policy does something.

Of each arm, settings that bind nothing must give the full cache's greedy tokens, and tight ones
must keep less than it keeps. Rounding may decide between tokens that are likeliest alike, so a
token counts as the full cache's if its logit, there, lies within rounding of the best.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from zoomkv.backbone.prefill import prefill
from zoomkv.caches.base import PolicyCache
from zoomkv.caches.registry import make_cache, options_of
from zoomkv.evaluation.budgets import Arm
from zoomkv.evaluation.recording import Recording, record
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY

_STEPS = 24
_PROMPT = 512  # tokens
_TIGHT_WINDOW = 8
_TIGHT_SHARE = 0.02  # which policies raise to the least that they can do with
_ROUNDING = {torch.float32: 1e-4}  # of the largest logit; fewer bits: _COARSE
_COARSE = 0.03
_THOUGHTS = 3  # paragraphs beyond those that are read in full

Check = dict[str, Any]


def check_full(model: Any, tokenizer: Any, ids: Tensor) -> Check:  # [1, T]
    """Whether the full cache decodes as the model does without one, and as a plain cache does.

    Args:
        model: Attached.
        tokenizer: Its tokenizer.
        ids: A whole question.
    """
    with torch.no_grad():
        tokens, logits = _greedy(model, make_cache("full", model, tokenizer), ids)
        whole = torch.cat([ids, tokens[None, :-1]], 1)
        uncached = model(whole, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
        plain = _plain(model, ids, tokens)
    problems = []
    if not bool(logits.isfinite().all()):
        problems.append("its logits are not finite")
    for found, what in ((uncached, "an uncached forward"), (plain, "DynamicCache")):
        at = _first_other(tokens, found, model.dtype)
        if at is not None:
            problems.append(f"token {at} of its answer is not that of {what}")
    detail = f"{len(tokens)} tokens as by an uncached forward and by DynamicCache"
    return _check("full", "full is sane", not problems, "; ".join(problems) or detail)


def check_arms(model: Any, tokenizer: Any, arms: Sequence[Arm], ids: Tensor) -> Iterator[Check]:
    """Checks that each arm does what it says, on one text that is read once.

    Args:
        model: Attached.
        tokenizer: Its tokenizer.
        arms: Of this model.
        ids: Any text; it is repeated, or cut, to 512 tokens.
    """
    ids = ids.repeat(1, -(-_PROMPT // ids.shape[1]))[:, :_PROMPT]
    with torch.no_grad():
        recording = record(model, ids)
        tokens, logits = _greedy(model, make_cache("full", model, tokenizer), ids)
        for arm in arms:
            if arm.policy == "full":
                continue
            loose = unbinding(arm)
            if loose is not None:
                cache = make_cache(arm.policy, model, tokenizer, **loose)
                found = _fed(model, cache, recording, tokens[:-1])
                yield _equals_full(arm, loose, tokens, logits, found, model.dtype)
            yield _differs(model, tokenizer, arm, recording, tokens)


def unbinding(arm: Arm) -> dict[str, Any] | None:
    """Options under which an arm binds nothing in a short text; None if it can't be told."""
    known = options_of(arm.policy)
    loose = {name: value for name, value in arm.options.items() if name != "host_precision"}
    everything = 4 * (_PROMPT + _STEPS)
    if loose.get("router") == "closed":  # which never fetches, so nothing may lie outside
        return {**loose, "budget": 1.0, "window": everything}
    if known.get("budget") is not None:
        return {**loose, "budget": 1.0}
    if "window" in known:
        return {**loose, "window": everything}
    return loose if arm.policy == "full_offloaded" else None


def tight(arm: Arm) -> dict[str, Any]:
    """Options under which an arm must leave something out."""
    known = options_of(arm.policy)
    if known.get("budget") is not None:
        return {**arm.options, "budget": _TIGHT_SHARE}
    return {**arm.options, "window": _TIGHT_WINDOW} if "window" in known else dict(arm.options)


def _equals_full(
    arm: Arm, loose: dict[str, Any], tokens: Tensor, logits: Tensor, found: Tensor, dtype: Any
) -> Check:
    at = _first_other(tokens, found, dtype, logits)
    told = _told(loose)
    if at is not None:
        detail = f"with {told} token {at} of {len(tokens)} is not that of full"
    else:
        apart = float((found - logits).abs().max())
        detail = f"with {told}: {len(tokens)} tokens alike, logits up to {apart:.1e} apart"
    return _check(arm.policy, "binds nothing equals full", at is None, f"{arm.label}: {detail}")


def _differs(model: Any, tokenizer: Any, arm: Arm, recording: Recording, tokens: Tensor) -> Check:
    options = tight(arm)
    if "max_interval" in options_of(arm.policy):  # it compresses what is summarised, nothing else
        count = options.get("consensus", 2) + _THOUGHTS
        tokens = _thoughts(tokenizer, count).to(tokens.device)
    cache, full = (
        make_cache(name, model, tokenizer, **of)
        for name, of in ((arm.policy, options), ("full", {}))
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*budget")  # it is far too small, on purpose
        for each in (cache, full):
            _fed(model, each, recording, tokens)
    kept, whole = cache.footprint(), full.footprint()
    told = _told(options)
    detail = (
        f"{arm.label}: with {told} {kept.rows_mean:.1f} rows are read, {kept.device_bytes} bytes "
        f"held; full: {whole.rows_mean:.1f}, {whole.device_bytes}"
    )
    less = kept.rows_mean < whole.rows_mean or kept.device_bytes < whole.device_bytes
    less |= arm.policy == "full_offloaded" and kept.bytes_to_device > 0  # of two layers it has all
    return _check(arm.policy, "tiny differs", less, detail)


def _told(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "its options"


def _check(policy: str, what: str, ok: bool, detail: str) -> Check:
    return {"kind": "check", "policy": policy, "what": what, "ok": ok, "detail": detail}


def _greedy(model: Any, cache: PolicyCache, ids: Tensor) -> tuple[Tensor, Tensor]:  # [n], [n, V]
    logits = [prefill(model, cache, ids)[0].float()]
    while len(logits) < _STEPS:
        token = logits[-1].argmax().view(1, 1)
        logits.append(model(token, cache=cache).logits[0, -1].float())
    found = torch.stack(logits)
    return found.argmax(-1), found


def _plain(model: Any, ids: Tensor, tokens: Tensor) -> Tensor:  # [n, V]
    cache = DynamicCache(config=model.config)
    logits = [model(ids, cache=cache, logits_to_keep=1).logits[0, -1].float()]
    for token in tokens[:-1]:
        logits.append(model(token.view(1, 1), cache=cache).logits[0, -1].float())
    return torch.stack(logits)


def _fed(model: Any, cache: PolicyCache, recording: Recording, tokens: Tensor) -> Tensor:
    """Logits ``[1 + n, V]`` from the prompt's last token on, as tokens are fed one by one."""
    columns = recording.ids.shape[1]
    cache.set_eos(None)
    cache.expect_prompt(columns)
    recording.feed(cache, columns - 1)
    logits = []
    for token in torch.cat([recording.ids[0, -1:], tokens]):
        logits.append(model(token.view(1, 1), cache=cache).logits[0, -1].float())
    return torch.stack(logits)


def _first_other(
    tokens: Tensor, found: Tensor, dtype: torch.dtype, judge: Tensor | None = None
) -> int | None:
    """Where found logits first choose another token, by more than rounding.

    Args:
        tokens: What the full cache chose, ``[n]``.
        found: Logits along these tokens, ``[n, V]``.
        dtype: Of the model.
        judge: Logits that say how much worse the other token is; by default the found ones.
    """
    judge = found if judge is None else judge
    allowed = _ROUNDING.get(dtype, _COARSE) * judge.abs().amax(-1)
    chosen = found.argmax(-1)
    best = judge.gather(1, tokens[:, None])[:, 0]
    other = judge.gather(1, chosen[:, None])[:, 0]
    wrong = (chosen != tokens) & ~((best - other).abs() <= allowed)
    wrong |= ~found.isfinite().all(-1)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def _thoughts(tokenizer: Any, count: int) -> Tensor:  # [n]
    """Paragraphs, each with its summary."""
    text = "".join(
        f"First we add {n} and {n + 1}, which makes {2 * n + 1}, and we keep that in mind.\n\n"
        f"{BEGIN_OF_SUMMARY}{n}+{n + 1}={2 * n + 1}{END_OF_SUMMARY}\n\n"
        for n in range(10, 10 + count)
    )
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
