"""Finds a checkpoint's weight files and the place of every tensor in them.

Reads headers only. Files in pickle formats are never opened, and neither is any file that the index does
not name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tessera.checkpoint.adapter import ADAPTER_WEIGHTS, Adapter
from tessera.checkpoint.quantized import Quantization
from tessera.checkpoint.safetensors import StoredTensor, WeightFile
from tessera.checkpoint.section import Section
from tessera.dtypes import BY_SAFETENSORS, FLOATS
from tessera.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_FLOATS: Final = {name: dtype for name, dtype in BY_SAFETENSORS.items() if dtype.name in {*FLOATS, "float64"}}

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by canonical name: the name that a family's modules give to a tensor."""


def weight_files(directory: Path, used: Callable[[str], bool] = lambda name: True) -> list[WeightFile]:
    """The headers of ``model.safetensors``, or of the shards that the index names, by file name.

    Raises ``CheckpointError`` for a tensor that the index puts where it is not, if its name is ``used``: tied
    models that were saved again list a head which no file has. A shard of such tensors alone may be missing.
    """
    if (directory / SINGLE_FILE).exists():
        return [WeightFile.read(directory / SINGLE_FILE)]
    placed = _index(directory).section("weight_map").values
    needed = {file for name, file in placed.items() if used(name)}
    names = [name for name in shards(directory) if name in needed or (directory / name).exists()]
    files = {name: WeightFile.read(directory / name) for name in names}
    held = {(tensor.name, name) for name, file in files.items() for tensor in file.tensors}
    for tensor, name in placed.items():
        if (tensor, name) not in held and used(tensor):
            raise CheckpointError(
                f"{files[name].path}: lacks tensor {tensor!r}, which {INDEX_FILE} puts there"
            )
    return list(files.values())


def weight_sizes(directory: Path) -> dict[str, int]:
    """The bytes of ``model.safetensors``, or of each shard that the index names, and of an adapter's file.

    By file name. Empty without any: families from elsewhere may keep their weights in other files.
    """
    if (directory / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        names = shards(directory) if (directory / INDEX_FILE).exists() else []
    return {
        name: (directory / name).stat().st_size
        for name in (*names, ADAPTER_WEIGHTS)
        if (directory / name).exists()
    }


def shards(directory: Path) -> list[str]:
    """The names of the files that the index puts tensors into; raises ``CheckpointError``."""
    index = _index(directory)
    names = sorted({str(name) for name in index.section("weight_map").values.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise index.error("weight_map", f"names {name!r}, which is no safetensors file beside it")
    return names


def _index(directory: Path) -> Section:
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(
            f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}; no other weight format is read"
        )
    return Section.read(directory / INDEX_FILE)


def stored_tensors(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], canonical: Callable[[str], str | None]
) -> dict[str, StoredTensor]:
    """The place of every tensor of ``shapes``, by canonical name.

    ``canonical`` turns a stored name into a canonical one, or into None for a tensor that the model does not
    use. Quantised weights come with their scales. An adapter in the directory replaces tensors, or is added
    to them when they are read. Raises ``CheckpointError`` that names tensor and file, with what was expected
    and what was found, for a tensor that is missing, unknown, there twice, of another shape, or not of a
    float type.
    """
    files = weight_files(directory, lambda name: canonical(name) is not None)
    found: dict[str, StoredTensor] = {}
    for stored, tensor in _named(directory, files):
        name = canonical(stored)
        if name is None:
            continue
        if name in found:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} is the same as {found[name].name!r}"
                f" in {found[name].file.name}"
            )
        if name not in shapes:
            raise CheckpointError(
                f"{tensor.file}: unexpected tensor {tensor.name!r} of shape {list(tensor.shape)};"
                " the configuration has no place for it"
            )
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} must have shape {list(shapes[name])},"
                f" found {list(tensor.shape)}"
            )
        if tensor.scales is None and tensor.dtype.safetensors not in _FLOATS:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} must be one of {list(_FLOATS)},"
                f" found {tensor.dtype.safetensors}"
            )
        found[name] = tensor
    if (adapter := Adapter.read(directory)) is not None:
        adapter.merge(found, shapes, canonical)
    for name, shape in shapes.items():
        if name not in found:
            searched = ", ".join(file.path.name for file in files)
            raise CheckpointError(
                f"{directory}: tensor {name!r} of shape {list(shape)} is missing from {searched}"
            )
    return found


def _named(directory: Path, files: Sequence[WeightFile]) -> list[tuple[str, StoredTensor]]:
    tensors = [tensor for file in files for tensor in file.tensors]
    quantization = Quantization.read(directory)
    if quantization is None:
        return [(tensor.name, tensor) for tensor in tensors]
    return quantization.joined(tensors)
