"""Fills torch modules from weight files, one tensor at a time.

Modules are built without storage. Each parameter then gets its memory, and its tensor is copied into it from
the file that the ``safetensors`` package has mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tessera.checkpoint.pickled import state_file
from tessera.checkpoint.progress import Progress
from tessera.checkpoint.safetensors import LowRank, Scales, StoredTensor
from tessera.dtypes import FLOATS
from tessera.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

_MAPPED_BYTES: Final = 64 << 20
# By the lower three bits; the fourth is the sign.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Without the sign; all others are finite.
_E4M3_NAN: Final = 0x7F


_AS_STORED: ContextVar[bool] = ContextVar("_AS_STORED", default=False)


@contextmanager
def as_stored() -> Iterator[None]:
    """Leave weights in FP8, in modules that can hold them so, where ``fill`` is called inside.

    Otherwise they are multiplied out. Every family's loading passes it by: what holds FP8 is below them all.
    """
    token = _AS_STORED.set(True)
    try:
        yield
    finally:
        _AS_STORED.reset(token)


@runtime_checkable
class Product(Protocol):
    """A module with a weight: ``stored`` is what that was read from, ``take_fp8`` holds it in FP8.

    ``takes_fp8`` says whether it can hold ``[columns, inner]`` so. Values are e4m3 ``[columns, inner]``,
    scales float32 ``[columns]``; ``input_scale`` float32 ``[]`` is None for inputs with a scale for each row.
    """

    stored: tuple[StoredTensor, ...]

    def takes_fp8(self, columns: int, inner: int) -> bool: ...

    def take_fp8(
        self, values: torch.Tensor, scales: torch.Tensor, input_scale: torch.Tensor | None
    ) -> None: ...


def torch_dtype(name: str) -> torch.dtype:
    """The type of that name; raises ``ConfigError`` for one that modules are not loaded in."""
    if name not in FLOATS:
        raise ConfigError(f"dtype {name!r} is none of {sorted(FLOATS)}")
    return FLOATS[name].torch


def fill(
    module: nn.Module,
    tensors: Mapping[str, StoredTensor],
    *,
    part: str,
    sources: Mapping[str, Sequence[str]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace every parameter of ``module`` by one with storage, read from its sources.

    ``part`` is what precedes the parameters' names in the tensors' canonical names. ``sources`` lists, for a
    submodule's name, the stored names that it stands for: its parameter is their rows, one after another.
    Says how far it has come where that takes longer. Raises ``CheckpointError`` for a file that ends early,
    and for a tensor with a value that is not finite in ``dtype``.
    """
    parameters = dict(module.named_parameters())
    read = {name: [tensors[source] for source in stored_names(part + name, sources)] for name in parameters}
    total = sum(tensor.nbytes for each in read.values() for tensor in each)
    progress = Progress(log, f"loading weights of {type(module).__name__}", total)
    filled: dict[str, torch.Tensor] = {}
    # The least and the largest value of each, which are looked at together: a GPU is waited for once.
    ranges: list[torch.Tensor] = []
    with TensorReader() as reader:
        for name, placeholder in parameters.items():
            owner, _, attribute = name.rpartition(".")
            holder, shape = module.get_submodule(owner), placeholder.shape
            if isinstance(holder, Product) and attribute == "weight":
                holder.stored = tuple(read[name])
                in_fp8 = _AS_STORED.get() and all(tensor.in_fp8 for tensor in read[name])
                if in_fp8 and holder.takes_fp8(*shape):
                    holder.take_fp8(*reader.fp8(read[name], device))
                    progress.add(sum(tensor.nbytes for tensor in read[name]))
                    continue
            value = torch.empty(placeholder.shape, dtype=dtype, device=device)
            flat = value.view(-1)
            offset = 0
            for tensor in read[name]:
                reader.read(tensor, flat[offset : offset + tensor.count])
                progress.add(tensor.nbytes)
                offset += tensor.count
            assert offset == flat.numel(), f"{name} was filled with {offset} of {flat.numel()} numbers"
            setattr(holder, attribute, nn.Parameter(value, requires_grad=False))
            filled[name] = flat
            ranges.append(torch.stack(flat.aminmax()))
        if not all(finite := torch.stack(ranges).isfinite().all(dim=1).tolist() if ranges else []):
            name = list(filled)[finite.index(False)]
            reader.refuse_what_is_not_finite(read[name], filled[name])


def stored_names(name: str, sources: Mapping[str, Sequence[str]]) -> list[str]:
    """The canonical names of what a parameter is made of, as ``fill`` says."""
    found = [name]
    for own, stored in sources.items():
        found = [
            one.replace(f".{own}.", f".{part}.")
            for one in found
            for part in (stored if f".{own}." in one else [own])
        ]
    return found


class TensorReader:
    """Reads tensors from weight files, of which it keeps one mapped.

    Pages that were read count against the process for as long as a file is mapped, so the file is mapped anew
    after every 64 MiB. For 976 MiB of bfloat16 in one file the peak was 1956 MiB with one mapping, 1044 so,
    996 MiB with a mapping for each tensor of 16 MiB; in 1.1 to 1.5 s on a busy machine.
    """

    def __init__(self) -> None:
        self._file: tuple[Path, Any] | None = None
        self._mapped = 0

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file = None

    def read(self, tensor: StoredTensor, into: torch.Tensor) -> None:
        """Copy all of ``tensor`` into the one-dimensional ``into``, on any device and of any float type.

        Quantised values are multiplied by their scales, and what an adapter adds is added, in float32 before.
        Raises ``CheckpointError`` for a file that has changed since its header was read.
        """
        if tensor.scales is None and tensor.added is None:
            value = self._stored(tensor)
        else:
            value = self._whole(tensor)
            if tensor.first is not None:
                value = value[tensor.first : tensor.first + tensor.shape[0]]
        into.copy_(value.reshape(-1))

    def refuse_what_is_not_finite(self, tensors: Sequence[StoredTensor], filled: torch.Tensor) -> NoReturn:
        """Raise ``CheckpointError`` naming the first of ``tensors`` with a value that is not finite.

        ``filled`` is one-dimensional and was read from all of them, and has such a value.
        """
        ends = accumulate(tensor.count for tensor in tensors)
        spans = ((tensor, slice(end - tensor.count, end)) for tensor, end in zip(tensors, ends, strict=True))
        tensor, part = next((each, own) for each, span in spans if not _are_finite(own := filled[span]))
        self.read(tensor, exact := torch.empty(tensor.count))
        if _are_finite(exact):
            kind = str(part.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} has values up to {exact.abs().max():.6g}, which"
                f" {kind} cannot hold: load it in bfloat16 or float32"
            )
        raise _not_finite(tensor)

    def fp8(
        self, tensors: Sequence[StoredTensor], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return tensors that are ``in_fp8``, one below the other: values, scales, the scale of their inputs.

        As ``Product`` has them. They share their inputs, so the largest of their scales serves all; without
        one for each there is none. Raises ``CheckpointError`` for a scale that is no positive number, and
        for a value that is none.
        """
        rows, inner = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        values = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(rows, device=device)
        start, of_inputs = 0, []
        for tensor in tensors:
            assert tensor.scales is not None
            part = slice(start, start + tensor.shape[0])
            values[part].copy_(self._stored(tensor))
            if int((values[part].view(torch.uint8) & _E4M3_NAN).amax()) == _E4M3_NAN:
                raise _not_finite(tensor)
            scales[part] = self._scale(tensor.scales.of_blocks).reshape(-1).to(device)
            start = part.stop
            if tensor.scales.of_inputs is not None:
                of_inputs.append(self._scale(tensor.scales.of_inputs).reshape(()))
        static = torch.stack(of_inputs).amax().to(device) if len(of_inputs) == len(tensors) else None
        return values, scales, static

    def _scale(self, tensor: StoredTensor) -> torch.Tensor:
        scale = self._stored(tensor).float()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} must be positive")
        return scale

    def _whole(self, tensor: StoredTensor) -> torch.Tensor:
        whole = self._stored(replace(tensor, first=None))
        whole = whole.float() if tensor.scales is None else self._multiplied(whole, tensor.scales)
        return whole if tensor.added is None else self._with_added(whole, tensor.added)

    def _multiplied(self, values: torch.Tensor, scales: Scales) -> torch.Tensor:
        weights = _unpacked(values) if scales.packed else values.float()
        of_blocks = self._stored(scales.of_blocks)
        of_blocks = (
            torch.exp2(of_blocks.float() - 127) if of_blocks.dtype == torch.uint8 else of_blocks.float()
        )
        rows, columns = weights.shape
        height, width = scales.block
        grid = of_blocks.reshape(-(-rows // height), -(-columns // width))
        if height > 1:
            grid = grid.repeat_interleave(height, dim=0)[:rows]
        if width > 1:
            grid = grid.repeat_interleave(width, dim=1)[:, :columns]
        weights *= grid
        if scales.overall is not None:
            overall = self._stored(scales.overall).float().reshape(())
            weights = weights / overall if scales.divides else weights * overall
        return weights

    def _with_added(self, whole: torch.Tensor, added: LowRank) -> torch.Tensor:
        product = self._stored(added.b).float()
        if added.a is not None:
            product = product @ self._stored(added.a).float()
        whole = whole + added.scale * (product.T if added.turned else product)
        if added.magnitude is not None:
            lengths = torch.linalg.vector_norm(whole, dim=1)
            whole = whole * (self._stored(added.magnitude).float() / lengths)[:, None]
        return whole

    def _stored(self, tensor: StoredTensor) -> torch.Tensor:
        if self._file is None or self._file[0] != tensor.file or self._mapped > _MAPPED_BYTES:
            # The old mapping ends before the new one begins.
            self._file = None
            self._file = tensor.file, opened(tensor.file)
            self._mapped = 0
        self._mapped += tensor.nbytes
        try:
            return self._value(tensor, self._file[1])
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{tensor.file}: cannot read tensor {tensor.name!r}: {error}") from error

    @staticmethod
    def _value(tensor: StoredTensor, file: Any) -> torch.Tensor:
        if tensor.first is None:
            whole: torch.Tensor = file.get_tensor(tensor.name)
            return whole
        rows: torch.Tensor = file.get_slice(tensor.name)[tensor.first : tensor.first + tensor.shape[0]]
        return rows


def _are_finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _not_finite(tensor: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: tensor {tensor.name!r} has values that are no numbers (NaN, or infinite):"
        " its training or a conversion went wrong"
    )


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Two E2M1 values for each byte ``[rows, bytes]``, as float32 ``[rows, 2 * bytes]``."""
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return torch.tensor((*_E2M1, *(-value for value in _E2M1)))[halves.int()]


class _State:
    """The tensors of a file that ``torch.save`` wrote, as ``safe_open`` gives those of its files.

    Each has a mapping of its own, and none of them can write to the file.
    """

    def __init__(self, path: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in state_file(path).tensors}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        mapped = np.memmap(tensor.file, np.uint8, "c", tensor.start, (tensor.nbytes,))
        return torch.from_numpy(mapped).view(tensor.dtype.torch).view(tensor.shape)

    get_slice = get_tensor


def opened(path: Path) -> Any:
    """Return the tensors of a weight file of either format, by ``keys``, ``get_tensor`` and ``get_slice``.

    Raises ``CheckpointError``.
    """
    if path.suffix != ".safetensors":
        return _State(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
