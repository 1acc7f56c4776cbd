"""A body that is parsed in pieces is what it is when it is parsed at once."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from tessera.errors import InvalidInput
from tessera.frontend.api import pieces, values

PARTS = ["a", "\u00e9", "\u0301", "\U0001f600", '"', "\\", "\n", ",", "[", "]", "{", "}", "x" * 10]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pieces end within any body, and within strings of 24 bytes; two numbers are a long list."""
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 40)
    monkeypatch.setattr(pieces, "_LOOK_BYTES", 32)
    monkeypatch.setattr(pieces, "_LONG_STRING_BYTES", 24)
    monkeypatch.setattr(pieces, "_LONG_LIST", 2)


def read(raw: bytes) -> Any:
    return values._read_in_pieces(raw, "", values.BRACKETS)


def text(chance: random.Random) -> str:
    return "".join(chance.choices(PARTS, k=chance.choice([0, 1, 3, 8, 60])))


def value(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(8) if depth else 0
    if kind < 3:
        return chance.choice([1, -2.5e10, True, None, "", text(chance), text(chance)])
    if kind == 3:
        return [chance.randrange(10**6) for _ in range(chance.randrange(40))]
    if kind < 6:
        return [value(chance, depth - 1) for _ in range(chance.randrange(6))]
    return {text(chance): value(chance, depth - 1) for _ in range(chance.randrange(6))}


def body(chance: random.Random) -> bytes:
    made = value(chance, 5)
    return json.dumps(made, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1])).encode()


def test_any_body_is_what_it_is_at_once() -> None:
    chance = random.Random(0)
    for _ in range(250):
        raw = body(chance)
        assert read(raw) == orjson.loads(raw), raw


def test_what_is_refused_at_once_is_refused_in_pieces() -> None:
    chance = random.Random(1)
    for _ in range(250):
        raw = bytearray(body(chance))
        raw[chance.randrange(len(raw))] = chance.choice(b'"\\,[]{}:a1 ')
        try:
            expected = orjson.loads(raw)
        except orjson.JSONDecodeError:
            with pytest.raises(InvalidInput):
                read(bytes(raw))
        else:
            assert read(bytes(raw)) == expected, raw


@pytest.mark.parametrize(
    "raw",
    [b'{"a": [1, 2], "b": 1, "a": [%s 3]}' % (b"5, " * 40), b'{"a": {"": [%s 3], "": 4}}' % (b"5, " * 40)],
)
def test_of_a_key_that_comes_twice_the_last_holds(raw: bytes) -> None:
    assert read(raw) == orjson.loads(raw)


@pytest.mark.parametrize("fault", ["\\ud83d", "\udce9"])
def test_a_long_string_that_is_no_text_is_named(fault: str) -> None:
    long = "\u00e9\\n\\ud83d\\ude00" * 30
    raw = f'{{"input": ["ok", "{long}{fault}{long}"]}}'.encode("utf-8", "surrogateescape")
    at = 30 * 3
    with pytest.raises(InvalidInput, match=f"at character {at} is half of a surrogate pair") as caught:
        read(raw)
    assert caught.value.param == "input[1]"
