"""Messages of gRPC: a call is read of one, and its answer written as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from tessera.errors import InvalidInput
from tessera_kserve import messages_pb2 as pb
from tessera_kserve.call import REGION, Answer, Call, Parameter, Shared, Wanted, check_count
from tessera_kserve.tensors import BYTES, NUMPY, Tensor, of_raw, of_values

# Of typed contents, taken at a time: 5 ms.
_PIECE_VALUES: Final = 1 << 16
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

M = TypeVar("M", bound=Message)


def parsed(kind: type[M], raw: bytes) -> M:
    """Raises ``InvalidInput`` for bytes that are no message."""
    try:
        return kind.FromString(raw)  # type: ignore[no-any-return]
    except DecodeError:
        raise InvalidInput(f"the message is no {kind.DESCRIPTOR.name}") from None


def serialized(message: Message) -> bytes:
    written: bytes = message.SerializeToString()
    return written


def read_call(message: pb.ModelInferRequest, peer: str, contents: Sequence[memoryview] = ()) -> Call:
    """Raises ``InvalidInput`` naming what is wrong; ``peer`` is the client's address.

    ``contents`` are the raw ones where those were taken out of the message.
    """
    raws: Iterator[bytes | memoryview] = iter(contents or message.raw_input_contents)
    raw_is_used = len(contents) > 0 or len(message.raw_input_contents) > 0
    inputs: dict[str, Tensor] = {}
    shared: dict[str, Shared] = {}
    nbytes = 0
    check_count(len(message.inputs), "inputs")
    check_count(len(message.outputs), "outputs")
    for tensor in message.inputs:
        name, said = tensor.name, tensor.name[:80]
        if name in inputs or name in shared:
            raise InvalidInput.at(said, "the input comes twice")
        own = _parameters(tensor.parameters)
        if REGION in own:
            shared[name] = Shared(datatype=tensor.datatype, shape=tensor.shape, parameters=own)
            continue
        if raw_is_used:
            if tensor.HasField("contents"):
                raise InvalidInput(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{said}' for model '{message.model_name[:80]}'",
                    param=said,
                )
            found = next(raws, None)
            if found is None:
                raise InvalidInput(f"unable to find data for input tensor '{said}'", param=said)
            data = found
        else:
            inputs[name] = _typed(tensor)
            nbytes += inputs[name].nbytes
            continue
        inputs[name] = of_raw(name, tensor.datatype, tensor.shape, data)
        nbytes += len(data)
    if next(raws, None) is not None:
        raise InvalidInput("raw_input_contents has more entries than there are inputs")
    outputs = tuple(Wanted(name=one.name, parameters=_parameters(one.parameters)) for one in message.outputs)
    return Call(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters=_parameters(message.parameters),
        inputs=inputs,
        shared=shared,
        outputs=outputs,
        nbytes=nbytes,
        peer=peer,
    )


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> Tensor:
    field = _CONTENTS.get(tensor.datatype)
    # of_values names the datatypes that have no typed contents, and those that there are none of.
    values = () if field is None else getattr(tensor.contents, field)
    if len(values) <= _PIECE_VALUES:
        return of_values(tensor.name, tensor.datatype, tensor.shape, list(values))
    pieces = [values[at : at + _PIECE_VALUES] for at in range(0, len(values), _PIECE_VALUES)]
    if tensor.datatype == BYTES:
        return of_values(tensor.name, tensor.datatype, tensor.shape, chain.from_iterable(pieces))
    dtype = np.dtype(NUMPY[tensor.datatype])
    # int_contents hold all that have 32 bits or fewer.
    wide = np.dtype(f"{dtype.kind}{max(dtype.itemsize, 4)}") if dtype.kind in "iu" else dtype
    numbers = np.concatenate([np.asarray(piece, wide) for piece in pieces])
    return of_values(tensor.name, tensor.datatype, tensor.shape, numbers)


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Parameter]:
    check_count(len(given), "parameters")
    found: dict[str, Parameter] = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(value, kind)
    return found


def write_answer(answer: Answer, call: Call) -> pb.ModelInferResponse:
    """The outputs raw: NVIDIA's client for Python reads no others. Those in regions are there already."""
    message = pb.ModelInferResponse(model_name=answer.model, model_version="1", id=answer.id)
    places = call.output_places
    for tensor in answer.outputs:
        one = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if (place := places.get(tensor.name)) is not None:
            for name, value in place.items():
                _set(one.parameters[name], value)
        else:
            message.raw_output_contents.append(tensor.raw())
    return message


def _set(parameter: pb.InferParameter, value: Parameter) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
