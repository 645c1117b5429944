"""What a trace says of each step is what that step's query could read, for every policy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.bases import make_base
from tests.caches.conftest import (
    BEGIN,
    DELIMITERS,
    DOT,
    END,
    TABLE,
    Bench,
    Policy,
    masked_dense,
    prompt_ids,
    run,
    scripted_ids,
)
from tests.conftest import make_tiny

import zoomkv
from zoomkv.caches.registry import make_cache, names
from zoomkv.evaluation.lens import recorder as recorder_module
from zoomkv.evaluation.lens.holdings import PLAIN, SUMMARY, ZOOMED
from zoomkv.evaluation.lens.recorder import Recorder, TracingGenerator
from zoomkv.evaluation.lens.trace_file import Trace, View, read_trace, write_trace
from zoomkv.generation import Generator, load
from zoomkv.modules.reader import Entries
from zoomkv.spans.thoughts import parse

PROMPT, ANSWER = 9, 66
POLICIES = [policy for policy in TABLE if policy.name in names()]
IDS = [f"{policy.name}-{policy.label}".rstrip("-") for policy in POLICIES]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=IDS)


def bench_of(policy: Policy, **options: Any) -> Bench:
    model, dense = make_tiny("llama", **options), make_tiny("llama", **options)
    zoomkv.attach(model)
    return Bench(model, dense, policy)


class Run:
    """A traced run over given tokens, and what an own spy saw in it."""

    def __init__(self, policy: Policy, **options: Any) -> None:
        self.bench = bench_of(policy, **options)
        self.cache = self.bench.cache()
        self.recorder = Recorder(self.cache)
        self.prompt, self.generated = prompt_ids(1, PROMPT), scripted_ids(1, ANSWER)
        self.seen: list[dict[str, Any]] = []
        traced = self.cache.commit

        def spy(step: Any, hidden: Any) -> None:
            self.look(step)
            traced(step, hidden)

        self.cache.commit = spy
        self.logits, self.reads = run(self.bench.model, self.cache, self.prompt, self.generated)
        # The last token is only written.
        tokens = [""] * (PROMPT + ANSWER + 1)
        self.trace = self.recorder.trace(tokens, policy.name, {}, "tiny")
        self.view = self.trace.views()

    def look(self, step: Any) -> None:
        if step.in_prompt:
            self.seen.clear()
        self.seen.append({"footprint": self.cache.footprint()})

    def layer(self, view: View, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Shares of one layer of the model."""
        at = 0 if len(view.exact) == 1 else number
        return view.exact[at], view.coarse[at]


@cache
def usual_run(number: int) -> Run:
    """Of a policy with the usual model; only looked at."""
    return Run(POLICIES[number])


def test_every_policy_is_here() -> None:
    assert {policy.name for policy in POLICIES} == set(names())


@every_policy
def test_a_dense_model_that_sees_what_the_trace_says_gives_the_same_logits(policy: Policy) -> None:
    """With one KV head a layer, shares are 0 or 1 and say all."""
    if policy.merges:
        pytest.skip("rows that were merged are nobody's alone: other tests look at these")
    found = Run(policy, kv_heads=1)
    masks = []
    for step in range(1, found.trace.steps):
        shares = [found.layer(found.view(step), layer)[0] for layer in range(2)]
        assert all(set(share.tolist()) <= {0.0, 1.0} for share in shares)
        masks.append([torch.from_numpy(share[None] == 1) for share in shares])
    ids = torch.cat([found.prompt, found.generated], dim=1)[0]
    dense = masked_dense(found.bench, ids, PROMPT, masks)
    torch.testing.assert_close(found.logits[0], dense[PROMPT - 1 :], atol=1e-4, rtol=1e-4)
    if policy.binding:
        assert not all(mask.all() for mask in masks[-1])


@every_policy
def test_shares_are_those_of_the_rows_that_are_reported(policy: Policy) -> None:
    found = usual_run(POLICIES.index(policy))
    view = found.view(0)
    assert (view.exact == 1).all() and not view.coarse.any() and view.exact.shape[1] == PROMPT
    for step, read in enumerate(found.reads, start=1):
        view = found.view(step)
        assert view.exact.shape[1] == len(view.marks) == PROMPT + step
        for layer, mask in enumerate(read):
            exact, coarse = found.layer(view, layer)
            assert exact[-1] == 1 and coarse[-1] == 0  # the query reads itself
            share = mask[0].double().mean(0).numpy()
            if policy.name == "semanticache":  # a cluster is reported where it begins
                assert (exact[:-1] <= share).all() and (exact + coarse == 1).all()
            else:
                np.testing.assert_array_equal(exact[:-1], share)
    alike = all(torch.equal(read[0], mask) for read in found.reads for mask in read)
    assert len(found.trace.groups) == (1 if alike else 2)


@every_policy
def test_bytes_are_those_of_the_step(policy: Policy) -> None:
    found = usual_run(POLICIES.index(policy))
    held = [seen["footprint"] for seen in found.seen]
    assert found.trace.device_bytes == [footprint.device_bytes for footprint in held]
    assert found.trace.host_bytes == [footprint.host_bytes for footprint in held]


def test_a_full_row_is_what_a_full_cache_stores() -> None:
    found = Run(Policy("full"))
    stored = [x for layer in found.cache.layers for x in layer.stored()]
    total = sum(x.numel() * x.element_size() for x in stored)
    assert total == found.trace.row_bytes * (PROMPT + ANSWER)


@every_policy
def test_a_trace_comes_back_from_its_file(policy: Policy, tmp_path: Any) -> None:
    trace = usual_run(POLICIES.index(policy)).trace
    write_trace(trace, tmp_path / "a.json")
    assert read_trace(tmp_path / "a.json") == trace
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# -- what is merged -----------------------------------------------------------------------------


def of_name(name: str, label: str = "") -> Policy:
    return next(policy for policy in POLICIES if (policy.name, policy.label) == (name, label))


class FollowMerges(Run):
    """Follows every merge of semanticache with sets of positions."""

    def look(self, step: Any) -> None:
        super().look(step)
        if step.in_prompt:
            for number, layer in enumerate(self.cache.layers):
                layer.merge = self.merging(number, layer, layer.merge)
            self.members: list[list[dict[int, set[int]]]] = [[{}, {}], [{}, {}]]
        self.seen[-1]["members"] = [[dict(head) for head in heads] for heads in self.members]

    def merging(self, number: int, layer: Any, merge: Any) -> Any:
        def spy(into: torch.Tensor, count: torch.Tensor) -> None:
            for head, members in enumerate(self.members[number]):
                slots = layer.slots.positions[0, head, : int(layer.slots.count[0])].tolist()
                now: dict[int, set[int]] = {}
                for slot, position in enumerate(slots):
                    kept = slots[int(into[0, head, slot])]
                    now.setdefault(kept, set()).update(members.get(position, {position}))
                self.members[number][head] = now
            merge(into, count)

        return spy


@pytest.mark.parametrize("label", ["", "tight"])
def test_clusters_of_semanticache(label: str) -> None:
    found = FollowMerges(of_name("semanticache", label))
    merged = 0
    for step in range(1, found.trace.steps):
        view = found.view(step)
        for number, heads in enumerate(found.seen[step]["members"]):
            exact, coarse = found.layer(view, number)
            for position in range(PROMPT + step - 1):
                inside = sum(
                    any(position in of and len(of) > 1 for of in head.values()) for head in heads
                )
                assert coarse[position] == inside / 2
                assert exact[position] == 1 - inside / 2
                merged += inside
    assert merged


SEKV = [policy for policy in POLICIES if policy.name == "sekv"]


@pytest.mark.parametrize("policy", SEKV, ids=[policy.label for policy in SEKV])
def test_coarse_entries_of_sekv(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is in a mean alone where no query has replaced its span's entry."""
    biases: list[torch.Tensor] = []
    part = Entries.part

    def spy(self: Entries, bias: torch.Tensor) -> Any:
        biases.append(bias.clone())
        return part(self, bias)

    monkeypatch.setattr(Entries, "part", spy)

    class Follow(Run):
        def look(self, step: Any) -> None:
            super().look(step)
            own, cache = self.seen[-1], self.cache
            own["biases"], own["span"] = list(biases), cache.spans.of.clone()
            own["exact"] = set(cache.slots.positions[0, 0, : int(cache.slots.count[0])].tolist())
            biases.clear()

    found = Follow(policy)
    means = zoomed = 0
    for step in range(1, found.trace.steps):
        view, seen = found.view(step), found.seen[step]
        span = seen["span"][0].tolist()
        for layer in range(2):
            exact, coarse = found.layer(view, layer)
            expected = np.zeros(PROMPT + step)
            if seen["biases"]:
                bias = seen["biases"][layer][0]  # [Hkv, ..., entries]
                read = bias.isfinite().flatten(1, -2).all(1)  # by all heads of a group
                for position, number in enumerate(span):
                    if number >= 0:
                        expected[position] = read[:, number].double().mean()
            np.testing.assert_array_equal(coarse, expected)
            assert ((exact + coarse) <= 1).all()
            means += int((coarse > 0).sum())
        for position in (view.exact.max(0)[:-1] > 0).nonzero()[0].tolist():
            fetched = position not in seen["exact"]
            assert view.marks[position] == (ZOOMED if fetched else PLAIN)
            zoomed += fetched
    assert zoomed and bool(means) == policy.merges


def test_what_sekv_fetches() -> None:
    class Follow(Run):
        def look(self, step: Any) -> None:
            super().look(step)
            told = self.cache.trace()
            self.seen[-1]["so far"] = [
                sum(map(sum, (entry[n] for entry in told))) for n in ("asked", "fetched")
            ]

    found = Follow(of_name("sekv"))
    totals = np.array([seen["so far"] for seen in found.seen])
    assert found.trace.fetches[0] == [0, 0]
    assert found.trace.fetches[1:-1] == np.diff(totals, axis=0)[1:].tolist()
    assert totals[-1].min() > 0


# -- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [policy for policy in POLICIES if policy.name in ("zoomr", "sumr")],
    ids=[name for name in IDS if name.startswith(("zoomr", "sumr"))],
)
def test_paragraphs_and_summaries(policy: Policy) -> None:
    """Segments by the plain parser, choices by the cache's own columns."""
    found = Run(policy)
    segments = [s for s in parse(found.generated[0].tolist(), DELIMITERS) if s.closed]
    bounds = [
        [PROMPT + edge for edge in (segment.start, segment.summary_start, segment.end)]
        for segment in segments
    ]
    assert found.trace.spans == [
        {"paragraph": [start, middle], "summary": [middle, end]} for start, middle, end in bounds
    ]
    assert len(segments) == 4 and {BEGIN, END, DOT} <= set(found.generated[0].tolist())
    told = found.cache.trace()
    by_step = {choice["step"]: choice for choice in found.trace.choices}
    for step in range(1, found.trace.steps):
        view, expected = found.view(step), [PLAIN] * (PROMPT + step)
        # A query comes after so many columns as its position says.
        before = [entry for entry in told if entry["column"] <= PROMPT + step - 1]
        if before:
            for number in before[-1]["zoomed"]:
                start, middle, _ = bounds[number]
                expected[start:middle] = [ZOOMED] * (middle - start)
            for number in before[-1]["summarised"]:
                _, middle, end = bounds[number]
                expected[middle:end] = [SUMMARY] * (end - middle)
        read = view.exact[0] > 0
        assert view.marks[read].tolist() == np.array(expected)[read].tolist()
        if step in by_step:
            assert by_step[step]["zoomed"] == before[-1]["zoomed"]
            assert by_step[step].get("votes") == before[-1].get("votes")
            assert by_step[step].get("agreeability") == before[-1].get("agreeability")
            assert before[-1]["rows_read"] == int(read.sum()) - 1  # the query itself apart
    assert len(by_step) > 4
    marks = {int(mark) for step in range(1, found.trace.steps) for mark in found.view(step).marks}
    assert marks == ({PLAIN, SUMMARY} if policy.name == "sumr" else {PLAIN, ZOOMED, SUMMARY}) or (
        policy.label == "zoom-all" and marks == {PLAIN, ZOOMED}
    )


@pytest.mark.parametrize("label", ["", "interval"])
def test_sentences(label: str) -> None:
    policy = of_name("sentence_kv", label)
    found, options = Run(policy), policy.binding
    interval, selected, chosen = options.get("interval", 1), PROMPT, 0
    for step in range(1, found.trace.steps):
        view, length = found.view(step), PROMPT + step - 1
        if length - selected >= interval:
            selected = length
        for position in range(length):
            if view.exact[:, position].any():
                always = position < options["start"] or position >= selected - options["recent"]
                assert view.marks[position] == (PLAIN if always else ZOOMED)
                chosen += not always
    assert chosen


@pytest.mark.parametrize(
    ("name", "unread"), [("h2o", "gone"), ("zoomr", "host"), ("sekv", "host"), ("full", "host")]
)
def test_where_the_unread_are(name: str, unread: str) -> None:
    assert Run(of_name(name)).trace.unread == unread


# -- many layers --------------------------------------------------------------------------------


def test_layers_that_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers of four heads: 20 pairs in 15 parts; none and all stay exactly that."""
    monkeypatch.setattr(recorder_module, "_MOST", 0)
    found = Run(of_name("h2o", "all"), num_hidden_layers=5, kv_heads=4)
    assert (found.trace.groups, found.trace.levels) == ([[0, 5]], [15])
    between = 0
    for step, read in enumerate(found.reads, start=1):
        share = torch.cat([mask[0] for mask in read]).double().mean(0).numpy()
        told = found.view(step).exact[0, :-1]
        assert np.abs(told - share).max() <= 1 / 20 + 1e-9
        assert ((told == 0) == (share == 0)).all() and ((told == 1) == (share == 1)).all()
        between += int(((told > 0) & (told < 1)).sum())
    assert between


def test_groups_are_as_small_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Run(of_name("sekv", "coarse"), num_hidden_layers=5)
    assert found.trace.groups == [[n, n + 1] for n in range(5)]
    tokens = found.trace.tokens
    size = sum(map(len, found.trace.states.values()))
    monkeypatch.setattr(recorder_module, "_MOST", size - 1)
    trace = found.recorder.trace(tokens, "sekv", {}, "tiny")
    assert trace.groups == [[0, 2], [2, 4], [4, 5]] and trace.levels == [4, 4, 2]
    single, view = found.view, trace.views()
    for step in range(trace.steps):
        for part in ("exact", "coarse"):
            own, together = getattr(single(step), part), getattr(view(step), part)
            expected = [own[:2].mean(0), own[2:4].mean(0), own[4]]
            np.testing.assert_allclose(together, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("counts", "pairs", "levels", "parts"),
    [
        ([0, 1, 2, 3], 3, 3, [0, 1, 2, 3]),
        ([0, 1, 10, 29, 30], 30, 15, [0, 1, 5, 14, 15]),
        ([0, 1, 99, 100], 100, 15, [0, 1, 14, 15]),
        ([0, 1], 1, 1, [0, 1]),
    ],
)
def test_counts_in_parts(counts: list[int], pairs: int, levels: int, parts: list[int]) -> None:
    assert recorder_module.in_parts(np.array(counts), pairs, levels).tolist() == parts


# -- what is refused ----------------------------------------------------------------------------


def test_one_sequence_and_one_turn() -> None:
    bench = bench_of(of_name("h2o"))
    cache = bench.cache()
    Recorder(cache)
    with pytest.raises(ValueError, match="give one prompt, without beams"):
        run(bench.model, cache, prompt_ids(2, 5), scripted_ids(2, 3))
    cache = bench.cache()
    recorder = Recorder(cache)
    with pytest.raises(ValueError, match="nothing was generated"):
        recorder.trace([], "h2o", {}, "tiny")
    cache.expect_prompt(5)
    bench.model(prompt_ids(1, 5), cache=cache)
    bench.model(scripted_ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match="7 tokens|6 tokens were fed"):
        recorder.trace(["a"] * 6, "h2o", {}, "tiny")
    cache.expect_prompt(9)
    with pytest.raises(ValueError, match="follows one turn"):
        bench.model(prompt_ids(1, 3), cache=cache)


def test_a_prompt_in_parts_is_one_step() -> None:
    bench = bench_of(of_name("h2o"))
    traces = []
    for chunk in (None, 4):
        cache = bench.cache()
        recorder = Recorder(cache)
        run(bench.model, cache, prompt_ids(1, 9), scripted_ids(1, 20), chunk=chunk)
        trace = recorder.trace([""] * 30, "h2o", {}, "tiny")
        assert (trace.prompt, trace.steps, len(trace.device_bytes)) == (9, 21, 21)
        traces.append(trace)
    # While it is read, slack depends on the parts.
    assert traces[0].device_bytes[1:] == traces[1].device_bytes[1:]
    assert traces[0].states == traces[1].states


# -- from text to trace -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_base(tmp_path_factory.mktemp("base")))


def traced(loaded: Any, tokens: int, **options: Any) -> tuple[TracingGenerator, Trace]:
    model, tokenizer = loaded
    generator = TracingGenerator(model, tokenizer, "h2o", budget=16, recent=4, **options)
    generator.generate("Step 3: \U0001f98a and \u20ac?", tokens)
    return generator, generator.trace("tiny")


def test_an_answer_is_as_without_a_trace_and_its_text_whole(loaded: Any) -> None:
    generator, trace = traced(loaded, 40)
    model, tokenizer = loaded
    plain = Generator(model, tokenizer, "h2o", budget=16, recent=4)
    (answer,) = plain.generate("Step 3: \U0001f98a and \u20ac?", 40)
    assert generator.answer == answer and trace.steps == len(answer.ids)
    prompt = tokenizer(plain.render("Step 3: \U0001f98a and \u20ac?"), add_special_tokens=False)
    ids = prompt["input_ids"] + answer.ids
    assert trace.prompt == len(prompt["input_ids"]) and len(trace.tokens) == len(ids)
    assert "".join(trace.tokens) == tokenizer.decode(ids)
    assert (trace.policy, trace.options) == ("h2o", {"budget": 16, "recent": 4})


def test_an_answer_of_one_token(loaded: Any) -> None:
    _, trace = traced(loaded, 1)
    assert trace.steps == 1 and trace.views()(0).exact.shape[1] == trace.prompt


def test_no_trace_before_an_answer(loaded: Any) -> None:
    model, tokenizer = loaded
    generator = TracingGenerator(model, tokenizer)
    with pytest.raises(ValueError, match="nothing was generated"):
        generator.trace("tiny")
    with pytest.raises(ValueError, match="one prompt"):
        generator.generate(["a", "b"], 4)


def test_an_option_that_json_does_not_know_is_named_by_its_kind() -> None:
    bench = bench_of(of_name("sekv"))
    cache = make_cache("full", bench.model)
    recorder = Recorder(cache)
    run(bench.model, cache, prompt_ids(1, 5), scripted_ids(1, 2))
    trace = recorder.trace([""] * 8, "sekv", {"router": bench.sketch, "budget": 0.1}, "tiny")
    assert trace.options == {"router": "Sketch", "budget": 0.1}
