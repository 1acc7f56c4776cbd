"""The networks that TensorRT is given compute what the torch engines compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tessera.models import open_model
from tessera.models.base import TextTensors
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tessera_engines.tensorrt.build import fill_network
from tessera_engines.tensorrt.module import logging_of
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import CheckpointSpec
from tests.references.tensorrt_network import Network

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-bindings and its libs")

LENGTHS = (1, 70, 37, 9)
TOKENS = 80


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of small tiles and four layers, so that float8 has layers to compute in."""

    def write(**changes: Any) -> LlamaNemotronVL:
        small = {"image_size": 64, "vision_layers": 4, "layers": 4, "vision_intermediate": 72}
        path = tmp_path_factory.mktemp("models") / "model"
        write_checkpoint(path, CheckpointSpec(**(small | changes)))
        model = open_model(path)
        assert isinstance(model, LlamaNemotronVL)
        return model

    return write


@pytest.fixture(scope="module")
def model(make: Any) -> LlamaNemotronVL:
    return make()


class Stages:
    """The network of any stage; what it needs stays alive with it."""

    def __init__(self, model: LlamaNemotronVL, dtype: str, layout: Layout = Layout.PADDED) -> None:
        self._model, self._dtype, self._layout = model, dtype, layout
        self._kept: list[object] = []

    def __call__(self, stage: Stage) -> Network:
        builder = trt.Builder(logging_of(trt)[0])
        definition = builder.create_network(0)
        spec = BuildSpec(
            stage=stage,
            flavour="tensorrt_rtx",
            dtype=self._dtype,
            layout=self._layout,
            profiles=(Profile(tokens=Range(1, TOKENS, 200)),),
        )
        graph, _ = fill_network(trt, definition, self._model, spec)
        self._kept += [builder, definition, graph]
        return Network(trt, definition, graph.weights)


class Batch:
    """Texts of ``LENGTHS``, the second with one tile in it and the third with another."""

    def __init__(self, model: LlamaNemotronVL, layout: Layout, dtype: torch.dtype) -> None:
        chance = np.random.default_rng(3)
        self.tiles = torch.from_numpy(chance.integers(0, 256, (2, *model.vision.unit_shape), dtype=np.uint8))
        with torch.no_grad():
            module = model.load_vision(dtype="float32", device="cpu")
            bounds, places = torch.arange(3, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int32)
            self.expected_rows = module(self.tiles, places, bounds, (1, 1))
        per_tile = model.vision.rows(1)
        self.rows = self.expected_rows.to(dtype, copy=True)
        sequences = [chance.integers(0, model.vocab_size, n, dtype=np.int32) for n in LENGTHS]
        maps = [np.full(n, -1, np.int32) for n in LENGTHS]
        maps[1][3 : 3 + per_tile] = np.arange(per_tile)
        maps[2][1 : 1 + per_tile] = np.arange(per_tile, 2 * per_tile)
        self.bounds = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
        flat, rows = np.concatenate(sequences), np.concatenate(maps)
        self.positions = torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS]))
        with torch.inference_mode():
            text = model.load_text(dtype="float32", device="cpu")
            index = np.flatnonzero(rows >= 0).astype(np.int32)
            self.expected = text(
                TextTensors(
                    torch.from_numpy(flat),
                    self.positions[None],
                    self.bounds,
                    LENGTHS,
                    self.rows.float(),
                    torch.from_numpy(index),
                )
            )
        self.layout = layout
        if layout is Layout.PACKED:
            self.ids, self.row_map = torch.from_numpy(flat), torch.from_numpy(rows)
            twice = {"query_lengths": self.bounds, "key_value_lengths": self.bounds.clone()}
            self.places = {"positions": self.positions, **twice}
            self.ends = {"query_lengths": self.bounds}
        else:
            # What stands in the padding is arbitrary.
            self.ids = torch.from_numpy(chance.integers(0, 200, (len(LENGTHS), TOKENS), dtype=np.int32))
            self.row_map = torch.full((len(LENGTHS), TOKENS), -1, dtype=torch.int32)
            for number, (tokens, places) in enumerate(zip(sequences, maps, strict=True)):
                self.ids[number, : len(tokens)] = torch.from_numpy(tokens)
                self.row_map[number, : len(tokens)] = torch.from_numpy(places)
            self.places = self.ends = {"lengths": torch.tensor(LENGTHS, dtype=torch.int32)}

    @property
    def tokens(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "vision_row": self.row_map}


def worst_cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = (value.double().flatten(0, -2) for value in (found, expected))
    return float(torch.cosine_similarity(found, expected, dim=-1).min())


def unit(vectors: torch.Tensor) -> None:
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)), atol=1e-5, rtol=0)


LAYOUTS = pytest.mark.parametrize("layout", list(Layout), ids=str)
KINDS = pytest.mark.parametrize(
    ("dtype", "kind", "least"),
    [
        ("float32", torch.float32, 0.999999),
        ("bfloat16", torch.bfloat16, 0.9995),
        ("float16", torch.float16, 0.9999),
        ("float8", torch.bfloat16, 0.98),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)


@KINDS
def test_vision(model: LlamaNemotronVL, dtype: str, kind: torch.dtype, least: float) -> None:
    batch = Batch(model, Layout.PADDED, kind)
    stages = Stages(model, dtype)
    found = stages(Stage.VISION)(tiles=batch.tiles)["rows"].flatten(0, 1)
    assert found.dtype == kind and found.shape == batch.expected_rows.shape
    assert worst_cosine(found, batch.expected_rows) > least


@KINDS
@LAYOUTS
def test_text(model: LlamaNemotronVL, layout: Layout, dtype: str, kind: torch.dtype, least: float) -> None:
    batch = Batch(model, layout, kind)
    stages = Stages(model, dtype, layout)
    found = stages(Stage.TEXT)(**batch.tokens, **batch.places, vision_rows=batch.rows)
    assert worst_cosine(found["vectors"], batch.expected) > least
    unit(found["vectors"])
    assert found["norms"].shape == (len(LENGTHS),) and bool((found["norms"] > 0).all())


@LAYOUTS
def test_fused_is_vision_and_text(model: LlamaNemotronVL, layout: Layout) -> None:
    batch = Batch(model, layout, torch.float32)
    stages = Stages(model, "float32", layout)
    found = stages(Stage.FUSED)(tiles=batch.tiles, **batch.tokens, **batch.places)
    assert worst_cosine(found["vectors"], batch.expected) > 0.999999


@LAYOUTS
def test_the_split_stages_make_up_the_text_stage(model: LlamaNemotronVL, layout: Layout) -> None:
    batch = Batch(model, layout, torch.float32)
    stages = Stages(model, "float32", layout)
    embedded = stages(Stage.EMBED)(**batch.tokens, vision_rows=batch.rows)["embedded"]
    hidden = stages(Stage.LM)(embedded=embedded, **batch.places)["hidden"]
    found = stages(Stage.POST)(hidden=hidden, **batch.ends)
    assert worst_cosine(found["vectors"], batch.expected) > 0.999999
    whole = stages(Stage.TEXT)(**batch.tokens, **batch.places, vision_rows=batch.rows)
    torch.testing.assert_close(found["norms"], whole["norms"])


@LAYOUTS
@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": "last"},
        {"pooling": "cls"},
        {"rope": None},
        {"pixel_shuffle": "v1", "select_layer": -2, "vision_activation": "gelu"},
        {"vision_activation": "quick_gelu", "kv_heads": 4},
    ],
    ids=str,
)
def test_other_configurations(make: Any, layout: Layout, changes: dict[str, Any]) -> None:
    model = make(**changes)
    batch = Batch(model, layout, torch.float32)
    stages = Stages(model, "float32", layout)
    found = stages(Stage.FUSED)(tiles=batch.tiles, **batch.tokens, **batch.places)
    assert worst_cosine(found["vectors"], batch.expected) > 0.999999


@LAYOUTS
def test_a_sequence_that_is_no_number_spoils_only_itself(model: LlamaNemotronVL, layout: Layout) -> None:
    batch = Batch(model, layout, torch.float32)
    stages = Stages(model, "float32", layout)
    batch.rows[2] = float("nan")
    found = stages(Stage.TEXT)(**batch.tokens, **batch.places, vision_rows=batch.rows)["vectors"]
    assert bool(found[1].isnan().all())
    kept = [0, 2, 3]
    assert worst_cosine(found[kept], batch.expected[kept]) > 0.999999


def test_empty_sequences_behind_the_last_change_nothing(model: LlamaNemotronVL) -> None:
    batch = Batch(model, Layout.PACKED, torch.float32)
    filled = torch.cat([batch.bounds, batch.bounds[-1:].repeat(3)])
    places = batch.places | {"query_lengths": filled, "key_value_lengths": filled.clone()}
    stages = Stages(model, "float32", Layout.PACKED)
    found = stages(Stage.TEXT)(**batch.tokens, **places, vision_rows=batch.rows)["vectors"]
    assert worst_cosine(found[: len(LENGTHS)], batch.expected) > 0.999999
