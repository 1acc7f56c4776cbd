"""The vision engine in torch, for CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.engine.base import vision_of
from tessera.engine.batch import Cost, VisionBatch, blank, hand_out, packed_cost, split_images
from tessera.engine.lanes import Lanes
from tessera.engine.placement import Placement
from tessera.engine.process import tune_interpreter
from tessera.engine.quantization import loaded
from tessera.engine.settings import EngineSettings
from tessera.engine.threads import one_thread
from tessera.engine.torch.cuda import CudaVision, graph_cost
from tessera.launched import Launched
from tessera.models.base import Model, VisionModule

# Pieces of a batch of whole images on the CPU for each lane, so that a lane that is held up can leave some to
# the others.
_PIECES = 4
# Units up to which images are replayed from graphs that pad them, by default. Not measured: wider batches
# compute for longer than their launches take.
_GRAPH_UNITS = 4096
# Rows of images that warm up beside the largest: attention has kernels of its own for small and middling
# ones, and no request should wait for their compiler.
_IMAGES = (64, 256)


class TorchVisionEngine:
    """Runs a family's vision module on batches of whole images, on the CPU in pieces."""

    takes_floats = True
    _divisible = True

    def __init__(self, model: Model, settings: EngineSettings, placement: Placement) -> None:
        self._spec = vision_of(model)
        self._max_units = max(settings.max_batch_cost, self._spec.max_units)
        default = self._max_units if self._spec.independent_units else _GRAPH_UNITS
        graph_units = graph_cost(model, settings, placement, default=default)
        self._model = model
        self._placement = placement
        self._module = self._load(model, settings, placement)
        self._lanes = None if placement.is_cuda or not self._divisible else Lanes()
        self._graph_units = min(graph_units, self._max_units)
        self._cuda: CudaVision | None = None
        if placement.is_cuda:
            self._cuda = CudaVision(self._module, model, self._spec, placement, graph_units=self._graph_units)

    def _load(self, model: Model, settings: EngineSettings, placement: Placement) -> VisionModule:
        return loaded(model.load_vision, model, "vision", settings, placement)

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2 if self._placement.is_cuda or (self._lanes and self._lanes.count > 1) else 1

    def warm(self) -> None:
        if self._cuda is None:
            with one_thread():
                self._run(1).result()
            tune_interpreter()
            return
        # The widest comes first and twice, because two batches are in flight: what cannot be allocated
        # must fail before the worker says it is ready.
        for launched in [self._run(self._max_units), self._run(self._max_units)]:
            launched.result()
        self._cuda.record()
        for each in _IMAGES if not self._spec.independent_units else ():
            self._run(self._max_units, each=each * self._spec.least_units).result()
        if self._spec.independent_units:
            # cuDNN plans its attention for each batch size anew, 0.05 s each: no request should wait for
            # that.
            for count in range(self._max_units - 1, self._graph_units, -1):
                self._run(count).result()
        self._run(1).result()
        tune_interpreter()

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[object]:
        if len({image.dtype for image in batch.pixels}) > 1:
            types = batch.by_type()
            # Pixels that a client normalised must not be rounded, the others not be sent as floats.
            return Launched.every(
                [self.launch(batch.pick(numbers), [out[number] for number in numbers]) for numbers in types]
            )
        if self._cuda is not None:
            return self._cuda.launch(batch, out)
        in_lanes = None
        if self._lanes is not None and self._lanes.count > 1:
            in_lanes = self._in_lanes(self._lanes, batch, out)
        return in_lanes or Launched.later(lambda: self._encode(batch, out))

    def _in_lanes(
        self, lanes: Lanes, batch: VisionBatch, out: Sequence[torch.Tensor]
    ) -> Launched[object] | None:
        """Run the batch in pieces, side by side; None where pieces would not keep the lanes busy."""
        if self._spec.independent_units:
            pieces = [[unit] for unit in range(int(batch.cu_units[-1]))]
            sizes = [1] * len(pieces)
        else:
            pieces = split_images(batch, _PIECES * lanes.count)
            units = batch.units
            sizes = [sum(units[number] for number in piece) for piece in pieces]
        if not lanes.suit(sizes):
            return None
        if self._spec.independent_units:
            batch = batch.by_unit()
            out = [rows for target in out for rows in torch.split(target, self._spec.rows(1))]

        def encode(piece: Sequence[int]) -> None:
            self._encode(batch.pick(piece), [out[number] for number in piece])

        return Launched.of_futures(lanes.start(encode, pieces, sizes), lambda _: None)

    def _encode(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> None:
        pixels = batch.pixels[0] if len(batch.pixels) == 1 else np.concatenate(batch.pixels)
        with torch.inference_mode():
            rows = self._module(
                torch.from_numpy(pixels),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.cu_units),
                batch.units,
            )
            hand_out(rows, out)

    def _run(self, units: int, *, each: int | None = None) -> Launched[object]:
        batch = blank(self._model, units, each=each)
        return self.launch(
            batch, [self._placement.rows(plan.rows, self._spec.row_width) for plan in batch.plans]
        )

    def close(self) -> None:
        self._cuda = None
        if self._lanes is not None:
            self._lanes.close()
        del self._module
