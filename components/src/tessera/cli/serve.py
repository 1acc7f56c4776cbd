"""``tessera serve``: a service on this machine, of what this interpreter has installed.

The settings of the launcher stand in ``launch/settings``. Flags of frontends and workers are taken as well,
and go to the processes that know them: they stand in ``frontend/settings`` and ``worker/settings``, which are
imported for a flag that the launcher does not have itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

from tessera.launch.children import Signals
from tessera.launch.processes import Workers, agg_workers, e_p_workers
from tessera.launch.report import Report
from tessera.launch.service import Service, status_of
from tessera.launch.settings import OPEN, Given, LaunchSettings, Setting, SettingError, plain, settings

_TEXT: Final = """\
Starts a service on this machine and keeps it running until Ctrl-C or SIGTERM: frontends on
one port, and workers, one for each card. A worker runs both stages of the model unless
--encode-workers or --embed-workers is given: then each stage has workers of its own. Without
MODEL it serves the demonstration model.

Flags of frontends and workers are taken as well: --help-all lists them, too.

A flag wins over the file that --config names, the file over the environment. The file is YAML
with a key for each flag: `port: 8000`, `encode_workers: 2`."""

_NAMES: Final = "--served-model-name"
# Of worker flags the only one that an encode worker refuses.
_NOT_OF_ENCODE_WORKERS: Final = frozenset({"--dynamo-model"})


class UnknownWord(Exception):
    """A command line that cannot be read, and why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UnknownWord(message)


@dataclass(frozen=True, slots=True)
class Passed:
    """A flag of frontends or workers with its values, as it was written."""

    flag: str
    values: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        if len(self.values) == 1:
            return [f"{self.flag}={self.values[0]}"]
        return [self.flag, *self.values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command line and its file say: settings by field, and flags of the processes."""

    given: Mapping[str, Given]
    frontend: Sequence[str] = ()
    worker: Sequence[str] = ()
    encode_worker: Sequence[str] = ()


def main(arguments: Sequence[str], prog: str = "tessera serve") -> int:
    """Run a service until a signal ends it; the status: 128 and the signal, 1 or 2 where it cannot start."""
    words = list(arguments)
    if not {"-h", "--help", "--help-all"}.isdisjoint(words):
        _help(prog, everything="--help-all" in words)
        return 0
    # What comes while modules are imported is found by launch.children.Signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        asked = read(words, prog)
    except UnknownWord as error:
        sys.stderr.write(f"{prog}: {error}; {prog} --help lists what there is\n")
        return 2
    except SettingError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
    signals = Signals()
    log_format = asked.given.get("log_format")
    report = Report(log_format.text if log_format else os.environ.get("LOG_FORMAT", ""))

    def serve() -> None:
        given = replace(LaunchSettings.read(os.environ, asked.given), passed=tuple(asked.frontend))
        split = is_split(given)

        def workers(settings: LaunchSettings) -> list[Workers]:
            if split:
                return e_p_workers(settings, asked.worker, asked.encode_worker)
            return agg_workers(settings, asked.worker)

        service = Service(
            given,
            workers,
            python=sys.executable,
            # What lies in the folder that it is started from is no part of the service.
            environment={**os.environ, "PYTHONSAFEPATH": "1"},
            signals=signals,
            report=report,
        )
        if service.worker_count and (
            missing := [name for name in ("torch", "safetensors") if not find_spec(name)]
        ):
            raise SettingError(
                f"workers need {' and '.join(missing)}, which is not installed here: "
                "pip install 'tessera-embed[worker]'"
            )
        service.check()
        service.run()

    return status_of(serve, report)


def is_split(settings: LaunchSettings) -> bool:
    """Whether each stage has workers of its own; raises ``SettingError`` for numbers of both kinds."""
    split = [name for name in ("encode_workers", "embed_workers") if getattr(settings, name) != OPEN]
    if split and settings.agg_workers != OPEN:
        both = f"{settings.named('agg_workers')} and {settings.named(split[0])}"
        raise SettingError(f"{both}: workers have both stages, or one each")
    return bool(split)


def read(words: Sequence[str], prog: str = "tessera serve") -> Asked:
    """A command line with the file that it names.

    Raises ``UnknownWord`` for a flag that nobody knows or a value that it refuses, ``SettingError`` for what
    is wrong in the file.
    """
    own = {each.variable.flag: each for each in settings() if each.variable.flag}
    config, left = _config(words)
    file = {} if config is None else _read_file(config)
    flags = {word.partition("=")[0] for word in left if word.startswith("--") and word != "--"}
    others = (flags | {f"--{key}" for key in file}) - own.keys()
    known = _known_to_processes() if others else {}
    for flag in sorted(flags & others - known.keys()):
        raise UnknownWord(f"there is no flag {flag}{_meant(flag, {*own, *known})}")
    for flag in sorted(others - known.keys()):
        meant = _meant(flag, {*own, *known}).replace("--", "")
        raise SettingError(f"{config}: there is no setting {flag.removeprefix('--')}{meant}")

    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    for flag in own:
        parser.add_argument(flag, dest=flag, default=None, nargs="+" if flag == _NAMES else None)
    for flag in sorted(flags & others):
        parser.add_argument(flag, action=_Collect, dest="passed", nargs=known[flag].values, default=[])
    parsed = vars(parser.parse_args(left))

    given = {
        each.field: Given(_setting_text(file[key]), f"{config}: {key}: {_setting_text(file[key])}")
        for each in own.values()
        if file.get(key := each.variable.flag.removeprefix("--")) is not None
    }
    passed = [_from_file(f"--{key}", value, known) for key, value in file.items() if f"--{key}" in others]
    names = parsed[_NAMES] or []
    if len(names) > 1 and parsed["model"] is None and parsed["--model-path"] is None:
        # The last may have been meant as MODEL.
        raise UnknownWord(f"{_NAMES} {' '.join(names)}: write MODEL before it, or a comma between names")
    parsed[_NAMES] = ",".join(names) or None
    for flag, each in own.items():
        if parsed[flag] is not None:
            given[each.field] = Given(parsed[flag], f"{flag} {parsed[flag]}")
    if parsed["model"] is not None:
        if parsed["--model-path"] is not None:
            raise UnknownWord(
                f"{parsed['model']} and --model-path {parsed['--model-path']}: one model is served"
            )
        given["model_path"] = Given(parsed["model"], parsed["model"])
    passed += parsed.get("passed", [])
    return _asked(given, [each for each in passed if each is not None], known)


class _Collect(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = (values,) if isinstance(values, str) else tuple(values)
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), Passed(str(option), given)])


def _config(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that is named, and the other words."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parsed, left = parser.parse_known_args(words)
    return parsed.config, left


def _read_file(path: Path) -> dict[str, Any]:
    """What stands in a YAML file, by flags without their first dashes. Raises ``SettingError``."""
    import yaml

    try:
        found = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise SettingError(f"{path}: not valid YAML: {said}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingError(f"{path}: must hold settings with their values, not a {type(found).__name__}")
    return {str(key).replace("_", "-"): value for key, value in found.items()}


def _setting_text(value: Any) -> str:
    """A value of YAML as a variable would hold it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """A flag of frontends or workers; ``values`` is how many it takes, as argparse writes it."""

    values: int | str | None
    frontend: bool
    worker: bool


def _known_to_processes() -> dict[str, _Flag]:
    """The flags of frontends and workers by name."""
    # Imported for these alone: they take a quarter of a second.
    from tessera.frontend.settings import FrontendSettings
    from tessera.settings import flags_of
    from tessera.worker.settings import WorkerSettings

    frontend, worker = flags_of(FrontendSettings), flags_of(WorkerSettings)
    return {
        flag: _Flag(values=(frontend | worker)[flag], frontend=flag in frontend, worker=flag in worker)
        for flag in frontend | worker
    }


def _from_file(flag: str, value: Any, known: Mapping[str, _Flag]) -> Passed | None:
    """A flag of a process as the file gives it; None where it says no more than its absence."""
    if known[flag].values == 0:
        if value:
            return Passed(flag, ())
        off = flag.replace("--", "--no-", 1)
        return Passed(off, ()) if off in known else None
    if value is None:
        return None
    if isinstance(value, list):
        return Passed(flag, tuple(map(str, value)))
    return Passed(flag, (json.dumps(value) if isinstance(value, dict) else str(value),))


def _asked(given: Mapping[str, Given], passed: Sequence[Passed], known: Mapping[str, _Flag]) -> Asked:
    frontend = [word for each in passed if known[each.flag].frontend for word in each.words]
    workers = [each for each in passed if known[each.flag].worker]
    worker = [word for each in workers for word in each.words]
    encode = [word for each in workers if each.flag not in _NOT_OF_ENCODE_WORKERS for word in each.words]
    if passed:
        _check(frontend, worker)
    return Asked(given=given, frontend=frontend, worker=worker, encode_worker=encode)


def _check(frontend: Sequence[str], worker: Sequence[str]) -> None:
    """Raises ``UnknownWord`` for values that frontends or workers would refuse, before any is started."""
    from tessera.errors import ConfigError
    from tessera.frontend.settings import FrontendSettings
    from tessera.settings import add_flags, read_flags
    from tessera.worker.settings import WorkerSettings

    for kind, words in ((FrontendSettings, frontend), (WorkerSettings, worker)):
        parser = _Parser(add_help=False, allow_abbrev=False)
        add_flags(parser, kind)
        try:
            read_flags(kind, parser.parse_args([*words, "--model-path=."]))
        except ConfigError as error:
            raise UnknownWord(error.message) from error


def _meant(flag: str, known: set[str]) -> str:
    close = get_close_matches(flag, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _help(prog: str, *, everything: bool) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [MODEL] [FLAG...]",
        description=_TEXT,
        add_help=False,
        formatter_class=_Formatter,
    )
    group = parser.add_argument_group("arguments")
    group.add_argument("model", nargs="?", metavar="MODEL", help="what is served, as --model-path says")
    group.add_argument("--config", metavar="FILE", help="YAML with settings: flags without their dashes")
    headings = {}
    for each in settings():
        variable = each.variable
        if not variable.flag:
            continue
        if variable.group not in headings:
            headings[variable.group] = parser.add_argument_group(variable.group)
        text = f"{plain(variable.help)} ({each.name}, default: {plain(each.default)})"
        headings[variable.group].add_argument(
            variable.flag, metavar=_metavar(each), help=text.replace("%", "%%")
        )
    if everything:
        _add_others(parser)
    parser.print_help()


def _metavar(setting: Setting) -> str:
    if setting.variable.metavar:
        return setting.variable.metavar
    if setting.variable.choices:
        return f"{{{','.join(setting.variable.choices)}}}"
    return "N" if setting.kind is int else setting.variable.flag.rpartition("-")[2].upper()


def _add_others(parser: argparse.ArgumentParser) -> None:
    """The flags of the processes that the launcher does not have itself."""
    from tessera.frontend.settings import FrontendSettings
    from tessera.settings import add_flags
    from tessera.worker.settings import WorkerSettings

    taken = {each.variable.flag for each in settings()}
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
