"""``docs/models.md`` names every family, its options with their defaults, and commands that work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tessera.models import families
from tessera.models.options import OptionsFamily
from tessera_tools.random_checkpoint.checkpoint import families as random_checkpoints
from tests.models.conftest import WriteCheckpoint
from tests.references import compare

COMMANDS = ("python ", "grep ", "ls ", "cat ")
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def section(family: str) -> str:
    return PAGE.partition(f"\n## {family}\n")[2].partition("\n## ")[0]


def test_every_family_is_described() -> None:
    for family in families():
        types = ", ".join(f"`{name}`" for name in family.model_types)
        assert f"| `{family.name}` | {types} |" in PAGE
        assert section(family.name)


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_options_and_their_defaults(name: str) -> None:
    (family,) = (family for family in families() if family.name == name)
    assert isinstance(family, OptionsFamily)
    table = section(name).partition("| option | default | meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.M)
    assert dict(rows) == {field.name: str(field.default) for field in msgspec.structs.fields(family.options)}


def checks(name: str) -> list[str]:
    """The commands that tell whether what a family's section assumes is so, of the table's second column."""
    table = section(name).partition("| assumed, not read from the published files |")[2].partition("\n\n")[0]
    cells = [row.rpartition(" | ")[2] for row in table.splitlines()[2:]]
    written = [command for cell in cells for command in re.findall(r"`([^`]+)`", cell)]
    return [command.replace("\\|", "|") for command in written if command.startswith(COMMANDS)]


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_checks_are_commands_that_run(name: str, written: WriteCheckpoint) -> None:
    """Each finds what it looks for in a checkpoint of the family, unless that file is not there."""
    path = written(random_checkpoints()[name].load().tiny)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in checks(name):
        if "AutoTokenizer" in command:
            # The published files alone have their class and their chat template.
            compile(command.partition('"')[2].rpartition('"')[0], name, "exec")
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=path, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.stdout.strip() or "No such file or directory" in done.stderr, (command, done.stderr)


def test_every_family_says_what_it_assumes() -> None:
    assert not [family.name for family in families() if not checks(family.name)]


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_the_command_compares_checkpoints_of_every_family(
    name: str, written: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(random_checkpoints()[name].load().tiny)
    cases = compare.INPUTS[name]
    few = [cases[0], *[each for each in cases if each.images][:1]]
    monkeypatch.setitem(compare.INPUTS, name, few)
    compare.main(str(path))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(few)
    for line in lines:
        if line[1] == "for":
            assert float(line[0]) == pytest.approx(float(line[2]), abs=5e-4)
        else:
            assert float(line[0]) >= 0.99999
