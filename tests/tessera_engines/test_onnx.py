"""Every stage's ONNX file in ONNX Runtime against the torch engine's modules, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tessera.models.llama_nemotron_vl.model import LlamaNemotronRerankVL, LlamaNemotronVL
from tessera_engines.compiled.spec import Profile, Range, axis_ranges
from tessera_engines.compiled.stages import load_stage
from tessera_engines.triton_export.onnx_file import OPSET, write_onnx
from tessera_engines.triton_export.repository import FUSED, SPLIT
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RerankSpec
from tests.models.llama_nemotron_vl.packing import encode
from tests.models.llama_nemotron_vl.stage_inputs import Batch, expected, image_batch, text_batch

pytestmark = [pytest.mark.compiles, pytest.mark.xdist_group("onnx")]

RANGES = axis_ranges(
    [Profile(units=Range(1, 3, 4), sequences=Range(1, 4, 8), tokens=Range(1, 32, 256), rows=Range(1, 8, 16))]
)
# Where a Triton repository has each stage; it has no text stage by itself.
FILES = {stage: f"split/{name}/1/model.onnx" for name, stage in SPLIT.items()}
FILES["fused"] = f"fused/{FUSED}/1/model.onnx"
STAGES = ("text", *FILES)


class OnnxStage:
    """One file and the session that runs it."""

    def __init__(self, model: LlamaNemotronVL, name: str, path: Path) -> None:
        """Writes the file where it is not there."""
        self.stage = load_stage(model, name, layout="padded", dtype="float32", device="cpu")
        self.path = path
        if not path.exists():
            assert write_onnx(self.stage, RANGES, path) == (path,)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        feed = {one.name: value.numpy() for one, value in zip(self.stage.inputs, inputs, strict=True)}
        return [torch.from_numpy(value) for value in self.session.run(None, feed)]


@pytest.fixture(scope="module")
def stages(
    model: LlamaNemotronVL, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, OnnxStage]:
    paths = {name: directory / file for name, file in FILES.items()}
    paths["text"] = tmp_path_factory.mktemp("onnx") / "text.onnx"
    return {name: OnnxStage(model, name, path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def batches(model: LlamaNemotronVL) -> list[Batch]:
    """From the smallest to the largest of the ranges, with images, with text, and with both."""
    return [
        text_batch(model, [1]),
        text_batch(model, [7, 1, 33]),
        text_batch(model, [256] + [3] * 7),
        image_batch(model, [1]),
        image_batch(model, [0, 2, 0, 1]),
        image_batch(model, [3, 0, 0, 0, 1]),
    ]


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    rows = (found.double().flatten(0, -2), wanted.double().flatten(0, -2))
    return float(torch.cosine_similarity(*rows, dim=-1).min())


def check(vectors: torch.Tensor, norms: torch.Tensor, pooled: torch.Tensor, request: Any) -> None:
    torch.testing.assert_close(norms, pooled.norm(dim=1), rtol=1e-4, atol=1e-5)
    cosine = worst(vectors, pooled)
    request.node.user_properties.append(("parity of ONNX stages", f"{request.node.name:40} {cosine:.8f}"))
    assert cosine >= 0.99999


@torch.inference_mode()
def test_vision(stages: dict[str, OnnxStage], model: LlamaNemotronVL) -> None:
    module = model.load_vision(dtype="float32", device="cpu")
    random = torch.Generator().manual_seed(0)
    for count in (1, 3, 4):
        tiles = torch.randint(0, 256, (count, *model.vision.unit_shape), dtype=torch.uint8, generator=random)
        assert worst(stages["vision"](tiles)[0].flatten(0, 1), encode(module, tiles)) >= 0.99999


@pytest.mark.parametrize("number", range(6))
@torch.inference_mode()
def test_text(
    stages: dict[str, OnnxStage],
    model: LlamaNemotronVL,
    batches: list[Batch],
    number: int,
    request: pytest.FixtureRequest,
) -> None:
    check(*stages["text"](*batches[number].padded()), expected(model, batches[number]), request)


@pytest.mark.parametrize("number", range(6))
@torch.inference_mode()
def test_text_in_three_parts(
    stages: dict[str, OnnxStage],
    model: LlamaNemotronVL,
    batches: list[Batch],
    number: int,
    request: pytest.FixtureRequest,
) -> None:
    ids, mask, rows, vision_map = batches[number].padded()
    tiles = rows.expand(model.config.tokens_per_tile, -1) if len(rows) == 1 else rows
    (embedded,) = stages["embed"](
        ids, tiles.reshape(-1, model.config.tokens_per_tile, model.output.width), vision_map
    )
    (hidden,) = stages["lm"](embedded, mask)
    check(*stages["post"](hidden, mask), expected(model, batches[number]), request)


@pytest.mark.parametrize("number", range(6))
@torch.inference_mode()
def test_fused(
    stages: dict[str, OnnxStage],
    model: LlamaNemotronVL,
    batches: list[Batch],
    number: int,
    request: pytest.FixtureRequest,
) -> None:
    batch = batches[number]
    check(*stages["fused"](*batch.fused(model)), expected(model, batch), request)


@pytest.mark.parametrize("name", STAGES)
def test_the_file_says_what_it_takes(stages: dict[str, OnnxStage], name: str) -> None:
    stage = stages[name]
    assert [*stage.path.parent.iterdir()] == [stage.path]
    file = onnx.load(stage.path)
    onnx.checker.check_model(file)
    assert [entry.version for entry in file.opset_import if not entry.domain] == [OPSET]
    for tensors, described in (
        (stage.session.get_inputs(), stage.stage.inputs),
        (stage.session.get_outputs(), stage.stage.outputs),
    ):
        assert [(one.name, one.shape) for one in tensors] == [
            (tensor.name, list(tensor.axes)) for tensor in described
        ]
    # Nothing whose shape depends on values: such operators make a GPU wait.
    assert not {node.op_type for node in file.graph.node} & {"NonZero", "Loop", "If", "Unique", "Compress"}


def test_large_weights_lie_beside_the_model(
    model: LlamaNemotronVL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera_engines.triton_export.onnx_file._LARGEST_INLINE", 1000)
    stage = model.load_stage("embed", layout="padded", dtype="float32", device="cpu")
    path, data = write_onnx(stage, RANGES, tmp_path / "embed.onnx")
    assert path.stat().st_size < 20_000 < data.stat().st_size
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids = np.array([[3, 4]], np.int32)
    rows = np.zeros((1, model.config.tokens_per_tile, model.output.width), np.float32)
    (found,) = session.run(None, {"input_ids": ids, "vision_rows": rows, "vision_map": np.full_like(ids, -1)})
    weight = dict(stage.module.named_parameters())["embed_tokens.weight"]
    np.testing.assert_array_equal(found[0], weight[[3, 4]].numpy())


@torch.inference_mode()
def test_scores_whole_and_in_parts(tmp_path: Path) -> None:
    """A logit has no length: it comes as it is, beside a norm of 1."""
    write_checkpoint(tmp_path / "model", RerankSpec(image_size=64, base_vocab=600, temperature=0.5))
    model = LlamaNemotronRerankVL(tmp_path / "model")
    batch = image_batch(model, [7, 0, 5, 0, 1])
    wanted = expected(model, batch)
    assert wanted.shape == (5, 1) and wanted.std() >= 1
    ids, mask, rows, vision_map = batch.padded()
    width = model.text.layer.hidden
    # Their files would be those of the other model, which has the same text tower: 9 s of processor time.
    # The fused one has the whole text stage in it.
    parts = [
        model.load_stage(name, layout="padded", dtype="float32", device="cpu") for name in ("embed", "lm")
    ]
    embed, lm = (part.module for part in parts)
    (embedded,) = embed(ids, rows.reshape(-1, model.config.tokens_per_tile, width), vision_map)
    hidden = lm(embedded, mask)
    found = [
        OnnxStage(model, "fused", tmp_path / "fused.onnx")(*batch.fused(model)),
        OnnxStage(model, "post", tmp_path / "post.onnx")(hidden, mask),
    ]
    for scores, norms in found:
        torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)
        assert norms.tolist() == [1.0] * 5
