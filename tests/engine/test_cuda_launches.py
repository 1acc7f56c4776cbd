"""What the CUDA engines launch, with streams whose work is done on the host at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, VisionBatch, blank, pack
from tessera.engine.graphs import graph_sizes
from tessera.engine.placement import Placement
from tessera.engine.torch import cuda
from tessera.models.base import ImagePlan, Pixels, VisionModule
from tests.engine.packed_images import noise, packed, rows_for
from tests.families.byte_text import PLACEHOLDER
from tests.families.dual_encoder import DualEncoder
from tests.families.grid import Grid, reference, reference_rows
from tests.tessera_engines.tensorrt_standin import HostStreams

HERE = Placement(device="cpu", dtype="float32")
MODEL = Grid(Path(), 3)
SPEC = MODEL.vision


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> HostStreams:
    found = HostStreams()
    monkeypatch.setattr(cuda, "CudaStreams", lambda _: found)
    return found


def inputs(lengths: Sequence[int], images: Sequence[int]) -> list[PackedInput]:
    """Texts of those lengths; the ones whose numbers are in ``images`` begin with two images."""
    chance = np.random.default_rng(sum(lengths))
    found = []
    for number, length in enumerate(lengths):
        tokens = chance.integers(0, 256, length, dtype=np.int32)
        plans = [MODEL.plan(*size, param="") for size in ((8, 16), (20, 9))] if number in images else []
        places = np.cumsum([1, *(plan.rows for plan in plans)])
        for plan, start in zip(plans, places, strict=False):
            tokens[start : start + plan.rows] = PLACEHOLDER
        found.append(
            PackedInput(
                tokens=tokens,
                positions=MODEL.positions(tokens, plans),
                vision=tuple(
                    torch.from_numpy(chance.standard_normal((plan.rows, SPEC.row_width), dtype=np.float32))
                    for plan in plans
                ),
                vision_index=MODEL.vision_index(tokens),
            )
        )
    return found


@pytest.mark.parametrize("graph_tokens", [0, 64])
def test_text_agrees_with_each_sequence_alone(streams: HostStreams, graph_tokens: int) -> None:
    module = MODEL.load_text(dtype="float32", device="cpu")
    text = cuda.CudaText(module, MODEL, HERE, graph_tokens=graph_tokens)
    text.record()
    batches = [([5], []), ([3, 19, 4], [1]), ([40, 14], [0, 1]), ([90, 1], [0]), ([1] * 20, [])]
    for lengths, images in batches:
        sequences = inputs(lengths, images)
        found = text.launch(pack(sequences)).result()
        assert found.bounds.tolist() == list(range(len(lengths) + 1)) and len(found.values) == len(lengths)
        for own, sequence in zip(found, sequences, strict=True):
            given = torch.cat(sequence.vision).numpy() if sequence.vision else np.empty((0, SPEC.row_width))
            expected = reference(MODEL.seed, sequence.tokens, sequence.positions, given.astype(np.float32))
            np.testing.assert_allclose(own.values[0] * own.norms[0], expected, rtol=1e-4, atol=1e-5)
    # The last two have too many tokens, and too many sequences.
    assert streams.replayed == (3 if graph_tokens else 0)


def grids(sizes: Sequence[tuple[int, int]], dtype: type = np.uint8) -> tuple[VisionBatch, list[np.ndarray]]:
    """Images of so many pixels, and the rows of each by the reference."""
    images = []
    for seed, (width, height) in enumerate(sizes):
        image = noise(MODEL, MODEL.plan(width, height, param=""), seed)
        if dtype is np.float32:
            image = Pixels(values=image.values / np.float32(100.0), plan=image.plan)
        images.append(image)
    expected = [reference_rows(MODEL.seed, image, MODEL.unit_positions(image.plan)) for image in images]
    return packed(MODEL, images), expected


def agree(found: Sequence[torch.Tensor], expected: Sequence[np.ndarray]) -> None:
    for rows, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows.numpy(), values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph_units", [0, 200])
def test_images_of_any_grid_run_together_without_padding_between_them(
    streams: HostStreams, graph_units: int
) -> None:
    module: VisionModule = MODEL.load_vision(dtype="float32", device="cpu")
    units: list[int] = []

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        units.append(len(arguments[0]))
        return module(*arguments)  # type: ignore[arg-type]

    vision = cuda.CudaVision(counted, MODEL, SPEC, HERE, graph_units=graph_units)  # type: ignore[arg-type]
    vision.record()
    replayed = 0
    for sizes in ([(8, 8)], [(40, 8), (24, 32), (8, 8)], [(64, 40)], [(64, 64), (8, 8)], [(8, 8)] * 9):
        batch, expected = grids(sizes)
        out = rows_for(MODEL, batch)
        units.clear()
        assert vision.launch(batch, out).result() is None
        agree(out, expected)
        # Too many units, and too many images.
        fits = graph_units and sum(batch.units) <= graph_units and len(sizes) <= 8
        replayed += bool(fits)
        assert streams.replayed == replayed
        assert units == [
            min(size for size in graph_sizes(200) if size >= sum(batch.units)) if fits else sum(batch.units)
        ]


def test_pixels_that_a_client_normalised_are_neither_scaled_nor_replayed(streams: HostStreams) -> None:
    vision = cuda.CudaVision(
        MODEL.load_vision(dtype="float32", device="cpu"), MODEL, SPEC, HERE, graph_units=64
    )
    vision.record()
    batch, expected = grids([(16, 16), (8, 24)], np.float32)
    out = rows_for(MODEL, batch)
    vision.launch(batch, out).result()
    agree(out, expected)
    assert streams.replayed == 0


@pytest.mark.parametrize("graph_units", [0, 2])
def test_independent_units_have_graphs_of_every_size(streams: HostStreams, graph_units: int) -> None:
    model = DualEncoder(Path(), 0)
    module = model.load_vision(dtype="float32", device="cpu")
    seen: list[int] = []

    def counted(pixels: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(pixels))
        return module(pixels, *rest)

    vision = cuda.CudaVision(counted, model, model.vision, HERE, graph_units=graph_units)  # type: ignore[arg-type]
    vision.record()
    assert seen == list(range(graph_units, 0, -1))
    for count in (1, 2, 3):
        batch = blank(model, count)
        for number, image in enumerate(batch.pixels):
            image[:] = 10 * number + 1
        out = rows_for(model, batch)
        seen.clear()
        vision.launch(batch, out).result()
        assert seen == [count]
        ones = module(torch.ones(1, *model.vision.unit_shape), None, None, None)
        for number, rows in enumerate(out):
            torch.testing.assert_close(rows, ones * (10 * number + 1), rtol=1e-4, atol=1e-4)
    assert streams.replayed == graph_units


def test_graphs_of_units_are_sizes_that_make_whole_rows() -> None:
    sizes, room = cuda.vision_sizes(SPEC, 101)
    assert sizes == [32, 64, 96, 104] and [room(size) for size in (32, 4096)] == [8, 16]
    sizes, room = cuda.vision_sizes(DualEncoder(Path(), 0).vision, 3)
    assert sizes == [1, 2, 3] and room(2) == 2


def test_index_arrays_are_sent_as_they_are() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.arange(12, dtype=np.int32).reshape(2, 6)[:, 1:4],
        np.empty((0, 9), np.int32),
        np.array([7], np.int32),
    ]
    staged, found = cuda.sent(arrays, HostStreams(), "cpu")
    for one, array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(one.numpy(), array)
        assert (one.is_contiguous() and (one.data_ptr() - staged.data_ptr()) % 16 == 0) or not one.numel()


def test_a_plan_says_how_many_rows_its_units_make() -> None:
    assert SPEC.least_units == 4 and SPEC.rows(8) == 2
    assert MODEL.plan(8, 16, param="") == ImagePlan(units=8, rows=2, grid=(1, 4, 2))
