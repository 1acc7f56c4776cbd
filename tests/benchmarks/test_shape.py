"""What ``benchmarks.shape`` reads from source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
from benchmarks.shape import Shape, main, outermost, shape

SOURCE = '''\
import functools

key = lambda a, b: a


class Large:
    """Has three methods."""

    @functools.cache
    def seven(self, a, b, /, c, *d, e, f, **g):
        def nested():
            return a

        return nested

    @staticmethod
    def six(a, b, c, d, e, f):
        return a

    @classmethod
    async def none(cls): ...


def small(): ...
'''


@pytest.fixture
def found(tmp_path: Path) -> Shape:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "module.py").write_text(SOURCE)
    return shape(tmp_path)


def test_classes_and_functions_have_their_lines(found: Shape) -> None:
    assert [(part.file, part.name, part.first, part.last) for part in found.classes] == [
        ("folder/module.py", "Large", 6, 21)
    ]
    assert [(part.name, part.first, part.lines, part.parameters) for part in found.functions] == [
        ("<lambda>", 3, 1, 2),
        ("Large.seven", 9, 6, 7),
        ("Large.seven.nested", 11, 2, 0),
        ("Large.six", 16, 3, 6),
        ("Large.none", 20, 2, 0),
        ("small", 24, 1, 0),
    ]


def test_functions_begin_where_python_says_so(found: Shape) -> None:
    def below(code: CodeType) -> Iterator[CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield constant
                yield from below(constant)

    codes = [code for code in below(compile(SOURCE, "module.py", "exec")) if code.co_name != "Large"]
    assert [(code.co_name, code.co_firstlineno) for code in codes] == [
        (part.name.rpartition(".")[2], part.first) for part in found.functions
    ]


def test_a_nested_function_is_within_the_one_around_it_alone(found: Shape) -> None:
    names = [part.name for part in outermost((*found.functions, *found.functions))]
    assert names == ["<lambda>", "Large.seven", "Large.six", "Large.none", "small"]
    nested = [part for part in found.functions if part.name == "Large.seven.nested"]
    assert outermost(nested) == (*nested,)


def test_what_is_printed(tmp_path: Path, found: Shape, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "largest class: 16 lines, Large in folder/module.py:6\n"
        "longest function: 6 lines, Large.seven in folder/module.py:9\n"
        "functions with more than 6 parameters: 1\n"
    )
