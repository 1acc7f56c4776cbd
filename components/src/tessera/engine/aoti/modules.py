"""Compiled text stages, packed and padded, as the modules that the torch engine drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tessera.engine.aoti.program import AotiProgram


class PackedModule:
    """Implements ``TextModule``; more sequences than the engine was built for go in several calls."""

    def __init__(self, program: AotiProgram, max_sequences: int) -> None:
        self.program = program
        self.max_sequences = max_sequences

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        vision_rows: torch.Tensor,
        vision_index: torch.Tensor,
    ) -> torch.Tensor:
        rows, vision_map = mapped(input_ids, vision_rows, vision_index)
        found = []
        for sequences, tokens in self._calls(lengths):
            vectors, norms = self.program(
                input_ids[tokens],
                positions[tokens],
                cu_seqlens[1:][sequences] - tokens.start,
                rows,
                vision_map[tokens],
            )
            found.append(vectors * norms[:, None])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _calls(self, lengths: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Which sequences, and which tokens, each call takes."""
        token = 0
        for first in range(0, len(lengths), self.max_sequences):
            part = lengths[first : first + self.max_sequences]
            yield slice(first, first + len(part)), slice(token, token + sum(part))
            token += sum(part)


def mapped(
    input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """At least one vision row, and int32 ``[tokens]``: the row in each token's place, or -1."""
    vision_map = torch.full_like(input_ids, -1)
    if not len(vision_index):
        return vision_rows.new_zeros(1, vision_rows.shape[1]), vision_map
    numbers = torch.arange(len(vision_index), dtype=torch.int32, device=input_ids.device)
    vision_map.index_copy_(0, vision_index.to(torch.int64), numbers)
    return vision_rows, vision_map


def bucketed_cost(count: int, total: int, longest: int) -> int:
    """Sequences are padded to the longest of those whose lengths have the same power of two below them.

    So none is padded to twice its length, nor beyond the longest.
    """
    return min(count * longest, 2 * total)


class PaddedModule:
    """Implements ``TextModule``: one call for the sequences of each bucket of lengths."""

    def __init__(self, program: AotiProgram, max_sequences: int) -> None:
        self._program = program
        self._max_sequences = max_sequences

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        vision_rows: torch.Tensor,
        vision_index: torch.Tensor,
    ) -> torch.Tensor:
        rows, vision_map = mapped(input_ids, vision_rows, vision_index)
        starts = cu_seqlens.tolist()
        pooled = torch.empty(len(lengths), vision_rows.shape[1], dtype=torch.float32)
        for numbers in self._calls(lengths):
            shape = (len(numbers), max(lengths[number] for number in numbers))
            ids, mask = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
            places = torch.full(shape, -1, dtype=torch.int32)
            for row, number in enumerate(numbers):
                tokens = slice(starts[number], starts[number + 1])
                ids[row, : lengths[number]] = input_ids[tokens]
                places[row, : lengths[number]] = vision_map[tokens]
                mask[row, : lengths[number]] = 1
            vectors, norms = self._program(ids, mask, rows, places)
            pooled[numbers] = vectors * norms[:, None]
        return pooled

    def _calls(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        buckets: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            buckets.setdefault(length.bit_length(), []).append(number)
        for numbers in buckets.values():
            for first in range(0, len(numbers), self._max_sequences):
                yield numbers[first : first + self._max_sequences]
