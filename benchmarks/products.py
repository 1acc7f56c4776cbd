"""The matrix products and the attention of one batch, alone: what no engine can undercut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.models import Model
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.nemotron_3_5_embed.model import Nemotron35Embed
from tessera.models.qwen3_vl_embedding.body import Qwen3VLBody
from tessera.models.splade.model import Splade
from tessera.models.tower import TowerModel
from tessera.models.two_towers.model import TwoTowers
from tessera.nn.forms.choice import form_for
from tessera.nn.spec import CHANNELS, LayerSpec


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The attention of ``times`` layers within sequences of these lengths."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """What layers consist of: products to queries, keys and values, back, to the MLP's inside, and back.

    A unit of a batch is ``rows`` rows. ``sequence`` is how many of them see each other, None if those of
    one input or image do. ``others`` are inner and columns of the products outside of the layers, and for how
    many rows one of theirs stands.
    """

    layers: int
    hidden: int
    intermediate: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    rows: int = 1
    sequence: int | None = None
    others: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, layer: LayerSpec, layers: int, others: tuple[tuple[int, int, int], ...] = ()) -> Tower:
        """So many such layers."""
        return cls(
            layers=layers,
            hidden=layer.hidden,
            intermediate=layer.intermediate,
            gated=layer.gated,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            causal=layer.causal,
            others=others,
        )

    def products(self, units: int) -> Iterator[Product]:
        rows, queries = units * self.rows, self.heads * self.head_dim
        yield Product(rows, self.hidden, queries + 2 * self.kv_heads * self.head_dim, self.layers)
        yield Product(rows, queries, self.hidden, self.layers)
        yield Product(rows, self.hidden, (1 + self.gated) * self.intermediate, self.layers)
        yield Product(rows, self.intermediate, self.hidden, self.layers)
        for inner, columns, joined in self.others:
            yield Product(rows // joined, inner, columns, 1)

    def scores(self, sizes: Sequence[int]) -> Scores:
        """Of inputs or images of so many units."""
        lengths = [size * self.rows for size in sizes]
        if self.sequence is not None:
            lengths = [self.sequence] * (sum(lengths) // self.sequence)
        return Scores(
            lengths=tuple(lengths),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            times=self.layers,
        )


def text_tower(model: Model) -> Tower:
    assert isinstance(model, TowerModel), model.family
    layer = model.text.layer
    others: tuple[tuple[int, int, int], ...] = ()
    if isinstance(model, Splade):
        # The head over the vocabulary, for each token.
        others = ((layer.hidden, layer.hidden, 1), (layer.hidden, model.vocab_size, 1))
    return Tower.of(layer, model.text.layers, others)


def vision_tower(model: Model) -> Tower:
    if isinstance(model, Qwen3VLBody):
        config = model.config.vision
        layer, join = config.layer, config.merge**2
        wide = layer.hidden * join
        # A still image's frames are equal, so their weights are added up before.
        patch = (CHANNELS * config.patch_size**2, layer.hidden, 1)
        merger = ((wide, wide, join), (wide, config.out_hidden, join))
        return Tower.of(
            layer,
            config.layers,
            others=(patch, *merger * (1 + len(config.deepstack))),
        )
    if isinstance(model, Nemotron35Embed):
        pixtral = model.config.vision
        hidden, join, width = pixtral.layer.hidden, pixtral.merge**2, pixtral.width
        patch = (CHANNELS * pixtral.patch_size**2, hidden, 1)
        projector = ((hidden * join, hidden, join), (hidden, width, join), (width, width, join))
        return Tower.of(pixtral.layer, pixtral.layers, others=(patch, *projector))
    if isinstance(model, TwoTowers):
        towers = model.config
        return replace(
            Tower.of(towers.layer, towers.layers, others=((towers.patch_features, towers.layer.hidden, 1),)),
            rows=model.patches,
            sequence=model.patches,
        )
    assert isinstance(model, LlamaNemotronVL), model.family
    vision, width, join = model.config.vision, model.text.layer.hidden, model.config.projector.factor**2
    hidden = vision.layer.hidden
    others = (
        (vision.patch_features, hidden, 1),
        (hidden * join, width, join),
        (width, width, join),
    )
    return replace(
        Tower.of(vision.layer, vision.layers_used, others=others),
        rows=vision.grid**2,
        sequence=vision.grid**2,
    )


def chain(products: Iterable[Product], device: str, dtype: torch.dtype) -> Callable[[], None]:
    """What runs all of them in order, on random numbers; zeros would run faster than data do."""
    operands = [
        (
            torch.randn(product.rows, product.inner, device=device, dtype=dtype),
            torch.randn(product.columns, product.inner, device=device, dtype=dtype).t(),
            product.times,
        )
        for product in products
    ]

    def run() -> None:
        for left, right, times in operands:
            for _ in range(times):
                torch.mm(left, right)

    return run


def attention(scores: Scores, device: str, dtype: torch.dtype) -> list[Callable[[], None]]:
    """What runs the attention alone, by each kernel that there is for these lengths."""
    form, lengths = form_for(torch.device(device), dtype), scores.lengths
    total, heads, shared = sum(lengths), scores.heads, scores.kv_heads
    q, k, v = torch.split(
        torch.randn(total, heads + 2 * shared, scores.head_dim, device=device, dtype=dtype),
        [heads, shared, shared],
        dim=1,
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    kinds = [form.packed(bounds, lengths)]
    if len(set(lengths)) == 1:
        kinds.append(form.equal(lengths[0]))

    def runner(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(scores.times):
                kinds[number].attend(q, k, v, causal=scores.causal)

        return run

    return [runner(number) for number in range(len(kinds))]


def sustained(run: Callable[[], object], device: str, duration: float) -> float:
    """Seconds of one call, repeated for so long: at the clock that the card holds under this load."""
    run()
    count, taken = 0, 0.0
    while not count or taken < duration:
        # Several in flight, so that the host is never waited for.
        times = max(1, min(8, count))
        taken += timed(lambda: [run() for _ in range(times)], device)  # noqa: B023
        count += times
    return taken / count


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
