"""Laying the runs of a text batch out as an engine takes them, in buffers that never move."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.batch import TextBatch
from tessera.engine.compiled.manifest import Binding, Manifest
from tessera.engine.compiled.spec import Layout, Profile
from tessera.engine.tensorrt.runs import Run

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """One run's int32 inputs as the engine takes them, by the names of its bindings.

    ``rows`` are the ranges of the batch's vision rows that come into the run's own, one after another.
    """

    arrays: dict[str, Int32Array]
    rows: tuple[tuple[int, int], ...]


class BatchLayout:
    """Lays the runs of one batch out; works out once where each sequence's vision rows are."""

    def __init__(self, batch: TextBatch, layout: Layout) -> None:
        self._batch = batch
        self._layout = layout
        # ``vision_index`` ascends, so that each sequence's rows lie together.
        self._first_row = np.searchsorted(batch.vision_index, batch.cu_seqlens).astype(np.int32)
        self._row_map = np.full(len(batch.input_ids), -1, np.int32)
        self._row_map[batch.vision_index] = np.arange(len(batch.vision_index), dtype=np.int32)

    @property
    def rows(self) -> list[int]:
        """Vision rows of each sequence."""
        return [int(count) for count in np.diff(self._first_row)]

    def lay(self, run: Run) -> Laid:
        batch, bounds = self._batch, self._batch.cu_seqlens
        rows, offset = [], 0
        pieces = []
        for member in run.members:
            start, end = int(self._first_row[member]), int(self._first_row[member + 1])
            part = slice(int(bounds[member]), int(bounds[member + 1]))
            places = self._row_map[part]
            pieces.append((batch.input_ids[part], np.where(places < 0, places, places - start + offset)))
            if start < end:
                rows.append((start, end))
                offset += end - start
        lengths = [batch.lengths[member] for member in run.members]
        lay = self._packed if self._layout is Layout.PACKED else self._padded
        return Laid(arrays=lay(run, pieces, lengths), rows=tuple(_joined(rows)))

    def _padded(
        self, run: Run, pieces: list[tuple[Int32Array, Int32Array]], lengths: list[int]
    ) -> dict[str, Int32Array]:
        ids = np.zeros((run.sequences, run.tokens), np.int32)
        places = np.full((run.sequences, run.tokens), -1, np.int32)
        for number, (tokens, row) in enumerate(pieces):
            ids[number, : len(tokens)] = tokens
            places[number, : len(row)] = row
        # Sequences that only fill the run up have one token, because attention to nothing is no number.
        filled = np.ones(run.sequences, np.int32)
        filled[: len(lengths)] = lengths
        return {"input_ids": ids, "vision_row": places, "lengths": filled}

    def _packed(
        self, run: Run, pieces: list[tuple[Int32Array, Int32Array]], lengths: list[int]
    ) -> dict[str, Int32Array]:
        total = sum(lengths)
        ids, places = np.zeros(run.tokens, np.int32), np.full(run.tokens, -1, np.int32)
        ids[:total] = np.concatenate([tokens for tokens, _ in pieces])
        places[:total] = np.concatenate([row for _, row in pieces])
        positions = np.zeros(run.tokens, np.int32)
        positions[:total] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        bounds = np.full(run.sequences + 1, total, np.int32)
        bounds[0] = 0
        np.cumsum(lengths, out=bounds[1 : len(lengths) + 1])
        return {
            "input_ids": ids,
            "vision_row": places,
            "positions": positions,
            "query_lengths": bounds,
            "key_value_lengths": bounds,
        }


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that follow one another made one."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


class Buffers:
    """``view`` gives the beginning of a buffer in another shape; rows can be had by indexing."""

    def __init__(self, manifest: Manifest, device: str) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for binding in manifest.bindings:
            shapes = [_largest(binding, profile, manifest.layout) for profile in manifest.profiles]
            dtype = getattr(torch, binding.dtype)
            self._tensors[binding.name] = torch.zeros(max(shapes, key=prod), dtype=dtype, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensors[name].view(-1)[: prod(shape)].view(shape)


def _largest(binding: Binding, profile: Profile, layout: Layout) -> tuple[int, ...]:
    """The binding's largest shape in a profile."""
    axes = {
        "vision_rows": ("rows",),
        "lengths": ("sequences",),
        "query_lengths": ("sequences",),
        "key_value_lengths": ("sequences",),
        "vectors": ("sequences",),
        "norms": ("sequences",),
    }.get(binding.name, ("sequences", "tokens") if layout is Layout.PADDED else ("tokens",))
    extra = 1 if binding.name in ("query_lengths", "key_value_lengths") else 0
    sizes = iter(getattr(profile, axis).max + extra for axis in axes)
    return tuple(next(sizes) if size == -1 else size for size in binding.shape)
