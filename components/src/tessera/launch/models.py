"""The models that a service has: those that are asked for, and what of each is there."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

from tessera.launch.children import Child
from tessera.launch.processes import Workers, agg_workers, e_p_workers, named_model_flags
from tessera.launch.settings import LaunchSettings, SettingError, Shared
from tessera.model_names import find_name, fold_name, namespace_of

S = TypeVar("S", bound=Shared)

MOST_MODELS: Final = 64
"""As frontends have it; their slots are below that."""

_EXPECTED: Final = ("expect_embed_workers", "expect_encode_workers")
# In what of a model frontends alone see a difference.
_OF_FRONTENDS: Final = ("dimensions_allowed", "max_embed_tokens", *_EXPECTED)


def _as_frontends_see(settings: LaunchSettings, other: LaunchSettings) -> LaunchSettings:
    """The settings with what frontends alone see from others."""
    return replace(settings, **{name: getattr(other, name) for name in _OF_FRONTENDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """A model as it is asked for: the settings of the service with its own over them.

    ``split`` gives each stage workers of its own. ``worker`` are further flags of its workers,
    ``encode_worker`` those of its encode workers. ``said`` is how whoever asked for it finds it.
    """

    settings: LaunchSettings
    split: bool
    worker: tuple[str, ...] = ()
    encode_worker: tuple[str, ...] = ()
    said: str = field(default="", compare=False)

    @classmethod
    def one_of_several(cls, settings: LaunchSettings, *, own_namespace: bool = False, **rest: Any) -> Self:
        """With a namespace for its workers alone, unless it was given one."""
        if not own_namespace:
            space = namespace_of(settings.dyn_namespace, settings.model_name)
            settings = replace(settings, dyn_namespace=space)
        return cls(settings=settings, **rest)

    @property
    def name(self) -> str:
        """The one that answers say."""
        return self.settings.model_name

    @property
    def key(self) -> str:
        """The same for all ways to write that name."""
        return fold_name(self.name)

    @property
    def of_workers(self) -> Self:
        """What its workers are started for: the same where frontends alone see a difference."""
        settings = _as_frontends_see(self.settings, LaunchSettings())
        if "--dynamo-model" not in self.worker:
            settings = replace(settings, served_model_name=self.name)
        return replace(self, settings=settings)

    def workers(self, settings: LaunchSettings) -> list[Workers]:
        """Its workers, by settings that have numbers."""
        if self.split:
            return e_p_workers(settings, self.worker, self.encode_worker)
        return agg_workers(settings, self.worker)

    def check(self) -> None:
        """Raises ``SettingError`` for what can be no model."""
        settings, path = self.settings, self.settings.model_path
        settings.check_path()
        for name in _EXPECTED:
            if not (getattr(settings, name) or "0").isdecimal():
                raise SettingError(f"{settings.named(name)}: is not a whole number")
        try:
            options = json.loads(settings.model_options or "{}")
        except (ValueError, RecursionError):
            options = None
        if not isinstance(options, dict):
            raise SettingError(f"{settings.named('model_options')}: is not a JSON object")
        # Else the frontends and workers would say it, each for itself, once they have been started.
        known = [os.path.join(path, name) for name in ("config.json", "modules.json")]
        if os.path.isdir(path) and not any(map(os.path.exists, known)) and not settings.is_adapter:
            from tessera.checkpoint.unread import checkpoint_instead

            raise SettingError(
                f"{settings.named('model_path')}: there is no config.json in it, so it is no checkpoint"
                f"{checkpoint_instead(path)}"
            )


def check_apart(models: Iterable[WantedModel]) -> None:
    """Raises ``SettingError`` for two models that a request, or a worker, could not tell apart.

    For too many, too.
    """
    models = list(models)
    if len(models) > MOST_MODELS:
        raise SettingError(f"{len(models)} models are more than {MOST_MODELS}")
    names: dict[str, WantedModel] = {}
    spaces: dict[str, WantedModel] = {}
    for model in models:
        for name in model.settings.model_names:
            if (other := names.setdefault(fold_name(name), model)) is not model:
                raise SettingError(
                    f"{model.said}: {name!r} is the name of {other.said} already; give one of them another "
                    "by served-model-name"
                )
        space = model.settings.dyn_namespace
        if (other := spaces.setdefault(space, model)) is not model:
            raise SettingError(
                f"{model.said}: its workers would be in {space!r} like those of {other.said}; give one of "
                "them another namespace"
            )


def listed_models(model_path: str) -> list[str]:
    """The models that TESSERA_MODEL_PATH names: several are separated by commas."""
    if os.path.isdir(model_path):
        return [model_path]
    return [each for each in (each.strip() for each in model_path.split(",")) if each]


def wanted_models(
    given: LaunchSettings, *, split: bool, worker: Sequence[str] = (), encode_worker: Sequence[str] = ()
) -> tuple[bool, list[WantedModel]]:
    """Whether TESSERA_MODEL_PATH names several models, and what it names. Raises ``SettingError``."""
    paths = listed_models(given.model_path)
    flags: Any = {"worker": tuple(worker), "encode_worker": tuple(encode_worker), "split": split}
    if len(paths) < 2:
        return False, [WantedModel(settings=given, **flags)]
    found = []
    for path in paths:
        settings = replace(given, model_path=path, written={**given.written, "model_path": path})
        found.append(WantedModel.one_of_several(settings, said=path, **flags))
    check_apart(found)
    return True, found


def of_list(path: str, settings: S) -> S:
    """The settings for workers of the model that ``served_model_name`` names in a file which frontends read.

    Raises ``SettingError`` for what is not there.
    """
    from tessera.small_files import read_yaml

    wanted = settings.served_model_name.strip()
    try:
        listed = read_yaml(path)["models"]
        entries = {name: entry for entry in listed for name in _names(settings, entry)}
    except OSError as error:
        raise SettingError(f"{settings.named('models_file')}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{settings.named('models_file')}: is no list of models: {' '.join(str(error).split())}"
        ) from error
    name = find_name(wanted, entries)
    if name is None:
        raise SettingError(
            f"{settings.named('served_model_name')}: says which of {', '.join(entries)} of {path} is served"
        )
    entry = entries[name]
    names = _names(settings, entry)
    space = (
        str(entry.get("embed_endpoint") or "").removeprefix("dyn://").rpartition(".")[0].rpartition(".")[0]
    )
    options = entry.get("model_options")
    return replace(
        settings,
        model_path=str(entry["model_path"]),
        model_revision=str(entry.get("revision") or ""),
        model_options=json.dumps(options) if options else "",
        served_model_name=",".join(names),
        dyn_namespace=space or namespace_of(settings.dyn_namespace, names[0]),
        encode_endpoint=str(entry.get("encode_endpoint") or settings.encode_endpoint),
    )


def _names(settings: Shared, entry: Mapping[str, Any]) -> list[str]:
    """Those of an entry of such a file, or what its checkpoint is called."""
    given = [str(name) for name in entry.get("served_model_names") or ()]
    return given or replace(settings, model_path=str(entry["model_path"]), served_model_name="").model_names


@dataclass(slots=True, eq=False, kw_only=True)
class Deployed:
    """A model of a running service.

    ``slot`` is its own for as long as it is served. ``settings`` have numbers, and the directory that was
    found; ``source`` is what the hub's is a copy of (``checkpoint/source``), in JSON. ``ports`` are those of
    its workers, in their order, ``share_flags`` what each of them is told of its share, and ``takes`` what it
    is counted with. ``loading`` says why it cannot be opened yet.
    """

    wanted: WantedModel
    slot: int
    settings: LaunchSettings
    workers: list[Workers]
    source: str = ""
    loading: str = ""
    ports: Sequence[int] = ()
    share_flags: Sequence[Sequence[Sequence[str]]] = ()
    takes: Sequence[Any] = ()
    children: list[Child] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.wanted.name

    @property
    def worker_count(self) -> int:
        """Of this host."""
        return sum(kind.count for kind in self.workers)

    @property
    def here(self) -> tuple[int, int]:
        """Embed and encode workers of this host; those with both stages embed."""
        counts = {kind.role: kind.count for kind in self.workers}
        return counts.get("agg", 0) + counts.get("embed", 0), counts.get("encode", 0)

    @property
    def expected(self) -> tuple[str, str]:
        """Embed and encode workers of all hosts."""
        embed, encode = self.here
        settings = self.settings
        return settings.expect_embed_workers or str(embed), settings.expect_encode_workers or str(encode)

    def follow(self, wanted: WantedModel) -> None:
        """Be what is asked for now, where that makes no difference to the workers."""
        self.wanted = wanted
        self.settings = _as_frontends_see(self.settings, wanted.settings)

    def frontend_flags(self) -> list[str]:
        """What frontends are told that serve this model alone."""
        embed, encode = self.expected
        # The numbers of workers that will be started, so that a missing one shows.
        return ["--expect-embed", embed, "--expect-encode", encode, *named_model_flags(self.settings)]

    def described(self) -> dict[str, Any]:
        """For the file that frontends read."""
        settings, space = self.settings, self.settings.dyn_namespace
        embed, encode = self.expected
        return {
            "model_path": settings.model_path,
            "revision": settings.model_revision,
            "model_options": json.loads(settings.model_options or "{}"),
            "served_model_names": self.wanted.settings.model_names,
            "dimensions_allowed": settings.dimensions_allowed,
            "max_embed_tokens": settings.max_embed_tokens,
            "embed_endpoint": f"dyn://{space}.embed.generate",
            "encode_endpoint": settings.encode_endpoint or f"dyn://{space}.encode.generate",
            "expected_embed": int(embed),
            "expected_encode": int(encode),
            "slot": self.slot,
            "source": json.loads(self.source) if self.source else None,
            "loading": self.loading,
        }


def document(models: Iterable[Deployed]) -> str:
    """What frontends read: ``--models``."""
    return json.dumps({"models": [model.described() for model in models]}, indent=1) + "\n"


def free_slot(taken: Collection[int]) -> int:
    """The lowest that is not taken."""
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
