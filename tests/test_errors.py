"""Errors keep what they say on their way between processes."""

from __future__ import annotations

import ast
import asyncio
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

import tessera
from tessera import errors, wire
from tessera.errors import TesseraError, from_code


def tree(root: type[TesseraError] = TesseraError) -> list[type[TesseraError]]:
    return [root] + [kind for child in root.__subclasses__() for kind in tree(child)]


def test_every_code_is_its_own() -> None:
    kinds = tree()
    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.code)
def test_an_error_survives_the_wire(kind: type[TesseraError]) -> None:
    sent = kind("what went wrong", param="input[2]", retry_after=1.5)
    reply = wire.decode_replies(wire.encode(wire.Failure.of(sent)))
    assert isinstance(reply, wire.Failure)
    received = reply.error()
    assert type(received) is kind
    assert (received.message, received.param, received.retry_after) == ("what went wrong", "input[2]", 1.5)
    assert str(received) == "what went wrong"


def test_an_error_is_named_anew_in_its_message_too() -> None:
    unnamed = errors.EngineFailed("no numbers", retry_after=2.0)
    first = unnamed.named("input[1]")
    assert (first.message, first.param, first.retry_after) == ("input[1]: no numbers", "input[1]", 2.0)
    again = first.named("documents[0]")
    assert type(again) is errors.EngineFailed
    assert (again.message, again.param) == ("documents[0]: no numbers", "documents[0]")
    # A message that does not begin with the name stays as it is.
    other = errors.InvalidInput("found input[1]", param="input[1]").named("input[2]")
    assert (other.message, other.param) == ("found input[1]", "input[2]")


def test_a_code_from_a_newer_peer_is_still_an_error() -> None:
    error = from_code("from_the_future", "hm", param="input[0]")
    assert type(error) is TesseraError
    assert error.param == "input[0]"


def test_the_module_describes_every_class() -> None:
    assert errors.__doc__ is not None
    for kind in tree():
        assert kind.__name__ in errors.__doc__


SOURCES = Path(tessera.__file__).parents[1]
_ERRORS = {
    name
    for module in (builtins, asyncio, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def _kept_errors(node: ast.AST) -> Iterator[str]:
    """Yield the errors that a module or a class makes once: outside functions, and not to raise them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Raise):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func) == "wire.Failure.of":
            # It copies the words.
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func).rpartition(".")[2] in _ERRORS:
            yield ast.unparse(child)
        yield from _kept_errors(child)


def test_no_module_keeps_an_error() -> None:
    """An error that is raised again and again keeps the frames of every time, and the requests in them."""
    paths = sorted(SOURCES.glob("tessera*/**/*.py"))
    kept = {str(path.relative_to(SOURCES)): [*_kept_errors(ast.parse(path.read_text()))] for path in paths}
    assert len(kept) > 500 and {name: errors for name, errors in kept.items() if errors} == {}


def test_an_error_that_a_module_keeps_is_found() -> None:
    source = "A = RuntimeError('x')\nclass B:\n    c: Final = errors.Unavailable('y')\n"
    assert len(list(_kept_errors(ast.parse(source)))) == 2
