"""The benchmarks measure what they say, and each runs from end to end at tiny sizes."""

import copy
import importlib
import json
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import zoomkv
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import make_cache
from zoomkv.cli import main
from zoomkv.spans.thoughts import Delimiters, parse
from zoomkv.spans.tracker import ThoughtTracker

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The benchmarks as modules, by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        names = (
            *("_harness", "context", "context_memory", "decode", "evicting", "lowrank", "memory"),
            *("needles", "gpu"),
        )
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def harness(scripts) -> ModuleType:
    return scripts._harness


# -- the script ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(250, 20, 35), (24, 4, 8), (5, 1, 9)])
def test_script_has_the_paragraphs_and_intervals_that_it_announces(harness, sizes):
    paragraph, summary, _ = sizes
    script = harness.Script(harness.BareTokenizer(), *sizes)
    assert script.period == paragraph + summary + 2
    total = 3 * script.period
    ids = torch.cat([script.token(number)[0] for number in range(total)])
    delimiters = Delimiters(begin=(1,), end=(2,))
    segments = parse(ids.tolist(), delimiters)
    assert len(segments) == 3 and all(part.closed for part in segments)
    assert {s.summary_start - s.start for s in segments} == {paragraph}
    assert {s.interior_end - s.interior_start for s in segments} == {summary}
    # The tracker of zoomr chooses in the last step of each interval.
    tracker = ThoughtTracker(delimiters, torch.arange(5) == 3, max_interval=10**6)
    tracker.start(torch.zeros(1, dtype=torch.int64))
    active = torch.ones(1, dtype=torch.bool)
    chooses = [bool(tracker.advance(ids[n : n + 1], active).boundary) for n in range(total)]
    ends = [script.interval(n + 1) > script.interval(n) for n in range(total)]
    assert chooses == ends and sum(ends) == 3 * script.choices


def test_script_at_its_defaults_is_the_papers_example(harness):
    script = harness.Script(harness.BareTokenizer())
    assert script.period / script.choices == pytest.approx(35, abs=1.5)


def test_rows_of_a_batch_may_stand_at_different_places(harness):
    script = harness.Script(harness.BareTokenizer(), 6, 2, 3)
    tokens = script.token(5, torch.tensor([0, 1, 10]))
    expected = [script.token(number)[0, 0] for number in (5, 6, 15)]
    assert tokens[:, 0].tolist() == expected


# -- filled caches ---------------------------------------------------------------------------------


def test_streamed_cache_filled_without_loading_is_the_same(scripts, harness):
    script = harness.Script(harness.BareTokenizer(), 20, 4, 7)
    full = {}
    for residency, skip in (("streamed", True), ("streamed", False), ("resident", False)):
        cache = scripts.memory._cache(
            scripts.memory.TINY, "zoomr", residency=residency, window=16, consensus=1
        )
        feeder = harness.Feeder(cache.shape, torch.float32)
        if skip:
            with harness.nothing_loaded():
                feeder.read_prompt(cache, 10, script.word)
                feeder.think(cache, script, 0, 120)
            assert cache.footprint().bytes_to_device == 0
        else:
            feeder.read_prompt(cache, 10, script.word)
            feeder.think(cache, script, 0, 120)
        step = cache.begin(script.token(120), None, None)
        row = torch.ones(1, 2, 1, 16)
        # Layers share two buffers: what one returned is gone two layers later.
        full[residency, skip] = [
            tuple(rows.clone() for rows in cache.update(row, row, layer))
            for layer in range(cache.shape.layers)
        ]
        assert cache.slots.length < 100, "nothing was dropped: this case shows nothing"
        assert step.start == 130
    first, *others = full.values()
    for other in others:
        for (keys, values), (same_keys, same_values) in zip(first, other, strict=True):
            # Slots may differ in order between the residencies, rows may not.
            order, same = keys[0, 0, :, 0].argsort(), same_keys[0, 0, :, 0].argsort()
            assert torch.equal(keys[:, :, order], same_keys[:, :, same])
            assert torch.equal(values[:, :, order], same_values[:, :, same])


def test_floor_computes_what_a_plain_cache_computes(scripts, harness, tiny_llama):
    model = tiny_llama()
    floor = scripts.decode.twin(model)
    assert floor.lm_head.weight is model.lm_head.weight
    floor.config._attn_implementation = "benchmark_floor"
    shape = ModelShape.of(model)
    rows = 9
    layers = [scripts.decode.FloorLayer(shape, torch.float32, lambda: rows) for _ in range(2)]
    plain = scripts.decode.DynamicCache()
    for number, layer in enumerate(layers):
        plain.update(layer._keys[:, :, : rows - 1], layer._values[:, :, : rows - 1], number)
    token = torch.tensor([[7]])
    with torch.inference_mode():
        got = floor(token, cache=scripts.decode.Cache(layers=layers)).logits
        expected = model(token, cache=plain).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_full_depth_scales_what_every_layer_holds(scripts, harness, tiny_llama):
    """A model of four layers holds what one of two layers does, at twice the depth."""
    script = harness.Script(harness.BareTokenizer(), 20, 4, 7)
    for policy, chosen in scripts.gpu._CACHES.values():
        sizes = []
        for layers in (2, 4):
            model = tiny_llama(num_hidden_layers=layers)
            cache = make_cache(policy, model, harness.BareTokenizer(), **chosen)
            feeder = harness.Feeder(cache.shape, torch.float32)
            feeder.read_prompt(cache, 10, script.word)
            feeder.think(cache, script, 0, 60)
            sizes.append(scripts.gpu._sizes(cache, 4 / layers))
        (_, predicted), (measured, same) = sizes
        assert predicted == measured == same


@pytest.mark.parametrize("policy", ["beacon_kv", "rpc", "snapkv"])
def test_budgets_scale_by_layers_and_batch(scripts, policy):
    """Four layers and three batch rows hold exactly six times what two layers and one row hold."""
    memory = scripts.memory
    one, other = (
        memory.peak_past_budget(
            replace(memory.TINY, layers=layers, batch=batch), policy, prompt=20, budget=72, cycles=3
        )
        for layers, batch in ((2, 1), (4, 3))
    )
    assert one.times(6) == other
    rows = 2 * 92 * memory.TINY.row  # of two layers, prompt and budget
    assert rows * 0.9 < one.rows <= rows and one.queries > 0
    assert (one.index > 0) == (policy != "rpc"), "rpc keeps the same rows for all heads"


def test_what_grows_beyond_its_budget_is_noticed(scripts, monkeypatch):
    memory, real = scripts.memory, make_cache
    monkeypatch.setattr(memory, "make_cache", lambda policy, model, budget: real(policy, model))
    with pytest.raises(RuntimeError, match="full grows beyond its budget of 512 rows"):
        memory.peak_past_budget(replace(memory.TINY, layers=1), "full", 20, 512, cycles=1)


def test_weights_of_qwen3_4b_are_those_of_its_shapes(scripts):
    hidden, between, heads, kv_heads, width = 2560, 9728, 32, 8, 128
    attention = 2 * hidden * width * (heads + kv_heads) + 2 * width
    layer = attention + 3 * hidden * between + 2 * hidden
    whole = 36 * layer + 151936 * hidden + hidden
    assert scripts.gpu.parameters(scripts.gpu.QWEN3_4B, 36) == whole
    assert whole == pytest.approx(4.02e9, rel=1e-3)


def test_lines_through_two_depths_meet_a_third(scripts):
    """What caches hold at three layers, and every step's peak, from one and two layers."""
    gpu = scripts.gpu
    arguments = SimpleNamespace(device="cpu", output=100, steps=2, cycles=1)
    for setting in (
        gpu.Setting("DynamicCache", 2),
        gpu.Setting("full", 2),
        gpu.Setting("beacon_kv", 2, 72),
        gpu.Setting("rpc", 2, 72),
    ):
        costs = []
        with torch.inference_mode():
            for layers in (1, 2, 3):
                model = gpu.built(gpu.QWEN3_4B, layers, True, "cpu")
                costs.append(gpu._cost(setting, model, 0, arguments))
        predicted, measured = gpu.at_depth(3, (1, 2), costs[:2]), costs[2]
        assert predicted.held == measured.held
        assert torch.equal(predicted.peaks, measured.peaks)
        assert len(measured.peaks) == (2 if setting.budget is None else 9)


def test_each_step_has_its_own_line(scripts):
    """A peak that grows with the layers overtakes one that does not."""
    cost = scripts.gpu.Cost
    costs = [cost(0.1 + 0.2 * n, 8 * n, torch.tensor([50.0, 4.0 + 10 * n])) for n in (2, 4)]
    whole = scripts.gpu.at_depth(10, (2, 4), costs)
    assert whole.seconds == pytest.approx(2.1)
    assert (whole.held, whole.peak) == (80, 104)


@pytest.mark.parametrize("policy", ["full", "beacon_kv", "rpc", "snapkv"])
def test_nothing_takes_more_memory_than_is_asked_for(scripts, policy, tmp_path):
    """The estimate covers weights, cache and all that a cycle allocates on the way."""
    gpu = scripts.gpu
    setting = gpu.Setting(policy, 2, None if policy == "full" else 72)
    with torch.inference_mode():
        model = gpu.built(gpu.QWEN3_4B, 2, True, "cpu")
        if setting.budget is None:
            cache = gpu._kept(setting, model, gpu._PROMPT + 60)
        else:
            cache = gpu._bounded(setting, model)
        held, step = gpu._held(cache), gpu._decoding(setting, model, cache)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for number in range(12):
                step(number)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    work = max(accumulate(change for _, change in changes))
    weights = sum(p.nbytes for p in model.parameters())
    assert work > 0
    assert weights + held + work <= gpu.needed(setting, 2, 100, True)


def test_settings_that_do_not_fit_are_left_out_by_name(scripts, monkeypatch, capsys):
    gpu = scripts.gpu
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--device", "cpu"])
    settings = [gpu._shrunk(setting) for setting in gpu._TABLE4]
    needs = {setting: gpu.needed(setting, 2, 50, True) for setting in settings}
    monkeypatch.setattr(gpu, "_free", lambda device: min(needs.values()))
    report = _report(scripts._harness, judged=False)
    arguments = SimpleNamespace(device="cpu", dry_run=True, layers=2, output=50, steps=2, cycles=1)
    with torch.inference_mode():
        gpu._measure_table4(arguments, report)
    (_, _, left_out), (_, _, measured) = report.tables
    assert left_out and measured and len(left_out) + len(measured) == len(settings)
    labels = [
        [str(cell) for cell in gpu._label(s)] for s in settings if needs[s] == min(needs.values())
    ]
    assert [row[:3] for row in measured] == labels


# -- timing ----------------------------------------------------------------------------------------


def test_ratios_are_of_means_over_whole_intervals(harness):
    nan = torch.nan
    seconds = {
        "slow": torch.tensor([2.0, 6.0, 2.0, 10.0]),
        "base": torch.tensor([1.0, 1.0, 2.0, 2.0]),
        "seldom": torch.tensor([3.0, nan, 5.0, nan]),
    }
    timings = harness.Timings(seconds, torch.tensor([0, 0, 1, 1]))
    assert timings.milliseconds("seldom") == pytest.approx(4000)
    ratio, error = timings.ratio("slow", "base")
    assert ratio == pytest.approx(20 / 6)
    assert error == pytest.approx(torch.tensor([8 / 2, 12 / 4]).std() / 2**0.5)
    assert timings.ratio("seldom", "base")[0] == pytest.approx(4 / 1.5)


def test_contenders_take_turns(harness):
    script = harness.Script(harness.BareTokenizer(), 6, 2, 3)
    calls = []
    contenders = [
        harness.Contender(name, lambda number, name=name: calls.append((number, name)), every)
        for name, every in (("a", 1), ("b", 1), ("c", 2))
    ]
    timings = harness.take_turns(contenders, 10, 16, script, warm_up=1)
    by_round = [[name for number, name in calls if number == n] for n in range(9, 16)]
    often, seldom = list("abc"), list("ab")
    assert list(map(sorted, by_round)) == [often, often, seldom, often, seldom, often, seldom]
    assert {names[0] for names in by_round} == {"a", "b", "c"}
    assert calls == sorted(calls, key=lambda call: call[0])
    assert timings.milliseconds("c") >= 0


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8),
)
def test_overlap_is_that_of_a_clock_that_ticks(scripts, one, other):
    spans = [[(start, start + length) for start, length in kind] for kind in (one, other)]
    busy = [{tick for start, end in kind for tick in range(start, end)} for kind in spans]
    shorter = min(map(len, busy))
    expected = len(busy[0] & busy[1]) / shorter if shorter else 0.0
    assert scripts.gpu.overlapped(*spans) == pytest.approx(expected)


# -- reports ---------------------------------------------------------------------------------------


def _report(harness, judged=True, **changed):
    arguments = SimpleNamespace(**{"markdown": False, "out": None, **changed})
    return harness.Report(arguments, judged)


def test_verdicts(harness, capsys):
    report = _report(harness)
    report.check("low enough", 1.1, "<=", 1.15)
    report.check("too high", 1.2, "<=", 1.15)
    report.check("too low", 5.3, ">=", 5.4)
    report.finish()
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.split()[-1] for line in lines if "<= " in line or ">= " in line]
    assert verdicts == ["yes", "NO", "NO"]
    report = _report(harness, judged=False)
    report.check("tiny", 1.2, "<=", 1.15)
    report.finish()
    assert "not judged" in capsys.readouterr().out


def test_markdown_tables_have_equal_cells(harness, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--markdown", "--seen", "600"])
    report = _report(harness, markdown=True)
    report.table("Sizes", ["cache", "MiB"], [["full", 12.345], ["none", ""]])
    report.finish()
    out = capsys.readouterr().out
    assert "zoomkv bench decode --seen 600\n" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[2].strip() == "12.3"


def test_json_is_written_as_a_whole_or_not_at_all(harness, tmp_path):
    path = tmp_path / "deep" / "figures.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        harness.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


# -- from end to end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words", "mentions"),
    [
        ("decode", ["--quick", "--precision", "fp32"], ["zoomr streamed", "floor of zoomr"]),
        ("memory", ["--quick"], ["R1-Distill-Llama-8B", "streamed, int8", "beacon_kv"]),
        ("evicting", ["--quick"], ["snapkv", "x floor", "of it queries"]),
        ("context", ["--quick"], ["sekv", "DynamicCache 2K", "rows read"]),
        ("context_memory", ["--quick"], ["Llama-3-8B", "Qwen2.5-14B", "streamed"]),
        (
            "gpu",
            ["--dry-run", "--device", "cpu", "--models", "qwen-7b"],
            ["full_offloaded", "beacon_kv", "paper: peak GB"],
        ),
    ],
)
def test_benchmark_runs(scripts, name, words, mentions, tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--out", str(out), "--markdown"])
    assert getattr(scripts, name).main() == 0
    printed = capsys.readouterr().out
    for text in mentions:
        assert text in printed
    content = json.loads(out.read_text())
    assert content["command"].startswith(f"zoomkv bench {name} ")
    assert content["figures"] and content["tables"]
    assert all(figure["value"] > 0 and figure["met"] is None for figure in content["figures"])


def test_factors_are_compared_with_the_optimum(scripts, tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert scripts.lowrank.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "gram" in printed and "over the optimum" in printed
    for table in json.loads(out.read_text())["tables"]:
        lost = dict(zip((row[0] for row in table["rows"]), table["rows"], strict=True))
        # Gram and SVD are both the optimum, to rounding.
        assert abs(float(lost["gram"][-1])) < 1e-4


def test_the_needle_table_counts_and_compares(scripts):
    found = {
        "hits": {
            "2048 unknown full": [True] * 4,
            "2048 unknown sekv 0.1": [True, True, True, False],
            "2048 unknown sekv closed 0.1": [False] * 4,
        },
        "bytes": {
            "2048 unknown full": 4 * 2**20,
            "2048 unknown sekv 0.1": 2**20,
            "2048 unknown sekv closed 0.1": 2**19,
        },
    }
    lines = scripts.needles.table(found).splitlines()
    assert "| full | 4 | 4 " in lines[2] and lines[2].endswith("| 100.0 % |")
    assert "| sekv 0.1 | 4 | 3 " in lines[3] and lines[3].endswith("| 1.00 | 25.0 % |")
    assert "| sekv closed 0.1 | 4 | 0 " in lines[4] and "| 0.25 |" in lines[4]


def test_int8_tier_moves_fewer_bytes(scripts, monkeypatch, capsys):
    """A row of 32 numbers: 64 bytes in bf16, 36 in int8 with its scale."""
    monkeypatch.setattr(sys, "argv", ["memory.py"])
    report = _report(scripts._harness, judged=False)
    arguments = SimpleNamespace(quick=True, text_tokens=60)
    with torch.inference_mode():
        scripts.memory._host_precision(arguments, report)
    assert report.figures[0].value == pytest.approx(36 / 64, rel=0.02)


def test_command_finds_the_benchmarks(capfd):
    assert main(["bench", "memory", "--help"]) == 0
    assert "--generated" in capfd.readouterr().out
    assert main(["bench", "nothing"]) == 2
    listed = capfd.readouterr().err
    assert "decode" in listed and "gpu" in listed and "_harness," not in listed


def test_wrong_sizes_are_refused(scripts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--seen", "100"])
    with pytest.raises(SystemExit) as refused:
        scripts.decode.main()
    assert refused.value.code == 2
    assert "--seen must be at least" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cuda", "--layers", "1"])
    with pytest.raises(SystemExit) as refused:
        scripts.gpu.main()
    assert refused.value.code == 2
    assert "--layers must be at least 2" in capsys.readouterr().err


def test_twin_is_unaffected_by_attaching(scripts, tiny_llama):
    model = tiny_llama()
    twin = scripts.decode.twin(model)
    zoomkv.attach(model)
    assert not zoomkv.backbone.attach.is_attached(twin)
    assert copy.deepcopy(twin).config._attn_implementation == "sdpa"
