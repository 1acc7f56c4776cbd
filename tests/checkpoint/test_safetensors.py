from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.safetensors import WeightFile
from tessera.dtypes import DTYPES
from tessera.errors import CheckpointError
from tessera.small_files import read_json
from tessera_tools.random_checkpoint.weights import encode_header


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + data)
    return path


def test_places_tensors_where_safetensors_put_them(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"one": torch.arange(6.0).reshape(2, 3), "two": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt"})
    file = WeightFile.read(path)
    assert {tensor.name for tensor in file.tensors} == set(tensors)
    for tensor in file.tensors:
        assert tensor.shape == tuple(tensors[tensor.name].shape)
        stored = path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
        assert stored == tensors[tensor.name].view(torch.uint8).numpy().tobytes()


def test_a_header_written_here_is_read_by_the_package(tmp_path: Path) -> None:
    shapes = {"one": (2, 3), "two": (), "three": (5,)}
    path = tmp_path / "a.safetensors"
    values = torch.arange(12, dtype=torch.bfloat16)
    path.write_bytes(
        encode_header(shapes.items(), DTYPES["bfloat16"]) + values.view(torch.uint8).numpy().tobytes()
    )
    loaded = load_file(path)
    assert {name: tuple(value.shape) for name, value in loaded.items()} == shapes
    assert torch.equal(torch.cat([loaded[name].view(-1) for name in shapes]), values)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header is not JSON"),
        (b"\xff\xff", "header is not JSON"),
        ([], "header is no JSON object"),
        ({"a": {}}, "'a' has no dtype, shape and data_offsets"),
        ({"a": []}, "'a' has no dtype, shape and data_offsets"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "'a' has no dtype, shape and data_offsets"),
        ({"a": {**GOOD, "dtype": "F13"}}, "malformed header entry"),
        ({"a": {**GOOD, "dtype": []}}, "malformed header entry"),
        (b'{"a":' + b"[" * 200_000, "header is not JSON"),
        ({"a": {**GOOD, "shape": [-2]}}, "malformed header entry"),
        ({"a": {**GOOD, "shape": [2.0]}}, "malformed header entry"),
        ({"a": {**GOOD, "shape": [3]}}, r"'a' of F32 \[3\] needs 12 bytes; its header says 0..8 of 8"),
        (
            {"a": {**GOOD, "data_offsets": [4, 12]}},
            "is cut short: it has [0-9]+ bytes, and tensor .a. ends at",
        ),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "a.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=message) as caught:
        WeightFile.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_files_cut_short(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file, or cut short"):
        WeightFile.read(path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a pointer of Git LFS"),
        (b"PK\x03\x04" + b"\xff" * 90, "a ZIP archive"),
        (b"<!DOCTYPE html><html><body>Please log in</body></html>", "a page of markup"),
    ],
)
def test_what_stands_in_its_place_is_named(tmp_path: Path, content: bytes, kind: str) -> None:
    """What a clone without LFS, a renamed file and a download behind a log-in leave."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"a.safetensors: is {kind}"):
        WeightFile.read(path)
    with pytest.raises(ValueError, match=f"it is {kind}"):
        read_json(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not readable"):
        WeightFile.read(tmp_path / "a.safetensors")
