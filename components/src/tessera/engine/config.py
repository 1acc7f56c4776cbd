"""What an engine config file says about one stage."""

from __future__ import annotations

from pathlib import Path

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage's engine.

    ``engine`` names the kind, ``dtype`` float32, bfloat16, float16 or auto (bfloat16 on CUDA, else float32),
    ``device`` cpu, cuda, cuda:N or auto. ``max_batch_cost`` and ``max_queue_cost`` count tokens for the text
    stage and tiles for the vision stage. On CUDA, batches of up to ``graph_cost`` are replayed from CUDA
    graphs: 0 for none, the engine's own choice by default. ``path`` is the directory of a built engine, for
    the kinds that are built ahead of time. ``quantization`` fp8 runs the products of the inner blocks in FP8,
    and ``unquantized_blocks`` blocks at each end as before. What waits may take the engine at most
    ``max_queue_seconds`` to work off, whatever ``max_queue_cost`` allows; an engine that is busy with one
    batch for longer than ``stall_seconds`` has failed.
    """

    engine: str = "torch"
    dtype: str = "auto"
    device: str = "auto"
    max_batch_cost: int
    max_queue_cost: int
    graph_cost: int | None = None
    path: Path | None = None
    quantization: str = "none"
    unquantized_blocks: int = 1
    max_queue_seconds: float = 10.0
    stall_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is none of auto, float32, bfloat16, float16")
        if self.max_batch_cost < 1 or self.max_queue_cost < self.max_batch_cost:
            raise ValueError("max_batch_cost must be at least 1, and max_queue_cost at least max_batch_cost")
        if self.quantization not in ("none", "fp8"):
            raise ValueError(f"quantization {self.quantization!r} is none of none, fp8")
        if self.unquantized_blocks < 0:
            raise ValueError("unquantized_blocks must be at least 0")
        if self.graph_cost is not None and self.graph_cost < 0:
            raise ValueError("graph_cost must be at least 0")
        if not self.max_queue_seconds > 0 or not self.stall_seconds > 0:
            raise ValueError("max_queue_seconds and stall_seconds must be positive")
