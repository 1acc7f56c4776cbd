"""The fields beside the inputs, the body as a whole, and its description."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import InvalidInput
from tessera.frontend.api.openai import EMBEDDINGS, INERT, parse_embeddings
from tessera.frontend.api.values import read_json
from tessera.frontend.request import EmbeddingsRequest, EmbedDtype, EncodingFormat, RequestLimits
from tessera.models.base import Truncate
from tessera_apis.tokenize import parse_tokenize


def parse(**fields: object) -> EmbeddingsRequest:
    return parse_embeddings({"input": "a", **fields})


def test_defaults() -> None:
    assert parse() == EmbeddingsRequest(inputs=parse().inputs)


def test_null_counts_as_absent() -> None:
    assert parse(**dict.fromkeys(EMBEDDINGS.names - {"input"})) == parse()


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"model": "m"}, "model", "m"),
        ({"encoding_format": "base64"}, "encoding_format", EncodingFormat.BASE64),
        ({"encoding_format": "bytes"}, "encoding_format", EncodingFormat.BYTES),
        ({"encoding_format": "bytes_only"}, "encoding_format", EncodingFormat.BYTES_ONLY),
        ({"endianness": "native"}, "big_endian", False),
        ({"endianness": "big"}, "big_endian", True),
        ({"return_multivector": True}, "multivector", True),
        ({"embed_dtype": "bfloat16"}, "dtype", EmbedDtype.BFLOAT16),
        ({"embedding_type": "float"}, "dtype", EmbedDtype.FLOAT32),
        ({"embedding_type": "ubinary", "embed_dtype": "ubinary"}, "dtype", EmbedDtype.UBINARY),
        ({"dimensions": 512}, "dimensions", 512),
        ({"normalize": False}, "normalize", False),
        ({"use_activation": False}, "normalize", False),
        ({"normalized": True, "use_activation": True}, "normalize", True),
        ({"truncate": "START"}, "truncate", Truncate.START),
        ({"truncate": True}, "truncate", Truncate.DECLARED),
        ({"truncate": True, "truncation_side": "left"}, "truncate", Truncate.START),
        ({"truncate_prompt_tokens": -1}, "truncate", Truncate.DECLARED),
        ({"truncate_prompt_tokens": -1}, "max_tokens", None),
        ({"truncate_prompt_tokens": 77}, "max_tokens", 77),
        ({"truncate_prompt_tokens": 77, "truncation_side": "left"}, "truncate", Truncate.START),
        ({"truncate_prompt_tokens": 77, "truncate": "START"}, "truncate", Truncate.START),
        ({"truncation_side": "left"}, "truncate", Truncate.NONE),
        ({"partial": True}, "allow_partial", True),
        ({"priority": -5}, "priority", -5),
        ({"rid": "r-1"}, "request_id", "r-1"),
    ],
)
def test_fields(fields: dict[str, object], name: str, value: object) -> None:
    assert getattr(parse(**fields), name) == value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"inputs": "a"}, "inputs", "unknown key; did you mean input?"),
        ({"input": "a", "colour": "blue"}, "colour", "unknown key; the known keys are"),
        ({"model": 1}, "model", "found 1"),
        ({"model": ""}, "model", "non-empty"),
        ({"encoding_format": "hex"}, "encoding_format", "base64, bytes, bytes_only, found 'hex'"),
        ({"encoding_format": ["float"]}, "encoding_format", "a list of 1"),
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype", "float32"),
        ({"embed_dtype": "int8", "embedding_type": "uint8"}, "embedding_type", "contradicts embed_dtype"),
        ({"late_chunking_params": {"chunk_size": 8}}, "late_chunking_params", "not supported"),
        ({"dimensions": -1}, "dimensions", "0 for the whole"),
        (
            {"dimensions": 1e30},
            "dimensions",
            "a width, or 0 for the whole, and 1e+30 is too large: the most is 2147483647",
        ),
        ({"dimensions": 2**31}, "dimensions", "2147483648 is too large"),
        ({"dimensions": -1e30}, "dimensions", "found -1e+30"),
        ({"dimensions": True}, "dimensions", "found true"),
        ({"dimensions": 8.0}, "dimensions", "found 8.0"),
        ({"normalize": 1}, "normalize", "true or false"),
        ({"normalize": True, "use_activation": False}, "use_activation", "contradicts normalize"),
        ({"truncate": "LEFT"}, "truncate", "NONE, START, END"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ({"truncate_prompt_tokens": 1e30}, "truncate_prompt_tokens", "1e+30 is too large"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "positive"),
        ({"truncate_prompt_tokens": 9, "truncate": "NONE"}, "truncate_prompt_tokens", "contradicts"),
        ({"truncate": "END", "truncation_side": "left"}, "truncation_side", "contradicts"),
        ({"truncation_side": "up"}, "truncation_side", "left, right"),
        ({"truncate": "DECLARED"}, "truncate", "NONE, START, END"),
        ({"input_type": "image"}, "input_type", "query"),
        ({"task": "classification"}, "task", "retrieval.query"),
        ({"task": "query", "input_type": "passage"}, "task", "contradicts"),
        ({"user": 1}, "user", "found 1"),
        ({"priority": 2**63}, "priority", "64-bit"),
        ({"priority": "high"}, "priority", "found 'high'"),
        ({"request_id": "a\r\nb"}, "request_id", "visible ASCII"),
        ({"partial": "yes"}, "partial", "true or false"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ({"mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs", "not supported"),
        ({"endianness": "middle"}, "endianness", "one of native, little, big"),
        ({"add_special_tokens": False}, "add_special_tokens", "not supported"),
        ({"add_special_tokens": 1}, "add_special_tokens", "not supported"),
        ({"add_generation_prompt": True}, "add_generation_prompt", "not supported"),
    ],
)
def test_errors(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_harmless_values_of_fields_without_meaning() -> None:
    for name, values in INERT.items():
        for value in values:
            assert parse(**{name: value}) == parse()
    message = [{"role": "user", "content": "a"}]
    for name in ("add_special_tokens", "add_generation_prompt", "continue_final_message"):
        assert parse_embeddings({"messages": message, name: True}) == parse_embeddings({"messages": message})
        assert parse_embeddings({"messages": message, name: False}) == parse_embeddings({"messages": message})


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"\\ud800": 1}', b"[" * 5000, b"NaN", b"{} {}"])
def test_malformed_json(raw: bytes) -> None:
    with pytest.raises(InvalidInput, match="not valid JSON"):
        read_json(raw)


def test_malformed_json_of_another_content_type() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n'
    with pytest.raises(InvalidInput, match="Content-Type is multipart/form-data, not application/json: "):
        read_json(form, "Multipart/form-data; boundary=x")
    for kind in ("", "application/json; charset=utf-8", "application/cloudevents+json", "text/json"):
        with pytest.raises(InvalidInput, match=r"^the body is not valid JSON: "):
            read_json(form, kind)
    assert read_json(b"{}", "multipart/form-data") == {}


def test_tokenize_names_its_own_keys() -> None:
    with pytest.raises(InvalidInput, match="the known keys are") as caught:
        parse_tokenize({"prompt": "a", "colour": 1}, RequestLimits(), ())
    known = caught.value.message.rpartition(" are ")[2].split(", ")
    assert {"prompt", "inputs", "input", "messages", "return_token_strs"} < set(known)
    with pytest.raises(InvalidInput, match="did you mean prompt"):
        parse_tokenize({"promt": "a"}, RequestLimits(), ())


@pytest.mark.parametrize("body", [None, [], "a", 1, True])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(InvalidInput, match="expected a JSON object"):
        parse_embeddings(body)


def test_the_schema_describes_every_field_and_is_json() -> None:
    assert EMBEDDINGS.schema["properties"].keys() == EMBEDDINGS.names
    assert EMBEDDINGS.schema["additionalProperties"] is False
    assert orjson.loads(orjson.dumps(EMBEDDINGS.schema)) == EMBEDDINGS.schema


_KEYS = sorted(
    {*EMBEDDINGS.names, "type", "text", "image", "image_url", "url", "role", "content", "uuid", "detail"}
)
_WORDS = [
    "text",
    "image_url",
    "input_image",
    "user",
    "query",
    "data:image/png;base64,AAAA",
    "http://x/y",
    "/x",
]
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**33)
    | st.floats()
    | st.sampled_from(_WORDS)
    | st.text(max_size=12)
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=3) | _JSON, _JSON)
def test_anything_is_either_parsed_or_invalid(body: object, value: object) -> None:
    for candidate in (body, {"input": value}, {"messages": value}, {"input": [value, value]}):
        try:
            request = parse_embeddings(candidate)
        except InvalidInput as error:
            assert error.message
        else:
            assert request.inputs
            assert all(found.parts for found in request.inputs)


def test_a_key_with_a_likely_meaning_is_not_followed_by_all_others() -> None:
    with pytest.raises(InvalidInput, match=r"^inputs: unknown key; did you mean input\?$"):
        parse(inputs="a")
