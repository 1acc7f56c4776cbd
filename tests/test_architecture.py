"""What ``docs/architecture.md`` says of the packages: which exist, and that imports go one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "components" / "src" / "tessera"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def rows() -> list[list[str]]:
    """The names in each row of the table of packages, in the page's order."""
    table = PAGE.partition("## Packages, lowest first")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[name.rstrip("/") for name in re.findall(r"`([\w/]+)`", line.split("|")[1])] for line in lines]


PLACES = {name: place for place, names in enumerate(rows()) for name in names}


def place_of(module: str) -> int | None:
    """The row of a module, by the longest name that it begins with; None for one in no row."""
    parts = module.split("/")
    for count in range(len(parts), 0, -1):
        if (place := PLACES.get("/".join(parts[:count]))) is not None:
            return place
    return None


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE).with_suffix("")).removesuffix("/__init__"), path


def imports(path: Path) -> Iterator[str]:
    """What a file imports of the package when it is loaded, as paths below it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tessera"):
            for name in node.names:
                for module in (f"{node.module}.{name.name}", node.module):
                    below = module.removeprefix("tessera").lstrip(".").replace(".", "/")
                    if (PACKAGE / f"{below}.py").exists() or (below and (PACKAGE / below).is_dir()):
                        yield below
                        break


def test_every_name_on_the_page_exists() -> None:
    assert len(PLACES) > 30
    for name in PLACES:
        assert (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists(), name


# What stands in no row puts its package together: the package's own root, the frontend's main.
PLACED = [(module, path) for module, path in modules() if place_of(module) is not None]


@pytest.mark.parametrize(("module", "path"), PLACED, ids=[module for module, _ in PLACED])
def test_imports_go_one_way(module: str, path: Path) -> None:
    place = place_of(module)
    assert place is not None
    for imported in imports(path):
        other = place_of(imported)
        assert other is None or other <= place, f"{module} imports {imported}, which stands below it"


def test_nearly_every_module_stands_in_a_row() -> None:
    rest = {module for module, _ in modules()} - {module for module, _ in PLACED}
    assert rest == {"__init__", "frontend", "frontend/__main__"}
