"""Vectors in every element type and encoding."""

from __future__ import annotations

import base64
import json
import time
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import orjson
import pytest

from tessera import wire
from tessera.errors import InvalidInput, UnsupportedMedia
from tessera.frontend.api.formats import (
    ResponseBody,
    convert,
    finish,
    frame_bytes,
    numbers,
    row_bytes,
)
from tessera.frontend.api.openai import parse_embeddings, write_embeddings
from tessera.frontend.request import EmbedDtype, EncodingFormat, RequestLimits
from tessera.frontend.serving.pipeline import Result, Usage
from tessera.frontend.serving.served import Served
from tessera.models.base import Output, OutputKind
from tessera.rows import Rows
from tests.frontend.api.whole import whole

HIDDEN = 64


def unit_rows(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def body(vectors: npt.NDArray[np.float32], *, failures: object = None, **fields: object) -> ResponseBody:
    request = parse_embeddings({"input": ["a"] * len(vectors), **fields})
    output = Output(kind=OutputKind.VECTOR, width=HIDDEN)
    count = len(vectors)
    result = Result(
        request_id="1",
        outputs={"vector": Rows(vectors, np.arange(count + 1), np.ones(count, np.float32))},
        lengths=[1] * count,
        errors=failures or {},  # type: ignore[arg-type]
        usage=Usage(text_tokens=7, image_tokens=256, cached_tokens=256),
        image_pixels=0,
        timings=wire.Timings(),
    )
    served = Served(names=("m",), output=output, limits=RequestLimits())
    return whole(write_embeddings(request, served, result))


def cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def test_json_body() -> None:
    vectors = unit_rows(3)
    found = body(vectors)
    assert found.media_type == "application/json"
    parsed = orjson.loads(found.content)
    assert {key: parsed[key] for key in ("id", "object", "model")} == {
        "id": "embd-1",
        "object": "list",
        "model": "m",
    }
    assert time.time() - 60 < parsed["created"] <= time.time()
    assert parsed["usage"] == {
        "prompt_tokens": 263,
        "total_tokens": 263,
        "prompt_tokens_details": {"text_tokens": 7, "image_tokens": 256, "cached_tokens": 256},
    }
    assert [(row["index"], row["object"]) for row in parsed["data"]] == [(i, "embedding") for i in range(3)]
    assert np.array_equal(np.array([row["embedding"] for row in parsed["data"]], np.float32), vectors)


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "base64"}, {"embed_dtype": "int8"}])
def test_many_vectors_are_written_block_by_block(fields: dict[str, str]) -> None:
    count = 2 * (1 << 16) // HIDDEN + 1
    vectors = unit_rows(count)
    many = json.loads(body(vectors, **fields).content)
    last = json.loads(body(vectors[-1:], **fields).content)
    assert many.keys() == last.keys()
    assert {**many, "data": [], "created": 0} == {**last, "data": [], "created": 0}
    assert [row["index"] for row in many["data"]] == list(range(count))
    assert many["data"][-1]["embedding"] == last["data"][0]["embedding"]
    if not fields:
        assert np.array_equal(np.array([row["embedding"] for row in many["data"]], np.float32), vectors)


def test_base64_is_little_endian_float32() -> None:
    vectors = unit_rows(2)
    rows = orjson.loads(body(vectors, encoding_format="base64").content)["data"]
    raw = b"".join(base64.b64decode(row["embedding"]) for row in rows)
    assert np.array_equal(np.frombuffer(raw, "<f4").reshape(2, HIDDEN), vectors)


@pytest.mark.parametrize("dtype", list(EmbedDtype))
def test_bytes_and_json_and_base64_agree(dtype: EmbedDtype) -> None:
    vectors = unit_rows(5)
    values = convert(vectors, dtype)
    raw = body(vectors, encoding_format="bytes", embed_dtype=dtype.value)
    metadata = json.loads(raw.headers["metadata"])
    assert raw.media_type == "application/octet-stream"
    assert raw.content == values.tobytes()
    assert metadata["shape"] == list(values.shape)
    assert metadata["embed_dtype"] == dtype.value
    assert metadata["endianness"] == "little"
    coded = orjson.loads(body(vectors, encoding_format="base64", embed_dtype=dtype.value).content)["data"]
    assert b"".join(base64.b64decode(row["embedding"]) for row in coded) == raw.content
    listed = orjson.loads(body(vectors, embed_dtype=dtype.value).content)["data"]
    expected = numbers(values, dtype)
    assert np.array_equal(np.array([row["embedding"] for row in listed], expected.dtype), expected)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        (EmbedDtype.FLOAT16, 0.999999),
        (EmbedDtype.BFLOAT16, 0.99999),
        (EmbedDtype.INT8, 0.9995),
        (EmbedDtype.UINT8, 0.9995),
    ],
)
def test_conversions_keep_directions(dtype: EmbedDtype, least: float) -> None:
    vectors = unit_rows(20)
    values = numbers(convert(vectors, dtype), dtype).astype(np.float32)
    if dtype is EmbedDtype.UINT8:
        values -= 128
    assert cosine(vectors, values).min() > least


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000]], np.uint32)
    assert convert(bits.view(np.float32), EmbedDtype.BFLOAT16).tolist() == [
        [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]
    ]


def test_packed_signs() -> None:
    row = np.array([[1, -1, 0, -0.5, 0.5, -1, -1, 1]], np.float32)
    assert convert(row, EmbedDtype.UBINARY).tolist() == [[0b10001001]]
    assert convert(row, EmbedDtype.BINARY).tolist() == [[0b10001001 - 128]]
    assert convert(-row - 1, EmbedDtype.BINARY).dtype == np.int8


@pytest.mark.parity
@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
@pytest.mark.parametrize("width", [8, 64, 61])
def test_packed_signs_are_those_of_the_reference(width: int) -> None:
    """Zeros are common behind a ReLU: as positive ones they would be nearly all bits."""
    from sentence_transformers.util import quantize_embeddings

    rows = np.random.default_rng(1).standard_normal((50, width)).astype(np.float32)
    rows[:20] = np.maximum(rows[:20], 0)
    rows[20:30] = np.minimum(rows[20:30], -0.0)
    rows[30] = 0
    for dtype in (EmbedDtype.BINARY, EmbedDtype.UBINARY):
        assert (convert(rows, dtype) == quantize_embeddings(rows, precision=dtype.value)).all()


def test_cutting_renormalises_only_when_asked() -> None:
    vectors = unit_rows(4)
    cut = finish(vectors, width=16, normalize=True)
    assert np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    assert np.allclose(cosine(cut, vectors[:, :16].copy()), 1)
    assert np.array_equal(finish(vectors, width=16, normalize=False), vectors[:, :16])
    assert np.array_equal(finish(vectors, width=HIDDEN, normalize=True), vectors)
    assert np.array_equal(finish(vectors * 3, width=16, normalize=False), 3 * vectors[:, :16])
    assert not finish(np.zeros((1, 8), np.float32), width=4, normalize=True).any()


@pytest.mark.parametrize("encoding", list(EncodingFormat))
@pytest.mark.parametrize(("dtype", "most"), [("float16", 65504.0), ("bfloat16", 3.3895e38)])
@pytest.mark.parametrize("name", ["embed_dtype", "output_dtype"])
def test_values_beyond_an_element_type_are_refused(
    encoding: EncodingFormat, dtype: str, most: float, name: str
) -> None:
    vectors = np.zeros((3, HIDDEN), np.float32)
    vectors[1, 3] = -most
    body(vectors, encoding_format=encoding.value, normalize=False, **{name: dtype})
    for beyond in (most * 1.002, np.finfo(np.float32).max):
        vectors[1, 3] = beyond
        with pytest.raises(InvalidInput, match=dtype) as caught:
            body(vectors, encoding_format=encoding.value, normalize=False, **{name: dtype})
        assert caught.value.param == name


def test_partial_answers() -> None:
    vectors = unit_rows(3)
    failures = {1: UnsupportedMedia("no image", param="input[1]")}
    data = orjson.loads(body(vectors, failures=failures, partial=True).content)["data"]
    assert data[1]["embedding"] is None
    assert data[1]["error"]["code"] == "unsupported_media"
    assert data[1]["error"]["param"] == "input[1]"
    assert len(data[0]["embedding"]) == len(data[2]["embedding"]) == HIDDEN
    raw = body(vectors, failures=failures, encoding_format="bytes")
    rows = np.frombuffer(raw.content, "<f4").reshape(3, HIDDEN)
    assert not rows[1].any()
    assert np.array_equal(rows[2], vectors[2])
    assert json.loads(raw.headers["metadata"])["errors"] == {"1": "unsupported_media"}


@pytest.mark.parametrize("dtype", list(EmbedDtype))
@pytest.mark.parametrize("encoding", list(EncodingFormat))
def test_no_row_takes_more_than_it_was_counted_for(dtype: EmbedDtype, encoding: EncodingFormat) -> None:
    # The longest numbers: nine digits, signs, and exponents of two digits.
    awkward = np.array([-1.17549435e-38, -3.40282347e38, -1.23456788e-05, -9.87654322e-01], np.float32)
    if dtype not in (EmbedDtype.FLOAT32, EmbedDtype.BFLOAT16):
        awkward = np.array([-0.000012345678, -65504.0, -0.98765432, 1.0], np.float32)
    if dtype is EmbedDtype.BFLOAT16:
        awkward[1] = -3.38e38
    for rows in (unit_rows(8), np.tile(awkward, (8, HIDDEN // 4)), np.full((8, HIDDEN), -1.0, np.float32)):
        one, all_of_them = (
            len(body(part, embed_dtype=dtype.value, encoding_format=encoding.value).content)
            for part in (rows[:1], rows)
        )
        counted = row_bytes(HIDDEN, dtype, encoding) + frame_bytes(encoding)
        assert all_of_them - one <= 7 * counted
        if encoding is not EncodingFormat.FLOAT:
            assert counted <= (all_of_them - one) / 7 + 96


def test_rows_from_a_buffer_are_not_written_to() -> None:
    vectors = np.frombuffer(unit_rows(2).tobytes(), "<f4").reshape(2, HIDDEN)
    failures = {0: UnsupportedMedia("no image")}
    for encoding in ("float", "base64", "bytes"):
        body(vectors, failures=failures, encoding_format=encoding)
    assert vectors.all()
