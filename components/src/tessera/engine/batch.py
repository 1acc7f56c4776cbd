"""Batches of the two stages, packed end to end on the host, and the rows that the text stage gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tessera.errors import EngineFailed
from tessera.image_plan import ImagePlan
from tessera.models.base import CHUNKS, Model, Output, OutputKind, Pixels, TextTensors
from tessera.rows import Rows

if TYPE_CHECKING:
    import torch


SHORTEST = 1e-12
"""A row shorter than this is divided by it, where rows are scaled to length 1."""
Values: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int32]
Bounds: TypeAlias = npt.NDArray[np.int64]

_NONE: Ids = np.empty(0, np.int32)
_START: Ids = np.zeros(1, np.int32)


Cost = Callable[[int, int, int], int]
"""What a batch costs, in tokens or units: from its number of entries, their total size, the largest size."""


def packed_cost(count: int, total: int, longest: int) -> int:
    """Cost where nothing is padded: the sum of the sizes."""
    return total


def padded_cost(count: int, total: int, longest: int) -> int:
    """Cost where every sequence is padded to the longest."""
    return count * longest


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBatch:
    """Whole images. ``pixels`` holds uint8 or float32 ``[units, *unit_shape]`` for each.

    ``positions`` is int32 ``[j, units]`` and ``cu_units`` int32 ``[images + 1]``, on the host.
    """

    pixels: tuple[npt.NDArray[np.uint8] | npt.NDArray[np.float32], ...]
    plans: tuple[ImagePlan, ...]
    positions: npt.NDArray[np.int32]
    cu_units: npt.NDArray[np.int32]

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(len(image) for image in self.pixels)

    def pick(self, numbers: Sequence[int]) -> VisionBatch:
        """The batch of some of the images."""
        return pack_images(
            [Pixels(values=self.pixels[number], plan=self.plans[number]) for number in numbers],
            [self.positions[:, self.cu_units[number] : self.cu_units[number + 1]] for number in numbers],
        )

    def by_type(self) -> list[list[int]]:
        """The numbers of the images of each type of pixels: one list, or two."""
        numbers: dict[str, list[int]] = {}
        for number, image in enumerate(self.pixels):
            numbers.setdefault(image.dtype.name, []).append(number)
        return list(numbers.values())

    def by_unit(self) -> VisionBatch:
        """Each unit as an image of its own, for a family whose units are independent."""
        return VisionBatch(
            pixels=tuple(image[unit : unit + 1] for image in self.pixels for unit in range(len(image))),
            plans=tuple(
                ImagePlan(units=1, rows=plan.rows // plan.units)
                for plan in self.plans
                for _ in range(plan.units)
            ),
            positions=self.positions,
            cu_units=np.arange(self.cu_units[-1] + 1, dtype=np.int32),
        )


def pack_images(images: Sequence[Pixels], positions: Sequence[npt.NDArray[np.int32]]) -> VisionBatch:
    """Pack at least one image; ``positions`` has ``Model.unit_positions`` of each."""
    bounds = np.zeros(len(images) + 1, np.int32)
    np.cumsum([len(image.values) for image in images], out=bounds[1:])
    return VisionBatch(
        pixels=tuple(image.values for image in images),
        plans=tuple(image.plan for image in images),
        positions=np.concatenate(positions, axis=1),
        cu_units=bounds,
    )


def hand_out(rows: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
    """Copy the first of ``rows`` into the tensors of ``out``, one after the other; the host does not wait.

    In one call: with each of its own a thread gives up the interpreter's lock. For a batch of 50 images that
    was a hundred times, and each time a busy event loop may keep it for a millisecond.
    """
    import torch

    counts = [len(target) for target in out]
    pieces = torch.split(rows[: sum(counts)], counts)
    torch._foreach_copy_(list(out), list(pieces), non_blocking=True)


def gather(images: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Copy the rows of images into a tensor, one after the other, and return it; the host does not wait."""
    start = 0
    for image in images:
        into[start : start + len(image)].copy_(image, non_blocking=True)
        start += len(image)
    return into


def uint8_pixels(batch: VisionBatch) -> list[npt.NDArray[np.uint8]]:
    """The pixels, for an engine that takes no others; raises ``EngineFailed`` if some are float32."""
    if any(image.dtype != np.uint8 for image in batch.pixels):
        raise EngineFailed("this kind of engine takes uint8 pixels alone; use engine: torch for float32 ones")
    return cast("list[npt.NDArray[np.uint8]]", list(batch.pixels))


def split_images(batch: VisionBatch, count: int) -> list[list[int]]:
    """Divide the images' numbers into at most ``count`` lists of about as many units each, in order."""
    return [list(range(first, last)) for first, last in pairwise(_cuts(batch.cu_units, count))]


def blank(model: Model, units: int, *, each: int | None = None) -> VisionBatch:
    """A batch to warm up with: black images of ``units`` units, or the few more that make whole rows.

    All but the last one are as large as an image can be, or of ``each`` units, which make whole rows.
    """
    spec = model.vision
    assert spec is not None
    largest = min(each or spec.max_units, spec.max_units)
    full, rest = divmod(-(-units // spec.least_units) * spec.least_units, largest)
    sizes = [largest] * full + [rest] * (rest > 0)
    positions = model.unit_positions(spec.largest)
    return pack_images(
        [
            Pixels(
                values=np.zeros((size, *spec.unit_shape), np.uint8),
                plan=ImagePlan(units=size, rows=spec.rows(size)),
            )
            for size in sizes
        ],
        [positions[:, :size] for size in sizes],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """Sequences packed without padding. Index arrays are int32 on the host.

    ``vision`` holds one tensor ``[rows, row_width]`` for each image, on host or device, in the order in which
    ``vision_index`` lists their packed positions.
    """

    input_ids: npt.NDArray[np.int32]  # [tokens]
    positions: npt.NDArray[np.int32]  # [k, tokens]
    cu_seqlens: npt.NDArray[np.int32]  # [batch + 1]
    lengths: tuple[int, ...]  # [batch]
    vision: tuple[torch.Tensor, ...]
    vision_index: npt.NDArray[np.int32]  # [sum of the rows of vision]
    asked: tuple[tuple[str, ...], ...] = ()  # [batch], names of outputs; () where all ask the default
    chunks: tuple[npt.NDArray[np.int32], ...] = ()  # [batch], as in PackedInput

    @property
    def names(self) -> list[str]:
        """The outputs that some sequence asks for."""
        return list(dict.fromkeys(name for names in self.asked for name in names or ("",)))


def segments(batch: TextBatch) -> Ids:
    """Return int32 ``[segments + 1]``, from 0: a batch cut at both ends of every chunk; none is empty.

    What lies between the chunks of two inputs is a segment, too, so that segments bound each other.
    """
    if not any(map(len, batch.chunks)):
        return _NONE
    return np.unique(np.concatenate((_START, *_packed_chunks(batch))))


def _packed_chunks(batch: TextBatch) -> list[Ids]:
    return [own + start for own, start in zip(batch.chunks, batch.cu_seqlens[:-1], strict=True)]


def tensors(batch: TextBatch, vision_rows: torch.Tensor) -> TextTensors:
    """Return a batch as a module takes it, with the rows of all its images and on their device."""
    import torch

    def put(values: Ids) -> torch.Tensor:
        found = torch.from_numpy(values)
        # A move gives up the interpreter's lock, also one that has nothing to do.
        return found if vision_rows.is_cpu else found.to(vision_rows.device)

    return TextTensors(
        put(batch.input_ids),
        put(batch.positions),
        put(batch.cu_seqlens),
        batch.lengths,
        vision_rows,
        put(batch.vision_index),
        put(segments(batch)),
    )


def merged(values: Values, indices: Ids, bounds: Bounds) -> tuple[Values, Ids]:
    """Return sparse rows as ``Rows`` has them, of weights in any order; the largest of an id counts.

    ``values`` is ``[rows, 1]``. An id of -1 and a weight that is not above 0 hold nothing; one that is not a
    number is kept, so that it is found where rows are answered.
    """
    weights = values[:, 0]
    held = np.flatnonzero((indices >= 0) & ~(weights <= 0))
    inputs = np.searchsorted(bounds, held, side="right") - 1
    keys = inputs * (np.int64(1) << 32) + indices[held]
    order = np.argsort(keys, kind="stable")
    keys, held = keys[order], held[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    own = keys[firsts] >> 32
    places = bounds[own] + np.arange(len(firsts)) - np.searchsorted(own, own)
    largest, ids = np.zeros_like(values), np.full_like(indices, -1)
    if len(firsts):
        largest[places, 0] = np.maximum.reduceat(weights[held], firsts)
        ids[places] = indices[held[firsts]]
    return largest, ids


def output_rows(computed: Values, batch: TextBatch, output: Output, indices: Ids | None = None) -> Rows:
    """Return the batch's computed float32 ``[rows, width]`` as its answer, scaled if ``output`` says so."""
    bounds = output.bounds(batch.lengths)
    if indices is not None or output.skiplist is not None:
        computed, indices = _held(computed, bounds, batch, output, indices)
    return scaled(computed, bounds, output, indices)


def named_rows(computed: Values, batch: TextBatch, output: Output, indices: Ids | None = None) -> Rows:
    """As ``output_rows``, of an output by its name: of ``CHUNKS`` each segment's row is computed."""
    if output.name != CHUNKS:
        return output_rows(computed, batch, output, indices)
    firsts = np.concatenate([own[:-1] for own in _packed_chunks(batch)])
    counts = [max(0, len(own) - 1) for own in batch.chunks]
    of_chunks = computed[np.searchsorted(segments(batch), firsts)]
    return scaled(of_chunks, np.cumsum([0, *counts], dtype=np.int64), output)


def _held(
    computed: Values, bounds: Bounds, batch: TextBatch, output: Output, indices: Ids | None
) -> tuple[Values, Ids]:
    """Return the rows with zeros where they hold nothing, and the token that each is of, -1 there."""
    if output.skiplist is not None:
        indices = output.skiplist.indices(batch.input_ids, bounds)
    assert indices is not None
    if output.kind is OutputKind.SPARSE:
        return merged(computed, indices, bounds)
    return np.where(indices[:, None] >= 0, computed, np.float32(0)), indices


def scaled(computed: Values, bounds: Bounds, output: Output, indices: Ids | None = None) -> Rows:
    """Return float32 ``[rows, width]`` of the inputs between ``bounds``, scaled if ``output`` says so."""
    if not output.unit_length:
        return Rows(computed, bounds, np.ones(len(computed), np.float32), indices)
    norms = np.sqrt(np.einsum("ij,ij->i", computed, computed))
    # Rows that are not finite are found where they are answered.
    with np.errstate(invalid="ignore"):
        return Rows(computed / np.maximum(norms, np.float32(SHORTEST))[:, None], bounds, norms, indices)


def rows_as_asked(outputs: Mapping[str, Rows], batch: TextBatch) -> list[Rows]:
    """Return the rows of each sequence of a batch, of the outputs that it asks for."""
    return [
        Rows.together([outputs[name].of(number) for name in names or ("",)])
        for number, names in enumerate(batch.asked)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInput:
    """One input: ``tokens`` int32 ``[n]``, ``positions`` int32 ``[k, n]``.

    ``vision_index`` is int32, the positions of its vision rows in it.
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    vision: tuple[torch.Tensor, ...] = ()
    asked: tuple[str, ...] = ()
    """The outputs that are asked for, in this order; none: the default."""
    vision_index: npt.NDArray[np.int32] = field(default_factory=lambda: _NONE)
    chunks: npt.NDArray[np.int32] = field(default_factory=lambda: _NONE)
    """int32 ``[chunks + 1]``, ascending: the bounds of its chunks in it; empty without any."""


def pack(sequences: Sequence[PackedInput]) -> TextBatch:
    """Pack at least one sequence into a batch, in their order."""
    lengths = np.fromiter((len(sequence.tokens) for sequence in sequences), np.int32, len(sequences))
    bounds = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    with_vision = [
        (sequence.vision_index + start, sequence.vision)
        for sequence, start in zip(sequences, bounds[:-1], strict=True)
        if sequence.vision
    ]
    return TextBatch(
        input_ids=np.concatenate([sequence.tokens for sequence in sequences]),
        positions=np.concatenate([sequence.positions for sequence in sequences], axis=1),
        cu_seqlens=bounds,
        lengths=tuple(lengths.tolist()),
        vision=tuple(rows for _, vision in with_vision for rows in vision),
        vision_index=(np.concatenate([index for index, _ in with_vision]) if with_vision else _NONE),
        asked=tuple([sequence.asked for sequence in sequences])
        if any(sequence.asked for sequence in sequences)
        else (),
        chunks=tuple([sequence.chunks for sequence in sequences]),
    )


def zeros(model: Model, total: int, length: int) -> TextBatch:
    """A batch to warm up with: ``total`` tokens of id 0, in sequences of ``length`` but the last one."""
    lengths = [length] * (total // length) + [total % length] * (total % length > 0)
    return pack(
        [
            PackedInput(tokens=tokens, positions=model.positions(tokens, ()))
            for tokens in (np.zeros(length, np.int32) for length in lengths)
        ]
    )


def split(batch: TextBatch, count: int) -> list[TextBatch]:
    """Divide a batch into at most ``count`` of about as many tokens each, in order, at ends of sequences."""
    bounds = batch.cu_seqlens
    cuts = _cuts(bounds, count)
    # Vision rows come in the order of their positions, so each piece has consecutive rows of whole images.
    rows = np.searchsorted(batch.vision_index, bounds[cuts])
    ends = np.cumsum([0, *(len(image) for image in batch.vision)])
    images = np.searchsorted(ends, rows)
    return [
        TextBatch(
            input_ids=batch.input_ids[bounds[first] : bounds[last]],
            positions=batch.positions[:, bounds[first] : bounds[last]],
            cu_seqlens=bounds[first : last + 1] - bounds[first],
            lengths=batch.lengths[first:last],
            vision=batch.vision[images[piece] : images[piece + 1]],
            vision_index=batch.vision_index[rows[piece] : rows[piece + 1]] - bounds[first],
            asked=batch.asked[first:last],
            chunks=batch.chunks[first:last],
        )
        for piece, (first, last) in enumerate(pairwise(cuts))
    ]


def _cuts(bounds: npt.NDArray[np.int32], count: int) -> list[int]:
    """Numbers of bounds, the first and the last among them, that divide what they bound about evenly."""
    wanted = np.arange(count + 1) * (bounds[-1] / count)
    after = np.clip(np.searchsorted(bounds, wanted), 1, len(bounds) - 1)
    nearest = np.where(wanted - bounds[after - 1] < bounds[after] - wanted, after - 1, after)
    return list(np.unique(nearest).tolist())
