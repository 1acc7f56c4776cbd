"""Every stage against transformers' own modules reading the same files, in batches of all kinds of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.models.qwen3_vl_embedding.model import Options, Qwen3VLEmbedding
from tessera_tools.random_checkpoint.qwen3 import VL_TINY, Qwen3VLSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.qwen3_vl_embedding.cases import CASES, LONG
from tests.models.qwen3_vl_embedding.stages import as_the_largest, check, stages
from tests.models.running import Given, batch_of, cosines, preprocessed, vectors, vision_rows
from tests.references.qwen3 import Qwen3VLReference, full_stop

pytestmark = pytest.mark.parity

BAR = 0.99999
BFLOAT16_BAR = 0.998

CONFIGURATIONS: dict[str, Qwen3VLSpec] = {
    "tiny": VL_TINY,
    "real heads, two levels": replace(
        VL_TINY,
        head_dim=128,
        heads=2,
        kv_heads=1,
        sections=(24, 20, 20),
        layers=3,
        vision_hidden=96,
        vision_heads=2,
        vision_intermediate=200,
        vision_layers=5,
        deepstack=(1, 3),
        positions=2304,
        rope_key="rope_parameters",
        appends_end=False,
        shards=3,
    ),
    "as the 8B": as_the_largest(VL_TINY),
    "no levels, bare names": replace(
        VL_TINY,
        hidden=192,
        kv_heads=4,
        theta=10_000.0,
        deepstack=(),
        text_prefix="language_model.",
        vision_prefix="visual.",
    ),
}

Record = Callable[[str, Any], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    name: str
    model: Qwen3VLEmbedding
    reference: Qwen3VLReference
    vectors: np.ndarray


def reference_vectors(reference: Qwen3VLReference, inputs: list[Given]) -> np.ndarray:
    return np.stack([reference.answer(each) for each in inputs])


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    """A checkpoint stored in bfloat16, with the reference's float32 answers."""
    path: Path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = Qwen3VLReference(path)
    return Built(
        name=request.param,
        model=Qwen3VLEmbedding(path, Options()),
        reference=reference,
        vectors=reference_vectors(reference, list(CASES.values())),
    )


def test_every_stage(built: Built, record_property: Record) -> None:
    model, reference = built.model, built.reference
    inputs = list(CASES.values())
    found = stages(model, reference, inputs)
    vision = model.load_vision(dtype="float32", device="cpu")
    text = model.load_text(dtype="float32", device="cpu")
    batch, pixels = batch_of(model, vision, inputs), preprocessed(model, inputs)
    for each, start, stop in zip(inputs, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        assert batch.input_ids[start:stop].tolist() == reference.tokens(
            [pixels[part].plan.grid if isinstance(part, bytes) else part for part in each.parts],
            full_stop(each.instruction),
        )
    vector = torch.from_numpy(vectors(model, text, batch)), torch.from_numpy(built.vectors)
    check(built.name, "qwen3_vl_embedding", {**found, "vector": vector}, BAR, record_property)


def test_the_stages_make_the_whole(built: Built) -> None:
    """The reference, taken apart for comparisons, computes what transformers' one call does."""
    for each in list(CASES.values())[3:8]:
        apart = built.reference.vector(each.parts)
        assert cosines(apart[None], built.reference.whole(each.parts)[None])[0] >= 0.9999999


def test_bfloat16(built: Built, record_property: Record) -> None:
    model = built.model
    vision = model.load_vision(dtype="bfloat16", device="cpu")
    text = model.load_text(dtype="bfloat16", device="cpu")
    found = vectors(model, text, batch_of(model, vision, list(CASES.values())))
    line = f"{built.name:26}worst cosine {cosines(found, built.vectors).min():.7f}"
    record_property("parity of qwen3_vl_embedding in bfloat16 with transformers in float32", line)
    assert cosines(found, built.vectors).min() >= BFLOAT16_BAR, line


def test_the_cases_are_far_apart(built: Built) -> None:
    """A wrong vector cannot pass for another case's."""
    likeness = built.vectors @ built.vectors.T - np.eye(len(CASES))
    assert likeness.max() < 0.98


def test_company_changes_nothing(built: Built) -> None:
    model = built.model
    vision = model.load_vision(dtype="float32", device="cpu")
    text = model.load_text(dtype="float32", device="cpu")
    inputs = list(CASES.values())
    alone = np.concatenate([vectors(model, text, batch_of(model, vision, [each])) for each in inputs])
    for company in (list(range(len(inputs))), list(reversed(range(len(inputs)))), [10, 3, 10, 0, 10]):
        found = vectors(model, text, batch_of(model, vision, [inputs[place] for place in company]))
        assert cosines(found, alone[company]).min() >= 0.999999


def test_mixed_grids_in_one_launch_are_those_of_one_by_one(built: Built) -> None:
    model = built.model
    vision = model.load_vision(dtype="float32", device="cpu")
    pixels = list(preprocessed(model, list(CASES.values())).values())
    assert len({each.plan.grid for each in pixels}) == 5
    for found, each in zip(vision_rows(model, vision, pixels), pixels, strict=True):
        (expected,) = vision_rows(model, vision, [each])
        assert found.shape == (each.plan.rows, model.vision.row_width)
        assert cosines(found.numpy(), expected.numpy()).min() >= 0.999999


def test_close_to_the_longest_input(model: Qwen3VLEmbedding, path: Path, record_property: Record) -> None:
    vision = model.load_vision(dtype="float32", device="cpu")
    text = model.load_text(dtype="float32", device="cpu")
    batch = batch_of(model, vision, [LONG, CASES["one word"]])
    assert 7500 < batch.lengths[0] <= model.max_tokens == 8192
    expected = reference_vectors(Qwen3VLReference(path), [LONG])
    cosine = cosines(vectors(model, text, batch)[:1], expected)[0]
    line = f"{'tiny':26}{batch.lengths[0]} tokens           worst cosine {cosine:.7f}"
    record_property("parity of qwen3_vl_embedding with transformers in float32: worst row", line)
    assert cosine >= BAR
