"""What the matrix products of a workload alone would allow, measured at its own shapes in the same run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from benchmarks.batches import workload_tokens
from tessera.models import Model, open_model
from tessera_tools.load.bodies import HttpWorkload


def bounds(
    model_path: Path, workloads: Sequence[HttpWorkload], *, tokens: int, units: int
) -> dict[str, float]:
    """Inputs a second by workload name, for batches of ``tokens`` tokens and ``units`` units.

    Runs in a process of its own, so that nothing of it stays on the card.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_bounds, (model_path, list(workloads), tokens, units))


def _bounds(model_path: Path, workloads: Sequence[HttpWorkload], tokens: int, units: int) -> dict[str, float]:
    import torch

    from benchmarks.products import chain, sustained, text_tower, vision_tower

    on_card = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_card else ("cpu", torch.float32)
    model = open_model(model_path)
    seconds = 1.0 if on_card else 0.0
    run = chain(text_tower(model).products(tokens), device, dtype)
    token_seconds = sustained(run, device, seconds) / tokens
    unit_seconds = 0.0
    if any(workload.size is not None for workload in workloads):
        run = chain(vision_tower(model).products(units), device, dtype)
        unit_seconds = sustained(run, device, seconds) / units
    return {
        workload.name: 1 / _input_seconds(model, workload, token_seconds, unit_seconds)
        for workload in workloads
    }


def _input_seconds(model: Model, workload: HttpWorkload, token_seconds: float, unit_seconds: float) -> float:
    if workload.size is None:
        return workload_tokens(model, workload) * token_seconds
    text = workload.tokens * token_seconds
    plan = model.plan(*workload.size, param="input")
    tokens = workload_tokens(model, workload)
    image = tokens * token_seconds + plan.units * unit_seconds * workload.fresh
    if workload.always_image:
        text += plan.rows * token_seconds + plan.units * unit_seconds
    return workload.text_share * text + (1 - workload.text_share) * image
