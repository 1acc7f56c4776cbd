"""What the pipeline gives back, before any wire form has touched it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.errors import TesseraError
from tessera.frontend.api.formats import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors in input order, float32 ``[inputs, hidden]``; rows of failed inputs are zeros.

    They are unit vectors, or as the model pooled them when the request asked for that.

    ``image_pixels`` counts the pixels of all images as they were sent.
    """

    vectors: npt.NDArray[np.float32]
    errors: dict[int, TesseraError]
    usage: Usage
    image_pixels: int
    timings: wire.Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An ``Embedded`` with what a response says about itself; ``created`` is in Unix seconds."""

    embedded: Embedded
    model: str
    request_id: str
    created: int
