"""What a text module is called with; importing this needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TextTensors:
    """The tensors of a packed batch of texts, all on the module's device.

    ``cu_seqlens`` bounds the sequences in the packed axis, and ``lengths`` says the same on the host.
    ``positions`` are ``Model.positions`` of the inputs side by side. ``vision_index`` has the packed position
    of each vision row. ``segments`` are bounds in the packed axis, from 0: chunks and what lies between them.
    """

    input_ids: torch.Tensor  # int32 [tokens]
    positions: torch.Tensor  # int32 [k, tokens]
    cu_seqlens: torch.Tensor  # int32 [batch + 1]
    lengths: Sequence[int]
    vision_rows: torch.Tensor  # [vision, row_width]
    vision_index: torch.Tensor  # int32 [vision]
    segments: torch.Tensor | None = None  # int32 [segments + 1]
