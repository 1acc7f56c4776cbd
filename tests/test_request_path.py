"""How much of the package one request passes, and that ``docs/architecture.md`` names the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.request_path.record import Paths, RequestPath, record
from benchmarks.shape import PACKAGE

pytestmark = [pytest.mark.service, pytest.mark.measures]

ARCHITECTURE = Path(__file__).parent.parent / "docs" / "architecture.md"
MOST_FOR_A_TEXT = 40
MOST_FOR_AN_IMAGE = 63
# Of the functions that run. Outputs by name took 90 lines of a text's, token ids as arrays and the declared
# side of truncation 45, connections that take turns 40; damaged files took 40 of an image's, decoding
# in turns by key 91. Whether a log is written meanwhile is 50.
MOST_LINES_FOR_A_TEXT = 2760 + 50
MOST_LINES_FOR_AN_IMAGE = 4410 + 50


@pytest.fixture(scope="module")
def paths(checkpoint: Path) -> Paths:
    return record(checkpoint)


def documented(title: str) -> set[str]:
    """The files that a section of the page names."""
    _, _, rest = ARCHITECTURE.read_text().partition(f"### {title}\n")
    section, _, _ = rest.partition("\n#")
    return {name for name in re.findall(r"`([\w/]+)`", section) if (PACKAGE / f"{name}.py").exists()}


def files(path: RequestPath) -> set[str]:
    return {stop.file.removesuffix(".py") for stop in path.stops}


def test_a_text_passes_few_files(paths: Paths) -> None:
    assert 20 < len(paths.text.stops) <= MOST_FOR_A_TEXT, paths.text.stops


def test_an_image_passes_few_files(paths: Paths) -> None:
    assert len(paths.text.stops) < len(paths.image.stops) <= MOST_FOR_AN_IMAGE, paths.image.stops


def test_a_text_runs_few_lines(paths: Paths) -> None:
    assert 0 < paths.text.lines_of_functions <= MOST_LINES_FOR_A_TEXT, paths.text.functions


def test_an_image_runs_few_lines(paths: Paths) -> None:
    assert paths.text.lines_of_functions < paths.image.lines_of_functions <= MOST_LINES_FOR_AN_IMAGE, (
        paths.image.functions
    )


def test_the_functions_that_run_are_in_the_files_and_none_twice(paths: Paths) -> None:
    for path in (paths.text, paths.image):
        assert {part.file.removesuffix(".py") for part in path.functions} <= files(path)
        lines = [(part.file, line) for part in path.functions for line in range(part.first, part.last + 1)]
        assert len(lines) == len(set(lines)) == path.lines_of_functions < path.lines_of_files


def test_every_process_has_a_part(paths: Paths) -> None:
    assert {stop.role for stop in paths.text.stops} == {"frontend", "embed worker"}
    assert {stop.role for stop in paths.image.stops} == {
        "frontend",
        "embed worker",
        "encode worker",
        "image decoder",
    }


def test_the_architecture_page_names_the_files_of_a_text(paths: Paths) -> None:
    assert documented("A text") == files(paths.text)


def test_the_architecture_page_names_the_further_files_of_an_image(paths: Paths) -> None:
    assert documented("An image") == files(paths.image) - files(paths.text)
