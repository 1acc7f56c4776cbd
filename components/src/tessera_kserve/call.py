"""One KServe call as both transports read it, and its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.api.values import Json, clip
from tessera_kserve.tensors import Tensor

Parameter = bool | int | float | str

REGION: Final = "shared_memory_region"
"""The parameter of a tensor that is in shared memory."""

# What every model knows: of transports, or said with a value that changes nothing.
_COMMON: Final = frozenset(
    ("priority", "timeout", "binary_data_output", "headers", "sequence_id", "sequence_start", "sequence_end")
)
_TRITON: Final = "triton_"
# Models have fewer. What is made of each takes 3 µs: a message of 256 KiB could have 131,000.
_MOST_NAMED: Final = 64


def check_count(count: int, what: str) -> None:
    """Refuse more inputs, outputs or parameters than a call has, before they are made into anything."""
    if count > _MOST_NAMED:
        raise InvalidInput.at(what, f"expected at most {_MOST_NAMED}, found {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An output that the client asks for."""

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """An input that is in shared memory, where its parameters say."""

    datatype: str
    shape: Sequence[Json]
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """``nbytes`` are those of the tensors. Without ``outputs`` all are wanted.

    ``shared`` are the inputs that are still to be read, and ``peer`` is the client's address.
    """

    model: str
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Shared] = field(default_factory=dict)
    outputs: tuple[Wanted, ...] = ()
    nbytes: int = 0
    peer: str = ""

    @property
    def output_places(self) -> dict[str, Mapping[str, Parameter]]:
        """The parameters of the outputs that are wanted in shared memory."""
        return {wanted.name: wanted.parameters for wanted in self.outputs if REGION in wanted.parameters}

    def check_parameters(self, own: Collection[str]) -> None:
        """Raises ``InvalidInput`` for a parameter that is neither among a model's own nor known to all."""
        for name in self.parameters:
            if name not in own and name not in _COMMON and not name.startswith(_TRITON):
                said = clip(name)
                raise InvalidInput.at(said, f"unknown parameter; known are {', '.join(sorted(own))}")
        if self.parameters.get("sequence_id", 0) not in (0, ""):
            raise InvalidInput.at("sequence_id", "these models have no sequences")

    def text(self, name: str) -> str | None:
        value = self.parameters.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidInput.at(name, "expected a text")
        return value or None

    def whole(self, name: str) -> int | None:
        value = self.parameters.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise InvalidInput.at(name, "expected a whole number")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.parameters.get(name, default)
        if not isinstance(value, bool):
            raise InvalidInput.at(name, "expected a boolean")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``model`` is the name that was asked for."""

    model: str
    id: str
    request_id: str
    outputs: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Of the tensors, raw."""
        return sum(tensor.nbytes for tensor in self.outputs)
