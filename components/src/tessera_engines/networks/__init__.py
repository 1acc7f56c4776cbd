"""Forward passes written for TensorRT, one package for each family, by the family's name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from tessera.errors import ConfigError
from tessera.models.base import Model, OutputKind
from tessera_engines.compiled.spec import Stage

if TYPE_CHECKING:
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
_OUTPUTS: Final = {OutputKind.SCORE: "score", OutputKind.TOKENS: "vector of each token"}


def networks_of(model: Model, stage: Stage) -> Describe:
    """Return the module's ``describe_network`` for the model's family.

    Raises ``ConfigError`` naming a family without networks, or whose text stage gives no single vector.
    """
    module = _NETWORKS.get(model.family)
    if module is None:
        raise ConfigError(
            f"family {model.family} describes no networks for TensorRT, see tessera_engines.networks;"
            " use engine: torch or aoti"
        )
    vectors = model.output.kind is OutputKind.VECTOR
    if stage in (Stage.TEXT, Stage.FUSED, Stage.POST) and not vectors:
        raise ConfigError(
            f"family {model.family} gives a {_OUTPUTS[model.output.kind]}, and TensorRT's stage {stage} one"
            " vector for each input; use engine: torch or aoti"
        )
    return cast(Describe, import_module(module).describe_network)
