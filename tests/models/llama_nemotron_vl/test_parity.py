"""Every stage against transformers' own modules reading the same files, and any batch against none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.imaging import Picture
from tessera.models.base import Prompt, Role
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision
from tessera.nn.loading import load_text
from tessera.nn.sequences import Packed
from tessera.nn.text import TextTower
from tessera_tools.random_checkpoint.llama import LLAMA3_SCALING
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint
from tests.models.llama_nemotron_vl.packing import pack, prompt
from tests.models.llama_nemotron_vl.test_preprocess import encoded, gradient
from tests.models.running import on
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.parity

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default shapes, 512 px": {"image_size": 512, "base_vocab": 2000},
    "layer -2, erf gelu, last": {
        "select_layer": -2,
        "vision_layers": 3,
        "vision_activation": "gelu",
        "pooling": "last",
        "rope_key": "rope_parameters",
        "layers": 3,
        "head_dim": 16,
        "seed": 1,
    },
    "layer 1, shuffle v1, cls": {
        "select_layer": 1,
        "vision_activation": "quick_gelu",
        "pixel_shuffle": "v1",
        "pooling": "cls",
        "kv_heads": 4,
        "hidden": 192,
        "head_dim": 64,
        "rope": {**LLAMA3_SCALING, "factor": 8.0, "original_max_position_embeddings": 256},
        "rope_theta": 10000.0,
        "seed": 2,
    },
    "one tile, shuffle by 4, linear rope": {
        "downsample_factor": 4,
        "image_size": 96,
        "patch_size": 8,
        "vision_activation": "relu",
        "dynamic_image_size": False,
        "kv_heads": 1,
        "rope": {"rope_type": "linear", "factor": 4.0},
        "shards": 2,
        "seed": 3,
    },
    "plain rope, 4 layers": {
        "rope": None,
        "layers": 4,
        "vision_layers": 4,
        "use_thumbnail": False,
        "text_prefix": "language_model.model.",
        "vision_prefix": "vision_model.",
        "seed": 4,
    },
}

LIMITS = {"float32": 0.99999, "bfloat16": 0.999}
WORDS = "the river under the bridge by the old temple and a market in the light of morning "

Record = Callable[[str, Any], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input, with what each stage of the reference makes of it."""

    prompt: Prompt
    rows: torch.Tensor | None
    tiles: np.ndarray | None
    fused: torch.Tensor
    hidden: torch.Tensor
    vector: torch.Tensor


def case(model: LlamaNemotronVL, reference: Reference, text: Any, images: list[bytes], role: Role) -> Case:
    cut = [reference.tiles(data) for data in images]
    counts = [len(tiles) for tiles in cut]
    made = prompt(model, text, counts, role=role)
    tokens = reference.tokens(text, counts, role.value) if isinstance(text, str) else list(text)
    assert made.tokens.tolist() == tokens
    rows = [reference.vision_rows(tiles) for tiles in cut]
    fused = reference.fused(tokens, rows)
    hidden = reference.last_hidden(fused)
    tiles = [model.preprocess(Picture(data, param="x")).values for data in images]
    return Case(
        prompt=made,
        rows=torch.cat(rows) if rows else None,
        tiles=np.concatenate(tiles) if tiles else None,
        fused=fused,
        hidden=hidden,
        vector=reference.pooled(hidden),
    )


def compare(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest error relative to the largest value, and the cosine of the worst row."""
    found, expected = found.double(), expected.double()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    return error, torch.cosine_similarity(found, expected, dim=-1).min().item()


def towers(model: LlamaNemotronVL, dtype: str) -> tuple[LlamaNemotronVision, TextTower]:
    vision = model.load_vision(dtype=dtype, device="cpu")
    assert isinstance(vision, LlamaNemotronVision)
    return vision, load_text(model.config.text, model.tensors(), part="text.", dtype=dtype, device="cpu")


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(
    request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint, photos: dict[str, bytes]
) -> tuple[str, Path, LlamaNemotronVL, list[Case]]:
    """A checkpoint stored in bfloat16 and a mixed batch with the reference's float32 answers."""
    changes = CONFIGURATIONS[request.param]
    path = make_checkpoint(dtype="bfloat16", **changes)
    model, reference = LlamaNemotronVL(path), Reference(path)
    large = changes.get("image_size") == 512
    pictures = [photos["china"]] if large else [encoded(gradient(200, 90)), encoded(gradient(50, 170))]
    inputs: list[tuple[Any, list[bytes], Role]] = [
        ([7], [], Role.NONE),
        ("one", [], Role.QUERY),
        ("What is shown in the picture?", [], Role.QUERY),
        (WORDS * 3, [], Role.PASSAGE),
        ("a picture" + " of a river" * 40, [pictures[0]], Role.PASSAGE),
        ("two words", [], Role.NONE),
    ]
    if large:
        inputs.append((list(range(3, 1103)) * 2, [], Role.NONE))
    else:
        inputs += [("", [pictures[1]], Role.PASSAGE), ("both", pictures, Role.QUERY)]
        inputs.append((WORDS * 64, [], Role.PASSAGE))
    cases = [case(model, reference, *arguments) for arguments in inputs]
    assert min(len(each.prompt.tokens) for each in cases) == 1
    assert max(len(each.prompt.tokens) for each in cases) > 2000
    return request.param, path, model, cases


@pytest.mark.parametrize("dtype", LIMITS)
@torch.no_grad()
def test_every_stage(
    built: tuple[str, Path, LlamaNemotronVL, list[Case]], dtype: str, record_property: Record
) -> None:
    name, _, model, cases = built
    vision, text = towers(model, dtype)
    seen = [each for each in cases if each.tiles is not None]
    rows = vision.rows(torch.from_numpy(np.concatenate([each.tiles for each in seen])))
    assert rows.shape[1:] == (model.config.tokens_per_tile, model.output.width)
    batch = pack(model, [each.prompt for each in cases], [rows])
    (fused,) = embedded = text.embed(batch.input_ids, batch.vision_rows, batch.vision_index)
    hidden = text.encode(embedded, batch.positions, Packed(batch.cu_seqlens, batch.lengths))
    vectors = text(batch)
    assert vectors.dtype == torch.float32
    assert vectors.shape == (len(cases), model.output.width)
    stages = {
        "vision rows": (rows.flatten(0, 1), torch.cat([each.rows for each in seen])),
        "fused embeddings": (fused, torch.cat([each.fused for each in cases])),
        "last hidden state": (hidden, torch.cat([each.hidden for each in cases])),
        "vector": (vectors, torch.stack([each.vector for each in cases])),
    }
    title = "parity with transformers in float32: worst row of a mixed batch"
    for stage, (found, expected) in stages.items():
        error, cosine = compare(found, expected)
        line = f"{name:36}{dtype:10}{stage:19}max rel err {error:.1e}  worst cosine {cosine:.7f}"
        record_property(title, line)
        print(line)
        assert cosine >= LIMITS[dtype], line


@pytest.mark.parametrize("dtype", LIMITS)
@torch.no_grad()
def test_same_type_as_the_reference(
    make_checkpoint: MakeCheckpoint, dtype: str, record_property: Record
) -> None:
    """Both sides in the same type, as the reference is deployed."""
    path = make_checkpoint(dtype="bfloat16")
    model = LlamaNemotronVL(path)
    reference = Reference(path, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    vision, text = towers(model, dtype)
    image = encoded(gradient(200, 90))
    worst = 1.0
    for words, images in (("a", []), (WORDS * 20, []), ("", [image]), ("of a river", [image, image])):
        expected = torch.from_numpy(reference.vector(words, images, "passage"))
        tiles = [model.preprocess(Picture(data, param="x")).values for data in images]
        rows = [vision.rows(torch.from_numpy(each)) for each in tiles]
        batch = pack(model, [prompt(model, words, [len(each) for each in tiles])], rows)
        worst = min(worst, compare(text(batch), expected[None])[1])
    title = "parity with transformers in the same type: worst vector"
    record_property(title, f"{dtype:10}worst cosine {worst:.7f}")
    assert worst >= LIMITS[dtype]


@torch.no_grad()
def test_independence_of_company(built: tuple[str, Path, LlamaNemotronVL, list[Case]]) -> None:
    """Alone, first, last, among long and short ones: the same vector."""
    _, _, model, cases = built
    _, text = towers(model, "float32")
    rows = {id(each): each.rows for each in cases}
    alone = {id(each): run(model, text, [each], rows)[0] for each in cases}
    by_length = sorted(cases, key=lambda each: len(each.prompt.tokens))
    shorts = by_length[:3]
    companies = [cases, by_length[::-1], [*shorts, *shorts], [by_length[-1], *shorts]]
    companies += [[each, by_length[1]] for each in cases] + [[by_length[2], each] for each in cases]
    for company in companies:
        for each, vector in zip(company, run(model, text, company, rows), strict=True):
            cosine = torch.cosine_similarity(vector.double(), alone[id(each)].double(), dim=0).item()
            assert cosine >= 0.999999


@torch.no_grad()
def test_tiles_do_not_mix(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint()
    model = LlamaNemotronVL(path)
    vision, _ = towers(model, "float32")
    tiles = torch.from_numpy(model.preprocess(Picture(encoded(gradient(200, 90)), param="x")).values)
    together = vision.rows(tiles)
    for position, tile in enumerate(tiles):
        assert compare(vision.rows(tile[None])[0], together[position])[1] >= 0.999999


@torch.no_grad()
def test_one_bad_input_spoils_no_other(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint()
    model = LlamaNemotronVL(path)
    _, text = towers(model, "float32")
    prompts = [prompt(model, "before"), prompt(model, "", [1]), prompt(model, "after it")]
    bad = torch.full((model.config.tokens_per_tile, model.output.width), float("nan"))
    vectors = text(pack(model, prompts, [bad]))
    assert not vectors[[0, 2]].isnan().any()
    assert vectors[1].isnan().all()


@torch.no_grad()
def test_different_photographs_differ(make_checkpoint: MakeCheckpoint, photos: dict[str, bytes]) -> None:
    path = make_checkpoint(image_size=512, base_vocab=2000)
    model = LlamaNemotronVL(path)
    vision, text = towers(model, "float32")
    tiles = [model.preprocess(Picture(data, param="x")).values for data in photos.values()]
    rows = [vision.rows(torch.from_numpy(each)) for each in tiles]
    vectors = text(pack(model, [prompt(model, "", [len(each)]) for each in tiles], rows))
    assert torch.cosine_similarity(vectors[0], vectors[1], dim=0) < 0.95


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_agrees_and_never_waits(make_checkpoint: MakeCheckpoint) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = make_checkpoint()
    model, reference = LlamaNemotronVL(path), Reference(path)
    image = encoded(gradient(200, 90))
    inputs = [("one", []), (WORDS * 20, []), ("of a river", [image]), (WORDS * 3, [])]
    cases = [case(model, reference, words, images, Role.PASSAGE) for words, images in inputs]
    vision = model.load_vision(dtype="bfloat16", device="cuda")
    text = model.load_text(dtype="bfloat16", device="cuda")
    tiles = torch.from_numpy(np.concatenate([each.tiles for each in cases if each.tiles is not None])).cuda()
    batch = pack(
        model, [each.prompt for each in cases], [each.rows for each in cases if each.rows is not None]
    )
    moved = on(torch.device("cuda"), batch)
    # Libraries may wait once, while they set up.
    text(replace(moved, vision_rows=vision.rows(tiles).flatten(0, 1)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        vectors = text(replace(moved, vision_rows=vision.rows(tiles).flatten(0, 1)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compare(vectors.cpu(), torch.stack([each.vector for each in cases]))[1] >= LIMITS["bfloat16"]


def run(
    model: LlamaNemotronVL, text: TextTower, cases: list[Case], rows: dict[int, torch.Tensor | None]
) -> torch.Tensor:
    parts = [part for part in (rows[id(each)] for each in cases) if part is not None]
    return text(pack(model, [each.prompt for each in cases], parts))
