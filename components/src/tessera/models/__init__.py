"""Model families: ``open_model`` finds the one that serves a checkpoint directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from tessera.checkpoint import source
from tessera.checkpoint.declared import read_declared, transformer_directory
from tessera.checkpoint.quantized import Quantization
from tessera.checkpoint.source import Source
from tessera.checkpoint.unread import checkpoint_instead
from tessera.errors import CheckpointError, ConfigError
from tessera.models.base import (
    Family,
    Model,
    Prompt,
    Role,
    Truncate,
    architectures_of,
)
from tessera.models.declared import assumed
from tessera.models.options import OptionsFamily
from tessera.siblings import MODELS, distribution_of, load, siblings
from tessera.small_files import read_json

__all__ = [
    "Family",
    "Model",
    "Prompt",
    "Role",
    "Truncate",
    "architectures_of",
    "families",
    "family_of",
    "find",
    "hub_models_of",
    "open_model",
    "try_out",
]

log = logging.getLogger(__name__)

_ASSUMED: Final = {
    "pooling": (
        "%s: declares no pooling (no modules.json); the mean is taken, as sentence-transformers does. If"
        " the model was trained with another one, name it by --model-options",
    ),
    "prompts": (
        "%s: declares no prompts (config_sentence_transformers.json); those of the family are taken. If the"
        " model was trained with others, declare them there",
    ),
}
_OF_KEY: Final = "the files have no %r, so it is as in the code of the published model: %s"

_BUILT_IN = (
    "bert",
    "bert:COLBERT",
    "bert:RERANK",
    "clip",
    "colqwen3",
    "llama_nemotron_embed",
    "llama_nemotron_embed:RERANK",
    "llama_nemotron_vl:RERANK",
    "llama_nemotron_vl",
    "llama_nemotron_vl:COLEMBED",
    "nemotron_3_5_embed",
    "nemotron_3_embed",
    "nemotron_colembed_vl",
    "qwen3_embedding",
    "qwen3_rerank",
    "qwen3_vl_embedding",
    "qwen3_vl_rerank",
    "siglip",
    "siglip2",
    "splade",
    "xlm_roberta",
    "xlm_roberta:COLBERT",
    "xlm_roberta:RERANK",
)
"""The families by the package of their body, with the name in its ``model`` where that is not ``FAMILY``."""


def families() -> list[Family]:
    """The built-in families and those that installed packages declare as entry points.

    Raises ``ConfigError`` for a package's that cannot be loaded, or has the name of another one.
    """
    found = []
    for place in _BUILT_IN:
        package, _, name = place.partition(":")
        found.append(
            cast(Family, getattr(import_module(f"tessera.models.{package}.model"), name or "FAMILY"))
        )
    names = {family.name for family in found}
    for entry in siblings(MODELS):
        family = cast(Family, load(entry))
        if family.name in names:
            package = distribution_of(entry)
            raise ConfigError(
                f"the package {package} adds a family {family.name!r}, and there is one already"
            )
        names.add(family.name)
        found.append(family)
    return found


def find(model: str, revision: str = "", *, known: Source | None = None, bar: bool = False) -> Source:
    """The checkpoint that is named: a directory, or a model of a hub that some family serves.

    As ``checkpoint.source.find``, which raises ``CheckpointError`` and ``ConfigError``.
    """
    return source.find(model, revision, known=known, recognise=family_of, bar=bar)


def open_model(path: str | Path, options: Mapping[str, object] = {}) -> Model:
    """Open the checkpoint directory at ``path``; ``options`` are the family's own, by name.

    The family gets the folder of the transformer, if ``modules.json`` names one below the directory.

    Raises what ``family_of`` raises, and ``ConfigError`` for an option that the family does not know.
    """
    directory = transformer_directory(Path(path).resolve())
    return family_of(directory, options).open_model(directory, options)


def try_out(model: Model) -> None:
    """Try a model's tokenizer, once before it is used; raises ``CheckpointError`` (``checkpoint/trial``).

    Warns of each thing that nothing declares.
    """
    for what in assumed(model):
        log.warning(*_ASSUMED.get(what, (_OF_KEY, what)), model.path)
    if (tried := getattr(model, "try_out", None)) is not None:
        tried()


def family_of(path: str | Path, options: Mapping[str, object] = {}) -> Family:
    """The family that serves the checkpoint directory at ``path``.

    Of several the one of the task that the option ``task`` names, or the checkpoint. Raises
    ``CheckpointError`` when it has no readable ``config.json``, or no family serves its ``model_type`` with
    its ``architectures``; and for weights that are quantised in a way that is not read, which is said before
    gigabytes of them are downloaded. Raises ``ConfigError`` when several families do: which one it is would
    be left to chance.
    """
    directory = transformer_directory(Path(path).resolve())
    family = _serving(directory, options)
    # Others read their weights themselves.
    if isinstance(family, OptionsFamily):
        Quantization.read(directory)
    return family


def _serving(directory: Path, options: Mapping[str, object]) -> Family:
    config = directory / "config.json"
    try:
        parsed = read_json(config)
    except FileNotFoundError as error:
        # Another module may be the first, which is refused by name.
        read_declared(directory)
        raise CheckpointError(
            f"{config}: there is no such file, so {directory} is no checkpoint{checkpoint_instead(directory)}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{config}: not readable: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{config}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{config}: must hold a JSON object")
    model_type = parsed.get("model_type")
    known = families()
    of_type = [family for family in known if model_type in family.model_types]
    if not of_type:
        served = sorted({name for family in known for name in family.model_types})
        found = (
            "model_type is missing; it may be one of"
            if model_type is None
            else f"model_type {model_type!r} is none of"
        )
        raise CheckpointError(f"{config}: {found} {served}; tessera models lists what is served")
    named = parsed.get("architectures")
    serving = [family for family in of_type if _serves(family, named)]
    tasks = {task: family for family in reversed(serving) if (task := _task_of(family)) is not None}
    asked = options.get("task", "auto")
    if tasks and (special := tasks.get(_declared_task(directory) if asked == "auto" else asked)):
        return special
    plain = [family for family in serving if _task_of(family) is None]
    if named and len(plain) > 1:
        raise ConfigError(
            f"{config}: model_type {model_type!r} with architectures {named!r} is served by the families"
            f" {', '.join(family.name for family in plain)}; uninstall the package of all but one"
        )
    if plain:
        return plain[0]
    served = sorted(name for family in of_type for name in architectures_of(family))
    raise CheckpointError(
        f"{config}: model_type {model_type!r} is served with one of the architectures {served}, not {named!r}"
    )


def _serves(family: Family, named: object) -> bool:
    architectures = architectures_of(family)
    return not named or not architectures or (isinstance(named, list) and named[0] in architectures)


def _declared_task(directory: Path) -> object:
    try:
        return read_declared(directory).task
    except CheckpointError:
        # Files that are not downloaded yet may be missing; what is wrong with others, opening says.
        return None


def _task_of(family: Family) -> object:
    return getattr(family, "task", None)


def hub_models_of(family: Family) -> Sequence[str]:
    """The published models of a family that are known to be served, by their names on the hub."""
    models: Sequence[str] = getattr(family, "hub_models", ())
    return models
