"""Finds a checkpoint's weight files and the place of every tensor in them.

Reads headers only, and no file that the index does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tessera.checkpoint.adapter import Adapter
from tessera.checkpoint.pickled import weight_file
from tessera.checkpoint.quantized import Quantization
from tessera.checkpoint.safetensors import StoredTensor, WeightFile
from tessera.checkpoint.section import Section
from tessera.checkpoint.unread import files_below, weights_instead
from tessera.checkpoint.weight_names import (
    ADAPTER_WEIGHTS,
    SINGLE_FILE,
    STATE_FILE,
    WEIGHTS,
    first_of,
    is_index,
    is_shard,
)
from tessera.dtypes import BY_SAFETENSORS, FLOATS
from tessera.errors import CheckpointError

_FLOATS: Final = {name: dtype for name, dtype in BY_SAFETENSORS.items() if dtype.name in {*FLOATS, "float64"}}

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by canonical name: the name that a family's modules give to a tensor."""


def weight_files(directory: Path, used: Callable[[str], bool] = lambda name: True) -> list[WeightFile]:
    """The headers of the file with all weights, or of the shards that an index names, by file name.

    Raises ``CheckpointError`` for a tensor that the index puts where it is not, if its name is ``used``: tied
    models that were saved again list a head which no file has. A shard of such tensors alone may be missing.
    """
    name = _weights_name(directory)
    if not is_index(name):
        return [weight_file(directory / name)]
    index = Section.read(directory / name)
    placed = index.section("weight_map").values
    needed = {file for name, file in placed.items() if used(name)}
    names = [name for name in _shards(index) if name in needed or (directory / name).exists()]
    if missing := [name for name in names if not (directory / name).exists()]:
        raise CheckpointError(
            f"{index.path}: names {missing[0]}, which is not there: {len(missing)} of {len(names)} files are"
            " missing; run the download again"
        )
    files = {name: weight_file(directory / name) for name in names}
    held = {(tensor.name, name) for name, file in files.items() for tensor in file.tensors}
    for tensor, name in placed.items():
        if (tensor, name) not in held and used(tensor):
            raise CheckpointError(
                f"{files[name].path}: lacks tensor {tensor!r}, which {index.path.name} puts there"
            )
    return list(files.values())


def weight_sizes(directory: Path) -> dict[str, int]:
    """The bytes of the file with all weights, or of each shard that an index names, and of an adapter's file.

    By file name. Empty without any: families from elsewhere may keep their weights in other files.
    """
    name = first_of(WEIGHTS, lambda name: (directory / name).exists())
    names = [] if name is None else named_weights(directory, name)
    return {
        name: (directory / name).stat().st_size
        for name in (*names, *ADAPTER_WEIGHTS)
        if (directory / name).exists()
    }


def named_weights(directory: Path, name: str) -> list[str]:
    """The files that one of ``WEIGHTS`` stands for: itself, or the shards of an index.

    Raises ``CheckpointError``.
    """
    return _shards(Section.read(directory / name)) if is_index(name) else [name]


def _shards(index: Section) -> list[str]:
    names = sorted({str(name) for name in index.section("weight_map").values.values()})
    for name in names:
        if not is_shard(name, index.path.name):
            kind = index.path.name.split(".")[1]
            raise index.error("weight_map", f"names {name!r}, which is no {kind} file beside it")
    return names


def weights_lacking(where: object, names: Iterable[str]) -> CheckpointError:
    """What is said of a checkpoint without a weight file that is read; it has files of these names."""
    return CheckpointError(
        f"{where}: has neither {SINGLE_FILE} nor {STATE_FILE}, nor an index of shards; no other weight format"
        f" is read{weights_instead(names)}"
    )


def _weights_name(directory: Path) -> str:
    name = first_of(WEIGHTS, lambda name: (directory / name).exists())
    if name is None:
        raise weights_lacking(directory, files_below(directory))
    return name


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
