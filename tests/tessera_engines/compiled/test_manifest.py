"""A manifest says what an engine is, and what does not match is refused with both sides named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tessera.errors import ConfigError, EngineMismatch
from tessera_engines.cli import main
from tessera_engines.compiled.manifest import FORMAT, Binding, Manifest, file_entries
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "engine.plan").write_bytes(b"plan")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.bin").write_bytes(bytes(1000))
    Manifest(
        stage=Stage.VISION,
        flavour="tensorrt_rtx",
        layout=Layout.PACKED,
        dtype="bfloat16",
        family="some_family",
        fingerprint="abc",
        width=64,
        row_width=128,
        capabilities=("8.9", "12.0"),
        versions={"tensorrt_rtx": "1.7.1"},
        profiles=(Profile(units=Range(1, 2, 4)),),
        bindings=(Binding(name="tiles", output=False, dtype="uint8", shape=(-1, 3, 512, 512)),),
        files=file_entries(tmp_path),
        build_seconds=1.5,
        built_at="2026-01-01T00:00:00+00:00",
    ).write(tmp_path)
    return tmp_path


def test_what_was_written_is_read(directory: Path) -> None:
    manifest = Manifest.read(directory)
    assert set(manifest.files) == {"engine.plan", "weights/a.bin"}
    assert manifest.profiles[0].units == Range(1, 2, 4)
    manifest.verify_files(directory)
    manifest.require(
        directory,
        stage=Stage.VISION,
        fingerprint="abc",
        capability="12.0",
        versions={"tensorrt_rtx": "1.7.1", "torch": "2"},
    )


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        ({"fingerprint": "def"}, ["another checkpoint", "abc", "def"]),
        ({"stage": Stage.TEXT}, ["vision", "text"]),
        ({"capability": "9.0"}, ["8.9, 12.0", "9.0"]),
        ({"versions": {"tensorrt_rtx": "1.8"}}, ["tensorrt_rtx 1.7.1", "tensorrt_rtx 1.8"]),
        ({"versions": {}}, ["tensorrt_rtx 1.7.1", "not installed"]),
        ({"dtype": "float16", "row_width": 2048}, ["bfloat16", "float16", "128", "2048"]),
    ],
    ids=str,
)
def test_a_mismatch_names_both_sides(directory: Path, expected: dict[str, object], names: list[str]) -> None:
    with pytest.raises(EngineMismatch) as caught:
        Manifest.read(directory).require(directory, **expected)
    for part in [str(directory), *names]:
        assert part in caught.value.message


def test_of_another_flavour_nothing_else_is_compared(directory: Path) -> None:
    with pytest.raises(
        EngineMismatch, match=r"flavour is tensorrt_rtx, wanted is aoti\. tessera engine build"
    ):
        Manifest.read(directory).require(directory, flavour="aoti", versions={"torch": "2"})


def test_what_is_needed_must_be_listed(directory: Path) -> None:
    with pytest.raises(EngineMismatch, match=r"manifest\.json: it does not list engine\.pt2"):
        Manifest.read(directory).verify_files(directory, "engine.plan", "engine.pt2")


@pytest.mark.parametrize("change", ["longer", "other", "gone"])
def test_changed_files_are_refused(directory: Path, change: str) -> None:
    plan = directory / "engine.plan"
    if change == "gone":
        plan.unlink()
    else:
        plan.write_bytes(b"plan!" if change == "longer" else b"plam")
    with pytest.raises(EngineMismatch, match=r"engine\.plan"):
        Manifest.read(directory).verify_files(directory)


def test_no_manifest_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tessera engine build"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", f'{{"format": {FORMAT}, "stage": "vision"}}'])
def test_a_broken_manifest_is_named(directory: Path, content: str) -> None:
    (directory / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        Manifest.read(directory)


@pytest.mark.parametrize("version", [1, 99, None])
def test_a_manifest_of_another_format_is_refused(directory: Path, version: int | None) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(EngineMismatch, match=rf"{version}.*reads {FORMAT}.*tessera engine build"):
        Manifest.read(directory)


def test_shapes_in_a_spec() -> None:
    spec = msgspec.convert(
        {"stage": "text", "flavour": "aoti", "profiles": [{"tokens": [1, 8, 64]}]}, BuildSpec
    )
    assert spec.profiles[0].tokens == Range(1, 8, 64)
    assert 64 in spec.profiles[0].tokens and 65 not in spec.profiles[0].tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float12"},
        {"profiles": []},
        {"stage": "engine"},
        {"profiles": [{"tokens": [8, 1, 64]}]},
        {"profiles": [{"units": [1, 2]}]},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"stage": "text", "flavour": "aoti"} | changes, BuildSpec)


def test_a_build_without_a_flavour_says_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["build", "--model-path", str(tmp_path), "--stage", "vision", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "--flavour" in said and "--config" in said


def test_calibration_that_nothing_would_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--flavour", "tensorrt_rtx", "--stage", "vision", "--calibration", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["build", "--model-path", str(tmp_path), *words, "--out", str(tmp_path / "out")])
    assert "float8, and this stage is built in bfloat16" in capsys.readouterr().err


def test_inspect_names_the_manifest_of_an_unknown_flavour(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flavour": "foo"}))
    with pytest.raises(SystemExit):
        main(["inspect", str(directory)])
    assert f"{path}: flavour 'foo'" in capsys.readouterr().err
