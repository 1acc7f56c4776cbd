"""How well the network retrieves among held-out pictures while it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from training.batches import join
from training.chunks import SIDES, Chunk
from training.network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalls:
    """Shares of first ranks among all held-out pictures, captions, or documents."""

    text_to_image: float
    image_to_text: float
    words_to_page: float
    narrowed: float

    def __str__(self) -> str:
        return (
            f"text→image {self.text_to_image:.3f}, image→text {self.image_to_text:.3f},"
            f" words→page {self.words_to_page:.3f}, narrowed {self.narrowed:.3f}"
        )


@torch.no_grad()
def validate(
    network: Network,
    chunks: Sequence[Chunk],
    device: torch.device,
    placeholder: int,
    precision: Callable[[], AbstractContextManager[object]],
) -> Recalls:
    """Recall at 1 among the pictures of ``chunks``: with full captions, and with words for pages."""
    full = _vectors(network, chunks, 0, device, placeholder, precision)
    partial = _vectors(network, chunks, 1, device, placeholder, precision)
    pages = torch.tensor([kind == "page" for chunk in chunks for kind in chunk.kinds], device=device)
    by_words = _first(partial["queries"], full["images"])
    return Recalls(
        text_to_image=_first(full["queries"], full["images"]).mean().item(),
        image_to_text=_first(full["images"], full["captions"]).mean().item(),
        words_to_page=by_words[pages].mean().item(),
        narrowed=_first(full["narrowed"], full["documents"]).mean().item(),
    )


def _vectors(
    network: Network,
    chunks: Sequence[Chunk],
    use: int,
    device: torch.device,
    placeholder: int,
    precision: Callable[[], AbstractContextManager[object]],
) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {side: [] for side in SIDES}
    for chunk in chunks:
        batch = join([(chunk, chunk.prompts[use])], device, placeholder)
        with precision():
            vectors = network(batch.tiles, batch.sequences)
        for side in SIDES:
            found[side].append(vectors[batch.sides[side]])
    return {side: torch.cat(vectors) for side, vectors in found.items()}


def _first(queries: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """1 for each query whose own item ranks first, else 0."""
    scores = queries @ items.T
    return (scores.argmax(1) == torch.arange(len(scores), device=scores.device)).float()
