"""Files as they are embedded, beside ImageMagick, Chromium and poppler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from benchmarks.files import documents, pictures
from benchmarks.files.shown import imagemagick
from PIL import Image

from tests.tessera_corpus.pdf_files import line, pdf

pytestmark = pytest.mark.confines


def verdicts(out: Path) -> dict[str, str]:
    return {
        Path(found["path"]).name: found["verdict"] for found in map(json.loads, out.read_text().splitlines())
    }


@pytest.mark.skipif(
    imagemagick() is None or shutil.which("chromium") is None,
    reason="ImageMagick or Chromium is not installed: scripts/system-packages",
)
def test_pictures_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    ramp = Image.linear_gradient("L").resize((40, 30))
    half = Image.merge("RGBA", (ramp, ramp.rotate(180), ramp, ramp))
    half.save(folder / "half.png")
    half.convert("P").save(folder / "palette.gif")
    ramp.convert("RGB").save(folder / "scan.tif", compression="tiff_lzw")
    # Nobody has said that a sample is alpha: ImageMagick takes it for one.
    shown = half.convert("RGB").split()
    Image.merge("RGBX", (*shown, Image.new("L", half.size, 0))).save(folder / "extra.tif", tiffinfo={338: 0})
    (folder / "broken.png").write_bytes(b"no picture")
    assert pictures.check(folder, out)
    assert verdicts(out) == {
        "half.png": "as both",
        "palette.gif": "as both",
        "scan.tif": "as ImageMagick",
        "extra.tif": "wrong",
        "broken.png": "refused",
    }
    said = capsys.readouterr().out
    assert f"wrong: {folder / 'extra.tif'} page 0" in said and said.count("wrong: ") == 1
    (folder / "extra.tif").unlink()
    assert not pictures.check(folder)


@pytest.mark.skipif(
    shutil.which("pdftoppm") is None, reason="poppler is not installed: scripts/system-packages"
)
def test_pages_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    (folder / "text.pdf").write_bytes(pdf([line("some words in a line"), line("and on another page")]))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    # Its letters stand apart as those of words do not: poppler takes each for a word.
    apart = pdf(["BT /F 12 Tf 9 Tc 10 100 Td (letters) Tj ET"])
    (folder / "apart.pdf").write_bytes(apart)
    assert documents.check(folder, out)
    assert verdicts(out) == {"text.pdf": "right", "broken.pdf": "refused", "apart.pdf": "words"}
    assert f"words: {folder / 'apart.pdf'} page 1" in capsys.readouterr().out
    (folder / "apart.pdf").unlink()
    assert not documents.check(folder)
