"""Chooses the static scales of a tower's products, and the layers that stay as they are, by their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

from tessera.nn.forms.plain import PLAIN, Form, Rows, tensor
from tessera.nn.fp8 import LARGEST, Fp8Weight, rounded, row_scales, values_of
from tessera.nn.layer import Linear, Stack, use

_ROWS: Final = 256
"""Rows of each product's inputs that scales are compared on."""

# What is compared with the largest input: what so large a share of all numbers lies below.
_SHARES: Final = (0.99999, 0.9999, 0.999)

Outputs = Callable[[], torch.Tensor]
"""Runs the tower over all inputs: float32 ``[rows, width]``."""


@dataclass(slots=True)
class Seen:
    """What a product has read: the largest absolute number, and some rows of every batch."""

    largest: float = 0.0
    rows: list[torch.Tensor] = field(default_factory=list)


class Observing(Form):
    """The plain form, which keeps what each product reads."""

    def __init__(self) -> None:
        self.seen: dict[Linear, Seen] = {}

    def product(self, linear: Linear, rows: Rows) -> torch.Tensor:
        given, seen = tensor(rows), self.seen.setdefault(linear, Seen())
        seen.largest = max(seen.largest, float(given.abs().max()))
        step = max(1, len(given) // 64)
        seen.rows.append(given[::step].clone())
        return super().product(linear, rows)


class Trying(Form):
    """The plain form with products as FP8 has them, by weights beside the tower's own."""

    def __init__(self, weights: Mapping[Linear, Fp8Weight]) -> None:
        self._weights = weights

    def product(self, linear: Linear, rows: Rows) -> torch.Tensor:
        return self._weights[linear].reference(tensor(rows), linear.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoss:
    """What a layer costs that is in FP8 alone; ``kept`` says that it stays as it is."""

    number: int
    loss: float
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTower:
    """``weights`` of the layers in FP8, and what these cost together; ``whole`` is what all layers would."""

    weights: Mapping[Linear, Fp8Weight]
    layers: tuple[LayerLoss, ...]
    loss: float
    whole: float
    clipped: int
    """Products whose scale is below that of their largest input."""


@torch.inference_mode()
def quantized(
    stack: Stack, outputs: Outputs, *, most_loss: float, progress: Callable[[str], None]
) -> QuantizedTower:
    """Calibrate the layers, whose form is plain, and leave out what costs too much.

    Losses are as ``loss_of`` has them. As long as that of the tower is above ``most_loss``, the layer that
    alone costs most of those that are left becomes what it was.
    """
    observing = Observing()
    with running(stack, dict.fromkeys(range(len(stack)), observing)):
        expected = outputs()
    progress(f"choosing scales of {len(observing.seen)} products")
    weights = {one: chosen(one, seen) for one, seen in observing.seen.items()}
    clipped = sum(
        float(weights[one].input_scale or 0) * LARGEST < seen.largest * 0.999
        for one, seen in observing.seen.items()
    )
    trying = Trying(weights)

    def loss(numbers: set[int]) -> float:
        with running(stack, dict.fromkeys(numbers, trying)):
            return loss_of(outputs(), expected)

    every = set(range(len(stack)))
    progress(f"measuring each of {len(every)} layers")
    alone = {number: loss({number}) for number in every}
    whole = total = loss(every)
    kept: set[int] = set()
    for number in sorted(every, key=alone.__getitem__, reverse=True):
        if total <= most_loss:
            break
        kept.add(number)
        total = loss(every - kept)
    return QuantizedTower(
        weights={
            one: weights[one]
            for number, layer in enumerate(stack.layers)
            if number not in kept
            for one in layer.linears
        },
        layers=tuple(LayerLoss(number=n, loss=alone[n], kept=n in kept) for n in sorted(every)),
        loss=total,
        whole=whole,
        clipped=clipped,
    )


def loss_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the mean of 1 less the cosine of each row; of single numbers, a share of their deviation."""
    if found.shape[1] == 1:
        return float((found - expected).abs().mean() / expected.std().clamp(min=1e-12))
    return float(1 - torch.cosine_similarity(found.double(), expected.double(), dim=1).mean())


def chosen(linear: Linear, seen: Seen) -> Fp8Weight:
    """Return the weight with one scale, and that scale of its inputs which changes the product least.

    Tried are the largest input there was, and numbers that nearly all inputs are below.
    """
    weight = linear.weight.float()
    scale = row_scales(weight.reshape(1, -1)).reshape(())
    values, scales = values_of(weight, scale), scale.expand(len(weight)).contiguous()
    whole = values.float() * scale
    rows = torch.cat(seen.rows).float()
    rows = rows[:: max(1, len(rows) // _ROWS)]
    numbers = rows.abs().flatten().sort().values
    tried = [seen.largest, *(float(numbers[int(share * (len(numbers) - 1))]) for share in _SHARES)]
    wanted = rows @ weight.t()
    best, least = tried[0], float("inf")
    for largest in dict.fromkeys(tried):
        if largest <= 0:
            continue
        off = float((rounded(rows, torch.tensor(largest / LARGEST)) @ whole.t() - wanted).square().sum())
        if off < least:
            best, least = largest, off
    return Fp8Weight(values=values, scales=scales, input_scale=torch.tensor(max(best, 1e-12) / LARGEST))


@contextmanager
def running(stack: Stack, forms: Mapping[int, Form]) -> Iterator[None]:
    """Run the layers of these numbers in other forms, inside."""
    for number, form in forms.items():
        use(stack.layers[number], form)
    try:
        yield
    finally:
        for number in forms:
            use(stack.layers[number], PLAIN)
