"""Errors keep what they say on their way between processes."""

from __future__ import annotations

import pytest

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


def test_a_code_from_a_newer_peer_is_still_an_error() -> None:
    error = from_code("from_the_future", "hm", param="input[0]")
    assert type(error) is TesseraError
    assert error.param == "input[0]"


def test_the_module_describes_every_class() -> None:
    assert errors.__doc__ is not None
    for kind in tree():
        assert kind.__name__ in errors.__doc__
