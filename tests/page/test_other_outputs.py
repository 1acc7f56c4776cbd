"""The try-it page of models whose output it cannot show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import SPLADE_TINY
from tests.families.dual_encoder import HIDDEN, install
from tests.frontend.alone import frontend
from tests.page.conftest import Open

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]


NOTICES = {f"#notice-{kind}" for kind in ("tokens", "score", "sparse")}


@pytest.mark.parametrize(
    ("family", "kind", "width", "takes"),
    [
        ("token_rows", "tokens", HIDDEN, "text alone"),
        ("pairs", "score", 1, "text and pictures"),
        ("splade", "sparse", 1, "text alone"),
    ],
)
def test_it_says_what_the_model_gives_instead(
    opened: Open, tmp_path: Path, family: str, kind: str, width: int, takes: str
) -> None:
    checkpoint, path = tmp_path / "model", ""
    if family == "splade":
        write_checkpoint(checkpoint, SPLADE_TINY)
    else:
        path = install(tmp_path / "site", f"tests.families.{family}")
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps({"model_type": f"test_{family}", "seed": 1}))
    with frontend(checkpoint, tmp_path, environment={"PYTHONPATH": path}) as client:
        page = opened(str(client.base_url))
        expect(page.locator(f"#notice-{kind}")).to_be_visible()
        expect(page.locator("#family")).to_have_text(
            f"Family {family}: output {kind}, {width} wide; takes {takes}."
        )
        others = NOTICES - {f"#notice-{kind}"}
        for hidden in ("#notice-text", "#search", "#pictures", *others):
            expect(page.locator(hidden)).to_be_hidden()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
