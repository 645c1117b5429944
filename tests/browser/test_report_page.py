"""The report's page in a browser: what it shows, sorts, filters, and how it looks."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from tests.evaluation.report.synthetic import answer, checks, comparison, write_results

from zoomkv.cli import main

ODD = "</script><script>window.bad = 1</script><b>שלום</b> 🐙 &amp; /*script*/"
NARROW = "document.querySelector('main svg').getBoundingClientRect().right < 401"
FIGURES = ["budget", "length", "memory", "needles", "throughput", "agreeability", "fidelity"]


def report(folder: Path, *words: Any, **header: Any) -> Path:
    path = write_results(folder / "results.jsonl", *words, **header)
    assert main(["report", str(path), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of all policies, with everything that there can be."""
    answers, timings = comparison()
    return report(tmp_path_factory.mktemp("report"), [*checks(), *answers], timings)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of three policies, for what is slow on hundreds of rows."""
    answers, timings = comparison(["full", "h2o", "zoomr"], (0.1, 0.2), 1)
    return report(tmp_path_factory.mktemp("small"), answers, timings)


@pytest.fixture
def opened(page: Any, out: Path) -> Any:
    page.goto((out / "index.html").as_uri())
    return page


def table_of(out: Path) -> list[dict[str, str]]:
    with open(out / "table.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shown_rows(page: Any) -> list[dict[str, Any]]:
    """The table's rows as they stand: each column's text, and which row it is."""
    return page.evaluate(
        """() => [...document.querySelectorAll('tbody tr')].map((tr) => ({
            at: Number(tr.dataset.row),
            ...Object.fromEntries([...tr.cells].map((td) => [td.dataset.key, td.textContent])),
        }))"""
    )


def figures(page: Any) -> list[str]:
    ids = "() => [...document.querySelectorAll('.figure:not([hidden])')].map((one) => one.id)"
    return [name.removeprefix("figure-") for name in page.evaluate(ids)]


def width_of(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


def colours(page: Any, *names: str) -> list[tuple[float, ...]]:
    """Variables of the style as they come out now, each red, green and blue from 0 to 1."""
    found = page.evaluate(
        """(names) => names.map((name) => {
            const probe = document.createElement('i');
            probe.style.color = `var(--${name})`;
            document.body.append(probe);
            const found = getComputedStyle(probe).color;
            probe.remove();
            return found;
        })""",
        list(names),
    )
    return [tuple(int(part) / 255 for part in re.findall(r"\d+", each)[:3]) for each in found]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The ratio that the Web Content Accessibility Guidelines define."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_everything_is_there(opened: Any, out: Path) -> None:
    assert (out / "index.html").stat().st_size < 2_000_000
    assert opened.title() == "ZoomKV report: checkpoints/made-up"
    assert opened.inner_text("h1") == "19 cache policies on checkpoints/made-up"
    assert figures(opened) == [*FIGURES, "table"]
    for fold in opened.query_selector_all("#about summary"):
        fold.click()
    about = opened.inner_text("#about")
    for text in ("zoomkv report", "results.jsonl", '"precision": "fp32"', "zoomkv 0.1.0", "49152"):
        assert text in about
    assert "tova, binds nothing equals full (token 31 differs)" in opened.inner_text("#notices")
    for svg in opened.locator("main svg[role=img]").all():
        assert svg.get_attribute("aria-label")


def test_the_table_says_what_the_file_says(opened: Any, out: Path) -> None:
    expected, shown = table_of(out), shown_rows(opened)
    assert [row["at"] for row in shown] == list(range(len(expected)))
    forms = {
        "n": lambda row: row["n"],
        "score": lambda row: f"{float(row['score']):.3f}",
        "held": lambda row: f"{100 * float(row['held']):.1f} %",
        "kl": lambda row: f"{float(row['kl']):.4f}" if row["kl"] else "—",
        "device_bytes_mean": lambda row: f"{float(row['device_bytes_mean']) / 2**20:.2f}",
        "host_bytes": lambda row: f"{float(row['host_bytes']) / 2**20:.2f}",
        "tokens_per_second": lambda row: (
            f"{float(row['tokens_per_second']):.1f} "
            f"({float(row['tokens_per_second_low']):.1f}–{float(row['tokens_per_second_high']):.1f})"
            if row["tokens_per_second"]
            else "—"
        ),
        "right": lambda row: (
            f"{100 * float(row['right']):.1f} % "
            f"({100 * float(row['right_low']):.1f}–{100 * float(row['right_high']):.1f})"
            if row["right"]
            else "—"
        ),
        "label": lambda row: row["label"],
        "task": lambda row: row["task"],
        "budget": lambda row: f"{100 * float(row['budget']):g} %" if row["budget"] else "—",
        "agreeability": lambda row: (
            f"{100 * float(row['agreeability']):.1f} %" if row["agreeability"] else "—"
        ),
    }
    numbers = re.compile(r"[\d,]*\.?\d+")
    for row, cells in zip(expected, shown, strict=True):
        for name, form in forms.items():
            text, found = form(row), cells[name].replace("\u202f", " ").replace(",", "")
            # Binary ties may be rounded either way: the last digit may differ by one.
            assert numbers.sub("", text) == numbers.sub("", found), name
            for one, other in zip(numbers.findall(text), numbers.findall(found), strict=True):
                step = 10.0 ** -len(one.partition(".")[2])
                assert abs(float(one) - float(other)) <= 1.01 * step * ("." in one), (name, text)


def test_points_say_what_the_table_says(opened: Any, out: Path) -> None:
    expected = {
        row["label"]: row
        for row in table_of(out)
        if (row["task"], row["budget"]) in (("ledger", "0.1"), ("ledger", ""))
    }
    opened.locator("input[data-text=ranked]").check()
    opened.locator('#figure-budget input[data-text="10 %"]').check()
    panel = opened.locator("#figure-budget .panel", has_text="ledger").locator("svg")
    panel.focus()
    seen = []
    for _ in expected:
        opened.keyboard.press("ArrowDown" if seen else "ArrowRight")
        label = opened.inner_text("#tip b")
        facts = opened.locator("#tip dd").all_inner_texts()
        row = expected[label]
        right, low, high = (100 * float(row[f"right{end}"]) for end in ("", "_low", "_high"))
        assert f"{right:.1f}\u202f% ({low:.1f}–{high:.1f})" in facts and row["n"] in facts
        seen.append((-right, label))
        if len(seen) == 5:
            break
    assert len(seen) == 5 and [share for share, _ in seen] == sorted(share for share, _ in seen)
    opened.keyboard.press("Escape")
    assert opened.locator("#tip").is_hidden()


def test_heat_maps_say_what_the_numbers_say(opened: Any, out: Path) -> None:
    numbers = json.loads((out / "report.json").read_text(encoding="utf-8"))
    opened.locator('#figure-needles input[data-text="needle, question unknown"]').check()
    opened.locator('#figure-needles input[data-text="20 %"]').check()
    panel = opened.locator("#figure-needles .panel", has_text="snapkv").locator("svg")
    shown = [int(text) for text in panel.locator("text.on-low, text.on-high").all_text_contents()]
    expected = []
    for needle in numbers["needles"]:
        row = numbers["rows"][needle["row"]]
        if (row["label"], row["protocol"], row["budget"]) == ("snapkv", "unknown", 0.2):
            pairs = zip(needle["right"], needle["n"], strict=True)
            expected += [round(100 * right / n) for right, n in pairs]
    assert len(shown) == 20 and shown == expected


def test_every_column_sorts(page: Any, small: Path) -> None:
    page.goto((small / "index.html").as_uri())
    values = """(key) => [...document.querySelectorAll(`td[data-key="${key}"]`)]
        .map((td) => td.dataset.value ?? null)"""
    count = len(shown_rows(page))
    keys = page.evaluate("[...document.querySelectorAll('th')].map((th) => th.dataset.key)")
    assert len(keys) >= 18
    for key in keys:
        directions = set()
        for _ in range(2):
            heading = page.locator(f'th[data-key="{key}"]')
            heading.locator("button").click()
            direction = heading.get_attribute("aria-sort")
            directions.add(direction)
            found = page.evaluate(values, key)
            present = [value for value in found if value is not None]
            assert len(found) == count and found[len(present) :] == [None] * (count - len(present))
            if key in ("label", "task", "protocol"):
                ordered = sorted(present, reverse=direction == "descending")
            else:
                present = [float(value) for value in present]
                ordered = sorted(present, reverse=direction == "descending")
            assert present == ordered, key
        assert directions == {"ascending", "descending"}
    assert page.locator("th[aria-sort=ascending], th[aria-sort=descending]").count() == 1


def test_filters_act_on_figures_and_table(opened: Any) -> None:
    opened.locator('[data-filter=budget] input[data-text="5 %"]').uncheck()
    rows = shown_rows(opened)
    assert rows and {row["budget"] for row in rows} == {"10 %", "20 %", "40 %", "—"}
    assert opened.locator("#figure-length h4", has_text="budget 5 %").count() == 0
    assert opened.locator('#figure-needles input[data-text="5 %"]').count() == 0
    opened.locator('[data-filter=length] input[data-text="4K"]').uncheck()
    assert "4K" not in {row["length"] for row in shown_rows(opened)}
    assert opened.locator("#figure-budget h4", has_text="4K tokens").count() == 0
    opened.locator('[data-filter=protocol] input[data-text="question known"]').uncheck()
    assert "known" not in {row["protocol"] for row in shown_rows(opened)}
    opened.locator('[data-filter=task] input[data-text="needle"]').uncheck()
    assert {row["task"] for row in shown_rows(opened)} == {"ledger", "fidelity"}
    assert figures(opened) == ["budget", "throughput", "agreeability", "fidelity", "table"]
    shown = len(shown_rows(opened))
    assert opened.inner_text("#shown").startswith(f"{shown} of 640 rows")
    opened.locator("#reset").click()
    assert len(shown_rows(opened)) == 640 and figures(opened) == [*FIGURES, "table"]


def test_policies_are_chosen(opened: Any) -> None:
    def chosen() -> set[str]:
        return set(opened.locator(".policies [aria-pressed=true]").all_inner_texts())

    first = {"beacon_kv", "full", "sekv", "zoomr c=2 k=3"}
    assert chosen() == first
    panel = opened.locator("#figure-budget svg[role=img]").first
    assert set(panel.locator("text.label").all_text_contents()) <= first
    opened.locator(".policies button", has_text="snapkv").click()
    assert chosen() == {*first, "snapkv"} and len(shown_rows(opened)) == 640
    opened.locator("input[data-text='others hidden']").check()
    assert {row["label"] for row in shown_rows(opened)} == chosen()
    assert panel.locator("g.series").count() == 5
    assert panel.locator("g.series:not(.chosen)").count() == 0


def test_pointing_at_a_line_shows_which_it_is(opened: Any) -> None:
    panel = opened.locator("#figure-budget svg[role=img]").first
    panel.scroll_into_view_if_needed()
    series = panel.locator("g.series", has=opened.locator("path.line")).first
    dot = series.locator("path.dot").nth(1).bounding_box()
    opened.mouse.move(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    name = opened.inner_text("#tip b")
    hot = opened.locator(".policies button.hot")
    assert hot.count() == 1 and hot.inner_text() == name
    assert "hot" in panel.locator(f'g[data-s="{hot.get_attribute("data-s")}"]').get_attribute(
        "class"
    )
    opened.mouse.click(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    assert name in set(opened.locator(".policies [aria-pressed=true]").all_inner_texts())
    opened.mouse.move(2, 2)
    assert opened.locator("#tip").is_hidden()


def saved(page: Any, button: Any, folder: Path) -> Path:
    with page.expect_download() as download:
        button.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def pixels(shot: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("figure", ["budget", "needles", "throughput", "agreeability"])
def test_a_saved_chart_is_the_chart(opened: Any, tmp_path: Path, figure: str, scheme: Any) -> None:
    opened.emulate_media(color_scheme=scheme)
    panel = opened.locator(f"#figure-{figure} .panel").first
    chart = panel.locator("svg[role=img]")
    chart.focus()
    opened.keyboard.press("ArrowRight")  # what only points at a mark is not saved
    path = saved(opened, panel.locator("button.save"), tmp_path)
    name = chart.get_attribute("aria-label")
    assert path.suffix == ".svg" and path.stem == re.sub(r"[\W_]+", "-", name)
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("aria-label") == name
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == chart.locator("text").all_text_contents()
    assert not re.search(r"var\(|class=|oklab|cursor|http(?!://www.w3.org/2000/svg)", text)
    # As a picture, which the page's style does not reach, it looks as it does on the page.
    opened.mouse.move(2, 2)
    shown = pixels(chart.screenshot())
    address = f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
    chart.evaluate(
        "(chart, src) => { const image = new Image(); image.src = src;"
        " image.style.display = 'block'; chart.replaceWith(image); return image.decode(); }",
        address,
    )
    drawn = pixels(panel.locator("img").screenshot())
    apart = np.abs(drawn - shown).max(-1)
    assert (apart > 64).mean() < 0.001 and apart.mean() < 2


def test_every_chart_can_be_saved(opened: Any, tmp_path: Path) -> None:
    charts, buttons = opened.locator("main svg[role=img]"), opened.locator("main button.save")
    assert charts.count() == buttons.count() > 20
    assert buttons.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))") == [
        f"Save SVG: {name}"
        for name in charts.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    ]


def test_a_saved_chart_with_odd_names_is_xml(page: Any, tmp_path: Path) -> None:
    lines = [
        answer(label=label, budget=budget, id="0")
        for label in ("</svg><b>&", "שלום")
        for budget in (0.1, 0.2)
    ]
    page.goto((report(tmp_path, lines) / "index.html").as_uri())
    path = saved(page, page.locator("button.save").first, tmp_path)
    texts = [each.text for each in ElementTree.parse(path).getroot().iter() if each.text]
    assert "</svg><b>&" in texts and "שלום" in texts


def test_tuned_arms_stand_beside_every_budget(page: Any, tmp_path: Path) -> None:
    tuned = "h2o at zoomr's bytes"
    arm = {"policy": "zoomr", "label": "zoomr", "options": {}, "model": None, "match": ["h2o"]}
    lines = [
        answer(label=label, budget=budget, seed=seed, id="0")
        for label, budgets in ((tuned, (60, 63)), ("tova", (0.1, 0.2)), ("zoomr", (None,)))
        for seed, budget in enumerate(budgets)
    ]
    settings = {"model": "m", "policies": [arm]}
    page.goto((report(tmp_path, lines, settings=settings) / "index.html").as_uri())
    chips = page.locator("[data-filter=budget] span").all_inner_texts()
    assert chips == ["none", "10 %", "20 %"]
    budgets = {(row["label"], row["budget"]) for row in shown_rows(page)}
    wanted = {(tuned, "61.5 rows, tuned"), ("tova", "10 %"), ("tova", "20 %"), ("zoomr", "—")}
    told = {(label, text.replace("\u202f", " ")) for label, text in budgets}
    assert told == wanted
    page.locator("input[data-text=ranked]").check()
    page.locator('#figure-budget input[data-text="20 %"]').check()
    panel = page.locator("#figure-budget .panel").first
    assert sorted(panel.locator("text.name").all_text_contents()) == sorted(
        [tuned, "tova", "zoomr"]
    )


def test_dark_and_light(opened: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(paper)
    opened.emulate_media(color_scheme="dark")
    dark = opened.evaluate(paper)
    assert light != dark and opened.inner_text("#theme") == "Light"
    opened.locator("#theme").click()
    assert opened.evaluate(paper) == light and opened.inner_text("#theme") == "Dark"
    opened.locator("#theme").click()
    assert opened.evaluate(paper) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(opened: Any, scheme: str) -> None:
    opened.emulate_media(color_scheme=scheme)
    names = ["ink", "muted", "accent", "bad", *(f"c{slot}" for slot in range(7))]
    paper, panel, *inks = colours(opened, "paper", "panel", *names)
    for name, ink in zip(names, inks, strict=True):
        assert contrast(paper, ink) >= 4.5, name
    assert contrast(panel, inks[0]) >= 4.5
    low, on_low, middle, high, on_high = colours(
        opened, "heat-low", "on-low", "heat-middle", "heat-high", "on-high"
    )
    assert contrast(low, on_low) >= 4.5 and contrast(high, on_high) >= 4.5
    assert contrast(middle, on_low) >= 3 and contrast(low, high) >= 4.5


def test_a_narrow_window_holds_it_all(opened: Any) -> None:
    opened.set_viewport_size({"width": 400, "height": 800})
    opened.wait_for_function(
        "document.querySelector('main svg').getBoundingClientRect().right < 401"
    )
    assert width_of(opened) <= 400
    for view in ("each policy", "ranked", "together"):
        opened.locator(f"input[data-text='{view}']").check()
        assert width_of(opened) <= 400, view
    opened.reload()
    assert opened.locator("#controls").is_hidden()
    opened.locator("aside summary").click()
    assert opened.locator("#controls").is_visible() and width_of(opened) <= 400


def test_keys_alone_reach_and_read_a_figure(page: Any, small: Path) -> None:
    page.goto((small / "index.html").as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "svg":
            break
    page.keyboard.press("ArrowRight")
    first = page.inner_text("#tip")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible() and page.inner_text("#tip") != first
    assert page.locator("#tip").get_attribute("role") == "status"


def test_little_data_leaves_figures_out(page: Any, tmp_path: Path) -> None:
    lines = [
        answer(task="ledger", protocol=None, length=None, depth=None, id=str(at)) for at in "012"
    ]
    page.goto((report(tmp_path, lines) / "index.html").as_uri())
    assert figures(page) == ["table"]
    assert page.inner_text("h1") == "h2o on checkpoints/made-up"
    assert page.locator("fieldset").count() == 0 and page.locator("aside").is_hidden()
    (row,) = shown_rows(page)
    assert row["n"] == "3" and row["right"].startswith("100.0\u202f%")


def test_texts_are_only_texts(page: Any, tmp_path: Path) -> None:
    lines = [
        answer(task=ODD, label=label, policy=ODD, budget=budget, right=right, id=ODD)
        for label in (ODD, "שלום", "🐙" * 30)
        for budget, right in ((0.1, True), (0.2, False))
    ]
    out = report(tmp_path, lines, model=ODD, settings={ODD: ODD})
    page.goto((out / "index.html").as_uri())
    assert page.evaluate("window.bad") is None
    assert page.title() == f"ZoomKV report: {ODD}"
    assert {row["label"] for row in shown_rows(page)} == {ODD, "שלום", "🐙" * 30}
    assert page.locator("b b, main script, h1 b").count() == 0
    assert figures(page) == ["budget", "table"]
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function(NARROW)
    assert width_of(page) <= 400


def test_budgets_in_rows_stand_at_what_they_held(page: Any, tmp_path: Path) -> None:
    lines = [
        answer(label=label, budget=budget, device_bytes_peak=20.0 * budget, id="0")
        for label in ("h2o", "tova")
        for budget in (16, 64, 1)
    ]
    page.goto((report(tmp_path, lines) / "index.html").as_uri())
    chips = page.locator("[data-filter=budget] span").all_inner_texts()
    assert chips == ["1 rows", "16 rows", "64 rows"]
    assert page.locator("#figure-budget input[name='budget:x']").count() == 0
    assert page.locator("#figure-budget svg").first.locator("path.dot").count() == 6
