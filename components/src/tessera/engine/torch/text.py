"""The text engine in torch, for CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.batch import (
    Cost,
    TextBatch,
    gather,
    named_rows,
    output_rows,
    packed_cost,
    rows_as_asked,
    split,
    tensors,
    zeros,
)
from tessera.engine.lanes import Lanes
from tessera.engine.placement import Placement
from tessera.engine.process import tune_interpreter
from tessera.engine.quantization import loaded
from tessera.engine.settings import EngineSettings
from tessera.engine.threads import fewest_rows, one_thread
from tessera.engine.torch.cuda import CudaText, graph_cost
from tessera.errors import EngineFailed
from tessera.launched import Launched
from tessera.models.base import VISION, Model, NamingModule, OutputKind, Outputs, TextModule, TextTensors
from tessera.rows import Rows

# Pieces of a batch on the CPU for each lane, so that a lane that is held up can leave some to the others; and
# the fewest tokens of a piece, which keep the interpreter's share small. A processor second of one thread
# makes 2,820 tokens of a small encoder in pieces of 128, 3,240 in those of 512 and 3,000 in those of 4,096.
_PIECES = 4
_LEAST_TOKENS = 512
T = TypeVar("T")


class TorchTextEngine:
    """Runs a family's text module on packed batches, on the CPU in pieces."""

    _divisible = True

    def __init__(self, model: Model, settings: EngineSettings, placement: Placement) -> None:
        graph_tokens = graph_cost(model, settings, placement, default=settings.max_batch_cost)
        self._model = model
        self._module = self._load(model, settings, placement)
        # The number of its rows is not that of the tower's.
        self._by_name = model.output.kind is OutputKind.SPARSE
        self._outputs = {"": model.output, **Outputs.of_model(model).by_name}
        self._max_length = model.max_tokens
        self._max_tokens = max(settings.max_batch_cost, model.max_tokens)
        self._placement = placement
        self._cuda: CudaText | None = None
        self._threads, self._fewest_rows = torch.get_num_threads(), fewest_rows(self._module)
        self._lanes: Lanes | None = None
        if not placement.is_cuda and self._divisible and (lanes := Lanes()).count > 1:
            self._lanes = lanes
        width = model.vision.row_width if model.vision else 0
        self._no_rows = torch.empty(0, width, dtype=placement.torch_dtype)
        if placement.is_cuda:
            self._cuda = self._on_cuda(self._module, placement, graph_tokens)

    def _load(self, model: Model, settings: EngineSettings, placement: Placement) -> TextModule:
        return loaded(model.load_text, model, "text", settings, placement)

    def _on_cuda(self, module: TextModule, placement: Placement, graph_tokens: int) -> CudaText:
        return CudaText(module, self._model, placement, graph_tokens=graph_tokens)

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2 if self._placement.is_cuda or self._lanes is not None else 1

    def warm(self) -> None:
        if self._cuda is None:
            with one_thread():
                self._first(self._zeros(8, 8))
            tune_interpreter()
            return
        # Short and long sequences run different kernels, and the widest batch comes twice, because two are
        # in flight: what cannot be allocated must fail before the worker says it is ready.
        self.launch(self._zeros(8, 8)).result()
        self.launch(self._zeros(self._max_tokens, min(256, self._max_length))).result()
        widest = self._zeros(self._max_tokens, self._max_length)
        for launched in [self.launch(widest), self.launch(widest)]:
            launched.result()
        self._cuda.record()
        self.launch(self._zeros(8, 8)).result()
        tune_interpreter()

    def _first(self, batch: TextBatch) -> None:
        """Run a batch on this thread, the first one."""
        if self._by_name and isinstance(self._module, NamingModule):
            self._named(self._module, _asking(batch))
        else:
            self._computed(batch)

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        if self._by_name:
            return self.launch_named(_asking(batch)).map(Rows.joined)
        if self._cuda is not None:
            return self._cuda.launch(batch)
        in_lanes = None if self._lanes is None else self._in_lanes(batch, self._lanes)
        return in_lanes or Launched.later(
            lambda: output_rows(self._alone(batch, self._computed), batch, self._model.output)
        )

    @property
    def gives(self) -> Collection[str]:
        return self._outputs.keys() - {"", VISION} if isinstance(self._module, NamingModule) else ()

    def launch_named(self, batch: TextBatch) -> Launched[list[Rows]]:
        module, names = self._module, batch.names
        if not isinstance(module, NamingModule):
            raise EngineFailed(f"this engine gives no outputs by name: {', '.join(names)}")
        if self._cuda is not None:
            return self._cuda.launch_named(batch, module, {name: self._outputs[name] for name in names})
        pieces = [batch] if self._lanes is None else split(batch, self._pieces(batch, self._lanes))
        sizes = [len(piece.input_ids) for piece in pieces]
        compute = partial(self._named, module)
        if self._lanes is None or not self._lanes.suit(sizes):
            return Launched.later(lambda: self._alone(batch, compute))
        return Launched.of_futures(
            self._lanes.start(compute, pieces, sizes), lambda computed: list(chain.from_iterable(computed))
        )

    def _named(self, module: NamingModule, batch: TextBatch) -> list[Rows]:
        names = batch.names
        with torch.inference_mode():
            computed = module.named(names, self._tensors(batch))
            outputs = {
                name: named_rows(
                    rows.values.numpy(),
                    batch,
                    self._outputs[name],
                    None if rows.indices is None else rows.indices.numpy(),
                )
                for name, rows in zip(names, computed, strict=True)
            }
        return rows_as_asked(outputs, batch)

    def _in_lanes(self, batch: TextBatch, lanes: Lanes) -> Launched[Rows] | None:
        """Run the batch in pieces, side by side; None where pieces would not keep the lanes busy."""
        pieces = split(batch, self._pieces(batch, lanes))
        sizes = [len(piece.input_ids) for piece in pieces]
        if not lanes.suit(sizes):
            return None
        return Launched.of_futures(
            lanes.start(self._computed, pieces, sizes),
            lambda computed: output_rows(np.concatenate(computed), batch, self._model.output),
        )

    def _zeros(self, total: int, length: int) -> TextBatch:
        return zeros(self._model, total, length)

    def _pieces(self, batch: TextBatch, lanes: Lanes) -> int:
        """Return how many pieces: the same number for each lane, unless they would be too small."""
        most = min(_PIECES * lanes.count, len(batch.input_ids) // _LEAST_TOKENS)
        return max(1, most - most % lanes.count if most > lanes.count else most)

    def _alone(self, batch: TextBatch, compute: Callable[[TextBatch], T]) -> T:
        """Run the batch on the calling thread, a small one without torch's others."""
        # Both numbers are set, whatever the thread had: one that first needs torch while another thread runs
        # a small batch is given one, too. Setting both takes 0.3 us.
        torch.set_num_threads(1 if len(batch.input_ids) < self._fewest_rows else self._threads)
        try:
            return compute(batch)
        finally:
            torch.set_num_threads(self._threads)

    def _computed(self, batch: TextBatch) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return self._module(self._tensors(batch)).numpy()

    def _tensors(self, batch: TextBatch) -> TextTensors:
        return tensors(batch, self._gather(batch) if batch.vision else self._no_rows)

    def _gather(self, batch: TextBatch) -> torch.Tensor:
        if len(batch.vision) == 1:
            return batch.vision[0].to(self._no_rows.dtype)
        shape = len(batch.vision_index), self._no_rows.shape[1]
        return gather(batch.vision, self._no_rows.new_empty(shape))

    def close(self) -> None:
        self._cuda = None
        if self._lanes is not None:
            self._lanes.close()
        del self._module


def _asking(batch: TextBatch) -> TextBatch:
    """Return a batch whose sequences all ask for the default output by name."""
    return replace(batch, asked=((),) * len(batch.lengths))
