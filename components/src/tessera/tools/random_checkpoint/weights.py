"""Random weights in the checkpoint's tensor layout, streamed to safetensors files without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tessera.checkpoint.safetensors import encode_header
from tessera.checkpoint.weights import INDEX_FILE, SINGLE_FILE, Shapes
from tessera.dtypes import FLOATS, Float32Array, bfloat16_bits
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.tensors import expected
from tessera.tools.random_checkpoint.spec import CheckpointSpec

# A prime, so that no row of any matrix lines up with another where the block starts over.
_BLOCK = 8_388_593
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    mean: float
    deviation: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def write_weights(directory: Path, spec: CheckpointSpec, config: ModelConfig, seed: int, dtype: str) -> None:
    """Write one file, or ``spec.shards`` files and their index; the same bytes for the same arguments."""
    source = np.random.Generator(np.random.PCG64(seed))
    block = source.standard_normal(_BLOCK, dtype=np.float32)
    groups = _grouped(list(_tensors(spec, config)), spec.shards)
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = SINGLE_FILE
        if spec.shards > 1:
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        with (directory / name).open("wb") as file:
            file.write(encode_header([(tensor.name, tensor.shape) for tensor in group], FLOATS[dtype]))
            for tensor in group:
                placed[tensor.name] = name
                _write(file, tensor, block, int(source.integers(_BLOCK)), dtype)
    if spec.shards > 1:
        total = sum(tensor.size for group in groups for tensor in group) * FLOATS[dtype].itemsize
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def all_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a checkpoint by canonical name, the encoder's unused pooling head included."""
    hidden, wide = config.vision.hidden, config.vision.intermediate
    head: Shapes = {
        "probe": (1, 1, hidden),
        "attention.in_proj_weight": (3 * hidden, hidden),
        "attention.in_proj_bias": (3 * hidden,),
        "attention.out_proj.weight": (hidden, hidden),
        "attention.out_proj.bias": (hidden,),
        "layernorm.weight": (hidden,),
        "layernorm.bias": (hidden,),
        "mlp.fc1.weight": (wide, hidden),
        "mlp.fc1.bias": (wide,),
        "mlp.fc2.weight": (hidden, wide),
        "mlp.fc2.bias": (hidden,),
    }
    return expected(config) | {f"vision.head.{name}": shape for name, shape in head.items()}


def _tensors(spec: CheckpointSpec, config: ModelConfig) -> Iterator[_Tensor]:
    prefixes = {"vision": spec.vision_prefix, "projector": spec.projector_prefix, "text": spec.text_prefix}
    for name, shape in all_shapes(config).items():
        part, _, rest = name.partition(".")
        mean, deviation = _distribution(name, shape)
        yield _Tensor(name=prefixes[part] + rest, shape=shape, mean=mean, deviation=deviation)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation that keep activations near unit size and different inputs apart."""
    if name.endswith("bias"):
        return 0.0, 0.05
    if "norm" in name or name == "projector.0.weight":
        return 1.0, 0.1
    if name.endswith(("embed_tokens.weight", "position_embedding.weight", "probe")):
        return 0.0, 0.5
    gain = 1.0
    if "patch_embedding" in name:
        gain = 4.0
    elif "q_proj" in name or "k_proj" in name:
        gain = 1.5
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))


def _grouped(tensors: list[_Tensor], shards: int) -> list[list[_Tensor]]:
    per_shard = -(-len(tensors) // shards)
    return [tensors[start : start + per_shard] for start in range(0, len(tensors), per_shard)]


def _write(file: BinaryIO, tensor: _Tensor, block: Float32Array, start: int, dtype: str) -> None:
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
