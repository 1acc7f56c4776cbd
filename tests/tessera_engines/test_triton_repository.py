"""Triton repositories: their configurations in Triton's own schema, and the router on a stand-in."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.json_format import MessageToJson

from tessera.errors import ConfigError
from tessera.models import open_model
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.cli import main
from tessera_engines.compiled.spec import Profile, axis_ranges
from tessera_engines.triton_export.repository import TritonRepository
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tests.families.grid import Grid
from tests.models.llama_nemotron_vl.stage_inputs import Batch, expected, image_batch, text_batch
from tests.tessera_engines.triton_stand_in import InferenceResponse, Repository, Request, Tensor

pytestmark = [pytest.mark.compiles, pytest.mark.xdist_group("onnx")]


@pytest.fixture
def repository(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    found = Repository(directory / "split")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", found.module())
    return found


@pytest.fixture
def router(repository: Repository, directory: Path) -> Any:
    """The repository's own ``model.py``, set up as Triton would."""
    path = directory / "split" / "router" / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("router_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.TritonPythonModel()
    config = MessageToJson(repository.config("router"), preserving_proto_field_name=True)
    made.initialize({"model_config": config})
    return made


def requests_of(model: LlamaNemotronVL, batch: Batch) -> list[Request]:
    """One request for each sequence; those with images bring their tiles."""
    found, start = [], 0
    for tokens, count in zip(batch.tokens, batch.counts, strict=True):
        inputs = {"input_ids": tokens[None]}
        if count:
            inputs["tiles"] = batch.tiles[None, start : start + count]
            start += count
        found.append(Request(**inputs))
    return found


def vectors(answers: list[InferenceResponse]) -> torch.Tensor:
    rows = []
    for answer in answers:
        assert not answer.has_error(), answer.error().message()
        named = {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
        assert named["vectors"].shape[0] == named["norms"].shape[0]
        rows.append(torch.from_numpy(named["vectors"] * named["norms"][:, None]))
    return torch.cat(rows)


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float(torch.cosine_similarity(found.double(), wanted.double(), dim=1).min())


def test_text_never_runs_the_encoder(model: LlamaNemotronVL, router: Any, repository: Repository) -> None:
    batch = text_batch(model, [7, 1, 33])
    assert worst(vectors(router.execute(requests_of(model, batch))), expected(model, batch)) >= 0.99999
    assert repository.calls == ["embed", "lm", "post"]


def test_images_and_text_in_one_batch(model: LlamaNemotronVL, router: Any, repository: Repository) -> None:
    batch = image_batch(model, [0, 2, 0, 1])
    assert worst(vectors(router.execute(requests_of(model, batch))), expected(model, batch)) >= 0.99999
    assert repository.calls == ["vit", "embed", "lm", "post"]


def test_what_does_not_fit_one_call_takes_several(
    model: LlamaNemotronVL, router: Any, repository: Repository
) -> None:
    batch = image_batch(model, [3, 2, 0, 4, *([0] * 9)])
    assert worst(vectors(router.execute(requests_of(model, batch))), expected(model, batch)) >= 0.99999
    assert repository.calls.count("vit") == 3 and repository.calls.count("lm") == 4


def test_several_rows_in_one_request(model: LlamaNemotronVL, router: Any) -> None:
    batch = image_batch(model, [1, 0, 1])
    tiles, ids, mask = batch.fused(model)
    request = Request(tiles=tiles.numpy(), input_ids=ids.numpy(), attention_mask=mask.numpy())
    assert worst(vectors(router.execute([request])), expected(model, batch)) >= 0.99999


@pytest.mark.parametrize("fault", ["count", "tiles", "mask"])
def test_a_malformed_request_fails_alone(model: LlamaNemotronVL, router: Any, fault: str) -> None:
    batch = image_batch(model, [1, 0])
    good = requests_of(model, batch)
    tokens, tile = batch.tokens[0][None], batch.tiles[None, :1]
    bad = {
        "count": Request(input_ids=tokens),
        "tiles": Request(
            input_ids=np.full((1, 5 * model.vision.rows(1)), model.image_token_id, np.int32),
            tiles=np.repeat(tile, 5, axis=1),
        ),
        "mask": Request(input_ids=tokens, tiles=tile, attention_mask=np.zeros_like(tokens)),
    }[fault]
    first, answer, last = router.execute([good[0], bad, good[1]])
    assert answer.has_error() and any(word in answer.error().message() for word in ("tiles", "mask"))
    assert worst(vectors([first, last]), expected(model, batch)) >= 0.99999


def test_a_request_that_makes_a_model_fail_fails_alone(
    model: LlamaNemotronVL, router: Any, repository: Repository
) -> None:
    batch = text_batch(model, [4, 3, 5])
    batch.tokens[1][0] = repository.failing_ids = model.vocab_size - 1
    first, answer, last = router.execute(requests_of(model, batch))
    assert answer.error().message() == "embed: out of memory"
    assert worst(vectors([first, last]), expected(model, batch)[[0, 2]]) >= 0.99999


def test_the_fused_model_takes_every_request_the_same_way(model: LlamaNemotronVL, directory: Path) -> None:
    fused = Repository(directory / "fused")
    batch = image_batch(model, [2, 0, 2])
    names = ("tiles", "input_ids", "attention_mask")
    inputs = [Tensor(name, value.numpy()) for name, value in zip(names, batch.fused(model), strict=True)]
    answer = fused.run("model_1", ["vectors", "norms"], inputs)
    assert worst(vectors([answer]), expected(model, batch)) >= 0.99999


@pytest.mark.parametrize("form", ["split", "fused"])
def test_configurations_are_what_the_files_take(directory: Path, form: str) -> None:
    found = Repository(directory / form)
    names = {path.name for path in (directory / form).iterdir()}
    assert names == ({"model_1"} if form == "fused" else {"vit", "embed", "lm", "post", "router"})
    for name in names:
        config = found.config(name)
        assert config.name == name
        if name == "router":
            assert config.backend == "python" and {one.name for one in config.input if one.optional} == {
                "attention_mask",
                "tiles",
            }
            assert all(one.allow_ragged_batch for one in config.input)
            assert config.dynamic_batching.max_queue_delay_microseconds == 3000
            continue
        graph = onnx.load(directory / form / name / "1" / "model.onnx").graph
        batch = [-1] if config.max_batch_size else []
        for described, tensors in ((config.input, graph.input), (config.output, graph.output)):
            for one, tensor in zip(described, tensors, strict=True):
                sizes = tensor.type.tensor_type.shape.dim
                shape = [size.dim_value if size.HasField("dim_value") else -1 for size in sizes]
                dims = [] if one.HasField("reshape") else list(one.dims)
                assert one.name == tensor.name and batch + dims == shape, (name, one.name)


def test_what_is_there_is_not_overwritten(
    model: LlamaNemotronVL, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what in (["--triton", "split"], ["--stage", "post"]):
        with pytest.raises(SystemExit):
            main(["export", "--model-path", str(model.path), *what, "--out", str(directory / "split")])
        assert "exists already" in capsys.readouterr().err


def test_one_stage_as_a_file(
    model: LlamaNemotronVL, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "post.onnx"
    main(["export", "--model-path", str(model.path), "--stage", "post", "--out", str(path)])
    assert str(path) in capsys.readouterr().out
    assert [one.name for one in onnx.load(path).graph.output] == ["vectors", "norms"]
    assert list(path.parent.iterdir()) == [path]


def test_more_tokens_than_the_model_takes_are_refused(
    model: LlamaNemotronVL, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--stage", "post", "--max-tokens", str(model.max_tokens + 1), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(["export", "--model-path", str(model.path), *words])
    assert f"at most {model.max_tokens}" in capsys.readouterr().err


def test_images_that_the_router_cannot_join_are_refused_by_name(tmp_path: Path) -> None:
    given: Any = Grid(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"family grid: .* independent units"):
        TritonRepository(given, tmp_path, axis_ranges([Profile()]), dtype="float32")


def test_vectors_of_tokens_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", replace(COLEMBED_TINY, image_size=64, base_vocab=600))
    given: Any = open_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="llama_nemotron_colembed_vl gives a vector of each token"):
        TritonRepository(given, tmp_path, axis_ranges([Profile()]), dtype="float32")
