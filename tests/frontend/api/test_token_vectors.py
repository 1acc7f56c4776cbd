"""Vectors of tokens as clients get them: matrices, their shapes, and bodies of bytes."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest

from tessera import wire
from tessera.errors import InvalidInput, UnsupportedMedia
from tessera.frontend.api.endpoint import Translated
from tessera.frontend.api.formats import ResponseBody, convert, frame_bytes, numbers, row_bytes
from tessera.frontend.api.openai import _translate as translate_embeddings
from tessera.frontend.request import EmbedDtype, EncodingFormat, RequestLimits
from tessera.frontend.serving.pipeline import Result, Usage
from tessera.frontend.serving.served import Served
from tessera.models.base import Output, OutputKind
from tessera.rows import Rows
from tessera_apis.pooling import _translate as translate_pooling
from tessera_apis.tei import EMBED_ALL
from tessera_apis.tei import _translate as translate_tei
from tests.frontend.api.whole import whole

WIDTH = 24
COUNTS = (3, 1, 5)
BOUNDS = np.cumsum((0, *COUNTS))
TOKENS = Served(names=("m",), output=Output(kind=OutputKind.TOKENS, width=WIDTH), limits=RequestLimits())
VECTORS = Served(names=("m",), output=Output(kind=OutputKind.VECTOR, width=WIDTH), limits=RequestLimits())
SCORES = Served(
    names=("m",), output=Output(kind=OutputKind.SCORE, width=1, unit_length=False), limits=RequestLimits()
)
Matrix = npt.NDArray[Any]


def unit_rows(count: int) -> npt.NDArray[np.float32]:
    rows = np.random.default_rng(3).standard_normal((count, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


ROWS = unit_rows(int(BOUNDS[-1]))
MATRICES = np.split(ROWS, BOUNDS[1:-1])


def result(rows: npt.NDArray[np.float32] = ROWS, bounds: Any = BOUNDS, errors: Any = None) -> Result:
    return Result(
        request_id="1",
        outputs={"output": Rows(rows, np.asarray(bounds, np.int64), np.ones(len(rows), np.float32))},
        lengths=np.diff(bounds).tolist(),
        errors=errors or {},
        usage=Usage(text_tokens=len(rows)),
        image_pixels=0,
        timings=wire.Timings(),
    )


def written(translated: Translated, found: Result | None = None) -> ResponseBody:
    return whole(translated.write(found or result()))


def embeddings(served: Served = TOKENS, found: Result | None = None, **fields: object) -> ResponseBody:
    return written(translate_embeddings({"input": ["a", "b", "c"], **fields}, served), found)


def pooled(served: Served = TOKENS, found: Result | None = None, **fields: object) -> ResponseBody:
    return written(translate_pooling({"input": ["a", "b", "c"], **fields}, served), found)


def data(body: ResponseBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(body.content)["data"]
    assert [row["index"] for row in found] == list(range(len(found)))
    return found


def test_an_embedding_is_a_matrix() -> None:
    for row, matrix in zip(data(embeddings()), MATRICES, strict=True):
        assert row.keys() == {"object", "index", "embedding"} and row["object"] == "embedding"
        assert np.array_equal(np.array(row["embedding"], np.float32), matrix)


def test_jinas_flag_has_jinas_key() -> None:
    for row, matrix in zip(data(embeddings(return_multivector=True)), MATRICES, strict=True):
        assert row.keys() == {"object", "index", "embeddings"}
        assert np.array_equal(np.array(row["embeddings"], np.float32), matrix)
    with pytest.raises(InvalidInput, match="one vector for each input") as caught:
        translate_embeddings({"input": "a", "return_multivector": True}, VECTORS)
    assert caught.value.param == "return_multivector"


@pytest.mark.parametrize("dtype", list(EmbedDtype))
def test_base64_says_its_shape_and_bytes_their_bounds(dtype: EmbedDtype) -> None:
    values = convert(ROWS, dtype)
    expected = np.split(values, BOUNDS[1:-1])
    coded = data(embeddings(encoding_format="base64", embed_dtype=dtype.value))
    for row, matrix in zip(coded, expected, strict=True):
        raw = np.frombuffer(base64.b64decode(row["embedding"]), matrix.dtype).reshape(row["shape"])
        assert np.array_equal(raw, matrix)
    body = embeddings(encoding_format="bytes", embed_dtype=dtype.value)
    metadata = json.loads(body.headers["metadata"])
    assert metadata["bounds"] == BOUNDS.tolist() and metadata["embed_dtype"] == dtype.value
    assert np.array_equal(np.frombuffer(body.content, values.dtype).reshape(metadata["shape"]), values)
    only = embeddings(encoding_format="bytes_only", embed_dtype=dtype.value)
    assert (only.content, only.headers) == (body.content, {})
    listed = data(embeddings(embed_dtype=dtype.value))
    found = np.concatenate([row["embedding"] for row in listed])
    assert np.array_equal(found.astype(np.float32), numbers(values, dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("encoding", ["float", "base64", "bytes_only"])
def test_the_most_significant_byte_may_come_first(dtype: str, encoding: str) -> None:
    little, big = (
        embeddings(encoding_format=encoding, embed_dtype=dtype, endianness=order)
        for order in ("native", "big")
    )
    if encoding == "float":
        assert little == big
        return
    if encoding == "base64":
        raw = [b"".join(base64.b64decode(row["embedding"]) for row in data(body)) for body in (little, big)]
    else:
        raw = [little.content, big.content]
    kind = np.dtype(f"u{convert(ROWS, EmbedDtype(dtype)).itemsize}")
    assert np.array_equal(np.frombuffer(raw[0], kind), np.frombuffer(raw[1], kind.newbyteorder(">")))


def test_a_matrix_longer_than_a_block_is_whole() -> None:
    rows = np.random.default_rng(0).standard_normal((9000, WIDTH)).astype(np.float32)
    found = result(rows, (0, 5, 8999, 9000))
    listed = data(embeddings(found=found))
    assert np.array_equal(np.concatenate([row["embedding"] for row in listed]).astype(np.float32), rows)


def test_rows_may_be_cut_and_have_unit_length_again() -> None:
    cut = ROWS[:, :8]
    found = np.concatenate([row["embedding"] for row in data(embeddings(dimensions=8))])
    np.testing.assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)
    assert data(embeddings(dimensions=8, encoding_format="base64"))[2]["shape"] == [5, 8]
    # As long as they were, where they never had unit length or the request wants that.
    longer = Output(kind=OutputKind.TOKENS, width=WIDTH, unit_length=False)
    other = Served(names=("m",), output=longer, limits=RequestLimits())
    for served, fields in ((other, {}), (TOKENS, {"normalize": False})):
        found = np.concatenate([row["embedding"] for row in data(embeddings(served, dimensions=8, **fields))])
        assert np.array_equal(found.astype(np.float32), cut)


def test_failed_inputs_have_no_rows() -> None:
    found = result(ROWS[:4], (0, 3, 3, 4), {1: UnsupportedMedia("no image", param="input[1]")})
    for encoding in ("float", "base64"):
        first, bad, last = data(embeddings(found=found, encoding_format=encoding, partial=True))
        assert bad["embedding"] is None and bad["error"]["param"] == "input[1]" and "shape" not in bad
        assert first["embedding"] and last["embedding"]
        first, bad, last = data(pooled(found=found, encoding_format=encoding, partial=True))
        assert bad["data"] is None and bad["error"]["code"] == "unsupported_media"
    for body in (embeddings, pooled):
        metadata = json.loads(body(found=found, encoding_format="bytes", partial=True).headers["metadata"])
        assert metadata["errors"] == {"1": "unsupported_media"}
        with pytest.raises(InvalidInput, match="no place for errors"):
            body(found=found, encoding_format="bytes_only", partial=True)


@pytest.mark.parametrize("dtype", list(EmbedDtype))
@pytest.mark.parametrize("encoding", list(EncodingFormat))
@pytest.mark.parametrize("write", [embeddings, pooled])
def test_no_input_takes_more_than_it_was_counted_for(
    dtype: EmbedDtype, encoding: EncodingFormat, write: Any
) -> None:
    rows = np.full((300, WIDTH), -1.17549435e-38, np.float32)
    whole, part = (
        len(write(found=result(rows, bounds), embed_dtype=dtype, encoding_format=encoding).content)
        for bounds in ((0, 100, 200, 300), (0, 100, 200, 200))
    )
    one = len(
        write(found=result(rows[:0], (0, 0, 0, 0)), embed_dtype=dtype, encoding_format=encoding).content
    )
    row, frame = row_bytes(WIDTH, dtype, encoding), frame_bytes(encoding)
    assert whole - one <= 300 * row + 3 * frame
    assert whole - part <= 100 * row + frame or encoding.value.startswith("bytes")
    assert encoding is EncodingFormat.FLOAT or 300 * row <= whole - one + 300 * 3


# What vLLM's examples have for reading a body of bytes by its header.
@dataclass
class MetadataItem:
    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


_READ = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "int8": "i1"}


def decode(body: ResponseBody) -> list[Matrix]:
    """As vLLM's ``decode_pooling_output`` reads it; bfloat16 as bits."""
    metadata = json.loads(body.headers["metadata"])
    items = sorted((MetadataItem(**item) for item in metadata["data"]), key=lambda item: item.index)
    found = []
    for item in items:
        values = np.frombuffer(body.content[item.start : item.end], _READ[item.embed_dtype])
        values = values.reshape(tuple(item.shape))
        if item.endianness not in ("native", sys.byteorder):
            values = values.byteswap()
        found.append(values)
    return found


@pytest.mark.parametrize("dtype", list(_READ))
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("task", ["token_embed", None])
def test_vllms_clients_read_bytes_by_their_metadata(dtype: str, endianness: str, task: str | None) -> None:
    body = pooled(task=task, encoding_format="bytes", embed_dtype=dtype, endianness=endianness)
    assert body.media_type == "application/octet-stream"
    values = convert(ROWS, EmbedDtype(dtype))
    for found, expected in zip(decode(body), np.split(values, BOUNDS[1:-1]), strict=True):
        assert np.array_equal(found, expected)
    only = pooled(task=task, encoding_format="bytes_only", embed_dtype=dtype, endianness=endianness)
    assert (only.content, only.headers) == (body.content, {})
    metadata = json.loads(body.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] == metadata["usage"]["total_tokens"] == len(ROWS)
    assert (metadata["id"], metadata["model"]) == ("pooling-1", "m") and metadata["created"] > 0


def test_pooling_answers_as_vllm() -> None:
    body = orjson.loads(pooled(task="token_embed").content)
    assert body.keys() == {"id", "object", "created", "model", "data", "usage"}
    for row, matrix in zip(body["data"], MATRICES, strict=True):
        assert row.keys() == {"index", "object", "data"} and row["object"] == "pooling"
        assert np.array_equal(np.array(row["data"], np.float32), matrix)
    for row, matrix in zip(data(pooled(encoding_format="base64")), MATRICES, strict=True):
        raw = np.frombuffer(base64.b64decode(row["data"]), "<f4")
        assert np.array_equal(raw.reshape(row["shape"]), matrix)


def test_pooling_of_a_vector_model() -> None:
    vectors = result(ROWS[:3], range(4))
    for fields in ({}, {"task": "embed"}):
        listed = data(pooled(VECTORS, vectors, **fields))
        assert np.array_equal(np.array([row["data"] for row in listed], np.float32), ROWS[:3])
    coded = data(pooled(VECTORS, vectors, encoding_format="base64"))
    assert all("shape" not in row for row in coded)
    assert b"".join(base64.b64decode(row["data"]) for row in coded) == ROWS[:3].tobytes()
    found = decode(pooled(VECTORS, vectors, encoding_format="bytes"))
    assert [row.shape for row in found] == [(WIDTH,)] * 3 and np.array_equal(np.stack(found), ROWS[:3])


def test_pooling_of_a_reranker() -> None:
    logits = np.array([[-90.0], [0.0], [2.5]], np.float32)
    found = result(logits, range(4))
    for fields in ({}, {"task": "classify"}, {"use_activation": True}):
        rows = [row["data"] for row in data(pooled(SCORES, found, **fields))]
        np.testing.assert_allclose(np.array(rows), 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-6)
    rows = [row["data"] for row in data(pooled(SCORES, found, use_activation=False))]
    assert rows == logits.tolist()
    raw = decode(pooled(SCORES, found, use_activation=False, encoding_format="bytes"))
    assert [row.tolist() for row in raw] == logits.tolist()


@pytest.mark.parametrize(
    ("served", "fields", "param", "words"),
    [
        (TOKENS, {"task": "embed"}, "task", "'m' does token_embed, and not 'embed'"),
        (TOKENS, {"task": "token_classify"}, "task", "does token_embed"),
        (TOKENS, {"task": "retrieval.query"}, "task", "does token_embed"),
        (TOKENS, {"task": 1}, "task", "expected token_embed, found 1"),
        (VECTORS, {"task": "token_embed"}, "task", "does embed"),
        (SCORES, {"task": "score"}, "task", "does classify"),
        (SCORES, {"embed_dtype": "int8"}, "embed_dtype", "a score has no int8"),
        (TOKENS, {"dimensions": 8}, "dimensions", "not supported"),
        (TOKENS, {"return_multivector": True}, "return_multivector", "not supported"),
        (TOKENS, {"data": {"x": 1}}, "data", "plugins"),
        (TOKENS, {"embed_dtype": "fp8_e4m3"}, "embed_dtype", "float16"),
        (TOKENS, {"endianness": "middle"}, "endianness", "native, little, big"),
        (TOKENS, {"input": ["a"] * 501, "encoding_format": "bytes"}, "encoding_format", "at most 500"),
        (TOKENS, {"colour": 1}, "colour", "unknown key"),
    ],
)
def test_what_pooling_refuses(served: Served, fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        pooled(served, **fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_the_longest_metadata_is_read_by_pythons_own_client() -> None:
    rows = np.zeros((500, 4096), np.float32)
    served = Served(
        names=("a-model/of-a-hub",), output=Output(kind=OutputKind.TOKENS, width=4096), limits=RequestLimits()
    )
    found = result(rows, range(501))
    big = pooled(served, found, input=["a"] * 500, encoding_format="bytes", endianness="big")
    # Its places are four digits longer where every input is a page.
    assert len(big.headers["metadata"]) + 500 * 2 * 4 < 65536


def test_tei_answers_a_list_of_matrices() -> None:
    body = written(translate_tei(EMBED_ALL, OutputKind.TOKENS, {"inputs": ["a", "b", "c"]}, TOKENS))
    for found, matrix in zip(orjson.loads(body.content), MATRICES, strict=True):
        assert np.array_equal(np.array(found, np.float32), matrix)
    with pytest.raises(InvalidInput, match="dimensions"):
        translate_tei(EMBED_ALL, OutputKind.TOKENS, {"inputs": "a", "dimensions": 8}, TOKENS)
