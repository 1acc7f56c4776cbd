"""Every kind of memory that an engine hands an image's rows out to, beside a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from tessera.engine.batch import hand_out
from tessera.engine.placement import Placement

COUNTS: Final = (5, 1, 64, 2, *[7] * 40)
WIDTH: Final = 96
PADDING: Final = 9
"""Rows behind the last image's, as a graph with room for more leaves them."""
UNTOUCHED: Final = -7.0

Targets = list[torch.Tensor]


def _apart(placement: Placement) -> Targets:
    """As a worker without a slab allocates them."""
    return [placement.rows(count, WIDTH) for count in COUNTS]


def _slab(placement: Placement) -> Targets:
    """Slots of a slab, with others' between them."""
    slab = placement.rows(sum(COUNTS) + len(COUNTS), WIDTH)
    return list(_between(slab))


def _columns(placement: Placement) -> Targets:
    """Rows that do not follow each other in memory."""
    return [placement.rows(count, 2 * WIDTH)[:, WIDTH:] for count in COUNTS]


def _host(placement: Placement) -> Targets:
    """One block of float32 on the host, page-locked beside a card: rows that are vectors go there."""
    return list(placement.host_rows(sum(COUNTS), WIDTH).split(COUNTS))


def _pageable(placement: Placement) -> Targets:
    """A slab that the processes of a host share, in the engine's type."""
    slab = torch.empty(sum(COUNTS) + len(COUNTS), WIDTH, dtype=placement.torch_dtype)
    return list(_between(slab))


def _mixed(placement: Placement) -> Targets:
    """Vectors of some images and rows of others, of two types in two places."""
    return [
        own if number % 3 else other
        for number, (own, other) in enumerate(zip(_slab(placement), _host(placement), strict=True))
    ]


TARGETS: Final[dict[str, Callable[[Placement], Targets]]] = {
    "apart": _apart,
    "slab": _slab,
    "columns": _columns,
    "host": _host,
    "pageable": _pageable,
    "mixed": _mixed,
}


def _between(slab: torch.Tensor) -> list[torch.Tensor]:
    starts = [sum(COUNTS[:number]) + number for number in range(len(COUNTS))]
    return [slab[start : start + count] for start, count in zip(starts, COUNTS, strict=True)]


class HandingOut:
    """The rows of a batch, the memory that they are handed out to, and whether they arrived there alone."""

    def __init__(self, kind: str, placement: Placement, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(sum(COUNTS) + PADDING, WIDTH, generator=generator)
        self.rows = rows.to(placement.device, placement.torch_dtype)
        self.out = TARGETS[kind](placement)
        self._memory = [torch.empty(0, dtype=one.dtype, device=one.device) for one in self.out]
        for memory, target in zip(self._memory, self.out, strict=True):
            memory.set_(target.untyped_storage())
            memory.fill_(UNTOUCHED)

    def start(self, rows: torch.Tensor) -> None:
        """Hand ``rows``, a batch's, out."""
        hand_out(rows, self.out)

    def check(self) -> None:
        """Compare all memory with what a copy of each image's rows leaves there."""
        found = [memory.clone() for memory in self._memory]
        for memory in self._memory:
            memory.fill_(UNTOUCHED)
        for target, rows in zip(self.out, self.rows.cpu().split((*COUNTS, PADDING)), strict=False):
            target.copy_(rows)
        for memory, own in zip(self._memory, found, strict=True):
            assert torch.equal(memory, own)
