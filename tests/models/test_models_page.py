"""``docs/models.md`` names every family, and its options with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tessera.models import families
from tessera.models.options import OptionsFamily

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
