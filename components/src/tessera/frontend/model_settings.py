"""The models that a frontend serves: one that its flags name, or those that a file lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from tessera.checkpoint.source import Source
from tessera.errors import ConfigError
from tessera.flags import convert, mapping
from tessera.frontend.widths import no_widths
from tessera.model_names import fold_name, namespace_of
from tessera.models import find
from tessera.settings import NOT_NEGATIVE, ModelOptions, Revision, ServedModelNames, Setting, served_names
from tessera.small_files import read_yaml, why_unread

MODELS_FLAG: Final = "--models"
_MOST: Final = 64


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. In a file each field is a key of this name.

    ``slot`` is a small number that stays the model's own for as long as it is served: it is where the
    frontends of a port keep its results. ``loading`` says why it cannot be opened yet; empty: it can.
    """

    model_path: Annotated[
        Path | None,
        Setting(
            flag="--model-path",
            help="a checkpoint directory, or ORG/NAME[@REVISION] of a hub to download once",
        ),
    ] = None
    revision: Revision = ""
    model_options: ModelOptions = {}
    served_model_names: ServedModelNames = ()
    dimensions_allowed: Annotated[
        str,
        Setting(
            flag="--dimensions-allowed",
            metavar="WIDTHS",
            check=no_widths,
            help="widths of vectors that requests may ask for (`dimensions`) beside those that the "
            "checkpoint lists, such as 256,512,1024 or 64-2048",
            more="A vector is cut and has unit length again. A model that was not trained for it loses more "
            "than one that was: measure what your search loses",
        ),
    ] = ""
    max_embed_tokens: Annotated[
        int,
        Setting(
            flag="--max-embed-tokens",
            check=NOT_NEGATIVE,
            help="tokens of a text that is longer than the model reads: it is cut into runs, and the mean of "
            "their vectors is its own; 0: it is refused",
            more="As vLLM's `enable_chunked_processing` with `max_embed_len`, of models that pool by mean; a "
            "request that asks to truncate is truncated",
        ),
    ] = 0
    embed_endpoint: Annotated[
        str,
        Setting(flag="--embed-endpoint", help="dyn://namespace.component.endpoint of the embed workers"),
    ] = ""
    encode_endpoint: Annotated[
        str, Setting(flag="--encode-endpoint", help="watched for /health only; the embed workers call it")
    ] = ""
    expected_embed: Annotated[
        int,
        Setting(flag="--expect-embed", check=NOT_NEGATIVE, help="number of embed workers that were started"),
    ] = 0
    expected_encode: Annotated[
        int,
        Setting(
            flag="--expect-encode", check=NOT_NEGATIVE, help="number of encode workers that were started"
        ),
    ] = 0
    slot: int = 0
    loading: str = ""
    source: dict[str, str] | None = None
    """What the launcher found of a model of a hub, as ``Source.as_json`` has it."""

    @property
    def name(self) -> str:
        """What answers, metrics and logs call it; settled settings alone have it."""
        return self.served_model_names[0]

    @property
    def directory(self) -> Path:
        """Of the checkpoint; settled settings alone have it."""
        assert self.model_path is not None
        return self.model_path

    @property
    def origin(self) -> Source | None:
        """What of a hub it is."""
        return None if self.source is None else Source.of_dict(self.source)

    def settled(self, namespace: str, *, several: bool = False) -> ModelSettings:
        """With its directory, names and endpoints; downloads a model of a hub, unless it is ``loading``.

        Its workers are in ``namespace``, those of one of ``several`` models in ``namespace_of``. Raises
        ``ConfigError`` and ``CheckpointError``.
        """
        assert self.model_path is not None
        found, source = self, self.origin
        if not self.loading:
            source = find(str(self.model_path), self.revision, known=source)
            found = msgspec.structs.replace(self, model_path=source.directory, source=source.as_dict())
        named = served_names(self.served_model_names, source.name if source else self.model_path.name)
        found = msgspec.structs.replace(found, served_model_names=named)
        # Its name, which its namespace is made of, is known only now.
        space = namespace_of(namespace, found.name) if several else namespace
        return msgspec.structs.replace(
            found,
            embed_endpoint=self.embed_endpoint or f"dyn://{space}.embed.generate",
            encode_endpoint=self.encode_endpoint or f"dyn://{space}.encode.generate",
        )


def read_models(path: Path, namespace: str) -> tuple[ModelSettings, ...]:
    """The models that a file lists under ``models``, in YAML or JSON; settled.

    A model's workers are in ``namespace_of`` where no endpoints are given, its slot is its place in the list
    where none has one. Raises ``ConfigError``, naming file, model and key, and ``CheckpointError``.
    """
    try:
        found = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{MODELS_FLAG} {path}: {why_unread(error)}") from error
    listed = mapping(found, str(path)).get("models")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: models: must be a list of models")
    if len(listed) > _MOST:
        raise ConfigError(f"{path}: models: {len(listed)} are more than {_MOST}")
    models = [_read(value, index, f"{path}: models[{index}]") for index, value in enumerate(listed)]
    settled = tuple(model.settled(namespace, several=True) for model in models)
    check_apart(settled)
    return settled


def _read(value: Any, index: int, said: str) -> ModelSettings:
    given = {"slot": index, **mapping(value, said)}
    model = convert(ModelSettings, given, said)
    if model.model_path is None:
        raise ConfigError(f"{said}: model_path: names no checkpoint")
    if not 0 <= model.slot < _MOST:
        raise ConfigError(f"{said}: slot: must be 0 to {_MOST - 1}, not {model.slot}")
    if refusal := no_widths("dimensions_allowed", model.dimensions_allowed):
        raise ConfigError(f"{said}: {refusal}")
    if model.max_embed_tokens < 0:
        raise ConfigError(f"{said}: max_embed_tokens: must not be negative, not {model.max_embed_tokens}")
    return model


def check_apart(models: Iterable[ModelSettings]) -> None:
    """Raises ``ConfigError`` for two models with a name that means both, or with the same slot or workers."""
    names: dict[str, str] = {}
    slots: dict[int, str] = {}
    endpoints: dict[str, str] = {}
    for model in models:
        for name in model.served_model_names:
            if (other := names.setdefault(fold_name(name), model.name)) != model.name:
                raise ConfigError(f"{name!r} would be the name of two models, {other!r} and {model.name!r}")
        if (other := slots.setdefault(model.slot, model.name)) != model.name:
            raise ConfigError(f"{other!r} and {model.name!r} have the same slot, {model.slot}")
        if (other := endpoints.setdefault(model.embed_endpoint, model.name)) != model.name:
            raise ConfigError(f"{other!r} and {model.name!r} have the same workers, {model.embed_endpoint}")
