"""Random weights in the checkpoint's tensor layout, streamed to safetensors files without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from tessera.checkpoint.safetensors import LENGTH_BYTES
from tessera.checkpoint.weight_names import INDEX_FILE, SINGLE_FILE
from tessera.checkpoint.weights import Shapes
from tessera.dtypes import FLOATS, DType, Float32Array, bfloat16_bits

# A prime, so that no row of any matrix lines up with another where the block starts over.
_BLOCK = 8_388_593
_CHUNK = 1 << 20
_AS_NAMED: Final[Mapping[str, str]] = {"": ""}

Distribution = Callable[[str, tuple[int, ...]], tuple[float, float]]
"""(name, shape) → mean and deviation of a tensor's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTensor:
    """A tensor as it is stored, whose numbers have this mean and deviation."""

    name: str
    shape: tuple[int, ...]
    mean: float
    deviation: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def random_tensors(
    shapes: Shapes, distribution: Distribution, stored: Mapping[str, str] = _AS_NAMED
) -> Iterator[RandomTensor]:
    """Yield a tensor for each of ``shapes``, in their order.

    ``stored`` has beginnings of names, and what stands there in the files; the first that fits counts.
    """
    for name, shape in shapes.items():
        begins = next(each for each in stored if name.startswith(each))
        mean, deviation = distribution(name, shape)
        yield RandomTensor(
            name=stored[begins] + name.removeprefix(begins), shape=shape, mean=mean, deviation=deviation
        )


def product_shapes(name: str, inner: int, columns: int) -> Shapes:
    """Return the shapes of a product with a bias."""
    return {f"{name}.weight": (columns, inner), f"{name}.bias": (columns,)}


def norm_shapes(name: str, width: int) -> Shapes:
    """Return the shapes of a LayerNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def write_weights(
    directory: Path, tensors: Iterable[RandomTensor], *, shards: int, seed: int, dtype: str
) -> None:
    """Write one file, or ``shards`` files and their index; the same bytes for the same arguments."""
    block, source = _block(seed)
    source = deepcopy(source)
    groups = _grouped(list(tensors), shards)
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = SINGLE_FILE
        if shards > 1:
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        with (directory / name).open("wb") as file:
            file.write(encode_header([(tensor.name, tensor.shape) for tensor in group], FLOATS[dtype]))
            for tensor in group:
                placed[tensor.name] = name
                _write(file, tensor, block, int(source.integers(_BLOCK)), dtype)
    if shards > 1:
        total = sum(tensor.size for group in groups for tensor in group) * FLOATS[dtype].itemsize
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


@lru_cache(maxsize=2)
def _block(seed: int) -> tuple[Float32Array, np.random.Generator]:
    """The numbers of a seed, and their source behind them.

    80 ms and 34 MB for all checkpoints of a process. A folder of a module has the next seed.
    """
    source = np.random.Generator(np.random.PCG64(seed))
    block = source.standard_normal(_BLOCK, dtype=np.float32)
    block.setflags(write=False)
    return block, source


def encode_header(tensors: Iterable[tuple[str, Sequence[int]]], dtype: DType) -> bytes:
    """The beginning of a file whose tensors, all of one type, follow in the order given here."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in tensors:
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    # The tensors' bytes begin at a multiple of eight.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _grouped(tensors: list[RandomTensor], shards: int) -> list[list[RandomTensor]]:
    per_shard = -(-len(tensors) // shards)
    return [tensors[start : start + per_shard] for start in range(0, len(tensors), per_shard)]


def _write(file: BinaryIO, tensor: RandomTensor, block: Float32Array, start: int, dtype: str) -> None:
    left = tensor.size
    while left:
        values = block[start : start + min(left, _CHUNK)]
        scaled = values * np.float32(tensor.deviation)
        scaled += np.float32(tensor.mean)
        file.write(_encoded(scaled, dtype))
        left -= len(values)
        start = (start + len(values)) % _BLOCK


def _encoded(values: Float32Array, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return bfloat16_bits(values).tobytes()
    return values.astype(FLOATS[dtype].numpy).tobytes()
