"""The settings of one stage's engine, as an engine config file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from tessera.settings import CHOSEN, Setting


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage's engine. Costs are tokens for the text stage and units for the vision stage."""

    engine: Annotated[str, Setting(help="the kind: `torch`, `tensorrt`, `aoti`, `tensorrt_llm`")] = "torch"
    dtype: Annotated[
        str,
        Setting(help="`float32`, `bfloat16`, `float16`; `auto` is bfloat16 on CUDA, else float32"),
    ] = "auto"
    device: Annotated[str, Setting(help="`cpu`, `cuda`, `cuda:N` or `auto`")] = "auto"
    max_batch_cost: Annotated[int, Setting(help=f"units or tokens in one engine call; {CHOSEN}")]
    max_queue_cost: Annotated[
        int,
        Setting(help=f"units or tokens that may wait, then 429; {CHOSEN}"),
    ]
    graph_cost: Annotated[
        int | None,
        Setting(
            help="batches of up to this cost are replayed from CUDA graphs; 0 for none, by default the "
            "engine's choice"
        ),
    ] = None
    path: Annotated[Path | None, Setting(help="directory of an engine that was built ahead of time")] = None
    quantization: Annotated[
        str,
        Setting(
            help="products in FP8: `stored` those whose weights the checkpoint has so, `fp8` those of the "
            "inner blocks, too, `none` no product; `auto` is `stored` where checkpoint and device can, "
            "else `none`"
        ),
    ] = "auto"
    unquantized_blocks: Annotated[int, Setting(help="blocks at each end that `fp8` leaves unchanged")] = 1
    max_queue_seconds: Annotated[
        float,
        Setting(help="time that the engine may need for its queue, whatever `max_queue_cost` allows"),
    ] = 10.0
    stall_seconds: Annotated[
        float, Setting(help="an engine that is busy with one batch for longer has failed")
    ] = 300.0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is none of auto, float32, bfloat16, float16")
        if self.max_batch_cost < 0 or self.max_queue_cost < 0:
            raise ValueError("max_batch_cost and max_queue_cost must not be negative")
        if 0 < self.max_queue_cost < self.max_batch_cost:
            raise ValueError("max_queue_cost must be at least max_batch_cost")
        if self.quantization not in ("auto", "none", "stored", "fp8"):
            raise ValueError(f"quantization {self.quantization!r} is none of auto, none, stored, fp8")
        if self.unquantized_blocks < 0:
            raise ValueError("unquantized_blocks must be at least 0")
        if self.graph_cost is not None and self.graph_cost < 0:
            raise ValueError("graph_cost must be at least 0")
        if not self.max_queue_seconds > 0 or not self.stall_seconds > 0:
            raise ValueError("max_queue_seconds and stall_seconds must be positive")
