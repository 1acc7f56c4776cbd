"""The try-it page of a model that takes no pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tessera_tools.random_checkpoint import qwen3
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tests.frontend.alone import frontend
from tests.page.conftest import Open

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]


def test_it_says_that_pictures_are_not_taken(opened: Open, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", qwen3.TINY, seed=0)
    with frontend(tmp_path / "model", tmp_path) as client:
        page = opened(str(client.base_url))
        expect(page.locator("#notice-text")).to_be_visible()
        expect(page.locator("#family")).to_have_text(
            f"Family qwen3_embedding: output vector, {qwen3.TINY.hidden} wide; takes text alone."
        )
        expect(page.locator("#health")).to_have_text("No worker is ready")
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
