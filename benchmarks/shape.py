"""``python -m benchmarks.shape``: the largest class, the longest function, functions with many parameters.

Read from the source of the package, or of any other FOLDER, such as the package of another commit. Lines are
those of the file from the first decorator on, with docstrings, comments and what is nested. Parameters
are counted without ``self`` and ``cls``; ``*args`` and ``**kwargs`` are one each.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tessera
from benchmarks import usage

PACKAGE = Path(tessera.__file__).parent
MANY_PARAMETERS = 6

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A class or a function, with its first and last line. The first one is where its code object begins."""

    file: str
    name: str
    first: int
    last: int
    parameters: int = 0

    @property
    def lines(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.lines} lines, {self.name} in {self.file}:{self.first}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of all modules below a folder. Functions are methods, nested ones and lambdas, too."""

    classes: tuple[Part, ...]
    functions: tuple[Part, ...]


def shape(folder: Path) -> Shape:
    classes: list[Part] = []
    functions: list[Part] = []
    for path in sorted(folder.rglob("*.py")):
        file = str(path.relative_to(folder))
        for node, part in _parts(file, ast.parse(path.read_bytes(), str(path))):
            (classes if isinstance(node, ast.ClassDef) else functions).append(part)
    return Shape(tuple(classes), tuple(functions))


def outermost(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Those that lie in none of the others, so that each line is in one of them: by file and line."""
    kept: list[Part] = []
    for part in sorted(set(parts), key=lambda part: (part.file, part.first, -part.last)):
        if not kept or part.file != kept[-1].file or part.first > kept[-1].last:
            kept.append(part)
    return tuple(kept)


def _parts(file: str, tree: ast.AST, within: str = "") -> Iterator[tuple[ast.AST, Part]]:
    for node in ast.iter_child_nodes(tree):
        inner = within
        if isinstance(node, _Function | ast.ClassDef):
            name = within + ("<lambda>" if isinstance(node, ast.Lambda) else node.name)
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            part = Part(
                file=file,
                name=name,
                first=min(each.lineno for each in (node, *decorators)),
                last=node.end_lineno or node.lineno,
                parameters=0 if isinstance(node, ast.ClassDef) else _parameters(node, tree),
            )
            yield node, part
            inner = f"{name}."
        yield from _parts(file, node, inner)


def _parameters(function: _Function, parent: ast.AST) -> int:
    given = function.args
    variadic = (given.vararg is not None) + (given.kwarg is not None)
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) + variadic
    if isinstance(parent, ast.ClassDef) and not isinstance(function, ast.Lambda):
        static = any(
            isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list
        )
        count -= not static
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.shape", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=PACKAGE, metavar="FOLDER")
    found = shape(parser.parse_args(argv).folder)
    many = sum(function.parameters > MANY_PARAMETERS for function in found.functions)
    print(f"largest class: {max(found.classes, key=lambda part: part.lines)}")
    print(f"longest function: {max(found.functions, key=lambda part: part.lines)}")
    print(f"functions with more than {MANY_PARAMETERS} parameters: {many}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
