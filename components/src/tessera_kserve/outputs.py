"""The tensors that the outputs of a served model are written as.

Every call gets the default output, which is one tensor where it is of vectors. Further outputs are given
where they are asked for by the names of their tensors. Sparse weights are ``NAME_indices`` and
``NAME_values`` ``[rows, weights]``, token vectors ``NAME`` ``[rows, tokens, width]`` and ``NAME_lengths``
``[rows]``. The row with the most decides the size: behind the end of the others are -1 as indices and 0 as
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.frontend.api.formats import finish
from tessera.frontend.request import EmbeddingsRequest
from tessera.frontend.serving.served import Served
from tessera.models.base import Output, OutputKind
from tessera.rows import Rows
from tessera_kserve.call import Call
from tessera_kserve.spec import FLOATS, Spec

Made = dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]
"""Values by the name of their tensor."""

_NOTHING: Final = -1
_INDEX_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class OutputTensors:
    """The tensors of a model's outputs; that of vectors by default is called ``default``."""

    default: str
    served: Served

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All of them, optional where a call gets them only if it asks."""
        return tuple([spec for output in self.served.outputs for spec in self._of(output)])

    def asked(self, call: Call) -> tuple[str, ...]:
        """Return the outputs that a call asks for, as a request has them: none for the default alone."""
        wanted = {one.name for one in call.outputs}
        names = [
            output.name
            for output in self.served.outputs
            if any(spec.name in wanted for spec in self._of(output))
        ]
        return () if names in ([], [self.served.output.name]) else tuple(names)

    def write(
        self, found: Mapping[str, Rows], request: EmbeddingsRequest, rows: int, filled: Sequence[int]
    ) -> Made:
        """Return the tensors of the outputs that a request asks for, ``rows`` long.

        ``found`` has the rows of those inputs that are ``filled``, nothing where none is; others get padding.
        """
        made: Made = {}
        for output in self.served.asked(request.outputs):
            if (own := found.get(output.name)) is None:
                own = Rows.zeros(np.zeros(1, np.int64), output.width)
            width = (output is self.served.output and request.dimensions) or output.width
            values = own.values
            if output.kind is not OutputKind.SPARSE:
                values = finish(values, width=width, normalize=request.normalize)
            specs = [spec.name for spec in self._of(output)]
            if output.kind is OutputKind.VECTOR:
                made[specs[0]] = _among(values, filled, rows, 0.0)
                continue
            counts = _among(np.diff(own.bounds).astype(np.int32), filled, rows, 0)
            there = np.arange(counts.max(initial=0)) < counts[:, None]
            if output.kind is OutputKind.TOKENS:
                made |= {specs[0]: _among(values, there, (*there.shape, width), 0.0), specs[1]: counts}
            else:
                ids = np.empty(0, np.int32) if own.indices is None else own.indices
                indices = _among(ids, there, there.shape, _NOTHING)
                made |= {specs[0]: indices, specs[1]: _among(values[:, 0], there, there.shape, 0.0)}
        return made

    def _of(self, output: Output) -> tuple[Spec, ...]:
        name, optional = output.name, output is not self.served.output
        match output.kind:
            case OutputKind.SPARSE:
                ids = Spec(name=f"{name}_indices", datatypes=("INT32",), dims=(-1,), optional=optional)
                return (ids, Spec(name=f"{name}_values", datatypes=FLOATS, dims=(-1,), optional=optional))
            case OutputKind.TOKENS:
                dims = (-1, output.width)
                lengths = Spec(
                    name=f"{name}_lengths", datatypes=("INT32",), dims=(1,), flat=True, optional=optional
                )
                return (Spec(name=name, datatypes=FLOATS, dims=dims, optional=optional), lengths)
            case _:
                tensor = name if optional else self.default
                return (Spec(name=tensor, datatypes=FLOATS, dims=(output.width,), optional=optional),)


def padded_bytes(outputs: Sequence[Output], bounds: Sequence[npt.NDArray[np.int64]], rows: int) -> int:
    """Return the bytes of outputs as float32, where every row is as long as the longest.

    ``bounds`` says which rows of each output are an input's.
    """
    return sum(
        rows
        * int(np.diff(ends).max(initial=0))
        * (4 * output.width + (_INDEX_BYTES if output.kind is OutputKind.SPARSE else 0))
        for output, ends in zip(outputs, bounds, strict=True)
    )


def _among(values: npt.NDArray[Any], places: Any, size: Any, padding: float) -> npt.NDArray[Any]:
    """Return the values at their places in an array of padding that is so large, or that long."""
    shape = (size, *values.shape[1:]) if isinstance(size, int) else size
    if values.shape == shape:
        return values
    found = np.full(shape, padding, values.dtype)
    found[places] = values
    return found
