"""Reads how weights are quantised, and joins each with its scales; torch-free.

Three declarations are known, by ``quantization_config`` of ``config.json`` or of the text model in it, or by
``hf_quant_config.json``:
NVIDIA's ModelOpt (FP8 by tensor, by row and by blocks, MXFP8, NVFP4), ``compressed-tensors`` (the same, and
MXFP4), and transformers' and DeepSeek's ``fp8``. All keep a weight's values beside scales that they are
multiplied by. Loading does that in float32 and rounds once, or leaves E4M3 values to products in FP8, for
which scales of inputs are stored, too. Those of caches of keys and values are not read.

NVFP4 and MXFP4 are in "OCP Microscaling Formats (MX) v1.0" (E2M1, E4M3, E8M0) and in ModelOpt's
documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.checkpoint.safetensors import Scales, StoredTensor
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.errors import CheckpointError

MODELOPT_FILE: Final = "hf_quant_config.json"

Block = tuple[int, int]
"""Rows and columns that have one scale."""

# The second is of early files of compressed-tensors.
_KEYS: Final = ("quantization_config", "compression_config")
_TEXT: Final = "text_config"
_MIXED: Final = "MIXED_PRECISION"
_LAYERS: Final = "quantized_layers"
_ALGORITHM: Final = "quant_algo"
# The blocks of ModelOpt's algorithms; none where a scale is of a row or of the tensor.
_MODELOPT: Final[dict[str, Block | None]] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": (128, 128),
    "FP8_BLOCK_SCALES": (128, 128),
    "MXFP8": (1, 32),
    "NVFP4": (1, 16),
    "W4A16_NVFP4": (1, 16),
}
_COMPRESSED: Final = (
    *("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    *("mxfp8-quantized", "mixed-precision", "dense"),
)
_STRATEGIES: Final = ("tensor", "channel", "group", "block", "tensor_group")
_WEIGHT: Final = ".weight"
_PACKED: Final = ".weight_packed"
_SCALES: Final = (".weight_scale", ".weight_scale_inv")
# Of the whole tensor, beside those of its blocks; values are divided by the second.
_OVERALL: Final = ".weight_scale_2"
_OVERALL_DIVISOR: Final = ".weight_global_scale"
# Of what an E4M3 product reads beside its weight.
_OF_INPUTS: Final = (".input_scale", ".activation_scale")
# Of caches, by the names that exporters gave them over time.
_OF_CACHES: Final = (
    *(f".{part}_{end}" for part in "qkv" for end in ("scale", "zero_point")),
    *(".kv_scale", ".output_scale", ".prob_output_scale"),
)
_BESIDE: Final = (*_OF_INPUTS, ".input_global_scale", *_OF_CACHES)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint declares of its weights; ``blocks`` are all that some of them may have.

    ``rounds_inputs`` says that products round what they read as well.
    """

    config: Section
    blocks: frozenset[Block]
    rounds_inputs: bool = True

    @classmethod
    def read(cls, directory: Path) -> Quantization | None:
        """Read the declaration in a directory, None where there is none.

        Raises ``CheckpointError`` naming file and key for one that is not known.
        """
        declared = _declaration(directory)
        if declared is None:
            return None
        method = declared.string("quant_method", _made_by(declared)).lower()
        if method.startswith("modelopt"):
            return cls(declared, _of_modelopt(declared))
        if method == "fp8":
            declared.string("fmt", "e4m3", among=("e4m3",))
            return cls(declared, frozenset(_block(declared, "weight_block_size")))
        if method in ("compressed-tensors", "compressed_tensors"):
            return cls(declared, *_of_compressed(declared))
        known = "modelopt, compressed-tensors and fp8"
        raise declared.error("quant_method", f"is {method!r}; of quantised weights {known} are read")

    def joined(self, tensors: Iterable[StoredTensor]) -> list[tuple[str, StoredTensor]]:
        """Return the tensors by the names that they would have unquantised, weights with their scales.

        Scales themselves are left out. Raises ``CheckpointError`` for a quantised weight whose scales are
        missing or do not cover it.
        """
        listed = list(tensors)
        by_name = {tensor.name: tensor for tensor in listed}
        joined: list[tuple[str, StoredTensor]] = []
        used: set[str] = set()
        for tensor in listed:
            module, quantised = _quantised(tensor)
            if not quantised:
                joined.append((tensor.name, tensor))
                continue
            weight = self._with_scales(tensor, module, by_name)
            assert weight.scales is not None
            used |= {scale.name for scale in (weight.scales.of_blocks, weight.scales.overall) if scale}
            joined.append((module + _WEIGHT, weight))
        return [(name, tensor) for name, tensor in joined if name not in used and not name.endswith(_BESIDE)]

    def _with_scales(
        self, tensor: StoredTensor, module: str, by_name: dict[str, StoredTensor]
    ) -> StoredTensor:
        scale = next((by_name[module + end] for end in _SCALES if module + end in by_name), None)
        if scale is None:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} of {tensor.dtype.safetensors} has no"
                f" {module + _SCALES[0]!r} beside it"
            )
        divisor = by_name.get(module + _OVERALL_DIVISOR)
        overall = divisor or by_name.get(module + _OVERALL)
        if overall is not None and math.prod(overall.shape) != 1:
            raise _does_not_cover(overall, tensor)
        of_inputs = next((by_name[module + end] for end in _OF_INPUTS if module + end in by_name), None)
        if of_inputs is not None and of_inputs.count != 1:
            raise CheckpointError(
                f"{of_inputs.file}: tensor {of_inputs.name!r} of shape {list(of_inputs.shape)}"
                " must be one number"
            )
        packed = tensor.dtype.name == "uint8"
        if packed:
            tensor = replace(tensor, shape=(tensor.shape[0], 2 * tensor.shape[1]))
        scales = Scales(
            of_blocks=scale,
            block=self._block(scale, tensor),
            overall=overall,
            divides=divisor is not None,
            packed=packed,
            rounds_inputs=self.rounds_inputs,
            of_inputs=of_inputs,
        )
        return replace(tensor, scales=scales)

    def _block(self, scale: StoredTensor, tensor: StoredTensor) -> Block:
        """Return what of the tensor one of the scales is for; raises ``CheckpointError``."""
        rows, columns = tensor.shape
        shape = tuple(size for size in scale.shape if size != 1)
        if not shape:
            return rows, columns
        if math.prod(shape) == scale.shape[0] == rows:
            return 1, columns
        for height, width in self.blocks:
            # Exporters keep an axis of one between the two.
            grid = math.ceil(rows / height), math.ceil(columns / width)
            if tuple(size for size in grid if size != 1) == shape:
                return height, width
        raise _does_not_cover(scale, tensor)


def _quantised(tensor: StoredTensor) -> tuple[str, bool]:
    """Return the module of a tensor, and whether it is the quantised weight of it."""
    if tensor.name.endswith(_PACKED):
        return tensor.name.removesuffix(_PACKED), _is_matrix(tensor)
    quantised = tensor.dtype.name in ("float8", "uint8") and _is_matrix(tensor)
    return tensor.name.removesuffix(_WEIGHT), quantised and tensor.name.endswith(_WEIGHT)


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2


def _does_not_cover(scale: StoredTensor, tensor: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{scale.file}: tensor {scale.name!r} of shape {list(scale.shape)} does not cover"
        f" {tensor.name!r} of shape {list(tensor.shape)}"
    )


def _declaration(directory: Path) -> Section | None:
    """Return the first that there is; of mixed layers, which may be listed in the second alone, that."""
    config = Section.read(directory / CONFIG_FILE, optional=True)
    places = [config, config.section(_TEXT)] if isinstance(config.values.get(_TEXT), dict) else [config]
    found = (place.section(key) for place in places for key in _KEYS if place.has(key))
    declared = next(found, None)
    file = directory / MODELOPT_FILE
    mixed = declared is not None and str(declared.values.get(_ALGORITHM)).upper() == _MIXED
    if file.exists() and (declared is None or (mixed and not declared.has(_LAYERS))):
        return Section.read(file)
    return declared


def _made_by(config: Section) -> str | None:
    """Return the method of files that do not name it: ModelOpt's own."""
    by = config.values.get("producer")
    inner = config.has("quantization")
    return "modelopt" if inner or (isinstance(by, dict) and by.get("name") == "modelopt") else None


def _of_modelopt(config: Section) -> frozenset[Block]:
    inner = config.section("quantization") if config.has("quantization") else config
    if _ALGORITHM in inner.values and not inner.has(_ALGORITHM):
        # Caches alone are quantised.
        return frozenset()
    named = [inner]
    if inner.string(_ALGORITHM).upper() == _MIXED:
        layers = inner.section(_LAYERS)
        named = [layers.section(layer) for layer in layers.values]
    blocks: set[Block] = set()
    for section in named:
        algorithm = section.string(_ALGORITHM)
        if algorithm.upper() not in _MODELOPT:
            raise section.error(_ALGORITHM, f"is {algorithm!r}; read are {', '.join(_MODELOPT)}")
        block = _MODELOPT[algorithm.upper()]
        if block is not None:
            height, width = block
            size = section.integer("group_size", width)
            blocks.add((min(height, size), size))
    return frozenset(blocks)


def _of_compressed(config: Section) -> tuple[frozenset[Block], bool]:
    """Return the blocks, and whether products round their inputs in every group."""
    config.string("format", _COMPRESSED[0], among=_COMPRESSED)
    config.string("quantization_status", "compressed", among=("compressed", "frozen"))
    sparsity = config.values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise config.error("sparsity_config", "is set, and not of format dense: it is not read")
    if config.values.get("transform_config"):
        raise config.error("transform_config", "is set, which turns the axes of weights: it is not read")
    # Without a group, or without weights in one, caches or inputs of attention alone are quantised.
    groups = config.section("config_groups") if config.has("config_groups") else replace(config, values={})
    blocks: set[Block] = set()
    rounds_inputs = True
    for name in groups.values:
        group = groups.section(name)
        if not group.has("weights"):
            continue
        if group.has("format"):
            group.string("format", among=_COMPRESSED)
        weights = group.section("weights")
        weights.string("type", among=("float",))
        weights.string("strategy", _STRATEGIES[0], among=_STRATEGIES)
        if not weights.flag("symmetric", True):
            raise weights.error("symmetric", "is false: weights with zero points are not read")
        blocks.update(_block(weights, "block_structure"))
        if weights.has("group_size"):
            blocks.add((1, weights.integer("group_size")))
        rounds_inputs &= group.has("input_activations")
    return frozenset(blocks), rounds_inputs


def _block(config: Section, key: str) -> Sequence[Block]:
    """Return a declared block, if there is one; raises ``CheckpointError``."""
    sizes = config.integers(key)
    if not sizes:
        return ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise config.error(key, f"must be two positive integers, not {list(sizes)}")
    return ((sizes[0], sizes[1]),)
