"""One model as it is served: its workers, its room for requests, and the way from a request to its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tessera.errors import ModelNotFound
from tessera.frontend.admission.room import Room
from tessera.frontend.metrics import ModelMetrics
from tessera.frontend.model_settings import ModelSettings
from tessera.frontend.request import RequestLimits
from tessera.frontend.serving.pipeline import Pipeline
from tessera.model_names import find_name
from tessera.models import Model
from tessera.models.base import Output, OutputKind, outputs_named
from tessera.rpc import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of a model that can serve now, by component.

    The encode workers are watched for health and capacity alone: the embed workers call them.
    """

    embed: Peers
    encode: Peers

    @property
    def by_component(self) -> Mapping[str, Peers]:
        return {"embed": self.embed, "encode": self.encode}

    @property
    def count(self) -> tuple[int, int]:
        """Embed and encode workers."""
        return len(self.embed.ready), len(self.encode.ready)

    async def close(self) -> None:
        """Follow and ask them no more."""
        for peers in self.by_component.values():
            await peers.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a client's form of a request is read with: the served model's names, its outputs, the default
    alone and all, and the limits.

    Answers say ``model``, the first of the ``names``. ``token_text`` is what the vocabulary calls an id.
    ``unlisted`` are outputs that routes of their own ask for, by name, such as that of a document's chunks.
    """

    names: tuple[str, ...]
    output: Output
    limits: RequestLimits
    outputs: Sequence[Output] = ()
    unlisted: Mapping[str, Output] = field(default_factory=dict)
    token_text: Callable[[int], str] = str
    model: str = field(init=False)
    kinds: frozenset[OutputKind] = field(init=False)

    def __post_init__(self) -> None:
        if not self.outputs:
            object.__setattr__(self, "outputs", (self.output,))
        object.__setattr__(self, "kinds", frozenset(output.kind for output in self.outputs))
        object.__setattr__(self, "model", self.names[0])

    def of_kind(self, kind: OutputKind) -> tuple[str, ...]:
        """Return the name of the first output of a kind, as a request has it: none for the default."""
        found = next(output for output in self.outputs if output.kind is kind)
        return () if found is self.output else (found.name,)

    def asked(self, names: Sequence[str]) -> Sequence[Output]:
        """Return the outputs that a request asks for by name, the default without any.

        Raises ``InvalidInput`` naming what the model has.
        """
        if len(names) == 1 and names[0] in self.unlisted:
            return (self.unlisted[names[0]],)
        return outputs_named(self.model, self.outputs, names, "output_types")

    def check(self, name: str) -> str:
        """The one of the names that a client means; raises ``ModelNotFound`` if it is none of them."""
        if (found := find_name(name, self.names)) is None:
            raise not_found(name, self.names)
        return found


def not_found(name: str, names: Sequence[str]) -> ModelNotFound:
    """The error for a name that is none of those that are served."""
    known = ", ".join(map(repr, names))
    return ModelNotFound(
        f"the model {name[:100]!r} is not served here, {known or 'none'} {'are' if len(names) > 1 else 'is'} "
        "(--served-model-name adds names)",
        param="model",
    )


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """A model, owned by one event loop; ``close`` ends it.

    ``settings`` may get other numbers of expected workers.
    """

    settings: ModelSettings
    model: Model
    served: Served
    workers: Workers
    pipeline: Pipeline
    room: Room
    metrics: ModelMetrics

    def expects(self, component: str) -> int:
        """The number of workers that were started."""
        return self.settings.expected_embed if component == "embed" else self.settings.expected_encode

    async def close(self) -> None:
        self.metrics.forget()
        await self.pipeline.close()
        await self.workers.close()
