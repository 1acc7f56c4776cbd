"""The decoder of Qwen3 checkpoints, as ``config.json`` describes it, and their control tokens; torch-free."""

from __future__ import annotations

from typing import Final

from tessera.checkpoint.section import Section
from tessera.models.decoder import read_layer, read_theta, refuse_flags, rope_section, rope_type
from tessera.nn.spec import RopeSpec, TextSpec

_THETA: Final = 10_000.0

DEFAULT_TASK: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""What a query is for that says nothing else."""

END_OF_TEXT: Final = "<|endoftext|>"
"""The last token of every input, whose state is the vector.

The released tokenizers append it in a post-processor, and tools that skip that step get worse vectors; here
it is part of the prompt, whatever the file says.
"""

TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE: Final = "<|image_pad|>"


def read_text(section: Section, *, sections: bool, levels: int = 0) -> TextSpec:
    """Read the decoder; ``sections`` says that positions have three axes.

    Without a theta it is that of ``transformers`` for text models; for three axes its releases differ in it.
    Raises ``CheckpointError`` for what no released Qwen3 embedding model has: biases, windows, scaled RoPE.
    """
    refuse_flags(section, "attention_bias", "use_sliding_window", why=", which is not supported")
    causal = section.flag("is_causal", True)
    layer = read_layer(section, activations=("silu",), head_dim=128, kv_heads=32, causal=causal, qk_norm=True)
    rope = rope_section(section)
    rope_type(rope, ("default",))
    layers = section.integer("num_hidden_layers")
    if levels > layers:
        raise section.error("num_hidden_layers", f"is {layers}, but vision rows enter behind {levels} layers")
    return TextSpec(
        vocab_size=section.integer("vocab_size", 151936),
        layers=layers,
        layer=layer,
        rope=RopeSpec(
            theta=read_theta(rope, section, None if sections else _THETA),
            sections=_sections(rope, layer.head_dim) if sections else (),
            interleaved=sections,
        ),
        pooling="last",
        levels=levels,
    )


def _sections(rope: Section, head_dim: int) -> tuple[int, int, int]:
    if not rope.flag("mrope_interleaved", True):
        raise rope.error("mrope_interleaved", "is false; sections in blocks are not supported")
    found = rope.integers("mrope_section") or (24, 20, 20)
    half = head_dim // 2
    # Height and width each take every third frequency from the front.
    if len(found) != 3 or min(found) < 0 or sum(found) != half or 3 * max(found[1:]) > half:
        raise rope.error(
            "mrope_section", f"must be three counts that interleave to {half}, not {list(found)}"
        )
    return (found[0], found[1], found[2])
