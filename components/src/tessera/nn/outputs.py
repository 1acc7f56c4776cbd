"""What a text tower gives by name beside its pooled rows; importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import torch

    from tessera.nn.tensors import TextTensors

STATES: Final = "states"
"""The output of each token's last hidden state, behind the final norm, before pooling."""

CHUNKS: Final = "chunks"
"""The output of each chunk of an input, pooled of the chunk's own tokens behind a pass over all of them."""

TOKEN_WEIGHTS: Final = "token_weights"
"""The output of each token's own weight, of which a sparse output has the largest for each id."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What is made of a batch for one output: float32 ``[rows, width]``, an input's rows side by side.

    An input has as many rows as its ``Output.rows`` says. ``indices``, int32 ``[rows]``, is the token id that
    each is of, -1 for one that holds nothing; None where all hold something. A sparse output may have an id
    of an input several times, in any order, and weights of 0: the largest weight of an id counts.
    """

    values: torch.Tensor
    indices: torch.Tensor | None = None


class OutputHead(Protocol):
    """Makes the rows of one output of a batch's last hidden states; nothing in it waits for the device."""

    def __call__(self, states: torch.Tensor, batch: TextTensors) -> HeadRows:
        """``states`` is float32 ``[tokens, hidden]``."""
        ...
