"""``python -m docs.tables``: write the tables of settings, of models of the hub, and of lines of families.

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``. After the name there may be flags or keys, to
write these alone, the heading of a group of flags, or packages of ``models/``; else it is what stands in no
group.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

import tessera.models
from tessera.errors import ConfigError
from tessera.flags import flag_fields
from tessera.frontend.settings import FrontendSettings
from tessera.launch.settings import rows, settings, variable_of
from tessera.models import families, hub_models_of
from tessera.settings import Field, Row, fields_of, joined
from tessera.transport.settings import TransportSettings
from tessera.worker.settings import StageSettings, WorkerSettings
from tessera_corpus.cli.embed import RunSettings
from tessera_engines.compiled.spec import BuildSpec, Profile

ROOT = Path(__file__).parents[1]
_MODELS = Path(tessera.models.__file__).parent
PAGES = ("docs/settings.md", "docs/operations.md", "docs/corpus.md", "docs/models.md", "CONTRIBUTING.md")

SETTINGS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "frontend": ("frontend flag", FrontendSettings),
    "worker": ("worker flag", WorkerSettings),
    "process": ("flag", WorkerSettings),
    "stages": ("key", StageSettings),
    "transport": ("key", TransportSettings),
    "build": ("key", BuildSpec),
    "profile": ("key", Profile),
    "embed": ("flag", RunSettings),
}
TABLE = re.compile(r"^<!-- (\w+)(?: (.+))? -->\n(?:.*\n)*?<!-- end -->$", re.MULTILINE)


def written(page: str) -> str:
    """The page with its tables as they should be."""
    return TABLE.sub(lambda found: _region(found[0].partition("\n")[0], found[1], found[2] or ""), page)


def _region(mark: str, name: str, what: str) -> str:
    own = {"variables": variables, "engines": _engines, "hub": _hub, "packages": partial(_packages, what)}
    table = own[name]() if name in own else _table(*SETTINGS[name], what)
    return f"{mark}\n{table}<!-- end -->"


def _table(head: str, settings: type[msgspec.Struct], what: str) -> str:
    names = what.split() if what.startswith("--") else []
    group = next((part for title, part in _groups(settings) if title == what), None)
    if what and group is not None:
        return _lines(head, rows_of(group), _variables(group))
    if what and not names:
        raise ValueError(f"{settings.__name__} has no group {what!r}")
    own = [field.setting.flag or field.name for field in fields_of(settings) if field.setting.help]
    return _lines(head, rows_of(settings, *(names or own)), {} if names else _variables(settings))


def _variables(settings: type[msgspec.Struct]) -> dict[str, str]:
    """The variables of flags; nothing for keys."""
    return {field.setting.flag: field.variable for field in flag_fields(settings)}


def _groups(settings: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The parts of settings with their headings, also those below a part that has none."""
    for field in fields_of(settings):
        if field.part is not None:
            yield field.setting.group, field.part
            if not field.setting.group:
                yield from _groups(field.part)


def rows_of(settings: type[msgspec.Struct], *names: str) -> list[Row]:
    """What to write about flags and keys: of these names, or all, in the order of the settings.

    Neighbours that mean the same share a row. A key below another one is written with a dot between.
    """
    named = list(_named(settings, ""))
    if missing := set(names).difference(name for name, _ in named):
        raise ConfigError(f"{settings.__name__} has no {', '.join(sorted(missing))}")
    return joined(
        Row(names=(name,), defaults=(_written(field),), text=field.text)
        for name, field in named
        if not names or name in names
    )


def _named(settings: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Field]]:
    for field in fields_of(settings):
        if isinstance(field.default, msgspec.Struct) and not field.setting.help:
            for name, inner in _named(type(field.default), f"{prefix}{field.name}."):
                # What the whole has for it, where that is not the part's own.
                yield name, replace(inner, default=getattr(field.default, inner.name, inner.default))
        elif field.setting.help:
            yield field.setting.flag or prefix + field.name, field


def _written(field: Field) -> str:
    shown = field.shown
    if isinstance(shown, bool):
        return "on" if shown else "off"
    if shown is None or isinstance(shown, tuple):
        return ""
    if isinstance(shown, msgspec.Struct):
        shown = msgspec.to_builtins(shown)
    return f"{shown:g}" if isinstance(shown, float) else str(shown)


def _lines(head: str, rows: list[Row], variables: Mapping[str, str]) -> str:
    """A table, with a column of the variables where there are some."""
    own = " variable |" if variables else ""
    lines = [f"| {head} |{own} default | meaning |", f"|---|{own and '---|'}---|---|"]
    for row in rows:
        defaults = ", ".join(row.defaults if len(set(row.defaults)) > 1 else row.defaults[:1])
        names = ", ".join(f"`{name}`" for name in row.names)
        if variables:
            names += f" | {', '.join(f'`{variables[name]}`' for name in row.names)}"
        lines.append(f"| {names} | {defaults} | {row.text} |")
    return "".join(f"{line}\n" for line in lines).replace("|  |", "| |")


def variables() -> str:
    """The launcher's variables, with the flags of ``tessera serve``."""
    flags = {field.variable: field.setting.flag for field in settings()}
    lines = ["| flag of `tessera serve` | variable | default | meaning |", "|---|---|---|---|"]
    for row in rows():
        own = ", ".join(f"`{flags[name]}`" for name in row.names if flags.get(name))
        names = ", ".join(f"`{name}`" for name in row.names)
        defaults = ", ".join(dict.fromkeys(row.defaults))
        lines.append(f"| {own} | {names} | {defaults} | {row.text} |".replace("|  |", "| |"))
    keys = [field.setting.flag.removeprefix("--") for field in settings() if variable_of(field).of_model]
    named = ", ".join(f"`{key.replace('-', '_')}`" for key in keys if key != "model-path")
    lines += [
        "",
        f"An entry of `models:` in the YAML has `model`, and may have its own values of these: {named}.",
    ]
    return "\n".join(lines) + "\n"


def _engines() -> str:
    """The keys of both stages in one table, with a column of defaults for each."""
    rows = {name: row for row in rows_of(StageSettings) for name in row.names}
    lines = ["| key | default of `vision` | default of `text` | meaning |", "|---|---|---|---|"]
    for name, row in rows.items():
        if name.startswith("vision."):
            key = name.removeprefix("vision.")
            lines.append(f"| `{key}` | {row.defaults[0]} | {rows[f'text.{key}'].defaults[0]} | {row.text} |")
    return "".join(f"{line}\n" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def _hub() -> str:
    """The published models that each family is known to serve, by their names on the hub."""
    lines = ["| family | models of the hub |", "|---|---|"]
    for family in sorted(families(), key=lambda family: family.name):
        if models := hub_models_of(family):
            lines.append(f"| `{family.name}` | {', '.join(f'`{model}`' for model in models)} |")
    return "".join(f"{line}\n" for line in lines)


def _packages(names: str) -> str:
    """The lines of packages of ``models/``."""
    counts = (sum(map(_lines_of, (_MODELS / name).glob("*.py"))) for name in names.split())
    rows = (f"| `{name}` | {count} |\n" for name, count in zip(names.split(), counts, strict=True))
    return "| package | lines |\n|---|---|\n" + "".join(rows)


def _lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def main() -> int:
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
