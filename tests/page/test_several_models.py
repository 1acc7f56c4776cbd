"""The page of a service of several models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY, TINY
from tests.e2e.several import Several, several
from tests.page.conftest import Open

pytestmark = [pytest.mark.service, pytest.mark.several, pytest.mark.xdist_group("several")]


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    write_checkpoint(folder / "reranker", RERANK_TINY, seed=2)
    write_checkpoint(folder / "other", TINY, seed=3)
    found = {"reranker": folder / "reranker", "pictures": checkpoint, "other": folder / "other"}
    with several(folder, found) as running:
        yield running


def test_a_model_is_chosen_and_pictures_are_embedded_anew(models: Several, opened: Open) -> None:
    page = opened(models.url)
    chosen = page.get_by_label("Model", exact=True)
    # The first that gives vectors.
    expect(chosen).to_have_value("pictures")
    assert chosen.locator("option").all_text_contents() == ["reranker", "pictures", "other"]
    expect(page.locator("#model")).to_have_text(": pictures")
    page.get_by_role("button", name="Take the examples").click()
    expect(page.locator("#pictures-state")).to_contain_text("ready to search")
    page.get_by_role("searchbox").fill("a heart")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#pictures-state")).to_contain_text("ranked")
    expect(page.locator("#curl")).to_contain_text('"model":"pictures"')
    scores = page.locator(".score")
    before = scores.all_text_contents()
    chosen.select_option("other")
    expect(page.locator("#model")).to_have_text(": other")
    expect(page.locator("#pictures-state")).to_contain_text("ready to search")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#curl")).to_contain_text('"model":"other"')
    expect(page.locator("#pictures-state")).to_contain_text("ranked")
    assert len(before) == scores.count() and scores.all_text_contents() != before
    chosen.select_option("reranker")
    expect(page.get_by_text("A reranker.")).to_be_visible()
    expect(page.locator("#search")).to_be_hidden()


def test_a_query_under_way_is_not_asked_of_another_model_s_vectors(models: Several, opened: Open) -> None:
    page = opened(models.url)
    page.get_by_role("button", name="Take the examples").click()
    expect(page.locator("#pictures-state")).to_contain_text("ready to search")
    held: list[Route] = []
    page.route("**/v1/embeddings", lambda route: held.append(route), times=1)
    page.get_by_role("searchbox").fill("a heart")
    with page.expect_request("**/v1/embeddings"):
        page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_label("Model", exact=True).select_option("other")
    expect(page.locator("#model")).to_have_text(": other")
    held[0].continue_()
    expect(page.locator("#pictures-state")).to_contain_text("ready to search")
    expect(page.locator("#search-error")).to_be_empty()
