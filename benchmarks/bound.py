"""What the matrix products of a workload alone would allow, measured at its own shapes in the same run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bodies import IMAGE_TEXT, HttpWorkload
from tessera.models.base import Role, Truncate
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL


def bounds(
    model_path: Path, workloads: Sequence[HttpWorkload], *, tokens: int, tiles: int
) -> dict[str, float]:
    """Inputs a second by workload name, for batches of ``tokens`` tokens and ``tiles`` tiles.

    Runs in a process of its own, so that nothing of it stays on the card.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_bounds, (model_path, list(workloads), tokens, tiles))


def _bounds(model_path: Path, workloads: Sequence[HttpWorkload], tokens: int, tiles: int) -> dict[str, float]:
    import torch

    from benchmarks.products import seconds, text_products, vision_products

    on_card = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_card else ("cpu", torch.float32)
    model = LlamaNemotronVL.open(model_path)
    repeats = 10 if on_card else 2

    def total(products: object) -> float:
        assert hasattr(products, "__iter__")
        return sum(seconds(product, device, dtype, repeats=repeats) for product in products)

    token_seconds = total(text_products(model.config, tokens)) / tokens
    tile_seconds = total(vision_products(model.config, tiles)) / tiles
    return {
        workload.name: 1 / _input_seconds(model, workload, token_seconds, tile_seconds)
        for workload in workloads
    }


def _input_seconds(
    model: LlamaNemotronVL, workload: HttpWorkload, token_seconds: float, tile_seconds: float
) -> float:
    text = workload.tokens * token_seconds
    if workload.size is None:
        return text
    tiles = model.tiles(*workload.size)
    prompt = model.prompt(
        IMAGE_TEXT,
        (tiles,),
        role=Role.PASSAGE,
        max_tokens=model.max_tokens,
        truncate=Truncate.NONE,
        param="input",
    )
    image = len(prompt.tokens) * token_seconds + tiles * tile_seconds * workload.fresh
    if workload.always_image:
        text += model.tokens_per_tile * token_seconds + tile_seconds
    return workload.text_share * text + (1 - workload.text_share) * image
