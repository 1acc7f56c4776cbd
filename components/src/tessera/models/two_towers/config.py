"""The two towers as ``config.json`` describes them; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from tessera.checkpoint.section import Section
from tessera.nn.spec import CHANNELS, Activation, LayerSpec

_ACTIVATIONS: Final[tuple[str, ...]] = get_args(Activation)

BASE: Final[Mapping[str, int]] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
}
"""The sizes of a vision transformer's base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision transformer; ``width`` is that of the vector that comes out.

    Learned positions lie on a square of ``grid`` by ``grid`` patches of ``patch_size`` pixels.
    """

    layer: LayerSpec
    layers: int
    patch_size: int
    grid: int
    width: int

    @property
    def patch_features(self) -> int:
        return CHANNELS * self.patch_size**2

    def activations(self, patches: int) -> int:
        """Elements alive at the widest point of so many patches, beside the weights."""
        # The pixels as bytes, in float32 before and after normalising, whatever the module's type.
        pixels = 2 * self.layer.hidden + 3 * self.patch_features
        return patches * max(self.layer.activations(), pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What an absent key of a tower means, by its class in ``transformers``; ``sizes`` are by their keys."""

    activation: str
    eps: float
    sizes: Mapping[str, int] = field(default_factory=dict)


def tower_section(config: Section, key: str, *, first_years: bool = False) -> Section:
    """Return the section of a tower; with ``first_years`` one ending in ``_dict`` wins, as of CLIP."""
    section = config.section(key) if config.has(key) else Section(path=config.path, prefix=key, values={})
    if not first_years or not config.has(f"{key}_dict"):
        return section
    older = config.section(f"{key}_dict")
    return Section(path=older.path, prefix=older.prefix, values={**section.values, **older.values})


def read_layer(section: Section, defaults: Defaults) -> tuple[LayerSpec, int]:
    """Read the layers of a tower, and how many there are; raises ``CheckpointError``."""

    def size(key: str) -> int:
        return section.integer(key, defaults.sizes.get(key))

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if hidden % heads:
        raise section.error("hidden_size", f"must be a multiple of num_attention_heads {heads}")
    layer = LayerSpec.encoder(
        hidden,
        heads,
        size("intermediate_size"),
        activation=section.string("hidden_act", defaults.activation, among=_ACTIVATIONS),
        eps=section.number("layer_norm_eps", defaults.eps),
    )
    return layer, size("num_hidden_layers")


def check_channels(section: Section) -> None:
    """Raise ``CheckpointError`` unless images have the three channels of RGB."""
    if (channels := section.integer("num_channels", CHANNELS)) != CHANNELS:
        raise section.error("num_channels", f"must be {CHANNELS}, those of RGB, not {channels}")


def read_sizes(section: Section, *, image_size: int, patch_size: int) -> tuple[int, int]:
    """Read the edges in pixels of a square image and of a patch; defaults are given.

    What is left of an image beyond whole patches is not looked at.
    """
    size, patch = section.integer("image_size", image_size), section.integer("patch_size", patch_size)
    if size < patch:
        raise section.error("image_size", f"must be at least patch_size {patch}, not {size}")
    return size, patch
