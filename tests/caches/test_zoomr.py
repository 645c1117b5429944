"""ZoomR's own rules: votes, selection, what moves, malformed summaries, the budget."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zoomkv
from zoomkv.caches.registry import make_cache

PROMPT, WINDOW = 7, 4


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


@pytest.fixture
def zoomr(model: Any, tools: Any) -> Any:
    def make(policy: str = "zoomr", **options: Any) -> Any:
        chosen = {"window": WINDOW, "max_interval": 16, **options}
        return make_cache(policy, model, tools.TOKENIZER, tools.DELIMITERS, **chosen)

    return make


def row_bytes(cache: Any, batch: int = 1) -> int:
    shape = cache.shape
    return batch * shape.layers * shape.kv_heads * 2 * shape.head_dim * 4


def segments(length: int) -> list[tuple[range, range]]:
    """Paragraphs and summaries of ``scripted_ids``, delimiters included, by position."""
    starts = range(PROMPT, PROMPT + length - 13, 14)
    return [(range(start, start + 9), range(start + 9, start + 14)) for start in starts]


def test_votes_and_selection_equal_a_plain_loop(model: Any, zoomr: Any, tools: Any) -> None:
    """Keys and queries are recorded from the model itself; the rest is section 3.3 in loops."""
    length, layers, heads, groups = 90, 2, 4, 2
    queries: list[list[Tensor]] = []
    keys: list[list[Tensor]] = [[] for _ in range(layers)]
    cache = zoomr(consensus=2, top_k=2)
    commit, update = cache.commit, cache.update

    def spy_commit(step: Any, hidden: Tensor) -> None:
        queries.append(list(step.observations))
        commit(step, hidden)

    def spy_update(k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        keys[layer].append(k[0])
        return update(k, v, layer, *rest, **named)

    cache.commit, cache.update = spy_commit, spy_update
    prompt, generated = tools.prompt_ids(1, PROMPT), tools.scripted_ids(1, length)
    with torch.no_grad():
        for part in (prompt, *generated.split(1, dim=1)):
            model(part, cache=cache)
    rows = [torch.cat(parts, dim=1) for parts in keys]  # by layer [Hkv, T, D]

    checked = 0
    for entry in cache.trace():
        closed = [s for s in segments(length) if s[1][-1] <= entry["position"]]
        votes = [0] * len(closed)
        step = queries[entry["position"] - PROMPT + 1]
        for layer in range(layers if closed else 0):
            for head in range(heads):
                scores = []
                for number, (_, summary) in enumerate(closed):
                    interior = list(summary)[1:-1]
                    mean = rows[layer][head // groups, interior].mean(0)
                    scores.append((float(step[layer][0, head, 0] @ mean), number))
                for _, number in sorted(scores)[-2:]:
                    votes[number] += 1
        assert entry["votes"] == votes
        assert sum(votes) == layers * heads * min(2, len(closed))
        voted = sorted((v, i) for i, v in enumerate(votes) if v)
        zoomed = sorted(i for _, i in voted[-2:])
        assert entry["zoomed"] == zoomed
        assert entry["summarised"] == sorted({i for _, i in voted} - set(zoomed))
        if len(closed) > 2:
            share = sum(votes[i] for i in zoomed) / sum(votes)
            assert math.isclose(entry["agreeability"], share, rel_tol=1e-6)
            checked += 1
        else:
            assert entry["agreeability"] is None
    assert checked > 5
    json.dumps(cache.trace(), allow_nan=False)


def test_index_set(zoomr: Any, model: Any, tools: Any) -> None:
    """Prompt, window, open paragraph, R of the winners, S of the losers; nothing else."""
    length = 90
    cache = zoomr(consensus=1, top_k=1)
    prompt, generated = tools.prompt_ids(1, PROMPT), tools.scripted_ids(1, length)
    _, reads = tools.run(model, cache, prompt, generated)
    entries = {entry["position"]: entry for entry in cache.trace()}
    expected: set[int] | None = None
    for number, read in enumerate(reads):
        position = PROMPT + number  # of the query
        if expected is not None:
            assert set(read[0][0, 0].nonzero().squeeze(1).tolist()) == expected
            expected.add(position)
        if (entry := entries.get(position)) is not None:
            known = segments(length)
            closed = [s for s in known if s[1][-1] <= position]
            start = closed[-1][1][-1] + 1 if closed else PROMPT
            expected = {*range(PROMPT), *range(position - WINDOW + 1, position + 1)}
            expected |= set(range(start, position + 1))
            for segment in entry["zoomed"]:
                expected |= set(known[segment][0])
            for segment in entry["summarised"]:
                expected |= set(known[segment][1])
            assert entry["rows_read"] == len(expected)
    assert len(entries) > 15


def test_everything_zoomed_reads_all_paragraphs_and_no_summary(
    model: Any, zoomr: Any, tools: Any
) -> None:
    cache = zoomr(consensus=50, top_k=50)
    tools.run(model, cache, tools.prompt_ids(1, PROMPT), tools.scripted_ids(1, 84))
    readable = set(cache.readable(0)[0, 0].nonzero().squeeze(1).tolist())
    paragraphs = {p for paragraph, _ in segments(84) for p in paragraph}
    assert paragraphs <= readable
    old = {p for _, summary in segments(84)[:-1] for p in summary}
    assert not old & readable


def test_sumr_reads_all_summaries_and_no_old_paragraph(model: Any, zoomr: Any, tools: Any) -> None:
    cache = zoomr("sumr")
    tools.run(model, cache, tools.prompt_ids(1, PROMPT), tools.scripted_ids(1, 84))
    readable = set(cache.readable(0)[0, 0].nonzero().squeeze(1).tolist())
    assert readable == {*range(PROMPT), *(p for _, summary in segments(84) for p in summary)}


def test_only_changed_rows_move(model: Any, zoomr: Any, tools: Any) -> None:
    """To the device: rows that were not there before. To the host: each row once."""
    cache = zoomr(consensus=1, top_k=1)
    prompt, generated = tools.prompt_ids(1, PROMPT), tools.scripted_ids(1, 90)
    _, reads = tools.run(model, cache, prompt, generated)
    fetched = 0
    for before, after in zip(reads, reads[1:], strict=False):
        old, new = before[0][0, 0], after[0][0, 0]
        fetched += int((new[: len(old)] & ~old).sum())
    one = row_bytes(cache)
    assert fetched > 0
    assert cache.footprint().bytes_to_device == fetched * one
    archived = cache.trace()[-1]["position"] + 1
    assert cache.footprint().bytes_to_host == archived * one


def test_streamed_keeps_two_layers_on_the_device(tiny: Any, tools: Any) -> None:
    model = tiny("llama", num_hidden_layers=5)
    zoomkv.attach(model)
    sizes = {}
    for residency in ("resident", "streamed"):
        cache = make_cache(
            "sumr",
            model,
            tools.TOKENIZER,
            tools.DELIMITERS,
            window=4,
            max_interval=16,
            residency=residency,
        )
        tools.run(model, cache, tools.prompt_ids(1, 40), tools.scripted_ids(1, 90))
        sizes[residency] = cache.footprint()
    streamed = sizes["streamed"]
    assert streamed.rows_max == sizes["resident"].rows_max
    allocated = streamed.device_bytes / (2 * row_bytes(cache) / cache.shape.layers)
    assert streamed.rows_max <= allocated <= streamed.rows_max + 128
    assert streamed.host_bytes > sizes["resident"].host_bytes


@pytest.mark.parametrize(("precision", "ratio"), [("int8", 0.54), ("nf4", 0.29)])
@pytest.mark.parametrize("residency", ["resident", "streamed"])
def test_quantised_hosts_move_less(
    tiny: Any, tools: Any, precision: str, ratio: float, residency: str
) -> None:
    """At a head dimension of 64, against bf16; and the output stays close."""
    options = {"hidden_size": 256, "head_dim": 64}
    moved, logits = {}, {}
    for host in ("auto", precision):
        model = tiny("llama", **options).to(torch.bfloat16)
        zoomkv.attach(model)
        cache = make_cache(
            "zoomr",
            model,
            tools.TOKENIZER,
            tools.DELIMITERS,
            window=4,
            consensus=1,
            top_k=1,
            residency=residency,
            host_precision=host,
        )
        logits[host], _ = tools.run(model, cache, tools.prompt_ids(1, 9), tools.scripted_ids(1, 60))
        moved[host] = cache.footprint()
    assert moved[precision].bytes_to_host <= ratio * moved["auto"].bytes_to_host
    if residency == "streamed":
        assert moved[precision].bytes_to_device <= ratio * moved["auto"].bytes_to_device
    assert logits[precision].isfinite().all()
    exact, coarse = (logits[host][0].float() for host in ("auto", precision))
    assert torch.equal(exact[:15], coarse[:15]) or residency == "streamed"
    similar = torch.nn.functional.cosine_similarity(exact, coarse, dim=-1)
    assert similar.median() > 0.9


def test_the_paragraph_being_written_is_always_readable(model: Any, zoomr: Any, tools: Any) -> None:
    generated = tools.scripted_ids(1, 84)
    generated = torch.cat([generated, tools.prompt_ids(1, 60, seed=3)], dim=1)
    generated[0, 90::10] = tools.DOT
    cache = zoomr(consensus=1, top_k=1)
    _, reads = tools.run(model, cache, tools.prompt_ids(1, PROMPT), generated)
    start = PROMPT + 84
    for number, read in enumerate(reads[84:]):
        assert read[0][0, 0, start : start + number].all()


def test_malformed_summaries_lose_no_token(model: Any, zoomr: Any, tools: Any) -> None:
    begin, end = tools.BEGIN, tools.END
    body = tools.prompt_ids(1, 40, seed=2)[0].tolist()
    broken = {
        "open only": [*body[:9], begin, *body[9:30]],
        "close only": [*body[:9], end, *body[9:30]],
        "open open close": [*body[:9], begin, *body[9:12], begin, *body[12:15], end, *body[15:30]],
        "close before open": [*body[:9], end, *body[9:12], begin, *body[12:30]],
        "empty": [*body[:9], begin, end, *body[9:30]],
    }
    for ids in broken.values():
        cache = zoomr(consensus=0, top_k=1, max_interval=3)
        _, reads = tools.run(model, cache, tools.prompt_ids(1, PROMPT), torch.tensor([ids]))
        closed = cache.tracker.table.count.item()
        covered = cache.readable(0)[0, 0]
        if closed == 0:
            assert covered.all()  # all is one open paragraph
        else:  # what was written since the summary is open
            assert covered[int(cache.tracker.table.open_start[0]) :].all()
        stored = cache.layers[0].archive
        assert stored is not None and cache.seen == PROMPT + len(ids)


def test_ending_anywhere_is_harmless(model: Any, zoomr: Any, tools: Any) -> None:
    generated = tools.scripted_ids(1, 30)
    for length in range(1, 31):
        cache = zoomr(consensus=1, top_k=1, max_interval=4)
        logits, _ = tools.run(model, cache, tools.prompt_ids(1, PROMPT), generated[:, :length])
        assert logits.isfinite().all()
        start = int(cache.tracker.table.open_start[0])
        assert cache.readable(0)[0, 0, start:].all()


def test_delimiters_in_the_prompt_are_text(model: Any, zoomr: Any, tools: Any) -> None:
    prompt = tools.prompt_ids(1, 12)
    prompt[0, 4], prompt[0, 8] = tools.BEGIN, tools.END
    cache = zoomr(consensus=1, top_k=1, max_interval=4)
    tools.run(model, cache, prompt, tools.prompt_ids(1, 20, seed=4))
    tools.run(model, cache, prompt, tools.prompt_ids(1, 20, seed=5))
    assert cache.tracker.table.count.item() == 0
    assert cache.readable(0).all()


def test_without_summaries_it_is_the_full_cache(model: Any, zoomr: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(1, PROMPT), tools.prompt_ids(1, 60, seed=3)
    logits, _ = tools.run(model, zoomr(), prompt, generated)
    full, _ = tools.run(model, make_cache("full", model), prompt, generated)
    torch.testing.assert_close(logits, full, atol=1e-5, rtol=1e-5)


def test_a_budget_takes_summaries_before_paragraphs(model: Any, zoomr: Any, tools: Any) -> None:
    prompt, generated = tools.prompt_ids(1, PROMPT), tools.scripted_ids(1, 140)
    known = segments(140)

    def chosen(budget: int | None) -> Any:
        cache = zoomr(consensus=2, top_k=3, budget=budget)
        tools.run(model, cache, prompt, generated)
        return cache.trace()

    free = chosen(None)
    wide, narrow, least = (chosen(budget)[-1] for budget in (75, 55, 46))
    assert free[-1]["summarised"]
    for entry in (wide, narrow, least):
        # A summary is read only if every winner is; a paragraph never together with its summary.
        voted = entry["votes"]
        assert not set(entry["zoomed"]) & set(entry["summarised"])
        if entry["summarised"]:
            assert len(entry["zoomed"]) == 2
            kept = min(voted[i] for i in entry["summarised"])
            gone = set(range(len(known))) - set(entry["summarised"]) - set(entry["zoomed"])
            assert all(voted[i] <= kept for i in gone)
    sizes = [len(e["zoomed"]) + len(e["summarised"]) for e in (free[-1], wide, narrow, least)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_a_choice_between_votes_uses_the_rows_own_last_vote(
    zoomr: Any, model: Any, tools: Any
) -> None:
    """One row fills its budget within a long sentence, while the other votes at each full stop."""
    script = tools.scripted_ids(1, 56)
    tail = tools.prompt_ids(2, 24, seed=4)
    tail[tail % 20 == tools.DOT] += 1
    tail[1, 3::5] = tools.DOT
    late = torch.cat([tools.prompt_ids(1, 5, seed=7), tools.scripted_ids(1, 51, seed=9)], dim=1)
    generated = torch.cat([torch.cat([script, late]), tail], dim=1)
    prompt = tools.prompt_ids(2, PROMPT)
    options = {"budget": 48, "max_interval": 40, "consensus": 2, "top_k": 2}
    together = zoomr(**options)
    tools.run(model, together, prompt, generated)
    for row in (0, 1):
        alone = zoomr(**options)
        tools.run(model, alone, prompt[row : row + 1], generated[row : row + 1])
        own = [entry for entry in together.trace() if entry["row"] == row]
        assert own == [entry | {"row": row} for entry in alone.trace()]


def test_the_interval_is_bounded_and_measured(model: Any, zoomr: Any, tools: Any) -> None:
    cache = zoomr(max_interval=5)
    assert math.isnan(cache.mean_interval())
    plain = tools.prompt_ids(1, 40, seed=3)
    plain[plain % 20 == tools.DOT] += 1
    tools.run(model, cache, tools.prompt_ids(1, PROMPT), plain)
    assert cache.mean_interval() == 5
    columns = [entry["column"] for entry in cache.trace()]
    assert columns == list(range(PROMPT + 5, PROMPT + 41, 5))


def test_textual_delimiters(model: Any, tools: Any) -> None:
    """A model that is only prompted to summarise: delimiters of several ids."""
    from zoomkv.spans.thoughts import Delimiters

    options = {"window": WINDOW, "max_interval": 16, "consensus": 1, "top_k": 1}
    textual = Delimiters(begin=(30, 31), end=(30, 32))
    cache = make_cache("zoomr", model, tools.TOKENIZER, textual, **options)
    body = [t if t not in (30, 31, 32) else 40 for t in tools.prompt_ids(1, 60, 2)[0].tolist()]
    ids = [*body[:12], 30, 31, *body[12:16], 30, 32, *body[16:40], tools.DOT, *body[40:]]
    tools.run(model, cache, tools.prompt_ids(1, PROMPT), torch.tensor([ids]))
    table = cache.tracker.table
    assert table.count.item() == 1
    assert (table.interior_start[0, 0] - PROMPT, table.interior_end[0, 0] - PROMPT) == (14, 18)
    assert cache.trace()[-1]["zoomed"] == [0]
