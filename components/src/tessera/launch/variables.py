"""The environment variables of a service: what they say, what of them is out of date, and what is unknown.

Flags of frontends and workers are known by their own settings, whose modules need what is installed: they
are imported where there is a variable that the launcher does not read itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.launch.settings import (
    LaunchSettings,
    RoleSettings,
    SettingError,
    Shared,
    read_fields,
    variable_of,
)
from tessera.settings import PREFIX, is_link
from tessera.terminal import near

NO_SETTINGS: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("API_KEYS", "TLS_KEY_PASSWORD"),
        # Of commands that ask a service.
        *("API_KEY", "URL"),
        # From the launcher to its processes.
        *("FRONTEND_GROUP", "MODEL_SOURCE"),
        # Where processes keep what may be made again.
        "CACHE_DIR",
        # Of deploy/ and of the launch scripts.
        *("ROOT", "VERSION", "PIP_ARGS"),
    )
)
"""What begins like a setting's variable and is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFlag:
    """A flag of frontends or workers; ``values`` is how many it takes, as argparse writes it."""

    values: int | str | None
    frontend: bool
    worker: bool
    variable: str


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag of frontends or workers in the words of a command line.

    ``said`` is how the variable or the key is found that gives it; empty for one of the command line itself.
    """

    flag: str
    words: tuple[str, ...]
    said: str = ""

    @classmethod
    def of(cls, flag: str, values: Sequence[str], said: str = "") -> GivenFlag:
        """With these values."""
        words = (f"{flag}={values[0]}",) if len(values) == 1 else (flag, *values)
        return cls(flag, words, said)


def process_flags() -> dict[str, ProcessFlag]:
    """The flags of frontends and workers by name."""
    # Imported for these alone: they take a quarter of a second.
    from tessera.flags import flag_fields, flags_of
    from tessera.frontend.model_settings import MODELS_FLAG
    from tessera.frontend.settings import FrontendSettings
    from tessera.worker.settings import WorkerSettings

    frontend, worker = flags_of(FrontendSettings), flags_of(WorkerSettings)
    variables = {
        field.setting.flag: field.variable
        for settings in (FrontendSettings, WorkerSettings)
        for field in flag_fields(settings)
    }
    return {
        flag: ProcessFlag(
            values=(frontend | worker)[flag],
            frontend=flag in frontend,
            worker=flag in worker,
            variable=variables.get(flag, ""),
        )
        for flag in frontend | worker
        # It is the launcher that writes the file.
        if flag != MODELS_FLAG
    }


def given_flags(environment: Mapping[str, str]) -> list[GivenFlag]:
    """The flags of frontends and workers that variables give.

    Raises ``SettingError`` for what is neither on nor off, and ``ImportError`` before anything is installed.
    """
    if not (names := _not_own(environment)):
        return []
    if sys.flags.no_site:
        import site

        site.main()
    from tessera.errors import ConfigError
    from tessera.flags import without_flag, words_of

    known = process_flags()
    found = []
    for flag, process in known.items():
        if process.variable not in names:
            continue
        text = environment[process.variable]
        said = f"{process.variable}={text}"
        try:
            words = words_of(flag, process.values, text, off=flag.replace("--", "--no-", 1) in known)
        except ConfigError as error:
            raise SettingError(f"{said}: {without_flag(error.message, flag)}") from error
        found.append(GivenFlag(flag, tuple(words), said))
    return found


def process_words(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The flags of frontends, and those of workers, that variables give; raises as ``given_flags``."""
    given = given_flags(environment)
    known = process_flags() if given else {}
    frontend = [word for each in given if known[each.flag].frontend for word in each.words]
    return frontend, [word for each in given if known[each.flag].worker for word in each.words]


# Of worker flags the only one that an encode worker refuses.
_NOT_OF_ENCODE_WORKERS: Final = frozenset({"--dynamo-model"})


def encode_flags(words: Sequence[str]) -> list[str]:
    """Those of a worker's flags that an encode worker takes, too."""
    return [word for word in words if word not in _NOT_OF_ENCODE_WORKERS]


def out_of_date(environment: Mapping[str, str], kind: type[Shared], *, scripts: bool = False) -> list[str]:
    """A sentence for each variable of before that sets something of these settings, with the one of now.

    What has no flag is for the launch ``scripts``, but for further flags of frontends.
    """
    renamed = {
        field.name.upper(): field.variable
        for field in read_fields(kind)
        if not variable_of(field).others and (scripts or field.name not in ("python", "venv"))
    }
    if scripts:
        renamed["PIP_ARGS"] = f"{PREFIX}PIP_ARGS"
    return [
        f"{old} is called {new} now: the old name works in this release and in no later one"
        for old, new in renamed.items()
        if environment.get(old)
    ]


def unknown(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of our prefix that no setting has; ``ImportError`` as ``given_flags``."""
    names = _not_own(environment)
    if not names:
        return []
    variables = {process.variable for process in process_flags().values() if process.variable}
    everything = variables | own_variables() | NO_SETTINGS
    return [
        f"{name} does nothing: no setting has such a variable{near(name, everything)}"
        for name in sorted(names - variables)
    ]


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of processes which are told all settings by flags."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) or name in NO_SETTINGS
    }


def _not_own(environment: Mapping[str, str]) -> set[str]:
    """The variables of our prefix that the launcher does not read itself."""
    return {
        name
        for name, text in environment.items()
        if name.startswith(PREFIX) and text and not is_link(name, text)
    } - (own_variables() | NO_SETTINGS)


def own_variables() -> set[str]:
    """What the launcher reads itself; flags tell it to the processes that it starts."""
    return {
        field.variable
        for settings in (LaunchSettings, RoleSettings)
        for field in read_fields(settings)
        # What only somebody else's name is for.
        if field.setting.flag or not variable_of(field).others
    }
