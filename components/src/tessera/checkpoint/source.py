"""Where a checkpoint comes from: a directory, or a model of a hub such as huggingface.co.

The launcher asks before its environment is made, so nothing but the standard library is imported here;
``hub`` is, once something has to be looked for.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.unread import no_directory
from tessera.checkpoint.weight_names import WEIGHTS
from tessera.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

SOURCE_VARIABLE: Final = "TESSERA_MODEL_SOURCE"
"""By which the launcher tells its children, in JSON, what ``--model-path`` is a copy of."""

DEFAULT_REVISION: Final = "main"

_NAME: Final = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_HUB_MODEL: Final = re.compile(rf"({_NAME}/{_NAME})(?:@(.+))?", re.ASCII)
_REVISION: Final = re.compile(r"[A-Za-z0-9_][\w./+-]{0,254}", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT: Final = re.compile(r"models--([^/]+)--([^/]+)")


def is_commit(revision: str) -> bool:
    """Whether a revision names a commit itself, and not a branch or a tag."""
    return _COMMIT.fullmatch(revision) is not None


@dataclass(frozen=True, slots=True)
class HubModel:
    """``ORG/NAME`` at a branch, a tag or a commit."""

    repository: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"

    @classmethod
    def named(cls, model: str, revision: str = "") -> HubModel | None:
        """What ``ORG/NAME`` or ``ORG/NAME@REVISION`` names; None for what is neither.

        Raises ``ConfigError`` for two revisions that differ, and for what cannot be one.
        """
        if (found := _HUB_MODEL.fullmatch(model)) is None:
            return None
        repository, own = found[1], found[2] or ""
        if own and revision and own != revision:
            raise ConfigError(f"{model}: names another revision than --revision {revision}")
        wanted = own or revision or DEFAULT_REVISION
        if not _REVISION.fullmatch(wanted) or ".." in wanted or "//" in wanted or wanted.endswith("/"):
            raise ConfigError(f"{wanted!r} cannot be a revision: it is a branch, a tag or a commit")
        return cls(repository, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint's ``directory``, and what of a hub it holds: ``commit`` of ``repository`` (ORG/NAME).

    ``revision`` is what was asked for. All three are empty for a directory that is no snapshot of a hub.
    ``cached`` says why a snapshot that was downloaded before is used though the hub has not confirmed it.
    """

    directory: Path
    repository: str = ""
    revision: str = ""
    commit: str = ""
    cached: str = ""

    @property
    def name(self) -> str:
        """What the model is called where no other name is given."""
        return self.repository or self.directory.resolve().name

    def described(self) -> dict[str, str | None] | None:
        """For clients and people; None for a directory."""
        if not self.commit:
            return None
        return {
            "repository": self.repository,
            "revision": self.revision,
            "commit": self.commit,
            "cached": self.cached or None,
        }

    def __str__(self) -> str:
        if not self.commit:
            return str(self.directory)
        of = "" if self.revision == self.commit else f" ({self.revision})"
        cached = f", from the cache: {self.cached}" if self.cached else ""
        return f"{self.repository} at commit {self.commit}{of}{cached}"

    def as_dict(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}

    def as_json(self) -> str:
        return json.dumps(self.as_dict())

    @classmethod
    def of_json(cls, text: str | None) -> Source | None:
        """What ``as_json`` made; None of nothing. Raises ``ConfigError``."""
        if not text:
            return None
        try:
            return cls.of_dict(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{SOURCE_VARIABLE}: is not what a launcher writes: {error}") from error

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> Source:
        """What ``as_dict`` made. Raises ``TypeError`` and ``KeyError`` for anything else."""
        return cls(**(values | {"directory": Path(values["directory"])}))


def is_adapter(directory: Path) -> bool:
    """Whether a directory has an adapter of PEFT, and not the weights that it changes."""
    return (directory / "adapter_config.json").exists() and not any(
        (directory / name).exists() for name in WEIGHTS
    )


def find(
    model: str,
    revision: str = "",
    *,
    known: Source | None = None,
    recognise: Callable[[Path], object],
    bar: bool = False,
) -> Source:
    """The checkpoint that ``model`` names: a directory, or ORG/NAME[@REVISION], downloaded if need be.

    An adapter that lies alone is joined with its base, which is looked for in the same way. ``known`` is what
    was found before, by the launcher. ``recognise`` is given a directory with a ``config.json`` before
    weights are downloaded, and raises ``CheckpointError`` where nobody serves such a model. ``bar`` shows a
    progress bar instead of lines. Raises ``CheckpointError`` and ``ConfigError``, one line each that says
    what to do.
    """
    if known is not None and known.directory == Path(model) and os.path.isdir(model):
        return known
    source = _alone(model, revision, recognise, bar)
    if not is_adapter(source.directory):
        return source
    from tessera.checkpoint.adapted import adapted

    return adapted(source, lambda base, at: find(base, at, recognise=recognise, bar=bar))


def _alone(model: str, revision: str, recognise: Callable[[Path], object], bar: bool) -> Source:
    if os.path.isdir(model):
        return _of_directory(model, revision)
    if os.path.isfile(model):
        raise CheckpointError(f"{model}: {no_directory(model)}")
    if (named := HubModel.named(model, revision)) is None:
        # Whoever opens it says what is missing.
        return Source(directory=Path(model))
    # Takes 0.3 s, which a directory need not wait for.
    from tessera.checkpoint.hub import fetch

    return fetch(named, recognise, bar=bar)


def _of_directory(model: str, revision: str) -> Source:
    directory = Path(model)
    if revision:
        raise ConfigError(f"--revision {revision}: {model} is a directory here, which has no revisions")
    if HubModel.named(model) is not None:
        log.info("%s is a directory here, which is served; no hub is asked", model)
    # A snapshot in a hub's cache, wherever that lies.
    place = directory.resolve()
    of = _SNAPSHOT.fullmatch(place.parent.parent.name)
    if of is None or place.parent.name != "snapshots" or not is_commit(place.name):
        return Source(directory=directory)
    return Source(directory=directory, repository=f"{of[1]}/{of[2]}", revision=place.name, commit=place.name)
