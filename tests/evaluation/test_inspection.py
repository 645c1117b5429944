"""Every number of an inspection against loops over what the plain eager model attends to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from zoomkv.data.traces import Segment, Trace, write_traces
from zoomkv.evaluation import attention_map as maps
from zoomkv.evaluation import figure_numbers as numbers_of
from zoomkv.evaluation import query_geometry as geometry
from zoomkv.evaluation.figure_numbers import figure_numbers
from zoomkv.evaluation.figures import draw, visible
from zoomkv.evaluation.inspection import Inspection, Rules, inspect_tokens
from zoomkv.evaluation.passages import Passage, read_source, tokenise

LENGTH, PROMPT = 120, 17
RULES = Rules(top_k=6, window=30, fraction=0.5)
IDS = torch.randint(1, 128, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
TEXTS = [f"<{number}>" for number in IDS]
MODELS = [("llama", 2), ("llama", 4), ("qwen3", 1), ("qwen2", 2)]
KINDS = ("local", "between", "global")


def make(tiny: Any, family: str, kv_heads: int) -> Any:
    """A model of spread attention: none of its weights vanish, so that their order is clear."""
    model = tiny(family, kv_heads=kv_heads)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "q_norm"):
                if hasattr(layer.self_attn, name):
                    getattr(layer.self_attn, name).weight.div_(6)
    return model


class Reference:
    """All of it, one query after the other."""

    def __init__(self, model: Any, rules: Rules = RULES) -> None:
        self.rules = rules
        before: dict[int, Tensor] = {}
        hooks = [
            # Qwen3 normalises its queries before it turns them.
            getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj).register_forward_hook(
                lambda module, args, out, number=number: before.update({number: out})
            )
            for number, layer in enumerate(model.model.layers)
        ]
        model.set_attn_implementation("eager")
        with torch.no_grad():
            output = model(torch.tensor([IDS]), output_attentions=True)
        model.set_attn_implementation("sdpa")
        for hook in hooks:
            hook.remove()
        self.weights = [layer[0].tolist() for layer in output.attentions]  # [L][H][T][T]
        self.layers, self.heads = len(self.weights), len(self.weights[0])
        self.unrotated = torch.stack(
            [
                before[layer].reshape(LENGTH, self.heads, -1).transpose(0, 1)
                for layer in range(self.layers)
            ]
        )  # [L, H, T, D]

    def top(self, layer: int, head: int, t: int) -> list[int]:
        row = self.weights[layer][head][t][: t + 1]
        return sorted(range(t + 1), key=lambda j: -row[j])[: self.rules.top_k]

    def median(self, layer: int, head: int, t: int) -> float:
        return median(t - j for j in self.top(layer, head, t))

    def kind(self, layer: int, head: int, t: int) -> str:
        distance = self.median(layer, head, t)
        if distance <= self.rules.window:
            return "local"
        return "global" if distance > self.rules.fraction * t else "between"

    def count(self, layer: int, head: int, start: int, end: int) -> int:
        return sum(self.kind(layer, head, t) == "global" for t in range(start, end))


@pytest.fixture(params=MODELS, ids=lambda case: f"{case[0]}-kv{case[1]}")
def case(request: Any, tiny: Any) -> tuple[Any, Reference, Inspection]:
    model = make(tiny, *request.param)
    reference = Reference(model)
    return model, reference, inspect_tokens(model, IDS, PROMPT, RULES)


@pytest.fixture
def found(tiny: Any) -> Inspection:
    return inspect_tokens(make(tiny, "llama", 2), IDS, PROMPT, RULES)


def test_counts_histograms_and_the_shown_head(case: Any) -> None:
    """Figures 3 and 1b, and what figures 1a and 2 start from."""
    _, reference, found = case
    start, end = found.interval
    assert (start, end) == (LENGTH - (LENGTH - PROMPT + 1) // 2, LENGTH)
    everywhere = [0] * LENGTH
    for layer, head in product(range(reference.layers), range(reference.heads)):
        assert found.counts[layer, head] == reference.count(layer, head, start, end)
        assert found.text_counts[layer, head] == reference.count(layer, head, PROMPT, LENGTH)
        bins = {"local": [0] * LENGTH, "global": [0] * LENGTH, "between": [0] * LENGTH}
        for t in range(LENGTH):
            kind = reference.kind(layer, head, t)
            everywhere[t] += kind == "global"
            if t >= PROMPT:
                for j in reference.top(layer, head, t):
                    bins[kind][(t - j) // found.bin_width] += 1
        size = found.histograms.shape[-1]
        assert found.histograms[layer, head].tolist() == [
            bins["local"][:size],
            bins["global"][:size],
        ]
    assert found.heads_where_global.tolist() == everywhere
    shown = found.head
    assert shown.kind.tolist() == [
        KINDS.index(reference.kind(shown.layer, shown.head, t)) for t in range(LENGTH)
    ]
    assert shown.median.tolist() == [
        reference.median(shown.layer, shown.head, t) for t in range(LENGTH)
    ]
    for t in range(LENGTH):
        tops = reference.top(shown.layer, shown.head, t)
        assert shown.top[t].tolist() == tops + [-1] * (RULES.top_k - len(tops))
    # The cases are not trivial ones.
    assert 0 < found.counts.sum() < found.counts.numel() * (end - start)
    assert (shown.kind[PROMPT:] == maps.LOCAL).any() and (shown.kind[PROMPT:] == maps.GLOBAL).any()


def test_queries_before_rope(case: Any) -> None:
    _, reference, found = case
    expected = reference.unrotated[found.head.layer, found.head.head]
    torch.testing.assert_close(found.head.unrotated, expected, atol=2e-5, rtol=1e-5)


def test_attention_map_and_top_keys(case: Any) -> None:
    """Figures 1a and 2."""
    _, reference, found = case
    figures, _ = figure_numbers(found, TEXTS)
    layer, head = found.head.layer, found.head.head
    shown = figures["1a_attention_map"]
    start, end = found.stretch
    assert (shown["layer"], shown["head"]) == (layer, head)
    assert shown["positions"] == list(range(start, end)) and shown["texts"] == TEXTS[start:end]
    assert shown["kinds"] == [reference.kind(layer, head, t) for t in range(start, end)]
    assert shown["keys_in_a_column"] == 1
    expected = [reference.weights[layer][head][t][:end] for t in range(start, end)]
    np.testing.assert_allclose(shown["largest_weight_in_a_column"], expected, atol=2e-6)

    queries = figures["2_top_keys"]["queries"]
    assert [query["kind"] for query in queries].count("global") == 2 == len(queries) / 2
    for query in queries:
        t = query["position"]
        assert start <= t < end and query["text"] == TEXTS[t]
        assert query["kind"] == reference.kind(layer, head, t)
        assert query["median_distance"] == reference.median(layer, head, t)
        keys = [key["position"] for key in query["keys"]]
        assert keys == reference.top(layer, head, t)
        assert [key["text"] for key in query["keys"]] == [TEXTS[j] for j in keys]
        weights = [reference.weights[layer][head][t][j] for j in keys]
        np.testing.assert_allclose([key["weight"] for key in query["keys"]], weights, atol=2e-6)


def test_neighbouring_keys_share_a_column_where_there_are_many(
    found: Inspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = figure_numbers(found, TEXTS)[0]["1a_attention_map"]["largest_weight_in_a_column"]
    monkeypatch.setattr(numbers_of, "_COLUMNS", 16)
    coarse = figure_numbers(found, TEXTS)[0]["1a_attention_map"]
    width = coarse["keys_in_a_column"]
    assert width == math.ceil(found.stretch[1] / 16) > 1
    for row, pooled in zip(fine, coarse["largest_weight_in_a_column"], strict=True):
        assert pooled == [max(row[i : i + width]) for i in range(0, len(row), width)]


def test_similarity_and_plane(case: Any) -> None:
    """Figures 4a and 4b."""
    _, reference, found = case
    figures, _ = figure_numbers(found, TEXTS)
    layer, head = found.head.layer, found.head.head
    queries = reference.unrotated[layer, head].double().numpy()
    start, end = found.interval
    kinds = [reference.kind(layer, head, t) for t in range(start, end)]

    def cosine(a: Any, b: Any) -> float:
        return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))

    expected = [
        [cosine(queries[s], queries[t]) for t in range(start, end)] for s in range(start, end)
    ]
    similarity = figures["4a_similarity"]
    assert similarity["kinds"] == kinds
    np.testing.assert_allclose(similarity["similarity"], expected, atol=1e-5)
    for name, first, second in [
        ("local to other local", "local", "local"),
        ("global to other global", "global", "global"),
        ("global to local", "global", "local"),
    ]:
        pairs = [
            expected[s][t]
            for s, t in product(range(end - start), repeat=2)
            if s != t and (kinds[s], kinds[t]) == (first, second)
        ]
        assert similarity["mean_similarity"][name] == pytest.approx(mean(pairs), abs=1e-5)

    plane = figures["4b_plane"]
    assert plane["positions"] == list(range(PROMPT, LENGTH))
    centred = queries[PROMPT:] - queries[PROMPT:].mean(0)
    left, values, axes = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(
        np.abs(plane["points"]), np.abs(left[:, :2] * values[:2]), atol=1e-4 * values[0]
    )
    np.testing.assert_allclose(
        plane["share_of_variance"], (values**2 / (values**2).sum())[:2], atol=1e-4
    )
    for axis in range(2):  # the sign: the largest entry of the component is positive
        component = centred.T @ np.array(plane["points"])[:, axis]
        assert component[np.abs(component).argmax()] > 0


def test_coverage(case: Any) -> None:
    """Figure 6a."""
    _, reference, found = case
    start, end = found.interval
    history = range(PROMPT, start)
    unit = torch.nn.functional.normalize(reference.unrotated.double(), dim=-1)
    coverage = figure_numbers(found, TEXTS)[0]["6a_coverage"]
    assert coverage["built_at"] == start and coverage["steps"] == list(range(start, end))

    def farthest(layer: int, head: int, among: list[int]) -> list[int]:
        """The appendix of the paper, word by word."""
        queries = unit[layer, head]
        average = {i: mean(float(queries[i] @ queries[j]) for j in among) for i in among}
        chosen = [min(among, key=lambda i: average[i])]
        while len(chosen) < 16:
            rest = [i for i in among if i not in chosen]
            nearest = {i: max(float(queries[i] @ queries[j]) for j in chosen) for i in rest}
            chosen.append(min(rest, key=lambda i: nearest[i]))
        return chosen

    def near(layer: int, head: int, chosen: list[int], t: int) -> float:
        return max(float(unit[layer, head, t] @ unit[layer, head, j]) for j in chosen)

    heads = list(product(range(reference.layers), range(reference.heads)))
    recent = list(history[-16:])
    sets: dict[str, Callable[[int, int], list[int]]] = {
        "32 recent": lambda layer, head: list(history[-32:]),
        "16 recent + 16 FPS": lambda layer, head: (
            farthest(layer, head, list(history[:-16])) + recent
        ),
        "16 initial + 16 recent": lambda layer, head: list(history[:16]) + recent,
    }
    for name, choose in sets.items():
        chosen = {(layer, head): choose(layer, head) for layer, head in heads}
        expected = [mean(near(*at, chosen[at], t) for at in heads) for t in range(start, end)]
        np.testing.assert_allclose(coverage["similarity"][name], expected, atol=1e-4)
        assert coverage["mean"][name] == pytest.approx(mean(expected), abs=1e-4)
    assert set(coverage["similarity"]) == {*sets, "16 recent + 16 random"}


def test_random_queries_are_older_ones_without_repetition_and_follow_the_seed() -> None:
    history = torch.randn(3, 50, 8)

    def draw_with(seed: int) -> Tensor:
        sets = geometry.observation_sets(history, torch.Generator().manual_seed(seed))
        return sets["16 recent + 16 random"]

    chosen = draw_with(3)
    for head in chosen.tolist():
        assert head[16:] == list(range(34, 50))
        assert len(set(head)) == 32 and max(head[:16]) < 34
    assert torch.equal(chosen, draw_with(3)) and not torch.equal(chosen, draw_with(4))
    assert len({tuple(head) for head in chosen.tolist()}) == 3  # each head draws its own


def test_random_coverage_is_that_of_its_set(tiny: Any) -> None:
    model = make(tiny, "llama", 2)
    reference = Reference(model)
    rules = replace(RULES, seed=5)
    found = inspect_tokens(model, IDS, PROMPT, rules)
    start, end = found.interval
    generator = torch.Generator().manual_seed(5)
    for layer in range(reference.layers):
        queries = reference.unrotated[layer]
        sets = geometry.observation_sets(queries[:, PROMPT:start], generator)
        unit = torch.nn.functional.normalize(queries, dim=-1)
        for t in range(start, end):
            near = [
                max(float(unit[head, t] @ unit[head, PROMPT + j]) for j in chosen)
                for head, chosen in enumerate(sets["16 recent + 16 random"].tolist())
            ]
            value = found.coverage["16 recent + 16 random"][layer, t - start]
            assert value.item() == pytest.approx(mean(near), abs=1e-4)


@settings(max_examples=60)
@given(
    length=st.integers(1, 40),
    count=st.integers(1, 50),
    group=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    at_once=st.integers(1, 600),
    seed=st.integers(0, 99),
)
def test_top_keys_in_chunks(
    length: int, count: int, group: tuple[int, int], at_once: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(group[0], length, 8, generator=generator)
    key = torch.randn(group[1], length, 8, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "_SCORES_AT_ONCE", at_once)
        top = maps.top_keys(query, key, count)
    assert top.shape == (group[0], length, min(count, length))
    distance = maps.distances(top)
    middle = maps.median_distance(distance)
    for head, t in product(range(group[0]), range(length)):
        scores = key[head * group[1] // group[0], : t + 1] @ query[head, t]
        expected = scores.argsort(descending=True)[:count].tolist()
        there = len(expected)
        assert top[head, t].tolist() == expected + [-1] * (top.shape[-1] - there)
        assert distance[head, t, :there].tolist() == [t - j for j in expected]
        assert middle[head, t] == median(t - j for j in expected)


@given(
    distance=st.lists(st.integers(0, 2000).map(lambda half: half / 2), min_size=1, max_size=80),
    window=st.integers(0, 400),
    fraction=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_kinds(distance: list[float], window: int, fraction: float) -> None:
    found = maps.kinds(torch.tensor(distance), window, fraction).tolist()
    for t, (kind, value) in enumerate(zip(found, distance, strict=True)):
        assert (kind == maps.LOCAL) == (value <= window)
        assert (kind == maps.GLOBAL) == (value > window and value > fraction * t)


def test_the_shown_head_is_the_busiest_that_is_not_always_global(tiny: Any) -> None:
    model = make(tiny, "llama", 2)
    for rules in (RULES, replace(RULES, window=9, fraction=0.1), replace(RULES, window=50)):
        found = inspect_tokens(model, IDS, PROMPT, rules)
        half = (found.interval[1] - found.interval[0]) / 2
        counts, text = found.counts.tolist(), found.text_counts.tolist()
        everywhere = list(product(range(len(counts)), range(len(counts[0]))))

        def rank(at: tuple[int, int]) -> tuple[bool, int, int]:
            count = counts[at[0]][at[1]]  # noqa: B023
            return 0 < count <= half, count, text[at[0]][at[1]]  # noqa: B023

        assert (found.head.layer, found.head.head) == max(everywhere, key=rank)
        for layer in range(len(counts)):
            of_layer = inspect_tokens(model, IDS, PROMPT, replace(rules, layer=layer)).head
            best = max((at for at in everywhere if at[0] == layer), key=rank)
            assert (of_layer.layer, of_layer.head) == best
        of_head = inspect_tokens(model, IDS, PROMPT, replace(rules, head=1)).head
        assert (of_head.layer, of_head.head) == max((a for a in everywhere if a[1] == 1), key=rank)
    given = inspect_tokens(model, IDS, PROMPT, replace(RULES, layer=1, head=3)).head
    assert (given.layer, given.head) == (1, 3)


def test_the_default_stretch_shows_both_kinds_best(tiny: Any) -> None:
    found = inspect_tokens(make(tiny, "llama", 2), IDS, PROMPT, replace(RULES, interval=(40, 110)))
    start, end = found.stretch
    kind = found.head.kind.tolist()

    def rarer(first: int) -> int:
        inside = kind[first : first + 32]
        return min(inside.count(maps.LOCAL), inside.count(maps.GLOBAL))

    assert end - start == 32
    assert start == max(range(40, 110 - 31), key=rarer)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("LLLGLLLLGLL", [2, 3, 7, 8]),
        ("LGG", [0, 1]),  # one local query is the neighbour of one global
        ("GBBLBL", [0, 3]),
        ("LLLL", [0, 1]),
        ("BGBG", [1, 3]),
        ("BB", []),
    ],
)
def test_neighbours(kinds: str, expected: list[int]) -> None:
    kind = torch.tensor(["LBG".index(letter) for letter in kinds], dtype=torch.int8)
    assert numbers_of._neighbours(kind, (0, len(kinds))) == expected


def test_interval_and_stretch_as_given(tiny: Any) -> None:
    rules = replace(RULES, interval=(5, 60), stretch=(2, 9))
    found = inspect_tokens(make(tiny, "llama", 2), IDS, PROMPT, rules)
    figures, notes = figure_numbers(found, TEXTS)
    assert figures["3_global_queries"]["interval"] == [5, 60]
    assert figures["1a_attention_map"]["positions"] == list(range(2, 9))
    assert "6a_coverage" not in figures and "6a_coverage is left out" in notes[-1]


def test_a_text_without_global_queries(tiny: Any, tmp_path: Path) -> None:
    found = inspect_tokens(make(tiny, "llama", 2), IDS, PROMPT)  # no distance exceeds 256
    figures, notes = figure_numbers(found, TEXTS)
    assert notes == [
        "no query of the text is global: none has its median distance above 256 tokens and "
        "0.25 of its position"
    ]
    assert not np.any(figures["3_global_queries"]["global_queries"])
    assert [query["kind"] for query in figures["2_top_keys"]["queries"]] == ["local"] * 2
    assert figures["4a_similarity"]["mean_similarity"]["global to local"] is None
    assert set(figures["4b_plane"]["kinds"]) == {"local"}
    assert len(figures) == 7
    for name, numbers in figures.items():
        draw(name, numbers, tmp_path / name)


def test_the_shortest_text(tiny: Any, tmp_path: Path) -> None:
    found = inspect_tokens(make(tiny, "llama", 2), IDS[:2], 0)
    figures, _ = figure_numbers(found, TEXTS[:2])
    assert found.interval == (1, 2) and set(figures) == set(PICTURES) - {"6a_coverage"}
    for name, numbers in figures.items():
        draw(name, json.loads(json.dumps(numbers, allow_nan=False)), tmp_path / name)


def test_half_precision_and_progress(tiny: Any) -> None:
    model = make(tiny, "llama", 2).bfloat16()
    done: list[tuple[int, int]] = []
    found = inspect_tokens(model, IDS, PROMPT, RULES, lambda *layers: done.append(layers))
    assert done == [(1, 2), (2, 2)] and found.head.query.dtype == torch.float32
    figures, _ = figure_numbers(found, TEXTS)
    json.dumps(figures, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval": (60, 121)}, "interval 60 to 121: give START below END, within the 120"),
        ({"interval": (60, 60)}, "interval 60 to 60: give START below END"),
        ({"stretch": (9, 3)}, "tokens 9 to 3: give START below END"),
        ({"layer": 2}, "layer 2: the model has layers 0 to 1"),
        ({"head": 4}, "head 4: the model has heads 0 to 3"),
        ({"top_k": 0}, "top_k=0, window=30: give at least 1 and 0"),
        ({"fraction": 1.0}, "fraction=1.0: choose a share"),
        ({"fraction": float("nan")}, "fraction=nan: choose a share"),
    ],
)
def test_bad_rules(tiny: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect_tokens(tiny("llama"), IDS, PROMPT, replace(RULES, **change))


def test_nothing_after_the_prompt(tiny: Any) -> None:
    with pytest.raises(ValueError, match="120 tokens, 119 of them the prompt: a text needs"):
        inspect_tokens(tiny("llama"), IDS, 119)


# Pictures.

PICTURES = {
    "1a_attention_map": 1.5,
    "1b_distances": 1.5,
    "2_top_keys": 1.5,
    "3_global_queries": 0.7,
    "4a_similarity": 1.0,
    "4b_plane": 0.9,
    "6a_coverage": 0.9,
}
"""The greatest height of each, in widths."""


def test_pictures(found: Inspection, tmp_path: Path) -> None:
    figures, _ = figure_numbers(found, TEXTS)
    assert list(figures) == list(PICTURES)
    for name, numbers in figures.items():
        assert json.loads(json.dumps(numbers)) == numbers  # a file's numbers are what is drawn
        draw(name, numbers, tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert picture.format == "PNG" and picture.width == 1600
            assert 0.3 < picture.height / picture.width <= PICTURES[name]
            assert np.asarray(picture.convert("L")).std() > 10  # not a blank page


def test_tokens_of_any_kind_can_be_drawn(
    found: Inspection, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    odd = ["$x_{$", "\n\n", "\t", "\x00", "\ufffd", "中文", "  a ", "", "\\frac$$", "🙂", "%" * 300]
    texts = [odd[number % len(odd)] for number in range(LENGTH)]
    figures, _ = figure_numbers(found, texts)
    for name in ("1a_attention_map", "2_top_keys"):
        draw(name, figures[name], tmp_path / "picture.png")
        with Image.open(tmp_path / "picture.png") as picture:
            assert picture.width == 1600 and picture.height < 6000
    assert not list(recwarn)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" step", "·step"),
        ("\n\n", "\\n\\n"),
        ("  ", "··"),
        ("a b ", "a b·"),
        ("\x00é", "\\x00é"),
        ("%" * 99, "%" * 39 + "…"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


# What is read.

TRACE = Trace("What is 1+2?", (Segment("1+2=3", "3"), Segment("so 3")), "The answer is 3.", id="a")
BEGIN, END = "<|begin_of_summary|>", "<|end_of_summary|>"


def decoded(tokenizer: Any, passage: Passage) -> tuple[str, str]:
    ids, prompt = passage.ids, passage.prompt
    return tokenizer.decode(ids[:prompt]), tokenizer.decode(ids[prompt:])


def test_a_trace_with_and_without_summaries(tokenizer: PreTrainedTokenizerFast) -> None:
    passage = tokenise(TRACE, tokenizer, 1000, "a.jsonl")
    prompt = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
    text = "1+2=3\n\nso 3\n\nThe answer is 3.<|im_end|>"
    assert decoded(tokenizer, passage) == (prompt, text)
    assert passage.notes == ("summaries left out: the model knows no delimiters for them",)


def test_summaries_stay_where_the_model_knows_them(tokenizer: PreTrainedTokenizerFast) -> None:
    from copy import deepcopy

    tokenizer = deepcopy(tokenizer)
    tokenizer.add_tokens([BEGIN, END], special_tokens=True)
    passage = tokenise(TRACE, tokenizer, 1000, "a.jsonl")
    assert f"1+2=3\n\n{BEGIN}3{END}\n\nso 3" in decoded(tokenizer, passage)[1]
    assert passage.notes == ()


def test_a_long_trace_is_cut_and_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenise(TRACE, tokenizer, 1000, "a.jsonl")
    passage = tokenise(TRACE, tokenizer, len(whole.ids) - 1, "a.jsonl")
    assert decoded(tokenizer, passage)[1] == "1+2=3\n\nso 3\n\n"
    assert "cut at a paragraph" in passage.notes[-1]
    with pytest.raises(ValueError, match="a.jsonl: the trace can't be rendered, 1 dropped"):
        tokenise(TRACE, tokenizer, whole.prompt + 1, "a.jsonl")


def test_a_text_with_and_without_a_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = tokenise("total 12", tokenizer, 1000, "a.txt")
    assert decoded(tokenizer, bare) == ("", "total 12")
    passage = tokenise("total 12", tokenizer, 1000, "a.txt", "why?")
    prompt = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(tokenizer, passage) == (prompt, "total 12")
    cut = tokenise("total 12", tokenizer, len(passage.ids) - 1, "a.txt", "why?")
    assert cut.ids == passage.ids[:-1] and cut.notes[0].startswith("cut from ")
    with pytest.raises(ValueError, match="the prompt alone fills the model's"):
        tokenise("total 12", tokenizer, passage.prompt, "a.txt", "why?")


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_traces(path, [TRACE, replace(TRACE, id="b")])
    assert read_source(path) == TRACE
    assert read_source(path, row=1).id == "b"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="there is no row 2 "):
        read_source(path, row=2)
