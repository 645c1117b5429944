"""The lens's page shows of each step what the trace says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.bases import make_tokenizer
from tests.caches.conftest import DELIMITERS, TABLE, Bench, prompt_ids, run, scripted_ids
from tests.conftest import make_tiny

import zoomkv
from zoomkv.evaluation.lens.holdings import SUMMARY, ZOOMED
from zoomkv.evaluation.lens.page import page_of
from zoomkv.evaluation.lens.pieces import pieces_of
from zoomkv.evaluation.lens.recorder import Recorder
from zoomkv.evaluation.lens.trace_file import Trace
from zoomkv.spans.thoughts import parse

PROMPT, ANSWER = 9, 60
CASES = [("zoomr", ""), ("sekv", "coarse"), ("h2o", ""), ("full", "")]
NASTY = '<img src=x onerror="throw 1"> \u20ac\U0001f98a &amp;\n\n'


def traced(name: str, label: str) -> Trace:
    (policy,) = (row for row in TABLE if (row.name, row.label) == (name, label))
    model = make_tiny("llama")
    zoomkv.attach(model)
    cache = Bench(model, model, policy).cache()
    recorder = Recorder(cache)
    run(model, cache, prompt_ids(1, PROMPT), scripted_ids(1, ANSWER))
    tokenizer = make_tokenizer()
    ids = (tokenizer(NASTY, add_special_tokens=False)["input_ids"] * 9)[: PROMPT + ANSWER + 1]
    return recorder.trace(pieces_of(tokenizer, ids), name, {"budget": "<b>"}, "tiny")


@pytest.fixture(scope="module", params=CASES, ids=[name for name, _ in CASES])
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trace, and the file of its page."""
    trace = traced(*request.param)
    file = tmp_path_factory.mktemp("lens") / "page.html"
    file.write_text(page_of(trace), encoding="utf-8")
    return trace, file


def opened(page: Any, file: Path) -> None:
    page.goto(file.as_uri())
    page.wait_for_selector("main:not([hidden])")


def go(page: Any, step: int) -> None:
    page.evaluate(
        "(step) => { const slider = document.getElementById('step'); slider.value = step;"
        "slider.dispatchEvent(new Event('input')); }",
        step,
    )


def classes(page: Any) -> list[list[str]]:
    return page.eval_on_selector_all(
        ".tokens .t", "cells => cells.map(cell => cell.className.split(' '))"
    )


def step_of(page: Any) -> int:
    found = re.match(r"Step (\d+) of", page.inner_text("#now"))
    assert found is not None
    return int(found[1]) - 1


def expected(trace: Trace, step: int, group: int | None = None) -> list[tuple[str, float]]:
    """State and share of each token that there is, from the decoded states."""
    view = trace.views()(step)
    layers = [end - first for first, end in trace.groups]
    weights = [n if group in (None, at) else 0 for at, n in enumerate(layers)]
    found = []
    for token in range(trace.prompt + step):
        exact, coarse = (
            sum(w * share for w, share in zip(weights, shares[:, token], strict=True))
            / sum(weights)
            for shares in (view.exact, view.coarse)
        )
        state = {ZOOMED: "zoomed", SUMMARY: "summary"}.get(int(view.marks[token]), "full")
        if exact == 0:
            state = "coarse" if coarse else trace.unread
        found.append((state, exact or coarse))
    return found


def assert_shows(page: Any, wanted: list[tuple[str, float]], total: int) -> None:
    cells = classes(page)
    assert len(cells) == total
    for cell, (state, share) in zip(cells, wanted, strict=False):
        assert state in cell
        (shade,) = (int(name[1:]) for name in cell if re.fullmatch(r"i\d+", name))
        assert shade - 1 < 10 * share + 1e-6 and 10 * share <= shade + 1e-6
    assert "query" in cells[len(wanted) - 1] and "next" in cells[len(wanted)]
    assert all("later" in cell for cell in cells[len(wanted) + 1 :])


def test_each_step_is_that_of_the_trace(page: Any, shown: Any) -> None:
    """To and fro, so that what the page keeps of one step can't help it with another."""
    trace, file = shown
    opened(page, file)
    total = len(trace.tokens)
    assert step_of(page) == trace.steps - 1  # it opens with the whole answer
    assert_shows(page, expected(trace, trace.steps - 1), total)
    for step in (0, 1, 40, 20, trace.steps - 1, 39, 7):
        go(page, step)
        assert step_of(page) == step
        assert_shows(page, expected(trace, step), total)


def test_the_text_is_whole_and_harmless(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    texts = page.eval_on_selector_all(".tokens .t", "cells => cells.map(cell => cell.textContent)")
    assert texts == trace.tokens and "<img" in "".join(texts)
    assert page.locator("img, b b").count() == 0 and "budget=<b>" in page.inner_text("#about")


def test_one_layer(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    if len(trace.groups) == 1:
        assert page.is_disabled("#layer")
        return
    go(page, 45)
    for group in range(len(trace.groups)):
        page.select_option("#layer", str(group))
        assert_shows(page, expected(trace, 45, group), len(trace.tokens))
    page.select_option("#layer", "all")
    assert_shows(page, expected(trace, 45), len(trace.tokens))


def test_keyboard(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    last = trace.steps - 1
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert step_of(page) == step
    page.keyboard.press("End")
    assert step_of(page) == last
    page.focus("#step")
    page.keyboard.press("ArrowLeft")
    assert step_of(page) == last - 1
    # In the text the same keys go from token to token, and the step stays.
    page.focus('.tokens .t[tabindex="0"]')
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.token") == "1"
    assert page.inner_text("#readout").startswith("Token 1 ") and step_of(page) == last - 1
    page.keyboard.press("End")
    assert page.inner_text("#readout").endswith("is being written")


def test_play_goes_on_to_the_end_and_stops(page: Any, shown: Any) -> None:
    from playwright.sync_api import expect

    trace, file = shown
    opened(page, file)
    go(page, trace.steps - 4)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    expect(page.locator("#now")).to_contain_text(f"Step {trace.steps} of")
    expect(page.locator("#play")).to_have_text("Play")
    page.click("#play")  # and from the end anew
    expect(page.locator("#now")).to_contain_text(re.compile(r"Step 1?\d of"))
    page.click("#play")
    stopped = step_of(page)
    page.wait_for_timeout(600)
    assert page.inner_text("#play") == "Play" and step_of(page) == stopped < trace.steps - 1


def test_what_a_token_says(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    go(page, 45)
    names = {
        "full": "full text", "zoomed": "zoomed", "summary": "summary",
        "coarse": "coarse, in a mean", "host": "on the host only", "gone": "evicted",
    }  # fmt: skip
    wanted = expected(trace, 45)
    pairs = trace.layers * trace.kv_heads
    for token in (0, 12, 30, trace.prompt + 40):
        page.evaluate(f"document.querySelector('[data-token=\"{token}\"]').focus()")
        state, share = wanted[token]
        said = page.inner_text("#readout")
        assert said.startswith(f"Token {token} ") and f"\u00b7 {names[state]}" in said
        if share:
            assert f"({round(share * pairs)} of {pairs})" in said
        else:
            assert "read by no head" in said


def test_legend_counts(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    go(page, 45)
    counts = page.eval_on_selector_all(
        "#legend li:has(.count)",
        "items => items.map(item => [item.firstChild.className.split(' ')[1],"
        " Number(item.querySelector('.count').textContent)])",
    )
    states = [state for state, _ in expected(trace, 45)]
    assert {name: count for name, count in counts if count} == {
        state: states.count(state) for state in set(states)
    }


def test_memory(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    go(page, 30)
    said, mib = page.inner_text("#bytes"), 2**20
    assert f"device {trace.device_bytes[30] / mib:.2f} MiB" in said
    assert f"full cache {trace.row_bytes * (trace.prompt + 30) / mib:.2f} MiB" in said
    assert page.get_attribute("#memory .place", "d") == "M30 0V100"
    slider, chart = (page.locator(name).bounding_box() for name in ("#step", "#memory"))
    assert abs(chart["x"] - slider["x"] - 8) < 1  # half a thumb: the line stands over its middle
    page.mouse.click(chart["x"] + chart["width"] * 10 / (trace.steps - 1), chart["y"] + 30)
    assert step_of(page) == 10


def test_paragraphs(page: Any, shown: Any) -> None:
    trace, file = shown
    opened(page, file)
    if not trace.spans:
        assert page.is_hidden("#paragraphs")
        return
    assert len(trace.spans) == sum(
        s.closed for s in parse(scripted_ids(1, ANSWER)[0].tolist(), DELIMITERS)
    )
    for step in (5, 30, 45, trace.steps - 1):
        go(page, step)
        query = trace.prompt + step - 1
        known = [n for n, span in enumerate(trace.spans) if span["summary"][1] <= query]
        items = page.locator("#spans li:visible")
        assert items.count() == len(known)
        (*_, choice) = [None, *(c for c in trace.choices if c["step"] <= step)]
        for span in known:
            assert choice is not None
            state = "host only"
            state = "zoomed" if span in choice["zoomed"] else state
            state = "summary" if span in choice["summarised"] else state
            said = items.nth(span).inner_text().split("\n")
            assert said[0] == str(span + 1) and said[1] == state
            assert said[-1] == str(choice["votes"][span])
        agreed = choice and choice["agreeability"]
        told = re.match(r"agreeability ([\d.]+):", page.inner_text("#agreeability"))
        assert (told is None) == (agreed is None)
        assert told is None or float(told[1]) == pytest.approx(agreed, abs=0.00501)
    page.locator("#spans li button").first.focus()
    marked = [n for n, names in enumerate(classes(page)) if "marked" in names]
    span = trace.spans[0]
    assert marked == list(range(span["paragraph"][0], span["summary"][1]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_fits_and_can_be_read(page: Any, shown: Any, width: int, scheme: Any) -> None:
    _, file = shown
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    opened(page, file)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", ground)[:3])) < 380
    assert dark == (scheme == "dark")
    for _ in range(2 if scheme == "light" else 1):  # auto, light, dark
        page.click("#theme")
    other = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert other != ground


def test_a_browser_that_is_too_old_is_told(browser: Any, shown: Any) -> None:
    _, file = shown
    context = browser.new_context()
    tab = context.new_page()
    tab.add_init_script("delete window.DecompressionStream")
    tab.goto(file.as_uri())
    tab.wait_for_selector("#trouble:not([hidden])")
    assert "too old" in tab.inner_text("#trouble") and tab.is_hidden("main")
    context.close()
