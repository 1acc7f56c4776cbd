"""What the CUDA engines launch, with streams whose work is done on the host at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, TextVectors, pack
from tessera.engine.placement import Placement
from tessera.engine.torch import cuda
from tests.engine.tensorrt_standin import HostStreams

HIDDEN = 4
HERE = Placement(device="cpu", dtype="float32")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> HostStreams:
    found = HostStreams()
    monkeypatch.setattr(cuda, "CudaStreams", lambda _: found)
    return found


class Sums:
    """Adds what stands at each token, the later ones weighted more; vision rows take the tokens' places."""

    def embed(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> torch.Tensor:
        embedded = torch.stack([input_ids + number for number in range(HIDDEN)], 1).float()
        embedded[vision_index.long()] = vision_rows
        return embedded

    def pooled(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        embedded *= positions[:, None] + 1
        return torch.stack([embedded[start:end].sum(0) for start, end in pairwise(cu_seqlens.tolist())])

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        vision_rows: torch.Tensor,
        vision_index: torch.Tensor,
    ) -> torch.Tensor:
        return self.pooled(self.embed(input_ids, vision_rows, vision_index), positions, cu_seqlens, lengths)


def inputs(lengths: Sequence[int], images: Sequence[int]) -> list[PackedInput]:
    chance = np.random.default_rng(sum(lengths))
    return [
        PackedInput(
            tokens=chance.integers(0, 99, length, dtype=np.int32),
            vision=(torch.from_numpy(chance.standard_normal((2, HIDDEN), dtype=np.float32)),)
            if number in images
            else (),
            vision_index=np.array([1, 2] if number in images else [], np.int32),
        )
        for number, length in enumerate(lengths)
    ]


def alone(sequence: PackedInput) -> TextVectors:
    batch = pack([sequence])
    rows = torch.cat(batch.vision) if batch.vision else torch.empty(0, HIDDEN)
    arrays = (batch.input_ids, batch.positions, batch.cu_seqlens)
    pooled = Sums()(
        *(torch.from_numpy(array) for array in arrays),
        batch.lengths,
        rows,
        torch.from_numpy(batch.vision_index),
    )
    return TextVectors.of(pooled.numpy())


@pytest.mark.parametrize("graph_tokens", [0, 64])
def test_text_agrees_with_each_sequence_alone(streams: HostStreams, graph_tokens: int) -> None:
    text = cuda.CudaText(Sums(), HIDDEN, HERE, graph_tokens=graph_tokens)
    text.record()
    batches = [([5], []), ([3, 9, 4], [1]), ([40, 4], [0, 1]), ([90, 1], [0]), ([1] * 20, [])]
    for lengths, images in batches:
        sequences = inputs(lengths, images)
        found = text.launch(pack(sequences)).result()
        for number, sequence in enumerate(sequences):
            expected = alone(sequence)
            np.testing.assert_allclose(found.vectors[number], expected.vectors[0], rtol=1e-5)
            np.testing.assert_allclose(found.norms[number], expected.norms[0], rtol=1e-5)
    # The last two have too many tokens, and too many sequences.
    assert streams.replayed == (3 if graph_tokens else 0)


@pytest.mark.parametrize("graph_tiles", [0, 2])
def test_rows_of_each_image_go_where_they_are_wanted(streams: HostStreams, graph_tiles: int) -> None:
    def module(tiles: torch.Tensor) -> torch.Tensor:
        means = tiles.float().mean((1, 2, 3))
        return means[:, None, None].expand(len(tiles), 3, HIDDEN).contiguous()

    vision = cuda.CudaVision(module, (3, 2, 2), HERE, graph_tiles=graph_tiles)
    vision.record()
    for counts in ([1], [1, 1], [2, 3]):
        tiles = [np.full((count, 3, 2, 2), 10 * number + 1, np.uint8) for number, count in enumerate(counts)]
        out = [torch.zeros(3 * count, HIDDEN) for count in counts]
        assert vision.launch(tiles, out).result() is None
        for number, rows in enumerate(out):
            assert bool((rows == 10 * number + 1).all())
    assert streams.replayed == graph_tiles
