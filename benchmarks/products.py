"""The matrix products of one batch and how long they take alone: what no engine can undercut."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tessera.models.llama_nemotron_vl.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Product:
    """``times`` products ``[rows, inner] x [inner, columns]``."""

    rows: int
    inner: int
    columns: int
    times: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.times


def vision_products(config: ModelConfig, tiles: int) -> Iterator[Product]:
    vision, text = config.vision, config.text
    rows, hidden, layers = tiles * vision.grid**2, vision.hidden, vision.layers_used
    yield Product(rows, vision.patch_features, hidden, 1)
    yield Product(rows, hidden, 3 * hidden, layers)
    yield Product(rows, hidden, hidden, layers)
    yield Product(rows, hidden, vision.intermediate, layers)
    yield Product(rows, vision.intermediate, hidden, layers)
    short = tiles * config.tokens_per_tile
    yield Product(short, hidden * config.projector.factor**2, text.hidden, 1)
    yield Product(short, text.hidden, text.hidden, 1)


def text_products(config: ModelConfig, tokens: int) -> Iterator[Product]:
    text = config.text
    heads = text.heads * text.head_dim
    yield Product(tokens, text.hidden, heads + 2 * text.kv_heads * text.head_dim, text.layers)
    yield Product(tokens, heads, text.hidden, text.layers)
    yield Product(tokens, text.hidden, 2 * text.intermediate, text.layers)
    yield Product(tokens, text.intermediate, text.hidden, text.layers)


def seconds(product: Product, device: str, dtype: torch.dtype, *, repeats: int = 10) -> float:
    """Median of timed runs on random numbers; zeros would run faster than data do."""
    left = torch.randn(product.rows, product.inner, device=device, dtype=dtype)
    right = torch.randn(product.columns, product.inner, device=device, dtype=dtype).t()
    # Several in a row: one alone would count the host's time to launch it.
    row = 8 if device.startswith("cuda") else 1

    def several() -> None:
        for _ in range(row):
            torch.mm(left, right)

    times = [timed(several, device) / row for _ in range(repeats + 3)]
    return statistics.median(times[3:]) * product.times


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds of one call on the device's own clock, or on the host's for the CPU."""
    if not device.startswith("cuda"):
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
