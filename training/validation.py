"""How well the network retrieves among held-out pictures while it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from training.batches import fits_of, join, owners_of
from training.chunks import SIDES, Chunk
from training.network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalls:
    """Shares of first ranks among all held-out pictures, captions, or documents."""

    text_to_image: float
    image_to_text: float
    words_to_page: float
    narrowed: float
    halved: float

    def __str__(self) -> str:
        return (
            f"text→image {self.text_to_image:.3f}, image→text {self.image_to_text:.3f},"
            f" words→page {self.words_to_page:.3f}, narrowed {self.narrowed:.3f},"
            f" halved {self.halved:.4f}"
        )


@torch.no_grad()
def validate(
    network: Network,
    chunks: Sequence[Chunk],
    device: torch.device,
    placeholder: int,
    precision: Callable[[], AbstractContextManager[object]],
) -> Recalls:
    """Recall at 1 among the pictures of ``chunks``: with full captions, with some words of each page, and
    with the halved pictures themselves.

    Other pictures that also hold all the words asked for count neither for nor against a page.
    """
    found = _vectors(network, chunks, device, placeholder, precision)
    parts = [(chunk, chunk.prompts[0]) for chunk in chunks]
    owners, fits = owners_of(parts).to(device), fits_of(parts, device)
    scores = found["words"] @ found["images"].T
    own = torch.zeros_like(fits).scatter_(1, owners[:, None], True)
    by_words = scores.masked_fill(fits & ~own, -torch.inf).argmax(1) == owners
    return Recalls(
        text_to_image=_first(found["queries"], found["images"]),
        image_to_text=_first(found["images"], found["captions"]),
        words_to_page=by_words.float().mean().item(),
        narrowed=_first(found["narrowed"], found["documents"]),
        halved=_first(found["views"], found["images"]),
    )


def _vectors(
    network: Network,
    chunks: Sequence[Chunk],
    device: torch.device,
    placeholder: int,
    precision: Callable[[], AbstractContextManager[object]],
) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {side: [] for side in SIDES}
    for chunk in chunks:
        batch = join([(chunk, chunk.prompts[0])], device, placeholder)
        with precision():
            vectors = network(batch.tiles, batch.sequences)
        for side in SIDES:
            found[side].append(vectors[batch.sides[side]])
    return {side: torch.cat(vectors) for side, vectors in found.items()}


def _first(queries: torch.Tensor, items: torch.Tensor) -> float:
    """Share of the queries whose own item ranks first."""
    scores = queries @ items.T
    return (scores.argmax(1) == torch.arange(len(scores), device=scores.device)).float().mean().item()
