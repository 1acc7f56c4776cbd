"""A compiled packed text stage as the module that the torch engine drives."""

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
