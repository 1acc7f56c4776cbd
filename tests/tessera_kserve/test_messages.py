"""Our messages are NVIDIA's own, as far as we have them: names, numbers and types of every field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from tessera_kserve import messages_pb2

PROTO = Path(messages_pb2.__file__).with_name("messages.proto")


def walk(messages: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, message in messages.items():
        yield prefix + name, message
        yield from walk(message.nested_types_by_name, f"{prefix}{name}.")


OURS = dict(walk(messages_pb2.DESCRIPTOR.message_types_by_name))
THEIRS = dict(walk(service_pb2.DESCRIPTOR.message_types_by_name)) | dict(
    walk(model_config_pb2.DESCRIPTOR.message_types_by_name)
)


def kind(field: Any) -> tuple[object, ...]:
    of = field.message_type or field.enum_type
    return field.number, field.type, field.is_repeated, of.name if of else None


@pytest.mark.parametrize("name", OURS)
def test_a_message_agrees(name: str) -> None:
    theirs = {field.name: kind(field) for field in THEIRS[name].fields}
    ours = {field.name: kind(field) for field in OURS[name].fields}
    assert ours.items() <= theirs.items()


def test_datatypes_agree() -> None:
    ours = messages_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    theirs = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: one.number for name, one in ours.items()} == {
        name: one.number for name, one in theirs.items()
    }


def test_a_message_of_theirs_is_read_as_it_was_written() -> None:
    theirs = service_pb2.ModelInferRequest(model_name="router", id="7", raw_input_contents=[b"\1\0"])
    theirs.parameters["priority"].uint64_param = 3
    tensor = theirs.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    tensor.contents.int64_contents.extend([5, -6])
    ours = messages_pb2.ModelInferRequest.FromString(theirs.SerializeToString())
    assert str(ours) == str(theirs)
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


def test_the_generated_file_is_that_of_the_proto() -> None:
    """Every name of the generated module is in the proto, by its number."""
    text = PROTO.read_text()
    for name, message in OURS.items():
        if not message.GetOptions().map_entry:
            assert f"message {name.rpartition('.')[2]} {{" in text, name
            for field in message.fields:
                assert f" {field.name} = {field.number};" in text, field.full_name
