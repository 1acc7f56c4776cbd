"""How many files of the package one request passes, and that ``docs/architecture.md`` names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.request_path.record import PACKAGE, Paths, Stop, record

pytestmark = [pytest.mark.service, pytest.mark.measures]

ARCHITECTURE = Path(__file__).parent.parent / "docs" / "architecture.md"
MOST_FOR_A_TEXT = 45
MOST_FOR_AN_IMAGE = 70


@pytest.fixture(scope="module")
def paths(checkpoint: Path) -> Paths:
    return record(checkpoint)


def documented(title: str) -> set[str]:
    """The files that a section of the page names."""
    _, _, rest = ARCHITECTURE.read_text().partition(f"### {title}\n")
    section, _, _ = rest.partition("\n#")
    return {name for name in re.findall(r"`([\w/]+)`", section) if (PACKAGE / f"{name}.py").exists()}


def files(stops: tuple[Stop, ...]) -> set[str]:
    return {stop.file.removesuffix(".py") for stop in stops}


def test_a_text_passes_few_files(paths: Paths) -> None:
    assert 20 < len(paths.text) <= MOST_FOR_A_TEXT, paths.text


def test_an_image_passes_few_files(paths: Paths) -> None:
    assert len(paths.text) < len(paths.image) <= MOST_FOR_AN_IMAGE, paths.image


def test_every_process_has_a_part(paths: Paths) -> None:
    assert {stop.role for stop in paths.text} == {"frontend", "embed worker"}
    assert {stop.role for stop in paths.image} == {
        "frontend",
        "embed worker",
        "encode worker",
        "image decoder",
    }


def test_the_architecture_page_names_the_files_of_a_text(paths: Paths) -> None:
    assert documented("A text") == files(paths.text)


def test_the_architecture_page_names_the_further_files_of_an_image(paths: Paths) -> None:
    assert documented("An image") == files(paths.image) - files(paths.text)
