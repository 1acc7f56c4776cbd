"""The commands of docs/recipes.md that search a folder of PDF files, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from tests.tessera_corpus.pdf_files import image, pdf

pytestmark = [pytest.mark.embeds, pytest.mark.xdist_group("corpus")]

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "examples" / "images"
SECTION = (ROOT / "docs" / "recipes.md").read_text().partition("## A folder of PDF files\n")[2]
COMMANDS = SECTION.partition("```bash\n")[2].partition("```")[0]
# An inch has 72 points, and a page is drawn with 150 pixels for each inch.
_POINTS = 0.48


def drawn(names: Sequence[str]) -> bytes:
    """A file with a picture of the examples on each page, pixel for pixel at 150 dpi."""
    pictures = [Image.open(PICTURES / f"{name}.jpg").convert("RGB") for name in names]
    width, height = (
        max(getattr(picture, side) for picture in pictures) * _POINTS for side in ("width", "height")
    )
    return pdf(
        [
            f"q {picture.width * _POINTS} 0 0 {picture.height * _POINTS} 0 0 cm /X{number} Do Q"
            for number, picture in enumerate(pictures)
        ],
        box=f"0 0 {width} {height}",
        resources="/XObject<<" + "".join(f"/X{each} {10 + each} 0 R" for each in range(len(names))) + ">>",
        objects=[image(picture.width, picture.height, picture.tobytes()) for picture in pictures],
    )


def test_the_page_that_is_asked_for_is_the_first_of_a_folder(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    (reports / "2025").mkdir(parents=True)
    (reports / "scenes.pdf").write_bytes(drawn(["pair-02", "scene-04", "table-01"]))
    (reports / "2025" / "charts.pdf").write_bytes(drawn(["chart-01", "chart-03", "page-03"]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if name != "TESSERA_MODEL_PATH"} | {"PATH": path}
    ran = subprocess.run(
        ["bash", "-ec", COMMANDS],
        cwd=tmp_path,
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said, *hits = ran.stdout.splitlines()
    assert "6 items embedded" in said
    assert re.fullmatch(r" +1\. +0\.\d{3} +2025/charts\.pdf#page=2", hits[0]) and len(hits) == 6
