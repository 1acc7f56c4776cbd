"""What ``docs/architecture.md`` says of the packages: which exist, and that imports go one way."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.command import Command
from tessera.siblings import COMMANDS, siblings

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "components" / "src"
PACKAGE = SOURCE / "tessera"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def rows(heading: str) -> list[str]:
    """The rows of the table below a heading, in the page's order."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| `")]


def names(cell: str) -> list[str]:
    return [name.rstrip("/") for name in re.findall(r"`([\w/]+)`", cell)]


PLACES = {
    name: place
    for place, row in enumerate(rows("Packages, lowest first"))
    for name in names(row.split("|")[1])
}
SIBLINGS = {names(row.split("|")[1])[0]: names(row) for row in rows("Beside the core")}
USABLE = {names(row.split("|")[1])[0]: names(row.split("|")[2]) for row in rows("What siblings may use")}
SHARED = "tessera_tools"
"""The one sibling that others import."""


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


def imports(path: Path, *, late: bool = False) -> Iterator[str]:
    """What a file imports of the core when it is loaded, or ever with ``late``, as paths below the core."""
    module = ast.parse(path.read_text())
    for node in ast.walk(module) if late else module.body:
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


def test_imports_go_one_way() -> None:
    wrong = []
    for module, path in PLACED:
        place = place_of(module)
        assert place is not None
        for imported in imports(path):
            other = place_of(imported)
            if other is not None and other > place:
                wrong.append(f"{module} imports {imported}, which stands below it")
    assert wrong == []


def test_nearly_every_module_stands_in_a_row() -> None:
    rest = {module for module, _ in modules()} - {module for module, _ in PLACED}
    assert rest == {"__init__", "frontend", "frontend/__main__"}


def mentions(source: str) -> set[str]:
    """The packages beside the core that a module imports, wherever it does, or has the name of in a text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        texts: list[str] = []
        if isinstance(node, ast.Import):
            texts = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            texts = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [node.value]
        found.update(name for text in texts for name in re.findall(r"\btessera_\w+", text))
    return found & SIBLINGS.keys()


def module_file(module: str) -> Path:
    path = SOURCE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_package_beside_the_core_is_on_the_page_with_its_modules() -> None:
    assert SIBLINGS.keys() == {path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"tessera"}
    for package, listed in SIBLINGS.items():
        assert (SOURCE / package / "py.typed").exists(), package
        paths = [
            *(SOURCE / package).glob("*.py"),
            *(path.parent for path in (SOURCE / package).glob("*/*.py")),
        ]
        assert {path.stem for path in paths} - {"__init__", "__main__"} <= set(listed), package


@pytest.mark.parametrize("package", ["tessera", *SIBLINGS])
def test_the_core_names_no_sibling_and_siblings_not_each_other(package: str) -> None:
    allowed = set() if package == "tessera" else {package, SHARED}
    for path in sorted((SOURCE / package).rglob("*.py")):
        assert mentions(path.read_text()) <= allowed, path


@pytest.mark.parametrize("package", SIBLINGS)
def test_siblings_import_what_they_may_use(package: str) -> None:
    usable = {*USABLE["any"], *USABLE.get(package, ())}
    used = {module for path in (SOURCE / package).rglob("*.py") for module in imports(path, late=True)}
    assert {
        module for module in used if not any(f"{module}/".startswith(f"{name}/") for name in usable)
    } == set()


def test_what_siblings_may_use_exists() -> None:
    assert USABLE.keys() - {"any"} <= SIBLINGS.keys()
    for name in {name for listed in USABLE.values() for name in listed}:
        assert (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists(), name


@pytest.mark.parametrize(
    "source",
    [
        "import tessera_tools",
        "from tessera_tools.table import number",
        "def later():\n    from tessera_tools import table",
        "import_module('tessera_tools.bench')",
        "run(f'-m tessera_tools.bench {word}')",
    ],
)
def test_every_way_to_name_a_sibling_is_seen(source: str) -> None:
    assert mentions(source) == {"tessera_tools"}


def test_what_has_a_similar_name_is_none() -> None:
    assert mentions("import tessera.command\nCOUNTER = 'tessera_tools_total'\n# tessera_tools\n") == set()


DECLARED = [
    (group, name, value)
    for group, entries in {"scripts": PROJECT["scripts"], **PROJECT["entry-points"]}.items()
    for name, value in entries.items()
]


@pytest.mark.parametrize(("group", "name", "value"), DECLARED, ids=[f"{g}-{n}" for g, n, _ in DECLARED])
def test_what_pyproject_declares_exists(group: str, name: str, value: str) -> None:
    module, attribute = value.split(":")
    body = ast.parse(module_file(module).read_text()).body
    assigned = {
        target.id
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert attribute in assigned | {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", PROJECT["entry-points"][COMMANDS])
def test_a_commands_module_exists_and_has_a_main(name: str) -> None:
    (entry,) = (entry for entry in siblings(COMMANDS) if entry.name == name)
    command = entry.load()
    assert isinstance(command, Command)
    body = ast.parse(module_file(command.module).read_text()).body
    assert "main" in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("package", SIBLINGS)
def test_loggers_beside_the_core_stand_below_its_own(package: str) -> None:
    """``--log-level`` is set on ``tessera``: what a sibling calls by its own name would be lost."""
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                name = node.args[0]
                assert isinstance(name, ast.Constant) and not str(name.value).startswith(package), path
