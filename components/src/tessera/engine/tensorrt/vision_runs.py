"""Batches of tiles through a loaded engine, which writes their rows where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.tensorrt.context import ALIGNMENT
from tessera.engine.tensorrt.lane import Lane, Ticket
from tessera.engine.tensorrt.loaded import LoadedEngine
from tessera.engine.tensorrt.replays import Replays


@dataclass(frozen=True, slots=True)
class LaunchedVision:
    """A batch whose rows are where they are wanted once its ticket is done."""

    ticket: Ticket

    def done(self) -> bool:
        return self.ticket.done()

    def result(self) -> None:
        self.ticket.wait()


class VisionRuns:
    """Runs of up to ``graph_tiles`` tiles are replayed from graphs, and their rows copied out of a buffer.

    Wider ones write their rows themselves, if they are wanted in one piece.
    """

    def __init__(self, loaded: LoadedEngine, lane: Lane, device: str, *, graph_tiles: int) -> None:
        self._profiles = loaded.manifest.profiles
        self._lane = lane
        self._replays = Replays(loaded, lane)
        self._most = max(profile.tiles.max for profile in self._profiles)
        self._graph_tiles = min(graph_tiles, self._most)
        self._fixed = {
            binding.name: torch.zeros(
                (self._graph_tiles, *binding.shape[1:]), dtype=getattr(torch, binding.dtype), device=device
            )
            for binding in loaded.manifest.bindings
        }
        self._device = device
        _, self._tokens_per_tile, self._hidden = self._fixed["rows"].shape

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> LaunchedVision:
        with torch.inference_mode():
            staged = self._lane.staging((sum(map(len, tiles)), *tiles[0].shape[1:]), torch.uint8)
            np.concatenate(tiles, out=staged.numpy())
            with self._lane.copying():
                batch = staged.to(self._device, non_blocking=True)
            with self._lane.computing():
                rows = _joined(out)
                scattered = rows is None or rows.data_ptr() % ALIGNMENT != 0
                if rows is None or scattered:
                    shape = (len(batch) * self._tokens_per_tile, self._hidden)
                    rows = torch.empty(shape, dtype=self._fixed["rows"].dtype, device=self._device)
                for start in range(0, len(batch), self._most):
                    part = batch[start : start + self._most]
                    first, count = start * self._tokens_per_tile, len(part) * self._tokens_per_tile
                    self._through(part, rows[first : first + count])
                if scattered:
                    done = 0
                    for target in out:
                        target.copy_(rows[done : done + len(target)], non_blocking=True)
                        done += len(target)
                return LaunchedVision(self._lane.ticket((staged, batch, rows)))

    def record(self) -> None:
        with torch.inference_mode(), self._lane.computing():
            for count in range(self._graph_tiles, 0, -1):
                self._replays.record(self._profile(count), self._first(count))

    def close(self) -> None:
        self._lane.settle()
        self._replays.close()

    def _through(self, tiles: torch.Tensor, rows: torch.Tensor) -> None:
        if len(tiles) > self._graph_tiles:
            shaped = rows.view(len(tiles), self._tokens_per_tile, self._hidden)
            self._replays.run(self._profile(len(tiles)), {"tiles": tiles, "rows": shaped})
            return
        fixed = self._first(len(tiles))
        fixed["tiles"].copy_(tiles)
        self._replays.run(self._profile(len(tiles)), fixed)
        rows.copy_(fixed["rows"].flatten(0, 1))

    def _first(self, count: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:count] for name, tensor in self._fixed.items()}

    def _profile(self, count: int) -> int:
        """The one for the fewest tiles that takes ``count``."""
        fitting = [number for number, profile in enumerate(self._profiles) if count in profile.tiles]
        return min(fitting, key=lambda number: self._profiles[number].tiles.max)


def _joined(out: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over all of ``out`` if they follow one another in one block of memory."""
    first = out[0]
    place = first.data_ptr()
    for part in out:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != place or not part.is_contiguous():
            return None
        place += part.numel() * part.element_size()
    rows = sum(map(len, out))
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
