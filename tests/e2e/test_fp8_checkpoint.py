"""Checkpoints in ModelOpt's FP8, in its full layout, behind both launch scripts of a machine without FP8.

One is as its exporter writes it, the other as ``tessera engine quantize`` does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tessera.models import open_model
from tessera.models.base import Role
from tests.checkpoint.modelopt import quantise
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, Service, launch
from tests.models.running import Given, batch_of, cosines, vectors

pytestmark = pytest.mark.service


def exported(checkpoint: Path, out: Path) -> None:
    quantise(checkpoint, out, static=True, without=("layers.1.mlp",))


def by_the_command(checkpoint: Path, out: Path) -> None:
    (inputs := out.parent / "inputs").mkdir()
    (inputs / "texts.txt").write_text("two cats on a sofa\nan invoice of March\nthe river under the bridge\n")
    command = [*(sys.executable, "-m", "tessera", "engine", "quantize"), *("--model-path", str(checkpoint))]
    command += [*("--calibration", str(inputs)), *("--out", str(out), "--most-loss", "1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


MAKERS: dict[str, Callable[[Path, Path], None]] = {"exported": exported, "quantized": by_the_command}


@pytest.fixture(scope="module", params=MAKERS)
def models(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The checkpoint in FP8, and one of the same numbers multiplied out, which says nothing of it."""
    folder = tmp_path_factory.mktemp("models")
    eight, plain = folder / "eight", folder / "plain"
    MAKERS[request.param](checkpoint, eight)
    shutil.copytree(checkpoint, plain)
    stored = load_file(eight / "model.safetensors")
    scaled = {name: value for name, value in stored.items() if not name.endswith("_scale")}
    for name, value in scaled.items():
        if f"{name}_scale" in stored:
            scaled[name] = value.float() * stored[f"{name}_scale"]
    save_file(scaled, plain / "model.safetensors", {"format": "pt"})
    return eight, plain


@pytest.fixture(scope="module", params=[("agg.sh", 1), ("e_p.sh", 2)], ids=["agg", "e_p"])
def service(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    script, workers = request.param
    with launch(script, models[0], tmp_path_factory.mktemp("log") / script, workers=workers) as running:
        yield running


def test_texts_and_images_are_those_of_the_weights_multiplied_out(
    service: Service, models: tuple[Path, Path], photos: dict[str, bytes]
) -> None:
    photo, text = photos["flower"], "a yellow heart"
    given: list[Any] = [text, parts(None, photo), parts(text, photo)]
    answer = httpx.post(
        f"{service.url}/v1/embeddings",
        json={"model": MODEL, "input": given, "input_type": "passage"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    found = np.array([entry["embedding"] for entry in answer.json()["data"]])
    model = open_model(models[1])
    vision = model.load_vision(dtype="float32", device="cpu")

    inputs = [Given(parts=each, role=Role.PASSAGE) for each in ((text,), (photo,), (photo, text))]
    batch = batch_of(model, vision, inputs)
    expected = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    assert cosines(found, expected).min() > 0.99999


def test_it_is_said_what_its_products_are(service: Service, models: tuple[Path, Path]) -> None:
    card = httpx.get(f"{service.url}/v1/models/{MODEL}").json()
    roles = ["embed"] if len(service.worker_ports) == 1 else ["embed", "encode"]
    assert [kind["role"] for kind in card["precision"]] in (roles, ["agg"])
    assert {(kind["dtype"], kind["rounding"]) for kind in card["precision"]} == {("float32", "")}
    count = sum(name.endswith("_proj.weight_scale") for name in load_file(models[0] / "model.safetensors"))
    assert f"text float32, {count} weights in FP8 multiplied out" in service.log.read_text()
    told = [
        service.worker_metric(worker, "tessera_precision", stage="text", dtype="float32", rounding="")
        for worker in range(len(service.worker_ports))
    ]
    assert sum(told) == 1
