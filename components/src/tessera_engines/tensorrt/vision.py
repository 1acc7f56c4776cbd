"""The vision engine of a TensorRT plan; it writes rows into the tensors of the caller where it can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.dtypes import DTYPES
from tessera.engine.base import vision_of
from tessera.engine.batch import VisionBatch, blank, hand_out, packed_cost, uint8_pixels
from tessera.engine.placement import Placement
from tessera.engine.process import tune_interpreter
from tessera.engine.settings import EngineSettings
from tessera.engine.streams import CudaStreams
from tessera.errors import EngineMismatch
from tessera.launched import Launched
from tessera.models.base import Model
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import Stage
from tessera_engines.tensorrt.loaded import ALIGNMENT, LoadedEngine, Replays, open_engine


class VisionRuns:
    """Runs the network's tiles, which are the units of its family and independent of one another.

    Runs of up to ``graph_tiles`` tiles are replayed from graphs, and their rows copied out of a buffer. Wider
    ones write into ``out`` themselves, if it is one block of memory.
    """

    def __init__(self, loaded: LoadedEngine, streams: CudaStreams, device: str, *, graph_tiles: int) -> None:
        self._profiles = loaded.manifest.profiles
        self._streams = streams
        self._replays = Replays(loaded, streams)
        self._most = max(profile.units.max for profile in self._profiles)
        self._graph_tiles = min(graph_tiles, self._most)
        self._fixed = {
            binding.name: torch.zeros(
                (self._graph_tiles, *binding.shape[1:]), dtype=DTYPES[binding.dtype].torch, device=device
            )
            for binding in loaded.manifest.bindings
        }
        self._device = device
        _, self._tokens_per_tile, self._row_width = self._fixed["rows"].shape

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[None]:
        tiles = uint8_pixels(batch)
        with torch.inference_mode():
            staged = self._streams.staging((sum(map(len, tiles)), *tiles[0].shape[1:]), torch.uint8)
            np.concatenate(tiles, out=staged.numpy())
            with self._streams.copying():
                sent = staged.to(self._device, non_blocking=True)
            with self._streams.computing():
                rows = _joined(out)
                scattered = rows is None or rows.data_ptr() % ALIGNMENT != 0
                if rows is None or scattered:
                    shape = (len(sent) * self._tokens_per_tile, self._row_width)
                    rows = torch.empty(shape, dtype=self._fixed["rows"].dtype, device=self._device)
                for start in range(0, len(sent), self._most):
                    part = sent[start : start + self._most]
                    first, count = start * self._tokens_per_tile, len(part) * self._tokens_per_tile
                    self._through(part, rows[first : first + count])
                if scattered:
                    hand_out(rows, out)
                return self._streams.launched(lambda: None, keep=(staged, sent, rows))

    def record(self) -> None:
        with torch.inference_mode(), self._streams.computing():
            for count in range(self._graph_tiles, 0, -1):
                self._replays.record(self._profile(count), self._first(count))

    def close(self) -> None:
        self._streams.synchronize()
        self._replays.close()

    def _through(self, tiles: torch.Tensor, rows: torch.Tensor) -> None:
        if len(tiles) > self._graph_tiles:
            shaped = rows.view(len(tiles), self._tokens_per_tile, self._row_width)
            self._replays.run(self._profile(len(tiles)), {"tiles": tiles, "rows": shaped})
            return
        fixed = self._first(len(tiles))
        fixed["tiles"].copy_(tiles)
        self._replays.run(self._profile(len(tiles)), fixed)
        rows.copy_(fixed["rows"].flatten(0, 1))

    def _first(self, count: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:count] for name, tensor in self._fixed.items()}

    def _profile(self, count: int) -> int:
        """The smallest profile that takes ``count`` tiles."""
        fitting = [number for number, profile in enumerate(self._profiles) if count in profile.units]
        return min(fitting, key=lambda number: self._profiles[number].units.max)


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


def check_vision_profiles(manifest: Manifest, where: str) -> int:
    """The most tiles of one run; raises ``EngineMismatch`` if no profile takes some smaller number."""
    most = max(profile.units.max for profile in manifest.profiles)
    for count in range(1, most + 1):
        if not any(count in profile.units for profile in manifest.profiles):
            raise EngineMismatch(
                f"{where}: no profile takes {count} tiles, but one takes {most}; the profiles are"
                f" {', '.join(str(profile.units) for profile in manifest.profiles)}"
            )
    return most


# Up to this many tiles the launches that a graph saves cost more than the copy of its rows.
_GRAPH_TILES = 4


class TensorRTVisionEngine:
    """Runs the vision stage of an engine directory; one thread drives it."""

    def __init__(self, model: Model, settings: EngineSettings, placement: Placement) -> None:
        loaded = open_engine(model, settings, placement, Stage.VISION)
        check_vision_profiles(loaded.manifest, str(settings.path))
        self._loaded: LoadedEngine | None = loaded
        self._model = model
        self._spec = vision_of(model)
        self._placement = placement
        self._max_units = max(settings.max_batch_cost, self._spec.max_units)
        graphs = _GRAPH_TILES if settings.graph_cost is None else settings.graph_cost
        self._runs = VisionRuns(loaded, CudaStreams(placement.device), placement.device, graph_tiles=graphs)

    takes_floats = False
    cost = staticmethod(packed_cost)
    depth = 2

    def warm(self) -> None:
        # The widest batch comes twice, because two are in flight.
        for launched in [self._run(self._max_units), self._run(self._max_units)]:
            launched.result()
        self._runs.record()
        self._run(1).result()
        if self._loaded is not None:
            self._loaded.save_compiled()
        tune_interpreter()

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[object]:
        return self._runs.launch(batch, out)

    def close(self) -> None:
        self._runs.close()
        self._loaded = None

    def _run(self, units: int) -> Launched[object]:
        batch = blank(self._model, units)
        rows = torch.empty(
            self._spec.rows(units),
            self._spec.row_width,
            dtype=self._placement.torch_dtype,
            device=self._placement.device,
        )
        return self.launch(batch, torch.split(rows, [plan.rows for plan in batch.plans]))
