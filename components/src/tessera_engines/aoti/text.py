"""The text stage compiled ahead of time, packed or padded, run by the torch engine's batches and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tessera.engine.batch import Cost, packed_cost
from tessera.engine.graphs import Graphs, graph_sizes
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.cuda import CudaText, sequence_room
from tessera.engine.torch.text import TorchTextEngine
from tessera.errors import ConfigError
from tessera.models.base import Model, TextModule, TextTensors
from tessera_engines.aoti.package import AotiProgram, open_package
from tessera_engines.compiled.spec import Layout, Stage


class AotiTextEngine(TorchTextEngine):
    """Runs an engine directory of the stage ``text``: layout padded on the CPU, packed on any device."""

    # One package runs one batch at a time.
    _divisible = False

    def _load(self, model: Model, settings: EngineSettings, placement: Placement) -> TextModule:
        package = open_package(model, settings, placement, Stage.TEXT)
        most = max(settings.max_batch_cost, model.max_tokens)
        sequences = package.ranges["sequences"].max
        if package.manifest.layout is Layout.PACKED:
            package.require_room("tokens", most, "the larger of max_batch_cost and the longest input")
        elif placement.is_cuda:
            raise ConfigError(
                f"{settings.path}: on CUDA engine aoti runs layout packed, and this one is padded"
            )
        else:
            package.require_room("tokens", model.max_tokens, "the longest input")
        package.require_room("rows", most, "the larger of max_batch_cost and the longest input")
        module = PackedModule if package.manifest.layout is Layout.PACKED else PaddedModule
        return module(package.load(), sequences, package.width("vision_rows"))

    def _on_cuda(self, module: TextModule, placement: Placement, graph_tokens: int) -> CudaText:
        assert isinstance(module, PackedModule)
        return AotiCudaText(module, self._model, placement, graph_tokens=graph_tokens)

    @property
    def cost(self) -> Cost:
        return bucketed_cost if isinstance(self._module, PaddedModule) else packed_cost


class CompiledModule:
    """A program for so many sequences, and vision rows so wide; both modules implement ``TextModule``."""

    def __init__(self, program: AotiProgram, max_sequences: int, row_width: int) -> None:
        self.program = program
        self.max_sequences = max_sequences
        self.row_width = row_width


class PackedModule(CompiledModule):
    """More sequences than the engine was built for go in several calls."""

    def __call__(self, batch: TextTensors) -> torch.Tensor:
        rows, vision_map = mapped(batch.input_ids, batch.vision_rows, batch.vision_index, self.row_width)
        found = []
        for sequences, tokens in self._calls(batch.lengths):
            vectors, norms = self.program(
                batch.input_ids[tokens],
                batch.positions[:, tokens].contiguous(),
                batch.cu_seqlens[1:][sequences] - tokens.start,
                rows,
                vision_map[tokens],
            )
            found.append(vectors * norms[:, None])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _calls(self, lengths: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """The sequences and the tokens of each call."""
        token = 0
        for first in range(0, len(lengths), self.max_sequences):
            part = lengths[first : first + self.max_sequences]
            yield slice(first, first + len(part)), slice(token, token + sum(part))
            token += sum(part)


def mapped(
    input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """At least one vision row, ``width`` wide, and int32 ``[tokens]``: the row for each token, or -1."""
    vision_map = torch.full_like(input_ids, -1)
    if not len(vision_index):
        return vision_rows.new_zeros(1, width), vision_map
    numbers = torch.arange(len(vision_index), dtype=torch.int32, device=input_ids.device)
    vision_map.index_copy_(0, vision_index.to(torch.int64), numbers)
    return vision_rows, vision_map


def bucketed_cost(count: int, total: int, longest: int) -> int:
    """An upper bound of the cost where sequences are padded to the longest of their bucket.

    A bucket has the lengths with the same number of bits: none is padded to twice its length, nor beyond the
    longest.
    """
    return min(count * longest, 2 * total)


class PaddedModule(CompiledModule):
    """One call for the sequences of each bucket of lengths."""

    def __call__(self, batch: TextTensors) -> torch.Tensor:
        rows, vision_map = mapped(batch.input_ids, batch.vision_rows, batch.vision_index, self.row_width)
        starts, lengths = batch.cu_seqlens.tolist(), batch.lengths
        found, order = [], []
        for numbers in self._calls(lengths):
            shape = (len(numbers), max(lengths[number] for number in numbers))
            ids, mask = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
            places = torch.full(shape, -1, dtype=torch.int32)
            for row, number in enumerate(numbers):
                tokens = slice(starts[number], starts[number + 1])
                ids[row, : lengths[number]] = batch.input_ids[tokens]
                places[row, : lengths[number]] = vision_map[tokens]
                mask[row, : lengths[number]] = 1
            vectors, norms = self.program(ids, mask, rows, places)
            found.append(vectors * norms[:, None])
            order += numbers
        return torch.cat(found)[torch.tensor(order).argsort()]

    def _calls(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        buckets: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            buckets.setdefault(length.bit_length(), []).append(number)
        for numbers in buckets.values():
            for first in range(0, len(numbers), self.max_sequences):
                yield numbers[first : first + self.max_sequences]


class AotiCudaText(CudaText):
    """The torch engine's copies and streams around graphs of the whole compiled stage."""

    def __init__(
        self, module: PackedModule, model: Model, placement: Placement, *, graph_tokens: int
    ) -> None:
        super().__init__(module, model, placement, graph_tokens=graph_tokens)
        self._packed = module

    def _recorded(self) -> Graphs:
        program = self._packed.program
        device, dtype = self._placement.device, self._placement.torch_dtype
        sizes = graph_sizes(self._graph_cost)

        def compute(
            inputs: tuple[torch.Tensor, ...], positions: torch.Tensor, ends: torch.Tensor
        ) -> torch.Tensor:
            input_ids, vision_map, rows = inputs
            vectors, norms = program(input_ids, positions.contiguous(), ends, rows, vision_map)
            return vectors * norms[:, None]

        return Graphs(
            compute,
            (
                torch.zeros(sizes[-1], dtype=torch.int32, device=device),
                torch.full((sizes[-1],), -1, dtype=torch.int32, device=device),
                torch.zeros(sizes[-1], self._packed.row_width, dtype=dtype, device=device),
            ),
            torch.zeros(self._position_rows, sizes[-1], dtype=torch.int32, device=device),
            sizes=sizes,
            room=lambda tokens: min(sequence_room(tokens), self._packed.max_sequences),
            streams=self._streams,
            ends_only=True,
        )

    def _replayed(self, graphs: Graphs, indices: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        input_ids, positions, ends, vision_index = indices
        rows, vision_map = mapped(input_ids, rows, vision_index, self._packed.row_width)
        return graphs.replay((input_ids, vision_map, rows), positions, ends)
