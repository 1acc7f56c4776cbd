"""Forward passes written for TensorRT, one package for each family, by the family's name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from tessera.models.base import Model
    from tessera_engines.networks.graph import Graph, NetworkRequest


class Describe(Protocol):
    """Declares inputs, operations and outputs of one stage of a model; reads the weights it needs.

    Raises ``CheckpointError``, and ``ConfigError`` for a stage or type that the family does not have.
    """

    def __call__(self, model: Any, graph: Graph, request: NetworkRequest) -> None: ...


_LLAMA_NEMOTRON_VL: Final = "tessera_engines.networks.llama_nemotron_vl"
_NETWORKS: Final = {
    "llama_nemotron_vl": _LLAMA_NEMOTRON_VL,
    "llama_nemotron_colembed_vl": _LLAMA_NEMOTRON_VL,
    "llama_nemotron_rerank_vl": _LLAMA_NEMOTRON_VL,
}


def network_of(model: Model) -> Describe | None:
    """Return the module's ``describe_network`` for the model's family, or None where it has no networks."""
    module = _NETWORKS.get(model.family)
    return None if module is None else cast(Describe, import_module(module).describe_network)
