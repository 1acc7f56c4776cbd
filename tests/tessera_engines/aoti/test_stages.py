"""Each stage, those that are compiled in another process than this, against the torch engine's modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.engine.placement import Placement
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.aoti.package import AotiPackage
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import Stage
from tessera_engines.compiled.stages import load_stage
from tests.models.llama_nemotron_vl.packing import encode
from tests.models.llama_nemotron_vl.stage_inputs import Batch, expected, image_batch, text_batch
from tests.tessera_engines.aoti.conftest import COMPILED, PARTS
from tests.tessera_engines.aoti.exported import leave_uncompiled

# The first test waits for the compilers.
pytestmark = [pytest.mark.compiles, pytest.mark.timeout(3900), pytest.mark.xdist_group("aoti")]

CPU = Placement(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaNemotronVL:
    return LlamaNemotronVL(checkpoint)


@pytest.fixture(scope="module")
def batches(model: LlamaNemotronVL) -> dict[str, Batch]:
    return {
        "one token": text_batch(model, [1]),
        "odd lengths": text_batch(model, [7, 1, 33]),
        "many": text_batch(model, [3] * 64),
        "one image": image_batch(model, [1]),
        "images and text": image_batch(model, [0, 2, 0, 1]),
    }


def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Row by row, in direction and in size."""
    assert found.shape == wanted.shape
    cosines = torch.cosine_similarity(found.double().flatten(0, -2), wanted.double().flatten(0, -2), dim=-1)
    assert float(cosines.min()) >= 0.99999
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_vision_in_every_number_of_tiles(engines: Path, model: LlamaNemotronVL) -> None:
    package = AotiPackage(model, engines / "vision", Stage.VISION, CPU).load()
    module = model.load_vision(dtype="float32", device="cpu")
    random = torch.Generator().manual_seed(0)
    for count in (1, 3, 32):
        tiles = torch.randint(0, 256, (count, *model.vision.unit_shape), dtype=torch.uint8, generator=random)
        compare(package(tiles)[0].flatten(0, 1), encode(module, tiles))


@torch.inference_mode()
def test_text(engines: Path, model: LlamaNemotronVL, batches: dict[str, Batch]) -> None:
    text = AotiPackage(model, engines / "text", Stage.TEXT, CPU).load()
    for name, batch in batches.items():
        vectors, norms = text(*batch.padded())
        compare(vectors * norms[:, None], expected(model, batch))
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)), msg=name)


@torch.inference_mode()
def test_text_in_parts(
    engines: Path,
    parts: Path,
    model: LlamaNemotronVL,
    batches: dict[str, Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As it is exported it refuses a batch of a single token, which the compiled one takes.
    lm = AotiPackage(model, engines / "lm", Stage.LM, CPU).load()
    leave_uncompiled(monkeypatch)
    embed, post = (AotiPackage(model, parts / name, Stage(name), CPU).load() for name in ("embed", "post"))
    for batch in batches.values():
        ids, mask, rows, vision_map = batch.padded()
        tiles = rows.expand(model.config.tokens_per_tile, -1) if len(rows) == 1 else rows
        (embedded,) = embed(
            ids, tiles.reshape(-1, model.config.tokens_per_tile, model.output.width), vision_map
        )
        (hidden,) = lm(embedded, mask)
        vectors, norms = post(hidden, mask)
        compare(vectors * norms[:, None], expected(model, batch))


@torch.inference_mode()
def test_fused(
    parts: Path, model: LlamaNemotronVL, batches: dict[str, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_uncompiled(monkeypatch)
    package = AotiPackage(model, parts / "fused", Stage.FUSED, CPU).load()
    for name in ("odd lengths", "one image", "images and text"):
        vectors, norms = package(*batches[name].fused(model))
        compare(vectors * norms[:, None], expected(model, batches[name]))


@pytest.mark.parametrize("stage", list(Stage), ids=str)
def test_the_manifest_says_what_the_engine_takes(
    engines: Path, parts: Path, model: LlamaNemotronVL, stage: Stage
) -> None:
    manifest = Manifest.read((engines if stage in COMPILED else parts) / stage)
    module = load_stage(model, stage, layout=manifest.layout, dtype="float32", device="cpu")
    named = {(one.name, one.output): one for one in manifest.bindings}
    for tensors, output in ((module.inputs, False), (module.outputs, True)):
        for tensor in tensors:
            binding = named.pop((tensor.name, output))
            assert binding.dtype == tensor.dtype
            assert binding.shape == tuple(axis if isinstance(axis, int) else -1 for axis in tensor.axes)
    assert not named
    assert manifest.capabilities == ("cpu",) and manifest.versions["torch"] == torch.__version__
    # Code alone: every number of the model stays in the checkpoint.
    assert stage in PARTS or sum(entry.nbytes for entry in manifest.files.values()) < 8 << 20
