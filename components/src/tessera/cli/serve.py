"""``tessera serve``: a service on this machine, of what this interpreter has installed.

The settings of the launcher stand in ``launch/settings``. Flags of frontends and workers are taken as well,
and go to the processes that know them: they stand in ``frontend/settings`` and ``worker/settings``, which are
imported for a flag that the launcher does not have itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NoReturn

from tessera.defaults import ENGINE_CONFIGS
from tessera.extras import absent, lack
from tessera.launch.children import Signals
from tessera.launch.models import WantedModel, check_apart, wanted_models
from tessera.launch.processes import Workers, frontend_flags, worker_flags
from tessera.launch.report import Report
from tessera.launch.service import Service, status_of
from tessera.launch.settings import (
    OPEN,
    Given,
    LaunchSettings,
    SettingError,
    default_of,
    log_format_of,
    plain,
    settings,
    variable_of,
)
from tessera.launch.variables import (
    GivenFlag,
    ProcessFlag,
    encode_flags,
    given_flags,
    out_of_date,
    process_flags,
    unknown,
    without_settings,
)
from tessera.settings import Field
from tessera.small_files import MOST_KEYS_BYTES, read_regular, read_yaml, why_unread
from tessera.terminal import complain, near

_TEXT: Final = """\
Starts a service on this machine and keeps it running until Ctrl-C or SIGTERM: frontends on
one port, and workers, one for each GPU. A worker runs both stages of the model unless
--encode-workers or --embed-workers is given: then each stage has workers of its own. Without
MODEL it serves the demonstration model. Of several models each has workers of its own, and
requests choose by name.

Flags of frontends and workers are taken as well: --help-all lists them, too.

A flag wins over the file that --config names, the file over the environment. The file is YAML
with a key for each flag: `port: 8000`, `encode_workers: 2`. Under `models:` it lists several
models: each has `model`, and what settings of its own it needs. SIGHUP reads that list again."""

_NAMES: Final = "--served-model-name"


class UnknownWord(Exception):
    """A command line that cannot be read, and why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UnknownWord(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command line and its file say: settings by field, and flags of the processes.

    ``models`` are several, which have all of that with their own over it; ``said`` is where one stands.
    ``keys`` is the file of API keys, where one is named, and the SHA-256 of what it holds.
    """

    given: Mapping[str, Given]
    said: str = ""
    frontend: Sequence[str] = ()
    worker: Sequence[str] = ()
    models: Sequence[Asked] = ()
    config: Path | None = None
    keys: tuple[str, bytes] | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """How a flag of a process is found that a variable or the file gives."""


def main(arguments: Sequence[str], prog: str = "tessera serve") -> int:
    """Run a service until a signal ends it; the status: 128 and the signal, 1 or 2 where it cannot start."""
    words = list(arguments)
    if not {"-h", "--help", "--help-all"}.isdisjoint(words):
        _help(prog, everything="--help-all" in words)
        return 0
    # What comes while modules are imported is found by launch.children.Signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        asked = read(words, prog, os.environ)
    except UnknownWord as error:
        complain(f"{prog}: {error}; {prog} --help lists what there is")
        return 2
    except SettingError as error:
        complain(f"{prog}: {error}")
        return 1
    signals = Signals()
    signals.rereads = asked.config is not None
    log_format = asked.given.get("log_format")
    report = Report(log_format.text if log_format else log_format_of(os.environ))
    for sentence in (*out_of_date(os.environ, LaunchSettings), *unknown(os.environ)):
        report.warn(sentence)

    def reread() -> tuple[list[WantedModel], list[str]]:
        try:
            now = read(words, prog, os.environ)
        except UnknownWord as error:
            raise SettingError(str(error)) from error
        models = first
        if now.models and asked.models:
            models = wanted(replace(asked, models=now.models))[2]
            check_engines(models)
        return models, changed(asked, now)

    given, several, first = LaunchSettings(), False, list[WantedModel]()

    def serve() -> None:
        nonlocal given, several, first
        given, several, first = wanted(asked)
        check_frontends(given, asked)
        check_engines(first)
        service = Service(
            given,
            first,
            several=several,
            python=sys.executable,
            # What lies in the folder that it is started from is no part of the service.
            environment={**without_settings(os.environ), "PYTHONSAFEPATH": "1"},
            signals=signals,
            report=report,
            reread=reread,
        )
        if service.worker_count and (lacking := absent("torch", "safetensors")):
            raise SettingError(f"a worker {lack(*lacking, extra='worker')}")
        service.check()
        service.run()

    return status_of(serve, report)


def wanted(asked: Asked) -> tuple[LaunchSettings, bool, list[WantedModel]]:
    """The settings of the service, whether it has several models, and its models. Raises ``SettingError``."""
    given = replace(LaunchSettings.read(os.environ, asked.given), passed=tuple(asked.frontend))
    if not asked.models:
        several, found = wanted_models(
            given, split=is_split(given), worker=asked.worker, encode_worker=encode_flags(asked.worker)
        )
        return given, several, found
    found = []
    for model in asked.models:
        common = {name: each for name, each in asked.given.items() if name not in _other_shape(model.given)}
        settings = LaunchSettings.read(os.environ, {**common, **model.given})
        try:
            split = is_split(settings)
        except SettingError as error:
            raise SettingError(f"{model.said}: {error}") from error
        worker = (*asked.worker, *model.worker)
        found.append(
            WantedModel.one_of_several(
                settings,
                own_namespace="dyn_namespace" in model.given,
                split=split,
                worker=worker,
                encode_worker=tuple(encode_flags(worker)),
                said=model.said,
            )
        )
    check_apart(found)
    return given, True, found


def _other_shape(given: Collection[str]) -> set[str]:
    """Numbers of workers of all models that one has no use for: its own workers are of the other kind."""
    split = {"encode_workers", "embed_workers"}
    if not split.isdisjoint(given):
        return {"agg_workers"}
    return split if "agg_workers" in given else set()


def changed(before: Asked, now: Asked) -> list[str]:
    """What has changed beside the models, as whoever wrote it calls it."""
    found = [
        (now.given.get(name) or before.given[name]).said
        for name in sorted(before.given.keys() | now.given.keys())
        if _text_of(before.given.get(name)) != _text_of(now.given.get(name))
    ]
    for words, others in ((before.frontend, now.frontend), (before.worker, now.worker)):
        found += [word for word in others if word not in words] or [w for w in words if w not in others]
    if before.keys != now.keys and now.keys is not None:
        found.append(f"what --api-keys-file {now.keys[0]} holds")
    if bool(before.models) is not bool(now.models):
        found.append(f"{now.config}: models")
    return list(dict.fromkeys(found))


def _text_of(given: Given | None) -> str | None:
    return None if given is None else given.text


def is_split(settings: LaunchSettings) -> bool:
    """Whether each stage has workers of its own; raises ``SettingError`` for numbers of both kinds."""
    split = [name for name in ("encode_workers", "embed_workers") if getattr(settings, name) != OPEN]
    if split and settings.agg_workers != OPEN:
        both = f"{settings.named('agg_workers')} and {settings.named(split[0])}"
        raise SettingError(f"{both}: workers have both stages, or one each")
    return bool(split)


def read(
    words: Sequence[str], prog: str = "tessera serve", environment: Mapping[str, str] | None = None
) -> Asked:
    """A command line with the file that it names, over flags of processes that the environment gives.

    Raises ``UnknownWord`` for a flag that nobody knows or a value that it refuses, ``SettingError`` for what
    is wrong in the file.
    """
    own = {field.setting.flag: field for field in settings() if field.setting.flag}
    config, left = _config(words)
    file = {} if config is None else _read_file(config)
    listed = file.pop("models", None)
    flags = {word.partition("=")[0] for word in left if word.startswith("--") and word != "--"}
    others = (flags | {f"--{key}" for key in file}) - own.keys()
    set_by_variables = given_flags(environment or {})
    known = process_flags() if others or set_by_variables else {}
    for flag in sorted(flags & others - known.keys()):
        raise UnknownWord(f"there is no flag {flag}{near(flag, {*own, *known, '--config', '--help-all'})}")
    for flag in sorted(others - known.keys()):
        meant = near(flag, {*own, *known, "--models"}).replace("--", "")
        raise SettingError(f"{config}: there is no setting {flag.removeprefix('--')}{meant}")

    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    for flag in own:
        parser.add_argument(flag, dest=flag, default=None, nargs="+" if flag == _NAMES else None)
    for flag in sorted(flags & others):
        parser.add_argument(flag, action=_Collect, dest="passed", nargs=known[flag].values, default=[])
    parsed = vars(parser.parse_intermixed_args(left))

    given = {
        field.name: Given(_setting_text(file[key]), f"{config}: {key}: {_setting_text(file[key])}")
        for flag, field in own.items()
        if file.get(key := flag.removeprefix("--")) is not None
    }
    passed: list[GivenFlag | None] = [
        *set_by_variables,
        *(
            _from_file(f"--{key}", value, known, f"{config}: {key}")
            for key, value in file.items()
            if f"--{key}" in others
        ),
    ]
    names = parsed[_NAMES] or []
    named = parsed["models"]
    if len(names) > 1 and not named and parsed["--model-path"] is None:
        # The last may have been meant as MODEL.
        raise UnknownWord(f"{_NAMES} {' '.join(names)}: write MODEL before it, or a comma between names")
    parsed[_NAMES] = ",".join(names) or None
    for flag, field in own.items():
        if parsed[flag] is not None:
            given[field.name] = Given(parsed[flag], f"{flag} {parsed[flag]}")
    if named and parsed["--model-path"] is not None:
        raise UnknownWord(
            f"{named[0]} and --model-path {parsed['--model-path']}: name models without a flag, all of them"
        )
    models = [] if listed is None else _listed(listed, config, own)
    if len(named) == 1 and not models:
        given["model_path"] = Given(named[0], named[0])
    elif named and models:
        raise UnknownWord(f"{' '.join(named)}: the models are those that {config} lists")
    elif named:
        models = [Asked(said=each, given={"model_path": Given(each, each)}) for each in named]
    if models and (twice := next((each for each in _OF_ONE if each in given), None)) is not None:
        raise UnknownWord(f"{given[twice].said}: is of one model, and there are several")
    passed += parsed.get("passed", [])
    return replace(_asked(given, passed, known), models=models, config=config)


# The names of one model; each of several has its own.
_OF_ONE: Final = ("model_path", "served_model_name")


def _listed(listed: Any, config: Path | None, own: Mapping[str, Field]) -> list[Asked]:
    """The models that stand in the file. Raises ``SettingError``."""
    if not isinstance(listed, list) or not listed:
        raise SettingError(f"{config}: models: must be a list of models")
    return [_listed_model(each, f"{config}: models[{index}]", own) for index, each in enumerate(listed)]


def _listed_model(entry: Any, said: str, own: Mapping[str, Field]) -> Asked:
    if isinstance(entry, str):
        entry = {"model": entry}
    if not isinstance(entry, dict):
        raise SettingError(f"{said}: must be a model with its settings, not a {type(entry).__name__}")
    values = {f"--{str(key).replace('_', '-')}": value for key, value in entry.items()}
    if "--model" in values:
        values["--model-path"] = values.pop("--model")
    given, passed = {}, []
    known = process_flags() if values.keys() - own.keys() else {}
    for flag, value in values.items():
        key = flag.removeprefix("--")
        if flag in own and variable_of(own[flag]).of_model:
            if value is not None:
                text = _setting_text(value)
                given[own[flag].name] = Given(text, f"{said}: {key}: {text}")
        elif flag in known and known[flag].worker and flag not in own:
            passed.append(_from_file(flag, value, known, f"{said}: {key}"))
        elif flag in own or flag in known:
            raise SettingError(f"{said}: {key}: is of the whole service: write it beside models")
        else:
            of_models = {flag for flag, field in own.items() if variable_of(field).of_model}
            meant = near(flag, {"--model"} | of_models | {each for each in known if known[each].worker})
            raise SettingError(f"{said}: there is no setting {key}{meant.replace('--', '')}")
    if not given.get("model_path", Given("", "")).text:
        raise SettingError(f"{said}: model: names no model")
    try:
        return replace(_asked(given, passed, known), said=said)
    except UnknownWord as error:
        raise SettingError(f"{said}: {error}") from error


class _Collect(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = (values,) if isinstance(values, str) else tuple(values)
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), GivenFlag.of(str(option), given)])


def _config(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that is named, and the other words."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parsed, left = parser.parse_known_args(words)
    return parsed.config, left


def _read_file(path: Path) -> dict[str, Any]:
    """What stands in a YAML file, by flags without their first dashes. Raises ``SettingError``."""
    try:
        found = read_yaml(path)
    except (OSError, ValueError) as error:
        raise SettingError(f"{path}: {why_unread(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingError(f"{path}: must hold settings with their values, not a {type(found).__name__}")
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in found.items():
        flag = str(key).replace("_", "-")
        if (other := names.setdefault(flag, str(key))) != str(key):
            raise SettingError(f"{path}: {other} and {key} are the same setting")
        settings[flag] = value
    return settings


def _setting_text(value: Any) -> str:
    """A value of YAML as a variable would hold it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_file(flag: str, value: Any, known: Mapping[str, ProcessFlag], said: str) -> GivenFlag | None:
    """A flag of a process as the file gives it; None where it says no more than its absence."""
    if known[flag].values == 0:
        if value:
            return GivenFlag.of(flag, (), said)
        off = flag.replace("--", "--no-", 1)
        return GivenFlag.of(off, (), said) if off in known else None
    if value is None:
        return None
    if isinstance(value, list):
        return GivenFlag.of(flag, tuple(map(str, value)), said)
    return GivenFlag.of(flag, (json.dumps(value) if isinstance(value, dict) else str(value),), said)


def _asked(
    given: Mapping[str, Given], words: Sequence[GivenFlag | None], known: Mapping[str, ProcessFlag]
) -> Asked:
    passed = [each for each in words if each is not None]
    frontend = [word for each in passed if known[each.flag].frontend for word in each.words]
    workers = [each for each in passed if known[each.flag].worker]
    worker = [word for each in workers for word in each.words]
    # The last that gives a flag is the one that counts.
    sources = {each.flag: each.said for each in passed}
    if passed:
        _check(frontend, worker, sources)
    return Asked(
        given=given,
        frontend=frontend,
        worker=worker,
        keys=_keys(frontend),
        sources={flag: said for flag, said in sources.items() if said},
    )


def _keys(frontend: Sequence[str]) -> tuple[str, bytes] | None:
    files = [word.partition("=")[2] for word in frontend if word.startswith("--api-keys-file=")]
    if not files:
        return None
    try:
        return files[-1], hashlib.sha256(read_regular(files[-1], MOST_KEYS_BYTES)).digest()
    except OSError:
        # Frontends say what is wrong with it.
        return files[-1], b""


def _check(frontend: Sequence[str], worker: Sequence[str], sources: Mapping[str, str]) -> None:
    """Raises ``UnknownWord`` for values that frontends or workers would refuse, before any is started.

    ``SettingError`` for those of a variable or the file.
    """
    from tessera.errors import ConfigError
    from tessera.flags import check_flags
    from tessera.frontend.settings import FrontendSettings
    from tessera.worker.settings import WorkerSettings

    for kind, words in ((FrontendSettings, frontend), (WorkerSettings, worker)):
        try:
            check_flags(kind, [*words, "--model-path=."])
        except ConfigError as error:
            refused = _blamed(error.message, sources)
            raise (UnknownWord if refused == error.message else SettingError)(refused) from error


def _blamed(message: str, sources: Mapping[str, str]) -> str:
    """An error about a flag, as one about the variable or the key that gives it."""
    from tessera.flags import without_flag

    for flag, said in sources.items():
        if said and re.match(rf"(argument )?{flag}\b(?!-)", message):
            rest = without_flag(message, flag)
            value, _, why = rest.partition(": ")
            return f"{said}: {why if why and said.endswith(value) else rest}"
    return message


def check_frontends(given: LaunchSettings, asked: Asked) -> None:
    """Raises ``SettingError`` for what frontends would refuse once they have been started."""
    own = [name for name in _OF_FRONTENDS if name in asked.given or name not in given.defaults]
    if not (own or asked.frontend or os.environ.get("TESSERA_API_KEYS")) or not given.frontends:
        return
    from tessera.errors import ConfigError
    from tessera.frontend.settings import check

    by_name = {field.name: field.setting.flag for field in settings()}
    said = {by_name[name]: given.named(name) for name in own}
    sources = {flag: name for flag, name in said.items() if not name.startswith("--")} | dict(asked.sources)
    try:
        check([*frontend_flags(given, given.dyn_http_port), *given.frontend_flags], os.environ)
    except ConfigError as error:
        raise SettingError(_blamed(error.message, sources)) from error


# What frontends are given by flags of the launcher that look at files, or are more than a word.
_OF_FRONTENDS: Final = (
    *("tls_cert", "tls_key", "max_file_size_mb", "dimensions_allowed", "max_embed_tokens"),
    "allowed_local_media_path",
)


def check_engines(models: Sequence[WantedModel]) -> None:
    """Raises ``SettingError`` for engine settings that workers would refuse once they have been started."""
    for model in models:
        for kind in model.workers(model.settings):
            own = [word for word in kind.flags if word.startswith(("--extra-engine", "--override-engine"))]
            if own or kind.engine_args != str(ENGINE_CONFIGS):
                _check_engine(model, kind)


def _check_engine(model: WantedModel, kind: Workers) -> None:
    from tessera.errors import ConfigError
    from tessera.worker.settings import check_stages

    settings = model.settings
    words = [*worker_flags(settings, kind.role, kind.engine_args), "--model-path", settings.model_path]
    try:
        check_stages([*words, *kind.flags])
    except ConfigError as error:
        raise SettingError(f"{model.said}: {error.message}" if model.said else error.message) from error


def _help(prog: str, *, everything: bool) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [MODEL...] [FLAG...]",
        description=_TEXT,
        add_help=False,
        formatter_class=_Formatter,
    )
    group = parser.add_argument_group("arguments")
    group.add_argument("model", nargs="*", metavar="MODEL", help="what is served, as --model-path says")
    group.add_argument("--config", metavar="FILE", help="YAML with settings: flags without their dashes")
    own = [field for field in settings() if field.setting.flag]
    for title, fields in groupby(own, key=lambda field: variable_of(field).group):
        heading = parser.add_argument_group(title)
        for field in fields:
            setting = field.setting
            text = f"{plain(setting.help)} ({field.variable}, default: {plain(default_of(field))})"
            heading.add_argument(setting.flag, metavar=_metavar(field), help=text.replace("%", "%%"))
    if everything:
        _add_others(parser)
    parser.print_help()


def _metavar(field: Field) -> str:
    if field.setting.metavar:
        return field.setting.metavar
    if field.choices:
        return f"{{{','.join(field.choices)}}}"
    return "N" if field.kind is int else field.setting.flag.rpartition("-")[2].upper()


def _add_others(parser: argparse.ArgumentParser) -> None:
    """The flags of the processes that the launcher does not have itself."""
    from tessera.flags import add_flags
    from tessera.frontend.settings import FrontendSettings
    from tessera.worker.settings import WorkerSettings

    taken = {field.setting.flag for field in settings()}
    for title, kind in (("frontends", FrontendSettings), ("workers", WorkerSettings)):
        group = parser.add_argument_group(f"of {title}")
        scratch = argparse.ArgumentParser(add_help=False)
        add_flags(scratch, kind)
        for action in scratch._actions:
            if not taken.intersection(action.option_strings):
                group._add_action(action)
            taken.update(action.option_strings)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)
