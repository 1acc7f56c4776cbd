"""What float8 takes its steps from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.base import vision_of
from tessera.errors import ConfigError, UnsupportedMedia
from tessera.imaging import Picture
from tessera.models import Model, open_model
from tessera_engines.cli import main
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import BuildSpec, Stage
from tessera_engines.tensorrt.calibration import read_samples


def spec(**changes: Any) -> BuildSpec:
    return BuildSpec(**({"stage": Stage.FUSED, "flavour": "tensorrt_rtx", "dtype": "float8"} | changes))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return open_model(checkpoint)


@pytest.fixture
def folder(tmp_path: Path, photos: dict[str, bytes]) -> Path:
    for name, data in photos.items():
        (tmp_path / f"{name}.JPG").write_bytes(data)
    (tmp_path / "queries.txt").write_text("a red flower\n\na temple in the mountains\n")
    (tmp_path / "notes.md").write_text("not read")
    return tmp_path


def test_images_become_tiles_and_lines_become_tokens(
    model: Model, folder: Path, photos: dict[str, bytes]
) -> None:
    samples, note = read_samples(model, spec(calibration=folder))
    expected = np.concatenate(
        [model.preprocess(Picture(photos[name], param="")).values for name in ("china", "flower")]
    )
    np.testing.assert_array_equal(np.stack(samples.tiles), expected)
    assert len(samples.tokens) == 2 and all(len(tokens) > 3 for tokens in samples.tokens)
    assert note == f"{len(expected)} tiles and 2 lines of text from {folder.name}"


@pytest.mark.parametrize(
    ("stage", "gone", "complaint"),
    [
        (Stage.VISION, ["china.JPG", "flower.JPG"], "no image"),
        (Stage.TEXT, ["queries.txt"], r"no \.txt"),
        (Stage.FUSED, ["queries.txt"], r"no \.txt"),
    ],
)
def test_what_a_stage_needs_must_be_there(
    model: Model, folder: Path, stage: Stage, gone: list[str], complaint: str
) -> None:
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=complaint):
        read_samples(model, spec(stage=stage, calibration=folder))


def test_a_file_that_is_no_image_is_named(model: Model, folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(UnsupportedMedia) as caught:
        read_samples(model, spec(calibration=folder))
    assert caught.value.param == str(folder / "broken.png")


def test_without_a_directory_the_samples_are_random_and_say_so(model: Model) -> None:
    samples, note = read_samples(model, spec())
    assert note.startswith("random") and {tile.shape for tile in samples.tiles} == {
        vision_of(model).unit_shape
    }
    assert all(tokens.max() < model.vocab_size for tokens in samples.tokens)


def test_other_types_need_no_samples(model: Model, folder: Path) -> None:
    samples, note = read_samples(model, spec(dtype="bfloat16", calibration=folder))
    assert not samples.tiles and not samples.tokens and note == ""


def test_a_missing_directory_is_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_samples(model, spec(calibration=tmp_path / "nowhere"))


def test_the_manifest_says_what_calibrated(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-bindings and its libs")
    out = tmp_path / "out"
    command = ["build", "--model-path", str(checkpoint), "--stage", "vision", "--out", str(out)]
    command += ["--flavour", "tensorrt_rtx", "--dtype", "float8", "--capability", "8.9"]
    main([*command, "--calibration", str(folder)])
    assert "tiles and 2 lines of text" in Manifest.read(out).notes["calibration"]
