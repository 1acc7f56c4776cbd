"""A large message is counted before it is parsed, and its raw contents are not copied."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tessera.errors import InvalidInput
from tessera_kserve import fields, messages
from tessera_kserve import messages_pb2 as pb
from tessera_kserve.fields import Fields


def call(chance: random.Random) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="router", id="x" * chance.randrange(300))
    made.parameters["timeout"].int64_param = chance.randrange(1 << 40)
    for index in range(chance.randrange(4)):
        tensor = made.inputs.add(name=f"in{index}", datatype="INT64", shape=[1, chance.randrange(1 << 31)])
        tensor.parameters["size"].string_param = "s" * chance.randrange(200)
        if chance.random() < 0.5:
            tensor.contents.int64_contents.extend(chance.randrange(-5, 1 << 50) for _ in range(9))
            tensor.contents.fp32_contents.extend(chance.random() for _ in range(9))
    made.outputs.add(name="out").parameters["binary"].bool_param = True
    made.raw_input_contents.extend(
        chance.randbytes(chance.randrange(400)) for _ in range(chance.randrange(4))
    )
    return made


def test_contents_and_the_rest_are_the_message() -> None:
    chance = random.Random(0)
    for _ in range(200):
        message = call(chance)
        found = Fields(message.SerializeToString())
        rest = pb.ModelInferRequest.FromString(found.rest)
        assert not rest.raw_input_contents
        rest.raw_input_contents.extend(map(bytes, found.contents))
        assert rest == message


def test_a_damaged_message_is_left_to_the_parser() -> None:
    chance = random.Random(1)
    for _ in range(300):
        raw = bytearray(call(chance).SerializeToString())
        raw[chance.randrange(len(raw))] = chance.randrange(256)
        raw = raw[: chance.randrange(1, len(raw) + 1)]
        try:
            expected = pb.ModelInferRequest.FromString(bytes(raw))
        except Exception:
            with pytest.raises(InvalidInput):
                messages.parsed(pb.ModelInferRequest, Fields(bytes(raw)).rest)
            continue
        try:
            found = Fields(bytes(raw))
        except InvalidInput as error:
            # Groups, which a parser skips.
            assert "is no ModelInferRequest" in str(error)
        else:
            assert [*map(bytes, found.contents)] == list(expected.raw_input_contents)


@pytest.mark.parametrize(
    "empty", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x18\x01", b"\x2a\x04\x2a\x02\x42\x00"]
)
def test_more_fields_than_a_call_has_are_refused(empty: bytes) -> None:
    with pytest.raises(InvalidInput, match="more than 200000 fields"):
        Fields(empty * 200_001)


def test_more_integers_than_a_call_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MOST_INTEGERS", 1000)
    message = pb.ModelInferRequest()
    message.inputs.add().contents.int64_contents.extend([-1] * 1000)
    Fields(message.SerializeToString())
    message.inputs[0].contents.int64_contents.append(1)
    with pytest.raises(InvalidInput, match="more than 1000 integers"):
        Fields(message.SerializeToString())


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT8", "INT32", "UINT64", "FP32", "FP64", "BYTES"])
def test_typed_contents_are_taken_in_pieces(datatype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[object] = [b"a", b"b"] if datatype == "BYTES" else [0, 1]
    if datatype == "UINT64":
        values = [2**63, 2**64 - 1]
    message = pb.ModelInferRequest()
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[14])
    getattr(tensor.contents, messages._CONTENTS[datatype]).extend(values * 7)
    whole = messages.read_call(message, "").inputs["x"].values
    monkeypatch.setattr(messages, "_PIECE_VALUES", 5)
    pieces = messages.read_call(message, "").inputs["x"].values
    assert pieces.dtype == whole.dtype and np.array_equal(pieces, whole)
    assert [*pieces] == values * 7
