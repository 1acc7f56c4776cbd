"""Engines of a small checkpoint, built on this machine for GPUs that it does not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.models import open_model
from tessera_engines.cli import main
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import Layout, Stage
from tessera_engines.tensorrt.build import TimingCache
from tessera_engines.tensorrt.module import logging_of
from tests.families import dual_encoder

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-bindings and its libs")

pytestmark = pytest.mark.compiles

CONFIG = """
build:
  - stage: vision
    flavour: tensorrt_rtx
    capabilities: ["8.9", "12.0"]
    profiles: [{units: [1, 1, 2]}, {units: [1, 4, 8]}]
  - &text
    stage: text
    flavour: tensorrt_rtx
    capabilities: ["8.9", "12.0"]
    layout: padded
    profiles: [{sequences: [1, 2, 4], tokens: [1, 64, 128], rows: [1, 256, 512]}]
  - {<<: *text, stage: fused, dtype: float16}
  - {<<: *text, stage: embed, capabilities: ["8.6", "8.9", "12.0"]}
  - {<<: *text, stage: lm}
  - {<<: *text, stage: post}
"""

VECTORS = {"vectors": ("float32", (-1, 128)), "norms": ("float32", (-1,))}
LENGTHS = {"lengths": ("int32", (-1,))}
TOKENS = {"input_ids": ("int32", (-1, -1)), "vision_row": ("int32", (-1, -1))}
TILES = {"tiles": ("uint8", (-1, 3, 256, 256))}
ROWS = {"vision_rows": ("bfloat16", (-1, 128))}
# Inputs and outputs of each stage, and how many attentions are in it.
EXPECTED: dict[Stage, tuple[dict[str, Any], dict[str, Any], int]] = {
    Stage.VISION: (TILES, {"rows": ("bfloat16", (-1, 64, 128))}, 2),
    Stage.TEXT: (TOKENS | ROWS | LENGTHS, VECTORS, 2),
    Stage.FUSED: (TILES | TOKENS | LENGTHS, VECTORS, 4),
    Stage.EMBED: (TOKENS | ROWS, {"embedded": ("bfloat16", (-1, -1, 128))}, 0),
    Stage.LM: (
        {"embedded": ("bfloat16", (-1, -1, 128))} | LENGTHS,
        {"hidden": ("bfloat16", (-1, -1, 128))},
        2,
    ),
    Stage.POST: ({"hidden": ("bfloat16", (-1, -1, 128))} | LENGTHS, VECTORS, 0),
}

LAYERS = {f"text.layers.{number}" for number in range(2)}
PARTS = {
    Stage.VISION: {"vision.embeddings", "vision.layers.0", "vision.layers.1", "projector"},
    Stage.TEXT: {"text.embed", "text.positions", "text.norm", "text.pooling"} | LAYERS,
    Stage.FUSED: {"vision.layers.1", "text.embed", "text.pooling"} | LAYERS,
    Stage.LM: LAYERS,
    Stage.POST: {"text.pooling"},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "engines.yaml"
    path.write_text(CONFIG)
    return path


def build(checkpoint: Path, stage: str, out: Path, *flags: str) -> None:
    main(["build", "--model-path", str(checkpoint), "--stage", stage, "--out", str(out), *flags])


@pytest.fixture(scope="module", params=list(Stage), ids=str)
def built(
    request: pytest.FixtureRequest, checkpoint: Path, config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("engines") / request.param
    build(checkpoint, request.param, out, "--config", str(config))
    return out


def test_the_manifest_says_what_was_built(built: Path, checkpoint: Path) -> None:
    manifest = Manifest.read(built)
    inputs, outputs, _ = EXPECTED[manifest.stage]
    found = {
        output: {b.name: (b.dtype, b.shape) for b in manifest.bindings if b.output is output}
        for output in (False, True)
    }
    assert found == {False: inputs, True: outputs}
    manifest.verify_files(built)
    manifest.require(
        built,
        fingerprint=open_model(checkpoint).fingerprint,
        versions={"tensorrt_rtx": trt.__version__},
        capability=manifest.capabilities[-1],
        flavour="tensorrt_rtx",
    )
    assert (built / "engine.plan").stat().st_size > 100_000


def test_inspection_shows_every_attention_fused(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(built)])
    found = json.loads(capsys.readouterr().out)
    stage = Stage(found["manifest"]["stage"])
    network, count = found["engine"]["network"], EXPECTED[stage][2]
    assert [layer["fused"] for layer in network["attention"]] == ["always"] * count
    assert {layer["form"] for layer in network["attention"]} <= {"padded_bhnd"}
    assert network["kinds"].get("non_zero") is None
    names = [layer["name"] for layer in network["layers"]]
    assert len(set(names)) == len(names) > 5
    parts = {name.split()[0] for name in names}
    assert parts >= PARTS.get(stage, set())
    if torch.cuda.is_available():
        assert "not_loaded" in found["engine"] or found["engine"]["tensors"]
    else:
        assert "GPU" in found["engine"]["not_loaded"]


def failure(capsys: pytest.CaptureFixture[str], checkpoint: Path, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        build(checkpoint, *arguments)
    assert caught.value.code == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_packed_attention_that_no_kernel_fuses_fails_the_build(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--flavour", "tensorrt_rtx", "--capability", "8.9")
    error = failure(capsys, checkpoint, "text", str(tmp_path / "text"), *flags)
    assert "no fused kernel is available" in error and "--layout padded" in error
    assert list(tmp_path.iterdir()) == []


def test_float32_attention_needs_leave_to_be_decomposed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--flavour", "tensorrt_rtx", "--capability", "8.9", "--dtype", "float32")
    error = failure(capsys, checkpoint, "vision", str(tmp_path / "vision"), *flags)
    assert "dedicated kernel" in error and "--decomposable" in error
    build(checkpoint, "vision", tmp_path / "vision", *flags, "--decomposable")
    assert Manifest.read(tmp_path / "vision").decomposable


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--flavour", "steam"), ["steam", "tensorrt_rtx", "aoti"]),
        (("--flavour", "tensorrt_rtx", "--capability", "9.0"), ["9.0", "8.9", "12.0"]),
        (("--flavour", "tensorrt_rtx", "--layout", "padded", "--config", "/nowhere.yaml"), ["/nowhere.yaml"]),
        ((), ["flavour"]),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_named(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    names: list[str],
) -> None:
    error = failure(capsys, checkpoint, "vision", str(tmp_path / "vision"), *flags)
    for name in names:
        assert name in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.usefixtures("forks")
def test_a_worker_on_a_machine_without_a_gpu_says_so_and_ends(
    checkpoint: Path, config: Path, tmp_path: Path
) -> None:
    built = tmp_path / "vision"
    build(checkpoint, "vision", built, "--config", str(config))
    arguments = {"vision": {"engine": "tensorrt", "path": str(built)}}
    command = [sys.executable, "-m", "tessera.worker", "--model-path", str(checkpoint)]
    command += ["--disaggregation-mode", "encode", "--override-engine-args", json.dumps(arguments)]
    environment = os.environ | {"DYN_DISCOVERY_BACKEND": "mem"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "needs an NVIDIA GPU of compute capability 8.9 or 12.0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_targets_must_be_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = failure(capsys, checkpoint, "vision", str(tmp_path / "v"), "--flavour", "tensorrt_rtx")
    assert "--capability 8.9" in error


def test_a_family_without_networks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.models.families", lambda: [dual_encoder.FAMILY])
    path = dual_encoder.make_checkpoint(tmp_path / "model", seed=0)
    flags = ("--flavour", "tensorrt_rtx", "--capability", "8.9")
    error = failure(capsys, path, "vision", str(tmp_path / "v"), *flags)
    assert "dual_encoder describes no networks" in error


def test_what_exists_is_left_alone(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--flavour", "tensorrt_rtx", "--capability", "8.9")
    assert "exists already" in failure(capsys, checkpoint, "vision", str(tmp_path), *flags)


def test_full_tensorrt_that_is_not_installed_says_how_to_get_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        import tensorrt  # noqa: F401
    except ModuleNotFoundError:
        flags = ("--flavour", "tensorrt", "--capability", "8.9")
        error = failure(capsys, checkpoint, "vision", str(tmp_path / "v"), *flags)
        assert "module tensorrt" in error and "pip install tensorrt-cu13" in error
    else:
        pytest.skip("tensorrt is installed here")


def test_a_timing_cache_that_nothing_uses_is_not_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "timing.bin"
    flags = ("--flavour", "tensorrt_rtx", "--capability", "8.9", "--layout", "padded")
    build(checkpoint, "post", tmp_path / "post", *flags, "--timing-cache", str(cache))
    assert "times nothing" in capsys.readouterr().err and not cache.exists()


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops")
def test_the_timing_cache_is_written_read_and_replaced(tmp_path: Path) -> None:
    """With TensorRT for RTX's own objects, which take and give caches but keep nothing in them."""
    path, told = tmp_path / "cache" / "timing.bin", []
    config = trt.Builder(logging_of(trt)[0]).create_builder_config()
    for version in ("1", "1", "2"):
        with TimingCache(path, version) as cache:
            cache.attach(config, told.append)
            cache.save(config)
        assert path.read_bytes().startswith(f"tessera timing cache, {version}\n".encode())
    assert told == [f"{path}: of another version, begun anew"]


def test_layouts_are_named_in_the_manifest(built: Path) -> None:
    manifest = Manifest.read(built)
    assert manifest.layout is (Layout.PACKED if manifest.stage is Stage.VISION else Layout.PADDED)
