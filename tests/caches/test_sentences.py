"""SentenceKV against loops over what the model itself computed; what ends a sentence."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import zoomkv
from zoomkv.caches.registry import make_cache

PADS, LENGTH, GENERATED, GROUP = (0, 7), 40, 60, 2


@pytest.fixture
def model(tiny_llama: Any, tools: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model, tools.TOKENIZER)
    return model


@dataclass
class Options:
    budget: int = 26
    start: int = 3
    recent: int = 5
    semantic_factor: float = 1.2
    window: int = 6
    kernel: int = 3
    interval: int = 1


def dot(one: Tensor, two: Tensor) -> float:
    return float(one.double() @ two.double())


def kept_of_prompt(queries: Tensor, keys: Tensor, head: int, size: int, o: Options) -> set[int]:
    """SnapKV in loops: what one KV head keeps of a prompt."""
    mean = [0.0] * size
    for when in range(size - o.window, size):
        for query in (2 * head, 2 * head + 1):
            logits = [
                dot(queries[query, when], keys[head, p]) / math.sqrt(8) for p in range(when + 1)
            ]
            weights = [math.exp(x - max(logits)) for x in logits]
            for p, weight in enumerate(weights):
                mean[p] += weight / sum(weights) / GROUP / o.window
    half = o.kernel // 2
    score = [max(mean[max(0, p - half) : p + half + 1]) for p in range(size)]
    may_go = range(o.start, size - max(o.recent, o.window))
    drop = max(0, size - int(o.semantic_factor * o.budget))
    return set(range(size)) - set(sorted(may_go, key=lambda p: (score[p], p))[:drop])


def expected_reads(
    queries: Tensor, keys: Tensor, ends: list[bool], size: int, head: int, o: Options
) -> list[set[int]]:
    """What one KV head reads in each decode step beside the step's own token."""
    kept = kept_of_prompt(queries, keys, head, size, o)
    total = len(ends)
    kept |= set(range(size, total))
    group = queries[2 * head : 2 * head + 2].double().mean(0)  # [T, D]
    asking = group[size - o.window : size].mean(0)
    since: list[int] = []  # queries of the sentence being written
    reads = []
    for step in range(total - size):
        seen = size + step
        if step % o.interval == 0:
            always = {p for p in range(seen) if p < o.start or p >= seen - o.recent}
            sentences, current = [], []
            for p in range(seen):
                current.append(p)
                if ends[p] or p == size - 1:
                    sentences.append(current)
                    current = []
            scored = []
            for number, sentence in enumerate(sentences):
                own = [p for p in sentence if p in kept]
                if own:
                    mean = keys[head, own].double().mean(0)
                    scored.append((-float(mean @ asking), number, own))
            walk = [p for _, _, own in sorted(scored) for p in own] + current
            room = o.budget - o.interval - len(always)
            read = always | set([p for p in walk if p not in always][:room])
        reads.append(set(read))
        read.add(seen)
        since.append(seen)
        if len(since) > 1:
            asking = group[since].mean(0)
        if ends[seen]:
            since = []
    return reads


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"interval": 4},
        {"semantic_factor": 1, "recent": 9},
        {"semantic_factor": 3, "start": 0, "budget": 20},
        {"semantic_factor": 1.5, "kernel": 1, "window": 2},
    ],
    ids=str,
)
def test_every_step_reads_what_a_loop_says(model: Any, tools: Any, changes: dict[str, Any]) -> None:
    options = Options(**changes)
    cache = make_cache("sentence_kv", model, **vars(options))
    queries, keys = tools.record_rows(cache, PADS)
    ids = tools.prompt_ids(2, LENGTH + GENERATED)
    ids[0, ::9], ids[1, 2::11] = tools.DOT, tools.DOT
    prompt, generated = ids.split((LENGTH, GENERATED), dim=1)
    mask = torch.ones_like(prompt)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = 0
    _, reads = tools.run(model, cache, prompt, generated, mask)
    for row, pads in enumerate(PADS):
        ends = [token % 20 == tools.DOT for token in ids[row, pads:].tolist()]
        for layer in range(2):
            q, k = torch.cat(queries[layer][row], 1), torch.cat(keys[layer][row], 1)
            for head in range(2):
                wanted = expected_reads(q, k, ends, LENGTH - pads, head, options)
                got = [set(r[layer][row, head].nonzero().squeeze(1).tolist()) for r in reads]
                assert got == wanted
                assert max(len(read) for read in got) == options.budget - 1
                fetched = set().union(*(b - a for a, b in zip(got, got[1:], strict=False)))
                assert len(fetched - set(range(LENGTH - pads, 100))) > 3  # prompt rows come back


def test_a_sentence_without_end_leaves_the_budget_alone(model: Any, tools: Any) -> None:
    """No stop anywhere: the prompt is one sentence, the answer an unfinished one."""
    ids = tools.prompt_ids(1, 80)
    ids[ids % 20 == tools.DOT] += 1
    options = {"budget": 20, "start": 2, "recent": 4, "window": 4, "interval": 1}
    cache = make_cache("sentence_kv", model, **options)
    _, reads = tools.run(model, cache, ids[:, :30], ids[:, 30:])
    for step, read in enumerate(reads):
        seen = 30 + step
        for layer in read:
            # The prompt is read as far as the budget goes, and nothing new that is not recent.
            want = set(range(15)) | set(range(seen - 4, seen))
            for head in layer[0]:
                assert set(head.nonzero().squeeze(1).tolist()) == want


def test_an_unfinished_answer_is_a_sentence_of_the_next_turn(model: Any, tools: Any) -> None:
    ids = tools.prompt_ids(2, 60)
    ids[ids % 20 == tools.DOT] += 1
    ids[:, 12] = tools.DOT
    cache = make_cache("sentence_kv", model, budget=30, start=2, recent=4, window=4)
    tools.run(model, cache, ids[:, :10], ids[:, 10:30])
    tools.run(model, cache, ids[:, 30:40], ids[:, 40:])
    ends = [p for p in range(60) if bool(cache._closed[0, p])]
    assert ends == [9, 12, 29, 39]
    assert cache._indexed.tolist() == [4, 4]
    archive = cache.layers[1].archive
    rows = (torch.zeros(17, dtype=torch.int64), slice(None), torch.arange(13, 30))
    keys, _ = archive.codec.decode(archive.take(rows))
    torch.testing.assert_close(cache._means[1, 0, :, 2], keys.mean(0))


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_rows_come_back_as_the_host_has_them(model: Any, tools: Any, precision: str) -> None:
    options = {"budget": 24, "start": 2, "recent": 4, "window": 4, "host_precision": precision}
    cache = make_cache("sentence_kv", model, **options)
    tools.run(model, cache, tools.prompt_ids(2, 30), tools.scripted_ids(2, 40))
    footprint = cache.footprint()
    assert footprint.bytes_to_device > 0 and footprint.rows_max == 24
    exact = make_cache("sentence_kv", model, **{**options, "host_precision": "auto"})
    tools.run(model, exact, tools.prompt_ids(2, 30), tools.scripted_ids(2, 40))
    assert footprint.bytes_to_host < exact.footprint().bytes_to_host


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 64}, "budget=64: this policy needs at least 72 rows"),
        ({"budget": 1.5}, "budget=1.5: a share"),
        ({"start": -1}, "start=-1"),
        ({"recent": 0}, "recent=0"),
        ({"interval": 0}, "interval=0"),
        ({"window": 0}, "window=0"),
        ({"kernel": 2}, "kernel=2: give an odd number"),
        ({"semantic_factor": 0.5}, "semantic_factor=0.5: give a number of at least 1"),
        ({"semantic_factor": float("nan")}, "semantic_factor=nan"),
        ({"semantic_factor": float("inf")}, "semantic_factor=inf"),
        ({"semantic_factor": True}, "semantic_factor=True"),
        ({"host_precision": "int4"}, "host_precision='int4'"),
    ],
)
def test_options_out_of_range(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_cache("sentence_kv", model, **options)


def test_it_needs_a_tokenizer(tiny_llama: Any) -> None:
    model = tiny_llama()
    zoomkv.attach(model)
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        make_cache("sentence_kv", model)
