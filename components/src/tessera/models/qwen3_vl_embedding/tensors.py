"""The tensors of a checkpoint: stored names, canonical names, shapes.

A canonical name is made of its part and its name inside the part: ``vision.blocks.0.norm1.weight``,
``text.norm.weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.weights import Shapes
from tessera.checkpoint.weights import stored_tensors as find_tensors
from tessera.models.qwen3_vl_embedding.config import ModelConfig, VisionConfig

_PREFIXES = (("visual.", "vision."), ("language_model.", "text."))
_OUTER = "model."
_UNUSED = "lm_head."


def canonical(name: str) -> str | None:
    """The canonical name of a stored tensor; ``None`` for the head that generates text."""
    bare = name.removeprefix(_OUTER)
    if bare.startswith(_UNUSED):
        return None
    for prefix, part in _PREFIXES:
        if bare.startswith(prefix):
            return part + bare.removeprefix(prefix)
    return name


def expected(config: ModelConfig) -> Shapes:
    """Every tensor that the checkpoint must have."""
    return vision_shapes(config.vision) | config.text.shapes("text.")


def stored_tensors(
    directory: Path, config: ModelConfig, names: Callable[[str], str | None] = canonical
) -> dict[str, StoredTensor]:
    """The place of every tensor that the model uses, by canonical name; raises ``CheckpointError``.

    ``names`` makes that name of a stored one.
    """
    return find_tensors(directory, expected(config), names)


def vision_shapes(config: VisionConfig) -> Shapes:
    """The vision tower's tensors by canonical name."""
    hidden, wide = config.layer.hidden, config.layer.intermediate
    patch = (config.channels, config.frames, config.patch_size, config.patch_size)
    shapes: Shapes = {
        "patch_embed.proj.weight": (hidden, *patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (config.grid**2, hidden),
    }
    for block in range(config.layers):
        stem = f"blocks.{block}."
        for norm in ("norm1", "norm2"):
            shapes |= {f"{stem}{norm}.weight": (hidden,), f"{stem}{norm}.bias": (hidden,)}
        shapes |= _linear(f"{stem}attn.qkv", hidden, 3 * hidden) | _linear(f"{stem}attn.proj", hidden, hidden)
        shapes |= _linear(f"{stem}mlp.linear_fc1", hidden, wide) | _linear(
            f"{stem}mlp.linear_fc2", wide, hidden
        )
    merged = hidden * config.merge**2
    mergers = [("merger", hidden)]
    mergers += [(f"deepstack_merger_list.{level}", merged) for level in range(len(config.deepstack))]
    for name, normalised in mergers:
        shapes |= {f"{name}.norm.weight": (normalised,), f"{name}.norm.bias": (normalised,)}
        shapes |= _linear(f"{name}.linear_fc1", merged, merged)
        shapes |= _linear(f"{name}.linear_fc2", merged, config.out_hidden)
    return {f"vision.{name}": shape for name, shape in shapes.items()}


def _linear(name: str, features: int, out: int) -> Shapes:
    return {f"{name}.weight": (out, features), f"{name}.bias": (out,)}
