"""Launches batches of tokens and of images on a CUDA device; nothing here waits for the device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from tessera.dtypes import DTYPES
from tessera.engine.batch import (
    SHORTEST,
    TextBatch,
    VisionBatch,
    gather,
    hand_out,
    named_rows,
    rows_as_asked,
    segments,
)
from tessera.engine.graphs import Graphs, graph_sizes
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.streams import CudaStreams, sendable
from tessera.errors import ConfigError
from tessera.extras import install
from tessera.launched import Launched
from tessera.models.base import (
    CHUNKS,
    Feature,
    Model,
    NamingModule,
    Output,
    OutputKind,
    SplitTextModule,
    TextModule,
    TextTensors,
    VisionModule,
    VisionSpec,
)
from tessera.nn.kernels import hopper
from tessera.rows import Rows

log = logging.getLogger(__name__)


def graph_cost(model: Model, settings: EngineSettings, placement: Placement, *, default: int) -> int:
    """Up to which cost batches are replayed from graphs, 0 for none.

    Raises ``ConfigError`` naming a family whose modules cannot be recorded, or the dtype that they cannot be
    recorded in, if the settings ask for graphs. In float32 attention goes by the lengths on the host, which
    a replay does not see. Programs that were compiled ahead of time can all be recorded.
    """
    if not placement.is_cuda:
        return 0
    recorded = Feature.GRAPHS in model.features
    if settings.engine != "torch" or (recorded and placement.dtype != "float32"):
        return default if settings.graph_cost is None else settings.graph_cost
    if settings.graph_cost:
        what = "in float32" if recorded else f"of family {model.family}"
        raise ConfigError(
            f"graph_cost {settings.graph_cost}: CUDA graphs cannot record modules {what}; leave graph_cost"
            " out, or set it to 0"
        )
    return 0


def advise(device: str) -> None:
    """Say what this GPU would be faster with, once."""
    _advise(hopper.missing(torch.device(device)))


@functools.cache
def _advise(missing: tuple[str, ...]) -> None:
    if missing:
        # One H100, bfloat16, both models of benchmarks/RESULTS.md: 7 to 12 %.
        log.warning("a Hopper GPU is 7 to 12 %% faster with %s: %s", " and ".join(missing), install("cuda"))


class _CudaStage:
    """The streams and graphs of a module; a ``graph_cost`` of 0 records no graphs."""

    def __init__(self, placement: Placement, graph_cost: int) -> None:
        self._placement = placement
        advise(placement.device)
        self._streams = CudaStreams(placement.device)
        self._graph_cost = graph_cost
        self._graphs: Graphs | None = None

    def record(self) -> None:
        if self._graph_cost:
            with torch.inference_mode(), self._streams.computing():
                self._graphs = self._recorded()

    def _recorded(self) -> Graphs:
        raise NotImplementedError


class CudaText(_CudaStage):
    """Launches a text module; ``graph_tokens`` is its graphs' cost."""

    def __init__(self, module: TextModule, model: Model, placement: Placement, *, graph_tokens: int) -> None:
        super().__init__(placement, graph_tokens)
        self._module = module
        self._output: Output = model.output
        self._row_width = model.vision.row_width if model.vision else 0
        self._position_rows = len(model.positions(np.zeros(1, np.int32), ()))
        self._longest = model.max_tokens

    def launch_named(
        self, batch: TextBatch, module: NamingModule, outputs: Mapping[str, Output]
    ) -> Launched[list[Rows]]:
        """Run one pass for all ``outputs``; no graph was recorded of what comes before pooling."""
        names = list(outputs)
        arrays = [batch.input_ids, batch.positions, batch.cu_seqlens, batch.vision_index, segments(batch)]
        with torch.inference_mode():
            with self._streams.copying():
                staged, indices = sent(arrays, self._streams, self._placement.device)
                sources, rows = self._rows(batch)
            with self._streams.computing():
                given = rows.to(self._placement.torch_dtype)
                computed = module.named(names, _tensors(batch, given, indices))
                fetched = {
                    name: self._rows_of(own.values, batch, outputs[name], own.indices)
                    for name, own in zip(names, computed, strict=True)
                }
                keep = (staged, indices, sources, rows, computed)

                def finished() -> list[Rows]:
                    return rows_as_asked({name: rows_of() for name, rows_of in fetched.items()}, batch)

                return self._streams.launched(finished, keep=keep)

    def _rows_of(
        self, computed: torch.Tensor, batch: TextBatch, output: Output, indices: torch.Tensor | None = None
    ) -> Callable[[], Rows]:
        """Begin to copy ``[rows, width]`` to the host in float32; returns what makes an answer of them."""
        norms = None
        if indices is None and scaled_on_device(output):
            computed, norms = unit_rows(computed)
        values = self._fetched(computed.float())
        ids, lengths = (None if each is None else self._fetched(each) for each in (indices, norms))

        def finished() -> Rows:
            if lengths is not None:
                return Rows(values.numpy(), output.bounds(batch.lengths), lengths.numpy())
            return named_rows(values.numpy(), batch, output, None if ids is None else ids.numpy())

        return finished

    def _fetched(self, computed: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host."""
        host = self._streams.staging(tuple(computed.shape), computed.dtype)
        host.copy_(computed, non_blocking=True)
        return host

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        graphs, compute, output = self._graphs, self._module, self._output
        if graphs is not None and not (
            graphs.fits(len(batch.input_ids), len(batch.lengths)) and max(batch.lengths) <= self._longest
        ):
            graphs = None
        bounds = batch.cu_seqlens if graphs is None else graphs.bounds(batch.cu_seqlens)
        with torch.inference_mode():
            with self._streams.copying():
                staged, indices = sent(
                    [batch.input_ids, batch.positions, bounds, batch.vision_index],
                    self._streams,
                    self._placement.device,
                )
                sources, rows = self._rows(batch)
            with self._streams.computing():
                given = rows.to(self._placement.torch_dtype)
                if graphs is None:
                    computed = compute(_tensors(batch, given, indices))
                else:
                    count = int(self._output.bounds(batch.lengths)[-1])
                    computed = self._replayed(graphs, indices, given)[:count]
                finished = self._rows_of(computed, batch, output)
                return self._streams.launched(finished, keep=(staged, indices, sources, rows, computed))

    def _recorded(self) -> Graphs:
        """Graphs of what follows the embedding, since vision rows have other places in each batch."""
        module, device = self._module, self._placement.device
        assert isinstance(module, SplitTextModule)
        sizes = graph_sizes(self._graph_cost)
        none = torch.zeros(0, dtype=torch.int32, device=device)
        token = torch.zeros(1, dtype=torch.int32, device=device)
        rows = self._placement.rows(0, self._row_width)
        return Graphs(
            lambda embedded, positions, cu_seqlens: module.pooled(
                embedded, positions, cu_seqlens, (min(positions.shape[1], self._longest),)
            ),
            tuple(
                embedded.new_zeros(sizes[-1], *embedded.shape[1:])
                for embedded in module.embed(token, rows, none)
            ),
            torch.zeros(self._position_rows, sizes[-1], dtype=torch.int32, device=device),
            sizes=sizes,
            room=sequence_room,
            streams=self._streams,
        )

    def _replayed(self, graphs: Graphs, indices: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._module, SplitTextModule)
        input_ids, positions, bounds, vision_index = indices
        return graphs.replay(self._module.embed(input_ids, rows, vision_index), positions, bounds)

    def _rows(self, batch: TextBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Send the vision rows; returns what the copies read, and ``[rows, row_width]`` on the device."""
        images = tuple(sendable(image, self._streams) for image in batch.vision)
        if not images:
            return (), self._placement.rows(0, self._row_width)
        if len(images) == 1 and images[0].is_cuda:
            return images, images[0]
        if all(image.is_cuda for image in images):
            return images, torch.cat(images)
        rows = torch.empty(
            sum(map(len, images)), self._row_width, dtype=images[0].dtype, device=self._placement.device
        )
        return images, gather(images, rows)


def _tensors(batch: TextBatch, vision_rows: torch.Tensor, indices: Sequence[torch.Tensor]) -> TextTensors:
    """Return a batch with its arrays as they were sent, segments last if there are any."""
    input_ids, positions, cu_seqlens, vision_index, *cuts = indices
    return TextTensors(input_ids, positions, cu_seqlens, batch.lengths, vision_rows, vision_index, *cuts)


def scaled_on_device(output: Output) -> bool:
    """Whether all rows are scaled, and are as many as tokens.

    To scale 16,384 rows of 2,560 takes a host 260 to 340 ms, in which nobody launches, and an H200, which
    computes a batch of them in 370, 0.18.
    """
    of_tokens = output.kind is OutputKind.TOKENS and output.name != CHUNKS
    return of_tokens and output.unit_length and output.skiplist is None


def unit_rows(computed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows ``[rows, width]`` scaled to length 1, as ``scaled`` does, and their lengths ``[rows]``."""
    norms = torch.linalg.vector_norm(computed, dim=1, dtype=torch.float32)
    return computed / norms.clamp_min(SHORTEST)[:, None], norms


def sequence_room(tokens: int) -> int:
    """Sequences that a graph for so many tokens has room for."""
    return max(16, tokens // 32)


class CudaVision(_CudaStage):
    """Launches a vision module; ``graph_units`` is its graphs' cost."""

    def __init__(
        self, module: VisionModule, model: Model, spec: VisionSpec, placement: Placement, *, graph_units: int
    ) -> None:
        super().__init__(placement, graph_units)
        self._module = module
        self._spec = spec
        self._position_rows = len(model.unit_positions(spec.largest))

    def _recorded(self) -> Graphs:
        sizes, room = vision_sizes(self._spec, self._graph_cost)
        device = self._placement.device

        def compute(
            rows: tuple[torch.Tensor, ...], positions: torch.Tensor, cu_units: torch.Tensor
        ) -> torch.Tensor:
            (pixels,) = rows
            longest = min(positions.shape[1], self._spec.max_units)
            return self._module(pixels, positions, cu_units, (longest,))

        return Graphs(
            compute,
            (torch.zeros(sizes[-1], *self._spec.unit_shape, dtype=torch.uint8, device=device),),
            torch.zeros(self._position_rows, sizes[-1], dtype=torch.int32, device=device),
            sizes=sizes,
            room=room,
            streams=self._streams,
        )

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[None]:
        """Images whose pixels are of one type."""
        graphs = self._graphs
        if graphs is not None and not (
            batch.pixels[0].dtype == np.uint8 and graphs.fits(int(batch.cu_units[-1]), len(batch.pixels))
        ):
            graphs = None
        bounds = batch.cu_units if graphs is None else graphs.bounds(batch.cu_units)
        with torch.inference_mode():
            total, dtype = int(batch.cu_units[-1]), DTYPES[batch.pixels[0].dtype.name].torch
            staged_pixels = self._streams.staging((total, *self._spec.unit_shape), dtype)
            np.concatenate(batch.pixels, out=staged_pixels.numpy())
            with self._streams.copying():
                pixels = staged_pixels.to(self._placement.device, non_blocking=True)
                staged, (positions, cu_units) = sent(
                    [batch.positions, bounds], self._streams, self._placement.device
                )
            with self._streams.computing():
                if graphs is None:
                    rows = self._module(pixels, positions, cu_units, batch.units)
                else:
                    rows = graphs.replay((pixels,), positions, cu_units)
                hand_out(rows, out)
                return self._streams.launched(
                    lambda: None, keep=(staged_pixels, staged, pixels, positions, cu_units, rows)
                )


def vision_sizes(spec: VisionSpec, most: int) -> tuple[list[int], Callable[[int], int]]:
    """Sizes of graphs for batches of up to ``most`` units, and how many images each has room for.

    There is a graph for every number of independent units, so none is padded.
    """
    if spec.independent_units:
        return list(range(1, most + 1)), lambda units: units
    sizes = {-(-size // spec.least_units) * spec.least_units for size in graph_sizes(most)}
    # An image more costs each layer's attention as many blocks as the longest image has, most of them empty.
    return sorted(sizes), lambda units: max(8, units // 256)


def sent(
    arrays: Sequence[npt.NDArray[np.int32]], streams: CudaStreams, device: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Send index arrays in one copy; returns the pinned source and a tensor for each."""
    # Each begins on a 16-byte boundary, because kernels are compiled once more for pointers that do not.
    starts = [0, *accumulate(-(-array.size // 4) * 4 for array in arrays)]
    staged = streams.staging((starts[-1],), torch.int32)
    view = staged.numpy()
    for array, start in zip(arrays, starts, strict=False):
        view[start : start + array.size] = array.ravel()
    on_device = staged.to(device, non_blocking=True)
    return staged, [
        on_device[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
