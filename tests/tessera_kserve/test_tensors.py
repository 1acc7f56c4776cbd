"""Tensors of KServe v2, from every form that clients send and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
)

from tessera.errors import InvalidInput
from tessera_kserve.tensors import BYTES, NUMPY, Tensor, floats, json_values, of_raw, of_values

PLAIN = [name for name in NUMPY if name != "BF16"]


@pytest.mark.parametrize("datatype", PLAIN)
def test_raw_contents_are_read_and_written(datatype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(NUMPY[datatype])
    assert np_to_triton_dtype(values.dtype) == datatype
    tensor = of_raw("x", datatype, [2, 3], values.tobytes())
    assert np.array_equal(tensor.values, values)
    assert tensor.raw() == values.tobytes()


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_are_as_nvidias_client_writes_them(found: list[bytes]) -> None:
    given_ = np.empty(len(found), object)
    given_[:] = found
    raw = serialize_byte_tensor(given_).item() if found else b""
    tensor = of_raw("text", BYTES, [len(found)], raw)
    assert list(tensor.values) == found
    assert tensor.raw() == raw
    assert tensor.nbytes == len(raw)
    assert list(deserialize_bytes_tensor(tensor.raw())) == found


def test_bfloat16_is_as_nvidias_client_reads_it() -> None:
    values = np.array([[1.0, -2.5, 3.140625]], np.float32)
    tensor = floats("pooled", values, "BF16")
    assert tensor.shape == (1, 3)
    assert np.array_equal(
        np.frombuffer(tensor.raw(), ml_dtypes.bfloat16), values.ravel().astype(ml_dtypes.bfloat16)
    )


def test_float16_is_rounded_to_nearest() -> None:
    values = np.array([0.1, -65519.0], np.float32)
    assert floats("pooled", values, "FP16").values.tolist() == [np.float16(0.1), -65504.0]


@pytest.mark.parametrize(("datatype", "least"), [("FP16", 65520.0), ("BF16", 3.3962e38)])
def test_a_value_beyond_the_datatype_is_refused(datatype: str, least: float) -> None:
    for value in (least, -least):
        values = np.array([[0.1], [value]], np.float32)
        with pytest.raises(InvalidInput, match=datatype) as caught:
            floats("pooled", values, datatype)
        assert caught.value.param == "pooled"
        assert floats("pooled", values, "FP32").values is not None
        floats("pooled", values * np.float32(0.999), datatype)


@pytest.mark.parametrize(
    ("datatype", "data", "wanted"),
    [
        ("INT64", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("INT32", [1, 2, 3, 4], [[1, 2], [3, 4]]),
        ("FP32", [[1, 2.5], [3, 4]], [[1, 2.5], [3, 4]]),
        ("BOOL", [True, False, True, True], [[True, False], [True, True]]),
        ("BYTES", [["a", "bc"], ["", "é"]], [[b"a", b"bc"], [b"", "é".encode()]]),
    ],
)
def test_values_are_flat_or_nested(datatype: str, data: list[object], wanted: list[object]) -> None:
    tensor = of_values("x", datatype, [2, 2], data)
    assert tensor.values.tolist() == wanted
    assert of_values("x", datatype, [2, 2], list(json_values(tensor))).values.tolist() == wanted


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "says"),
    [
        ("INT64", [2, 3], b"\0" * 47, "takes 48 bytes, found 47"),
        ("INT64", [-1, 3], b"", "no size of a dimension"),
        ("INT64", [1 << 40], b"", "no size of a dimension"),
        ("INT64", [1 << 30, 1 << 30, 1 << 30], b"", "takes"),
        ("INT64", [1] * 9, b"\0" * 8, "dimensions at most"),
        ("INT63", [1], b"\0" * 8, "none of"),
        ("", [1], b"", "none of"),
        ("BYTES", [1], b"\4\0\0\0abc", "has only 3"),
        ("BYTES", [1], b"\4\0", "cut off"),
        ("BYTES", [2], b"\1\0\0\0a", "takes 2 elements, found 1"),
    ],
)
def test_wrong_raw_contents_are_refused_by_name(
    datatype: str, shape: list[int], raw: bytes, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        of_raw("input_ids", datatype, shape, raw)
    assert caught.value.param == "input_ids"
    assert "input_ids" in caught.value.message


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("INT64", [2], [1, 2.5]),
        ("INT8", [1], [300]),
        ("UINT8", [1], [-1]),
        ("INT64", [1], [1 << 70]),
        ("INT64", [2], [[1], [2, 3]]),
        ("INT64", [1], ["1"]),
        ("INT64", [1], [None]),
        ("INT64", [1], [{}]),
        ("INT64", [1], []),
        ("BOOL", [1], [1]),
        ("BYTES", [1], [1]),
        ("BYTES", [2], ["a"]),
        ("FP16", [1], [1.0]),
        ("BF16", [1], [1.0]),
        ("FP32", [1], ["x"]),
    ],
)
def test_wrong_values_are_refused_by_name(datatype: str, shape: list[int], data: list[object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        of_values("x", datatype, shape, data)
    assert caught.value.param == "x"


def test_half_precision_has_no_form_in_json() -> None:
    tensor = Tensor(name="pooled", datatype="FP16", shape=(1,), values=np.zeros(1, np.float16))
    with pytest.raises(InvalidInput, match="binary_data"):
        json_values(tensor)
