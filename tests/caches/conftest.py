"""The case table that drives the invariants for every policy, and what they are run with."""

import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LogitsProcessor, LogitsProcessorList

import zoomkv
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import POLICIES, make_cache
from zoomkv.modules.router import Router
from zoomkv.modules.sketch import Sketch
from zoomkv.spans.thoughts import Delimiters

BEGIN, END, EOS, DOT = 2, 3, 1, 10
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Policy:
    """One row of the table: options that bind in short sequences, and options that don't."""

    name: str
    binding: dict[str, Any] = field(default_factory=dict)
    loose: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    merges: bool = False  # rows may stand for several tokens
    ragged: bool = False  # batch rows hold unlike numbers of rows, in buffers that are padded


_THOUGHTS = {"window": 6, "max_interval": 16}
_ZOOM = {**_THOUGHTS, "consensus": 1, "top_k": 1}

_OUTPUT = {"budget": 16, "recent": 4}  # the prompt stays and does not count
_EVERYTHING = {"budget": 28, "recent": 4, "n_sink": 2, "count_prefix": True}
_LOOSE = {"budget": 500, "recent": 4}
_STEEP = {"budget": 2000, "recent": 4}  # the last layer has a twentieth
_MERGES = {"budget": 32, "recent": 4, "n_sink": 2}
_SENTENCES = {"budget": 24, "start": 2, "recent": 5, "window": 4, "kernel": 3}
_CONTEXT = {"window": 4, "slack": 4, "min_span": 3, "max_span": 6, "width": 8}
_ZOOMS = {**_CONTEXT, "budget": 48, "coarse_precision": "auto"}
_ROWS = {**_ZOOMS, "coarse_share": 0.0}
_FACTORS = {**_ZOOMS, "recovery": "lowrank"}
_OPEN = {**_CONTEXT, "budget": 1.0}
_STREAMS = {**_OPEN, "residency": "streamed"}
_SPANS = {"window": 4, "slack": 4, "router": "gated", "coarse_precision": "auto", "budget": 56}
_PAPER = {**_SPANS, "spans": "paper", "min_span": 3, "max_span": 6, "alpha": 2.0}
_EVEN = {**_SPANS, "spans": "fixed", "max_span": 6, "min_span": 3}
_ALL_OPEN = {**_PAPER, "budget": 1.0, "threshold": 1e-30, "recovery": "exact"}
_BEACONS = {"beacons": 4, "recent_queries": 3, "refill": 0.625}  # more rows go than are recent

TABLE = [
    Policy("full"),
    Policy("full_offloaded"),
    Policy("streaming_llm", {"budget": 12, "n_sink": 2}, {"budget": 500}),
    Policy("streaming_llm", {"budget": 12, "count_prefix": False}, {"budget": 500}, "output"),
    Policy("sumr", _THOUGHTS, {"window": 500}),
    Policy("sumr", {**_THOUGHTS, "residency": "streamed"}, {"window": 500}, "streamed"),
    Policy("zoomr", _ZOOM, {"window": 500}),
    Policy("zoomr", {**_ZOOM, "residency": "streamed"}, {"window": 500}, "streamed"),
    Policy("zoomr", {**_ZOOM, "consensus": 50, "top_k": 50}, {"window": 500}, "zoom-all"),
    Policy("zoomr", {**_ZOOM, "consensus": 2, "budget": 64}, {"window": 500}, "budget"),
    Policy("zoomr", {**_ZOOM, "open_cap": 8, "vote_heads": "kv_mean"}, {"window": 500}, "cap"),
    Policy("snapkv", {**_OUTPUT, "window": 8, "kernel": 3}, _LOOSE),
    Policy("snapkv", {**_EVERYTHING, "window": 4, "kernel": 3}, _LOOSE, "all"),
    Policy("rpc", {**_OUTPUT, "window": 8, "kernel": 3}, _LOOSE),
    Policy("rpc", {**_EVERYTHING, "window": 4, "aggregation": "group"}, _LOOSE, "all"),
    Policy("r_kv", {**_OUTPUT, "window": 4, "kernel": 3}, _LOOSE),
    Policy("r_kv", {**_EVERYTHING, "window": 4, "threshold": 0.2}, _LOOSE, "all"),
    Policy("random", _OUTPUT, _LOOSE),
    Policy("random", {**_EVERYTHING, "seed": 3}, _LOOSE, "all"),
    Policy("h2o", _OUTPUT, _LOOSE),
    Policy("h2o", {**_EVERYTHING, "recent": None}, _LOOSE, "all"),
    Policy("h2o", {**_EVERYTHING, "normalised": True}, _LOOSE, "normalised"),
    Policy("tova", {**_OUTPUT, "refill": 0.9999}, _LOOSE),
    Policy("tova", {**_EVERYTHING, "recent": 1}, _LOOSE, "all"),
    Policy("keydiff", _OUTPUT, _LOOSE),
    Policy("keydiff", _EVERYTHING, _LOOSE, "all"),
    Policy("chunkkv", {**_OUTPUT, "window": 8, "kernel": 3, "chunk_length": 5}, _LOOSE),
    Policy("chunkkv", {**_EVERYTHING, "window": 4, "chunk_length": 3}, _LOOSE, "all"),
    Policy("pyramidkv", {**_OUTPUT, "window": 8, "kernel": 3}, _STEEP),
    Policy("pyramidkv", {**_EVERYTHING, "window": 4, "beta": 2.0}, _STEEP, "all"),
    Policy("beacon_kv", {**_OUTPUT, **_BEACONS}, _LOOSE),
    Policy("beacon_kv", {**_EVERYTHING, "beacons": 3, "recent_queries": 2}, _LOOSE, "all"),
    Policy("beacon_kv", {**_OUTPUT, **_BEACONS, "sampling": "naive"}, _LOOSE, "naive"),
    Policy("initial_recent", {**_OUTPUT, "initial": 4, "recent_queries": 3}, _LOOSE),
    Policy("initial_recent", {**_EVERYTHING, "initial": 3, "recent_queries": 2}, _LOOSE, "all"),
    Policy("sentence_kv", {**_SENTENCES, "semantic_factor": 1, "interval": 1}, _LOOSE),
    Policy("sentence_kv", {**_SENTENCES, "interval": 5}, _LOOSE, "interval"),
    Policy("semanticache", {**_MERGES, "reach": 8}, _LOOSE, merges=True),
    Policy("semanticache", {**_MERGES, "budget": 14}, _LOOSE, "tight", merges=True),
    Policy("sekv", {**_ROWS, "router": "trained"}, _OPEN),
    Policy("sekv", {**_ROWS, "router": "trained", "anchor_share": 0.1}, _OPEN, "anchors"),
    Policy("sekv", {**_ROWS, "router": "trained", "residency": "streamed"}, _OPEN, "streamed"),
    Policy("sekv", {**_ROWS, "router": "oracle"}, {**_OPEN, "router": "oracle"}, "oracle"),
    Policy("sekv", {**_ROWS, "router": "random"}, {**_OPEN, "router": "random"}, "random"),
    Policy("sekv", {**_ZOOMS, "router": "trained"}, _STREAMS, "coarse", merges=True),
    Policy("sekv", {**_ZOOMS, "router": "mean-key"}, _OPEN, "mean-key", merges=True),
    Policy("sekv", _EVEN, _ALL_OPEN, "paper", merges=True),
    Policy("sekv", {**_EVEN, "rope": "pre"}, _ALL_OPEN, "paper-pre", merges=True),
    Policy("sekv", {**_EVEN, "recovery": "exact"}, _ALL_OPEN, "paper-exact", merges=True),
    Policy("sekv", {**_PAPER, "residency": "streamed"}, _ALL_OPEN, "paper-streamed", True, True),
    Policy("sekv", {**_PAPER, "alpha": "auto", "budget": 72}, _ALL_OPEN, "paper-auto", True, True),
    Policy("sekv", {**_FACTORS, "router": "trained"}, _OPEN, "factors", merges=True),
    # The examples of docs/adding-a-policy.md.
    Policy("value_norm", {"budget": 16, "recent": 4, "interval": 3}, {"budget": 500, "recent": 4}),
    Policy("peak", {**_OUTPUT, "window": 4}, _LOOSE),
    Policy("peak", {**_EVERYTHING, "window": 4}, _LOOSE, "all"),
]
EXAMPLES = {"value_norm": "ValueNormCache", "peak": "PeakCache"}

# Every policy meets every family, MHA, GQA and MQA, tied and untied embeddings.
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kv_heads": 2}),
    ("qwen2", {"kv_heads": 4, "tied": True}),
    ("qwen3", {"kv_heads": 1}),
    ("mistral", {"kv_heads": 2, "tied": True}),
]


class WordTokenizer:
    """128 tokens, one word each; no file needed."""

    all_special_ids = [0, EOS, BEGIN, END]
    eos_token_id = EOS

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(128)}

    def batch_decode(self, ids: list[list[int]], **kwargs: Any) -> list[str]:
        return ["." if i[0] % 20 == DOT else f" w{i[0]}" for i in ids]


TOKENIZER = WordTokenizer()
DELIMITERS = Delimiters(begin=(BEGIN,), end=(END,))


class Bench:
    """A tiny attached model, a policy's caches for it, and ways to run them."""

    def __init__(self, model: Any, dense: Any, policy: Policy) -> None:
        self.model = model
        self.dense = dense
        self.policy = policy

    def cache(self, loose: bool = False, **options: Any) -> Any:
        chosen = self.policy.loose if loose else self.policy.binding
        if chosen.get("router") == "trained":
            chosen = {**chosen, "router": self.sketch}
        if chosen.get("router") == "gated":
            chosen = {**chosen, "router": self.router}
        return make_cache(
            self.policy.name,
            self.model,
            tokenizer=TOKENIZER,
            delimiters=DELIMITERS,
            **{**chosen, **options},
        )

    @cached_property
    def sketch(self) -> Sketch:
        """Random projections: fitted ones would turn with the last bit of a few keys."""
        shape = ModelShape.of(self.model)
        sketch = Sketch(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, 8)
        torch.nn.init.normal_(sketch.key, generator=torch.Generator().manual_seed(0))
        group = shape.heads // shape.kv_heads
        sketch.query.data = sketch.key.data.repeat_interleave(group, 1)
        return sketch

    @cached_property
    def router(self) -> Router:
        """Random projections and thresholds, so that some spans open for some heads."""
        shape = ModelShape.of(self.model)
        sizes = shape.layers, shape.heads, shape.kv_heads, shape.head_dim
        draws = torch.Generator().manual_seed(0)
        router = Router(*sizes, width=4, rank=8, threshold=0.8, generator=draws)
        torch.nn.init.normal_(router.threshold_logit, 1.5, generator=draws)
        return router

    def generate(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Greedy by default; summaries and sentence ends are forced at fixed steps."""
        options = {"max_new_tokens": 40, "do_sample": False, **options}
        script = LogitsProcessorList([ScriptedSummaries(ids.shape[1])])
        if mask is None:
            mask = torch.ones_like(ids)
        return self.model.generate(ids, attention_mask=mask, logits_processor=script, **options)

    def alone(self, ids: Tensor, **options: Any) -> Tensor:
        return self.generate(ids, cache=self.cache(), **options)


class ScriptedSummaries(LogitsProcessor):
    """Every 13 tokens: seven free ones, a dot, ``begin``, two free ones, ``end``, a free one."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = (input_ids.shape[1] - self.prompt) % 13
        scores = scores.clone()
        scores[:, [0, BEGIN, END]] = -torch.inf
        if step in (7, 8, 11):
            scores[:, :] = -1e4
            scores[:, {7: DOT, 8: BEGIN, 11: END}[step]] = 0
        return scores


def prompt_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 128, (batch, length), generator=generator)


def distinct_ids(batch: int, length: int, seed: int = 2) -> Tensor:
    """No token comes twice in a row."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(108, generator=generator)[:length] for _ in range(batch)]
    return 20 + torch.stack(rows)


def scripted_ids(batch: int, length: int, seed: int = 1) -> Tensor:
    """Paragraphs of 9 tokens, summaries of 3 within delimiters."""
    ids = prompt_ids(batch, length, seed)
    step = torch.arange(length) % 14
    for number, token in {4: DOT, 8: DOT, 9: BEGIN, 13: END}.items():
        ids[:, step == number] = token
    return ids


@torch.no_grad()
def run(
    model: Any,
    cache: Any,
    prompt: Tensor,
    generated: Tensor,
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Feeds a prompt, then given tokens one by one.

    Returns:
        Logits of the prompt's last and of every generated token ``[B, 1 + n, V]``, and what could
        be read in each step, for each layer ``[B, heads, positions]``.
    """
    reads: list[list[Tensor]] = []
    commit = cache.commit

    def spy(step: Any, hidden: Tensor) -> None:
        if not step.in_prompt:
            reads.append([cache.readable(layer) for layer in range(len(cache))])
        commit(step, hidden)

    cache.commit = spy
    try:
        fed = 0
        cache.expect_prompt(cache.seen + prompt.shape[1])
        for part in prompt.split(chunk or prompt.shape[1], dim=1):
            fed += part.shape[1]
            seen = None if mask is None else mask[:, :fed]
            logits = [model(part, attention_mask=seen, cache=cache).logits[:, -1]]
        for token in generated.split(1, dim=1):
            fed += 1
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits.append(model(token, attention_mask=mask, cache=cache).logits[:, -1])
    finally:
        del cache.commit
    return torch.stack(logits, dim=1), reads


Parts = list[list[list[Tensor]]]


def record_rows(cache: Any, pads: tuple[int, ...]) -> tuple[Parts, Parts]:
    """Has a cache that watches queries write down all queries and keys of a run.

    Args:
        cache: An empty one.
        pads: How many of them each row's prompt begins with.

    Returns:
        Queries and keys of each layer and row, tensors ``[heads, n, D]`` in the order of positions.
    """
    parts: tuple[Parts, Parts] = (
        [[[] for _ in pads] for _ in cache.layers],
        [[[] for _ in pads] for _ in cache.layers],
    )
    update, watch = cache.update, cache.watch

    def note(which: int, layer: int, rows: Tensor) -> None:
        for row, first in enumerate(pads):
            parts[which][layer][row].append(rows[row, :, first if rows.shape[2] > 1 else 0 :])

    def spy_update(k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        note(1, layer, k.clone())
        return update(k, v, layer, *rest, **named)

    def spy_watch(step: Any, layer: int, query: Tensor, key: Tensor) -> Any:
        note(0, layer, query.clone())
        return watch(step, layer, query, key)

    cache.update, cache.watch = spy_update, spy_watch
    return parts


_MASKS: list[Tensor] = []  # by layer, bool [heads, T, T]


def _masked_dense(module, query, key, value, attention_mask, scaling, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = _MASKS[module.layer_idx]
    mask = mask.repeat_interleave(query.shape[1] // len(mask), 0)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("masked_dense", _masked_dense)


@torch.no_grad()
def masked_dense(bench: Bench, ids: Tensor, prompt: int, reads: list[list[Tensor]]) -> Tensor:
    """Logits of an ordinary dense forward where each query sees just what it could read.

    Args:
        ids: One sequence ``[T]``.
        prompt: Its prompt's length.
        reads: For each generated token and layer, mask ``[heads, positions]``.

    Returns:
        Logits ``[T, V]``.
    """
    if bench.policy.merges:
        pytest.skip("rows that were merged are nobody's alone: its own tests have a reference")
    total = len(ids)
    _MASKS.clear()
    for layer in range(len(reads[0])):
        heads = reads[0][layer].shape[0]
        mask = torch.ones(total, total, dtype=torch.bool).tril().repeat(heads, 1, 1)
        for number, read in enumerate(reads):
            row = prompt + number
            mask[:, row, :row] = read[layer][:, :row]
        _MASKS.append(mask)
    bench.dense.set_attn_implementation("masked_dense")
    return bench.dense(ids[None]).logits[0]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_model: each policy with one model, not with every one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bench" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("one_model")
    params, ids = [], []
    for number, policy in enumerate(TABLE):
        models = MODELS if marker is None else [MODELS[number % len(MODELS)]]
        for family, options in models:
            params.append((policy, family, options))
            ids.append("-".join(filter(None, (policy.name, policy.label, family))))
    metafunc.parametrize("bench", params, ids=ids, indirect=True)


@pytest.fixture
def bench(request: pytest.FixtureRequest, tiny: Any) -> Bench:
    """A case: policy and model."""
    policy, family, options = request.param
    model = tiny(family, **options)
    zoomkv.attach(model)
    return Bench(model, tiny(family, **options), policy)


@pytest.fixture(autouse=True)
def example_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the examples of docs/adding-a-policy.md, from the text of the page."""
    text = (ROOT / "docs" / "adding-a-policy.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for code, (name, class_name) in zip(blocks, EXAMPLES.items(), strict=True):
        module = ModuleType(f"{name}_example")
        exec(compile(code, "docs/adding-a-policy.md", "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(POLICIES, name, f"{module.__name__}:{class_name}")


@pytest.fixture
def tools() -> ModuleType:
    """The functions of this file, for tests: ``tools.run``, ``tools.prompt_ids`` and so on."""
    return sys.modules[__name__]
