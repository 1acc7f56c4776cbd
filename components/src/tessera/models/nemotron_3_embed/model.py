"""A checkpoint of Nemotron-3-Embed as the rest of Tessera sees it; importing and opening need no torch.

An input is the role's prompt and the text, between the marks that the checkpoint's own tokenizer adds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from tessera.checkpoint.declared import read_declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.base import Family
from tessera.models.decoder import max_positions
from tessera.models.llama.config import read_dimensions
from tessera.models.llama.prompt import read_prefixes
from tessera.models.marks import marks_of
from tessera.models.ministral3.config import read_pooling, read_text, with_defaults
from tessera.models.options import MaxTokens, OptionsFamily
from tessera.models.tower import TowerModel

_ARCHITECTURE: Final = "Ministral3Model"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pooling`` is for a checkpoint that declares none; ``max_tokens`` bounds one input."""

    pooling: Literal["declared", "avg", "last", "cls"] = "declared"
    max_tokens: MaxTokens = 32_768


class Nemotron3Embed(TowerModel):
    """Implements ``tessera.models.base.Model``."""

    family = "nemotron_3_embed"

    def __init__(self, path: Path, options: Options) -> None:
        config = with_defaults(Section.read(path / CONFIG_FILE))
        declared = read_declared(path)
        text = read_text(config, pooling=read_pooling(config, declared, options.pooling))
        super().__init__(
            path,
            text,
            options,
            max_tokens=min(options.max_tokens, max_positions(config)),
            dimensions=read_dimensions(config, text.layer.hidden, default=range(1, text.layer.hidden)),
            declared=declared,
        )
        self.prompts = read_prefixes(config, declared=self.declared)
        self.marks = marks_of(self._tokenizer)


FAMILY: Family = OptionsFamily(
    model_types=("ministral3",),
    hub_models=(
        "nvidia/Nemotron-3-Embed-1B-BF16",
        "nvidia/Nemotron-3-Embed-8B-BF16",
        "nvidia/Nemotron-3-Embed-1B-NVFP4",
    ),
    options=Options,
    opened=Nemotron3Embed,
    architectures=(_ARCHITECTURE,),
)
