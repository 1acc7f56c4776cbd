"""The stages for compilers against the modules that the engines run, eagerly and in every pooling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.errors import ConfigError
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.compiled.stages import load_stage
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint
from tests.models.llama_nemotron_vl.packing import encode
from tests.models.llama_nemotron_vl.stage_inputs import Batch, expected, image_batch, text_batch

BATCHES = {"one token": [1], "odd": [7, 1, 12], "equal": [5, 5]}


def stage(
    model: LlamaNemotronVL, name: str, layout: str = "padded", dtype: str = "float32"
) -> torch.nn.Module:
    return load_stage(model, name, layout=layout, dtype=dtype, device="cpu").module


def compare(found: tuple[torch.Tensor, torch.Tensor], pooled: torch.Tensor) -> None:
    vectors, norms = found
    assert vectors.dtype == norms.dtype == torch.float32
    torch.testing.assert_close(norms, pooled.norm(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vectors * norms[:, None], pooled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["avg", "last", "cls"])
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_text_in_both_layouts_and_in_parts(make_checkpoint: MakeCheckpoint, pooling: str, name: str) -> None:
    model = LlamaNemotronVL(make_checkpoint(pooling=pooling))
    batch = text_batch(model, BATCHES[name])
    pooled = expected(model, batch)
    compare(stage(model, "text")(*batch.padded()), pooled)
    compare(stage(model, "text", "packed")(*batch.packed()), pooled)
    input_ids, mask, rows, vision_map = batch.padded()
    tiles = rows.view(-1, model.config.tokens_per_tile, model.output.width) if len(rows) > 1 else rows[None]
    (embedded,) = stage(model, "embed")(input_ids, tiles, vision_map)
    compare(stage(model, "post")(stage(model, "lm")(embedded, mask), mask), pooled)


@torch.inference_mode()
def test_images_and_text_together(small: LlamaNemotronVL) -> None:
    batch = image_batch(small, [0, 2, 0, 1], seed=3)
    pooled = expected(small, batch)
    compare(stage(small, "text")(*batch.padded()), pooled)
    compare(stage(small, "text", "packed")(*batch.packed()), pooled)


@torch.inference_mode()
def test_vision(small: LlamaNemotronVL) -> None:
    tiles = torch.from_numpy(image_batch(small, [3]).tiles)
    module = small.load_vision(dtype="float32", device="cpu")
    torch.testing.assert_close(stage(small, "vision")(tiles).flatten(0, 1), encode(module, tiles))


@torch.inference_mode()
def test_fused_takes_pixels_whether_it_needs_them_or_not(small: LlamaNemotronVL) -> None:
    batch = image_batch(small, [2, 0, 2])
    compare(stage(small, "fused")(*batch.fused(small)), expected(small, batch))


@torch.inference_mode()
def test_what_padding_holds_does_not_matter(small: LlamaNemotronVL) -> None:
    hidden = torch.randn(2, 4, small.output.width)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.int32)
    post = stage(small, "post")
    clean, _ = post(hidden, mask)
    hidden[0, 2:] = torch.nan
    torch.testing.assert_close(post(hidden, mask)[0], clean)


@torch.inference_mode()
def test_tokens_behind_the_last_sequence_change_nothing(small: LlamaNemotronVL) -> None:
    batch = text_batch(small, [4, 3])
    ids, positions, ends, rows, vision_map = batch.packed()
    more = [torch.nn.functional.pad(one, (0, 5)) for one in (ids, positions, vision_map)]
    compare(stage(small, "text", "packed")(more[0], more[1], ends, rows, more[2]), expected(small, batch))


def test_too_many_placeholders_read_nothing_beyond_their_rows(small: LlamaNemotronVL) -> None:
    batch = image_batch(small, [1, 1])
    tiles, ids, mask = batch.fused(small)
    ids[0] = small.config.image_token_id
    with torch.inference_mode():
        vectors, _ = stage(small, "fused")(tiles, ids, mask)
    assert bool(vectors.isfinite().all())
    compare((vectors[1:], expected(small, batch)[1:].norm(dim=1)), expected(small, batch)[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_half_precision_stays_close(small: LlamaNemotronVL, dtype: str) -> None:
    batch = text_batch(small, [7, 3, 12])
    vectors, _ = stage(small, "text", dtype=dtype)(*batch.padded(dtype))
    cosines = torch.cosine_similarity(vectors, expected(small, batch), dim=1)
    assert float(cosines.min()) > 0.999


@pytest.mark.parametrize("name", ["embed", "lm", "post"])
def test_a_part_reads_only_its_own_weights(small: LlamaNemotronVL, name: str) -> None:
    counts = {
        part: sum(one.numel() for one in stage(small, part).parameters())
        for part in ("text", "embed", "lm", "post")
    }
    assert counts["embed"] + counts["lm"] == counts["text"] and counts["post"] == 0
    assert all(not one.is_meta for one in stage(small, name).parameters())


def test_what_there_is_not(small: LlamaNemotronVL) -> None:
    for name, layout, said in [
        ("head", "padded", "head"),
        ("text", "loose", "loose"),
        ("lm", "packed", "lm"),
    ]:
        with pytest.raises(ConfigError, match=said):
            small.load_stage(name, layout=layout, dtype="float32", device="cpu")


def test_batches_are_what_the_engines_are_given(small: LlamaNemotronVL) -> None:
    """The padded and packed forms of the helper come from one source, which the engines' packing checks."""
    batch: Batch = image_batch(small, [1, 0])
    packed = pack(
        [PackedInput(tokens=tokens, positions=small.positions(tokens, ())) for tokens in batch.tokens]
    )
    ids, positions, ends, _, vision_map = batch.packed()
    np.testing.assert_array_equal(ids.numpy(), packed.input_ids)
    np.testing.assert_array_equal(positions.numpy(), packed.positions)
    np.testing.assert_array_equal(ends.numpy(), packed.cu_seqlens[1:])
    np.testing.assert_array_equal(
        np.flatnonzero(vision_map.numpy() >= 0), small.vision_index(packed.input_ids)
    )
