"""The browser's fixtures see what they must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import misbehaviour


def html(folder: Path, body: str) -> str:
    file = folder / "page.html"
    file.write_text(f"<!doctype html><title>a page</title>{body}", encoding="utf-8")
    return file.as_uri()


def test_a_quiet_page_passes(page: Any, tmp_path: Path) -> None:
    page.goto(html(tmp_path, "<script>console.log('fine')</script>"))
    assert page.title() == "a page"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<script>throw new Error('broken')</script>", "thrown: broken"),
        ("<script>console.error('oh')</script>", "error: oh"),
        ("<script>console.warn('hm')</script>", "warning: hm"),
        ("<img src='http://127.0.0.1:9/a.png'>", "asked for http://127.0.0.1:9/a.png"),
    ],
)
def test_what_a_page_must_not_do_is_seen(
    browser: Any, tmp_path: Path, body: str, expected: str
) -> None:
    tab = browser.new_page()
    found = misbehaviour(tab)
    tab.goto(html(tmp_path, body))
    tab.wait_for_load_state("networkidle")
    tab.close()
    assert expected in found
