"""The page in Debian's Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.disaggregated import Disaggregated

Open = Callable[..., Page]

# A busy machine takes its time.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole session: while it is open, this thread's event loop runs and no other can.
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (scripts/system-packages)")
    with sync_playwright() as playwright:
        # Its sandbox cannot be used by root, whom containers run tests as.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens pages in contexts of their own; nothing may fail in their scripts."""
    contexts = []
    troubles: list[str] = []

    def make(url: str, **context: object) -> Page:
        made = browser.new_context(**context)  # type: ignore[arg-type]
        made.set_default_timeout(30_000)
        contexts.append(made)
        page = made.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(url)
        return page

    yield make
    for made in contexts:
        made.close()
    assert troubles == []


@pytest.fixture
def page(service: Disaggregated, opened: Open) -> Page:
    """The page of the closed service, with its key entered."""
    shown = opened(service.url)
    shown.get_by_label("This service asks for an API key").fill(service.key)
    shown.keyboard.press("Enter")
    shown.wait_for_selector("#health.ready")
    shown.get_by_text("Embed worker").wait_for()
    return shown
