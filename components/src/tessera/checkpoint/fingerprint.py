"""A short name for what a checkpoint computes; part of every cache key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

from tessera.checkpoint.adapter import adapter_weights
from tessera.checkpoint.pickled import weight_file
from tessera.checkpoint.quantized import MODELOPT_FILE
from tessera.checkpoint.safetensors import WeightFile
from tessera.checkpoint.weights import weight_files
from tessera.errors import CheckpointError
from tessera.small_files import read_regular

_CHUNK: Final = 1024
# Some of them hold the weights of a module.
_MOST_BYTES: Final = 4 << 30


def fingerprint(directory: Path, *, revision: bytes, files: Sequence[str]) -> str:
    """32 hexadecimal digits over ``revision``, ``files`` and a sample of the weights, and an adapter's.

    ``revision`` is the family's name and a number that is raised by hand whenever preprocessing, prompts or
    the forward pass change what they compute. ``files`` are the names of the configuration, processor and
    tokenizer files; one that is absent counts as absent.

    Covers every byte of these files and of ``hf_quant_config.json``, every weight file's header (names,
    shapes, types, offsets) and, of each tensor, its first, middle and last KiB. It tells apart checkpoints
    that were trained, quantised, merged or sharded differently, since those change all of a tensor; it cannot
    see a change confined to the unsampled inside of a large tensor. The directory's place, file times and
    other files in it have no part. Costs a few small reads for each tensor. Raises ``CheckpointError``
    without weight files, and for one of ``files`` that is no regular file.
    """
    digest = blake3(revision)
    # A declaration of its own; a checkpoint without it keeps the name that it had.
    for name in (*files, *(name for name in (MODELOPT_FILE,) if (directory / name).exists())):
        # The folder of a transformer may be a link, and its modules are in the one above.
        path = Path(os.path.normpath(directory / name))
        try:
            content = read_regular(path, _MOST_BYTES) if path.exists() else b""
        except OSError as error:
            raise CheckpointError(f"{path}: not readable: {error}") from error
        digest.update(f"{name} {path.exists()} {len(content)} ".encode())
        digest.update(content)
    # Loading complains of what is missing.
    weights = weight_files(directory, lambda name: False)
    if (adapter := adapter_weights(directory)) is not None:
        weights.append(weight_file(directory / adapter))
    for file in weights:
        digest.update(f"weights {len(file.header)} ".encode())
        digest.update(file.header)
        for sample in _samples(file):
            digest.update(sample)
    return str(digest.hexdigest(length=16))


def _samples(file: WeightFile) -> Iterator[bytes]:
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        for tensor in file.tensors:
            if tensor.nbytes <= 3 * _CHUNK:
                yield os.pread(descriptor, tensor.nbytes, tensor.start)
                continue
            for offset in (0, (tensor.nbytes - _CHUNK) // 2, tensor.nbytes - _CHUNK):
                yield os.pread(descriptor, _CHUNK, tensor.start + offset)
    finally:
        os.close(descriptor)
