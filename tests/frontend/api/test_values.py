"""Bodies of JSON: their lists are counted before they are parsed, strings that are no text are named."""

from __future__ import annotations

import json
from array import array

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tessera.errors import InvalidInput
from tessera.frontend.api import pieces
from tessera.frontend.api.openai import parse_embeddings
from tessera.frontend.api.pieces import filled, more_outside_strings, without_numbers
from tessera.frontend.api.values import BRACKETS, NoText, read_json


def outside(raw: bytes, marks: bytes) -> int:
    """What ``more_outside_strings`` counts, by one character after another."""
    found, within, escaped = 0, False, False
    for code in raw:
        if escaped:
            escaped = False
        elif within and code == ord("\\"):
            escaped = True
        elif code == ord('"'):
            within = not within
        elif not within and code in marks:
            found += 1
    return found


_TEXT = st.text(alphabet='\\"[{,a\u00fc\U0001f600')
_VALUES = st.recursive(
    _TEXT | st.integers(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=20,
)


@given(_VALUES, st.integers(1, 9), st.booleans())
def test_strings_are_left_out_wherever_they_are_cut(value: object, piece: int, ascii_: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_LOOK_BYTES", piece)
        for marks in (b"[{", b","):
            count = outside(raw, marks)
            assert not more_outside_strings(raw, marks, count)
            assert count == 0 or more_outside_strings(raw, marks, count - 1)


@example([0, -(2**63) - 1], 1, 0, b"")
@example([0, 2**64], 1, 0, b"")
@given(_VALUES, st.integers(1, 9), st.integers(0, 200), st.sampled_from([b"", b",", b"]", b"[1]", b'"']))
def test_a_body_is_the_same_in_pieces(value: object, piece: int, at: int, fault: bytes) -> None:
    raw = json.dumps(value).encode()
    raw = raw[:at] + fault + raw[at:]
    numbers: dict[str, object] = {}
    try:
        whole = orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_BYTES", piece)
        patch.setattr(pieces, "_LONG_LIST", 2)
        try:
            found = filled(orjson.loads(without_numbers(raw, numbers)), numbers)
        except orjson.JSONDecodeError:
            found = None
    assert as_lists(found) == whole


def as_lists(value: object) -> object:
    """A parsed body with lists in place of arrays, which it has for lists of numbers alone."""
    match value:
        case array():
            assert value.typecode == ("d" if any(isinstance(number, float) for number in value) else "q")
            return value.tolist()
        case list():
            assert len(value) < 2 or not all(type(item) is int and abs(item) >> 63 == 0 for item in value)
            return list(map(as_lists, value))
        case dict():
            return {name: as_lists(item) for name, item in value.items()}
        case _:
            return value


@pytest.mark.parametrize(
    ("written", "kind"),
    [("7", "q"), ("-3", "q"), ("0.5", "d"), ("1e3", "d"), ("9223372036854775807", "q")],
)
def test_a_long_list_of_numbers_is_an_array(written: str, kind: str) -> None:
    raw = b'{"input": [[%s], [1, 2]]}' % b", ".join([written.encode()] * 600_001)
    numbers, few = read_json(raw)["input"]  # type: ignore[index]
    assert numbers.typecode == kind and few == [1, 2]
    assert numbers.tolist() == [json.loads(written)] * 600_001
    assert numbers != few and numbers == array(kind, numbers)


@pytest.mark.parametrize("odd", ["true", "null", "18446744073709551615", '"a"', "[1]"])
def test_a_long_list_of_other_values_counts_as_such(odd: str) -> None:
    raw = b"[[%s], %s]" % (b", ".join([b"1"] * 600_001), odd.encode())
    assert len(read_json(raw)[0]) == 600_001  # type: ignore[index]
    raw = b"[[%s, %s]]" % (odd.encode(), b", ".join([b"1"] * 600_001))
    with pytest.raises(InvalidInput, match="more than 600000 values outside long lists of numbers"):
        read_json(raw)


@pytest.mark.parametrize("fault", [b",", b",,1", b", 1 1", b", -", b", 01", b"1e", b", .5"])
def test_a_fault_in_a_long_list_is_found(fault: bytes) -> None:
    for raw in (b"[1%s%s]", b"[%s1%s]"):
        parts = (b", 1" * 600_001, fault) if raw[1:2] == b"1" else (b"1, " * 600_001, fault)
        with pytest.raises(InvalidInput, match="not valid JSON"):
            read_json(raw % parts)


def test_a_body_of_too_many_lists_is_refused_before_it_is_parsed() -> None:
    most = b"[" + b",".join([b"[]"] * (BRACKETS - 1)) + b"]"
    assert len(read_json(most)) == BRACKETS - 1  # type: ignore[arg-type]
    for raw in (most[:-1] + b",[]]", most[:-1] + b",{}]", b"[" * (BRACKETS + 1), most + b"[]"):
        with pytest.raises(InvalidInput, match=f"more than {BRACKETS} lists and objects"):
            read_json(raw)


def test_texts_of_brackets_and_the_largest_batches_are_read() -> None:
    text = '[{"' * 100_000
    assert read_json(json.dumps({"input": text}).encode()) == {"input": text}
    tokens = {"input": [[1, 2, 3]] * 8192}
    assert len(parse_embeddings(read_json(json.dumps(tokens).encode())).inputs) == 8192
    system = {"role": "system", "content": [{"type": "text", "text": "Find it."}]}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked, last = (
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [parts[0] | {"text": ""}]},
    )
    conversations = {"messages": [[system, asked, last]] * 8192}
    assert len(parse_embeddings(read_json(json.dumps(conversations).encode())).inputs) == 8192


@pytest.mark.parametrize(
    ("raw", "param", "at"),
    [
        (b'{"input": ["ok", "x\\ud83d"]}', "input[1]", 1),
        (b'{"input": ["ok", "\\ude00 x"]}', "input[1]", 0),
        (b'{"input": ["ok", "caf\xe9"]}', "input[1]", 3),
        (b'{"input": ["\xc3\xa9", "\xed\xa0\xbd"]}', "input[1]", 0),
        (b'{"input": [{"text": "\\uD800"}]}', "input[0].text", 0),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
         "messages[0].content[0].text", 0),
        (b'{"documents": ["a", {"text": "b", "title": "\\udfff"}], "query": "q"}', "documents[1].title", 0),
        (b'{"texts": ["a", "b\\ud800"], "query": "q"}', "texts[1]", 1),
        (b'{"inputs": [{"name": "text", "data": ["a", "\\ud800"]}]}', "inputs[0].data[1]", 0),
        (b'{"input": "a", "user": "\\ud800"}', "user", 0),
        (b'"\\ud800"', None, 0),
    ],
)  # fmt: skip
def test_a_string_that_is_no_text_is_named(raw: bytes, param: str | None, at: int) -> None:
    with pytest.raises(InvalidInput, match=f"at character {at} is half of a surrogate pair") as caught:
        read_json(raw)
    assert caught.value.param == param


def test_a_string_that_is_no_text_is_named_beside_many_numbers() -> None:
    with pytest.raises(InvalidInput, match="user: a string that is no text: at character 0"):
        read_json(b'{"input": [' + b"1," * 700_000 + b'1], "user": "\\ud800"}')


def test_partial_leaves_the_other_inputs() -> None:
    raw = b'{"partial": true, "input": ["x\\ud83d", "ok", ["\xff"], {"text": "\\ud800"}, "\\ud83d\\ude00"]}'
    inputs = parse_embeddings(read_json(raw)).inputs
    assert [entry.malformed is None for entry in inputs] == [False, True, False, False, True]
    assert [entry.malformed and entry.malformed.param for entry in inputs] == [
        *("input[0]", None, "input[2][0]", "input[3].text", None)
    ]
    assert inputs[4].parts == ("\U0001f600",)
    body = read_json(b'{"partial": true, "input": ["a"], "user": "\\ud800"}')
    assert body == {"partial": True, "input": ["a"], "user": NoText(0)}
    with pytest.raises(InvalidInput, match="user: expected a non-empty string, found a string that is no"):
        parse_embeddings(body)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"input": "\\ud800"',
        b'{"input": "\\ud800", "dimensions": NaN}',
        b'{"input": "\\ud800", "dimensions": ' + b"9" * 5000 + b"}",
        b'{"input": "\\ud800", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"\x89PNG\r\n\xff",
        b'{"input": [' + b'"",' * 550_000 + b'"\\ud800"]}',
        b'{"input": [' + b"1," * 700_000 + b"]}",
    ],
    ids=["cut off", "no number", "many digits", "deep", "a picture", "many strings", "a comma"],
)
def test_what_is_no_json_besides_is_refused_as_that(raw: bytes) -> None:
    with pytest.raises(InvalidInput, match="the body is not valid JSON"):
        read_json(raw)


@pytest.mark.parametrize("name", ["input", "messages", "modality"])
def test_items_are_counted_before_they_are_looked_at(name: str) -> None:
    several: object = [[""], *[""] * 9000] if name == "messages" else ["text"] * 9001
    with pytest.raises(InvalidInput, match=f"{name}: expected at most 8192 inputs, found 9001"):
        parse_embeddings({"input": "a", name: several} if name == "modality" else {name: several})
