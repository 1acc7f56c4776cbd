"""The try-it page of models whose output it cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.families.dual_encoder import HIDDEN, install
from tests.families.token_rows import make_checkpoint
from tests.frontend.alone import frontend
from tests.page.conftest import Open

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]


def test_it_says_what_a_model_of_token_vectors_gives_instead(opened: Open, tmp_path: Path) -> None:
    path = install(tmp_path / "site", "tests.families.token_rows")
    checkpoint = make_checkpoint(tmp_path / "model", 1)
    with frontend(checkpoint, tmp_path, environment={"PYTHONPATH": path}) as client:
        page = opened(str(client.base_url))
        expect(page.locator("#notice-tokens")).to_be_visible()
        expect(page.locator("#family")).to_have_text(
            f"Family token_rows: output tokens, {HIDDEN} wide; takes text alone."
        )
        for hidden in ("#notice-text", "#notice-score", "#search", "#pictures"):
            expect(page.locator(hidden)).to_be_hidden()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
