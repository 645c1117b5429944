"""Headless Chromium for the pages that we write: a page that misbehaves fails its test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

REQUIRED = "ZOOMKV_TEST_BROWSER"
"""Set where a missing browser is a failure, as on the build machine."""


def find_chromium() -> str | None:
    """Its path, or ``None``."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def misbehaviour(tab: Any) -> list[str]:
    """A list that grows by what a tab does from now on and a page of ours must not do.

    It throws, writes a warning or an error to its console, or asks for anything but files.
    """
    found: list[str] = []

    def heard(line: Any) -> None:
        if line.type in ("error", "warning"):
            found.append(f"{line.type}: {line.text}")

    def asked(request: Any) -> None:
        if request.url.partition(":")[0] not in ("file", "data", "blob", "about"):
            found.append(f"asked for {request.url[:200]}")

    tab.on("pageerror", lambda error: found.append(f"thrown: {error}"))
    tab.on("console", heard)
    tab.on("request", asked)
    return found


# Not for the whole session: while it runs, this thread has an event loop, which others start too.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, started once for each file of tests."""
    executable = find_chromium()
    if executable is None:
        message = "no Chromium: apt-get install --no-install-recommends chromium"
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new tab, 1280 pixels wide and light; ``page.goto(path.as_uri())`` opens a file.

    The test fails if the page did anything of what ``misbehaviour`` lists.
    """
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    tab = context.new_page()
    tab.set_default_timeout(30_000)
    wrong = misbehaviour(tab)
    yield tab
    context.close()
    assert not wrong, "\n".join(wrong)
