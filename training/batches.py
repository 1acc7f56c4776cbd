"""From chunks to batches on the device: each chunk is used several times, a while apart."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from training.chunks import SIDES, Chunk, Chunks, Int64Array, Prompts
from training.network import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """``sides`` int64 are each side's rows among the sequences, the same place in two sides being a pair.

    ``owners`` int64 ``[words]`` is the image that each query for words was made from, and ``fits`` bool
    ``[words, images]`` where an image has all of its words. ``originals`` int64 ``[views]`` is the image that
    each view shows.
    """

    tiles: torch.Tensor
    sequences: Sequences
    sides: dict[str, torch.Tensor]
    owners: torch.Tensor
    fits: torch.Tensor
    originals: torch.Tensor


def join(parts: Sequence[tuple[Chunk, Prompts]], device: torch.device, placeholder: int) -> Batch:
    """One batch of several chunks' pictures and prompts, every side across all of them."""
    ids = torch.from_numpy(np.concatenate([prompts.ids for _, prompts in parts]))
    lengths = [length for _, prompts in parts for length in prompts.lengths]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    positions = np.arange(len(ids), dtype=np.int32) - np.repeat(bounds[:-1], lengths)
    tiles: list[torch.Tensor] = []
    sides: dict[str, list[torch.Tensor]] = {side: [] for side in SIDES}
    first_tile = first_sequence = 0
    for chunk, prompts in parts:
        tiles.append(torch.from_numpy(prompts.tiles + first_tile))
        first_tile += len(chunk.tiles)
        for side in SIDES:
            sides[side].append(torch.arange(prompts.sizes[side]) + first_sequence)
            first_sequence += prompts.sizes[side]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(
        tiles=torch.cat([moved(chunk.tiles) for chunk, _ in parts]),
        sequences=Sequences(
            ids=moved(ids),
            positions=moved(torch.from_numpy(positions)),
            bounds=moved(torch.from_numpy(bounds)),
            lengths=lengths,
            tiles=moved(torch.cat(tiles)),
            placeholders=moved(torch.nonzero(ids == placeholder).flatten()),
        ),
        sides={side: moved(torch.cat(rows)) for side, rows in sides.items()},
        owners=moved(owners_of(parts)),
        fits=fits_of(parts, device),
        originals=moved(originals_of(parts)),
    )


def owners_of(parts: Sequence[tuple[Chunk, Prompts]]) -> torch.Tensor:
    """Int64 ``[words]``: which of all the chunks' images each query for words was made from."""
    return _numbered(parts, [prompts.owners for _, prompts in parts])


def originals_of(parts: Sequence[tuple[Chunk, Prompts]]) -> torch.Tensor:
    """Int64 ``[views]``: which of all the chunks' images each view shows."""
    return _numbered(parts, [prompts.originals for _, prompts in parts])


def _numbered(parts: Sequence[tuple[Chunk, Prompts]], images: Sequence[Int64Array]) -> torch.Tensor:
    """Numbers of images within each chunk, as numbers among all the chunks' images."""
    first = np.cumsum([0, *(prompts.sizes["images"] for _, prompts in parts)])
    return torch.from_numpy(np.concatenate([a + b for a, b in zip(images, first[:-1], strict=True)]))


def fits_of(parts: Sequence[tuple[Chunk, Prompts]], device: torch.device) -> torch.Tensor:
    """Bool ``[words, images]`` on the device: which images hold every word that a query asks for."""
    asked = torch.from_numpy(np.concatenate([prompts.asked for _, prompts in parts])).to(device).float()
    written = torch.from_numpy(np.concatenate([chunk.written for chunk, _ in parts])).to(device).float()
    # Counts of words are small whole numbers: the product is exact.
    return asked @ written.T == asked.sum(1, keepdim=True)


class _Numbers(Sampler[int]):
    """First the chunks that were waiting when a run was stopped, then new ones without end."""

    def __init__(self, waiting: list[int], following: int) -> None:
        self._waiting, self._following = waiting, following

    def __iter__(self) -> Iterator[int]:
        yield from self._waiting
        number = self._following
        while True:
            yield number
            number += 1


class Pool:
    """Chunks on the device, from which each step draws some at random.

    A chunk leaves after ``uses`` draws, each with other prompts, and a new one takes its place: drawing
    pictures costs more processor time than training on them. ``state`` is enough to go on exactly.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        capacity: int,
        workers: int,
        device: torch.device,
        state: dict[str, Any] | None = None,
    ) -> None:
        uses = chunks.recipe.uses
        # A run may go on with fewer uses than it began with.
        waiting = [(number, used) for number, used in state["waiting"] if used < uses] if state else []
        self._following: int = state["following"] if state else 0
        self._source = random.Random(chunks.recipe.seed)
        if state:
            self._source.setstate(state["source"])
        self._uses, self._capacity, self._device = uses, capacity, device
        loader: DataLoader[Chunk] = DataLoader(
            chunks,
            batch_size=None,
            sampler=_Numbers([number for number, _ in waiting], self._following),
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=device.type == "cuda",
        )
        self._arriving = iter(loader)
        self._chunks = [self._next(used) for _, used in waiting]

    @property
    def state(self) -> dict[str, Any]:
        return {
            "waiting": [(chunk.number, chunk.used) for chunk in self._chunks],
            "following": self._following,
            "source": self._source.getstate(),
        }

    def draw(self, count: int) -> list[tuple[Chunk, Prompts]]:
        """``count`` different chunks, each with a set of prompts that was not used before."""
        while len(self._chunks) < self._capacity:
            self._chunks.append(self._next(0))
            self._following += 1
        drawn = []
        for position in sorted(self._source.sample(range(len(self._chunks)), count), reverse=True):
            chunk = self._chunks[position]
            drawn.append((chunk, chunk.prompts[chunk.used]))
            chunk.used += 1
            if chunk.used == self._uses:
                del self._chunks[position]
        return drawn

    def _next(self, used: int) -> Chunk:
        chunk: Chunk = next(self._arriving)
        chunk.used = used
        chunk.tiles = chunk.tiles.to(self._device, non_blocking=True)
        return chunk
