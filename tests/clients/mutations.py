"""Requests that are almost right: damaged images, tensors and JSON, reproducible from a seed."""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

Request = tuple[str, bytes]
"""Path and body."""

_INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]
_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 1e308, -0.5, "", "x", "\ud800", "\0", "é" * 500),
    *([], {}, [[]], [{}], {"type": "text"}, [None], "NONE", "base64", "binary", "image", "query"),
]


def image_files() -> list[bytes]:
    # One tile, so that encoders are not what the time goes to; those of other modes below have several.
    picture = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    files = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        for options in ({}, {"exif": exif}) if kind not in ("GIF", "BMP") else ({},):
            file = io.BytesIO()
            picture.save(file, kind, **options)
            files.append(file.getvalue())
    for mode, kind in (
        ("P", "GIF"),
        ("LA", "PNG"),
        ("I;16", "PNG"),
        ("CMYK", "JPEG"),
        ("1", "TIFF"),
        ("F", "TIFF"),
    ):
        file = io.BytesIO()
        picture.resize((40, 24)).convert("L").convert(mode).save(file, kind)
        files.append(file.getvalue())
    frames = io.BytesIO()
    picture.save(frames, "GIF", save_all=True, append_images=[picture.rotate(90), picture])
    return [*files, frames.getvalue()]


def tensor_file(hidden: int, rows: int = 3) -> bytes:
    header = {"a": {"dtype": "F32", "shape": [rows, hidden], "data_offsets": [0, 4 * rows * hidden]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * rows * hidden)


def bodies(image_url: str) -> list[tuple[str, dict[str, Any]]]:
    part = {"type": "image_url", "image_url": {"url": image_url}}
    content = [{"type": "text", "text": "a"}, part]
    return [
        ("/v1/embeddings", {"input": ["a", [1, 2], {"text": "b", "image": image_url}, content]}),
        ("/v1/embeddings", {"messages": [[{"role": "user", "content": content}]], "truncate": "END"}),
        (
            "/v1/embeddings",
            {"input": "a", "dimensions": 64, "embed_dtype": "int8", "encoding_format": "bytes"},
        ),
        (
            "/v1/embeddings",
            {"input": ["a", "b"], "modality": ["text", "text"], "partial": True, "priority": 3},
        ),
        ("/v1/embeddings", {"input": [{"text": "a", "instruction": "b"}], "instruction": "c"}),
        (
            "/v1/embeddings",
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": ""},
                ],
                "continue_final_message": True,
            },
        ),
        (
            "/v1/embeddings",
            {
                "input": [
                    [
                        {
                            "type": "image_embeds",
                            "image_embeds": {"image_embeds": "AAAA", "image_grid_thw": [1, 2, 2]},
                        }
                    ]
                ]
            },
        ),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float", "binary"]}),
        ("/v2/embed", {"inputs": [{"content": content}], "truncate": "END", "max_tokens": 500}),
        ("/v1/multimodalembeddings", {"inputs": [{"content": content}], "input_type": "query"}),
        ("/embed", {"inputs": ["a", [1, 2, 3]], "truncate": True, "prompt_name": "query"}),
        ("/invocations", {"inputs": "a", "truncate": True, "truncation_direction": "Left"}),
        (
            "/pooling",
            {"input": ["a", content], "task": "embed", "encoding_format": "bytes", "endianness": "big"},
        ),
        ("/pooling", {"messages": [{"role": "user", "content": content}], "encoding_format": "bytes_only"}),
        (
            "/v1/rerank",
            {
                "query": {"image": image_url},
                "documents": ["a", {"text": "b", "image": image_url}, {"content": content}],
                "top_n": 2,
                "return_documents": True,
                "rank_fields": None,
            },
        ),
        ("/v2/rerank", {"query": "a", "documents": [{"x": "b", "y": "c"}], "rank_fields": ["y", "x"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_k": None, "truncation": True}),
        ("/rerank", {"query": "a", "texts": ["b", "c"], "truncate": True, "return_text": True}),
        ("/score", {"queries": ["a", "b"], "items": ["c", "d"], "max_tokens_per_doc": 3}),
        ("/v1/ranking", {"query": {"text": "a"}, "passages": [{"text": "b", "image": image_url}]}),
        ("/tokenize", {"prompt": "a b c", "truncate_prompt_tokens": 2}),
    ]


class Mutator:
    """An endless source of requests; the same seed gives the same ones."""

    def __init__(self, seed: int, hidden: int) -> None:
        self._source = np.random.default_rng(seed)
        self._images = image_files()
        self._tensor = tensor_file(hidden)
        self._bodies = bodies("data:image/png;base64," + base64.b64encode(self._images[0]).decode())
        self._kinds: list[Callable[[], Request]] = [
            self._image,
            self._image,
            self._tensors,
            self._json,
            self._raw,
        ]

    def request(self) -> Request:
        return self._kinds[self._source.integers(len(self._kinds))]()

    def _image(self) -> Request:
        data = self._damaged(self._images[self._source.integers(len(self._images))])
        url = "data:;base64," + base64.b64encode(data).decode()
        return "/v1/embeddings", json.dumps({"input": [{"image": url}]}).encode()

    def _tensors(self) -> Request:
        part = {
            "type": "image_embeds",
            "image_embeds": base64.b64encode(self._damaged(self._tensor, 120)).decode(),
        }
        return "/v1/embeddings", json.dumps({"input": [[part]]}).encode()

    def _json(self) -> Request:
        path, body = copy.deepcopy(self._bodies[self._source.integers(len(self._bodies))])
        for _ in range(self._source.integers(1, 4)):
            self._change(body)
        return path, json.dumps(body).encode()

    def _raw(self) -> Request:
        path, body = self._bodies[self._source.integers(len(self._bodies))]
        return path, self._damaged(json.dumps(body).encode())

    def _damaged(self, data: bytes, head: int = 0) -> bytes:
        """Bytes replaced, cut, doubled or inserted; with ``head`` mostly among the first of them."""
        changed = bytearray(data)
        for _ in range(self._source.integers(1, 6)):
            if not changed:
                break
            end = min(head, len(changed)) if head and self._source.random() < 0.8 else len(changed)
            at = int(self._source.integers(end))
            match self._source.integers(6):
                case 0 | 1:
                    changed[at] = self._source.integers(256)
                case 2:
                    changed[at] = _INTERESTING[self._source.integers(len(_INTERESTING))]
                case 3:
                    del changed[at : at + int(self._source.integers(1, 9))]
                case 4:
                    changed[at:at] = self._source.bytes(int(self._source.integers(1, 9)))
                case _:
                    piece = changed[at : at + int(self._source.integers(1, 33))]
                    changed[at:at] = piece
        if self._source.random() < 0.1:
            del changed[int(self._source.integers(len(changed) + 1)) :]
        return bytes(changed)

    def _change(self, value: Any) -> None:
        """Replace, remove, add or double one value somewhere inside."""
        while isinstance(value, dict | list) and value:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = keys[self._source.integers(len(keys))]
            if isinstance(value[key], dict | list) and value[key] and self._source.random() < 0.7:
                value = value[key]
                continue
            other = copy.deepcopy(_VALUES[self._source.integers(len(_VALUES))])
            match self._source.integers(4):
                case 0:
                    del value[key]
                case 1 if isinstance(value, dict):
                    value[str(other)[:20]] = other
                case 2 if isinstance(value, list):
                    value.append(copy.deepcopy(value[key]))
                case _:
                    value[key] = other
            return
