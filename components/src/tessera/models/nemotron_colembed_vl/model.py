"""A checkpoint of Nemotron ColEmbed VL 4B or 8B v2 as the rest of Tessera sees it; opening needs no torch.

The body is Qwen3-VL's with attention both ways. Every state before the final norm, scaled to length 1, is a
vector, those of the template included. Prompts are turns of the checkpoint's own chat template::

    query           Query: query: {text}
    anything else   the images, then passage: {text}
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.errors import ConfigError
from tessera.models.base import Content, Family, OutputKind, Prompt, Role, Truncate
from tessera.models.chat import CHAT_FILES, Chat
from tessera.models.declared import role_prompts
from tessera.models.llama.prompt import found_prefixes
from tessera.models.options import OptionsFamily
from tessera.models.prompts import Segment
from tessera.models.qwen3_vl_embedding.body import ImageOptions, Qwen3VLBody
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.config import read_config as read_body
from tessera.models.two_towers.images import read_processor

_ARCHITECTURE: Final = "Qwen3VLNemotronEmbedModel"
SETTINGS_FILE: Final = "processor_config.json"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each 0 is what the checkpoint's processor says; ``max_tokens`` bounds one input, and a query again."""

    min_pixels: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_pixels: Annotated[int, msgspec.Meta(ge=0, le=1 << 27)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_query_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class NemotronColEmbedVL(Qwen3VLBody):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token, template included."""

    family = "nemotron_colembed_vl"
    version = 3
    by_processor = True
    files = (*Qwen3VLBody.files, *CHAT_FILES, SETTINGS_FILE)
    kind = OutputKind.TOKENS

    def __init__(self, path: Path, options: Options) -> None:
        """Read configuration, tokenizer and chat template, as ``Qwen3VLBody`` does."""
        config = read_config(path)
        super().__init__(path, config, read_limits(path, config, options))
        assert self.placeholder is not None
        self._chat = Chat(path, self._tokenizer, placeholder=self.placeholder, generation=True)
        # Published checkpoints may be without it; their class then has these.
        settings = Section.read(path / SETTINGS_FILE, optional=True)
        self._most_of_query = options.max_query_tokens or settings.integer("q_max_length", 512)
        chosen = {"q_max_length": options.max_query_tokens, "p_max_length": options.max_tokens}
        self.lacking_keys = tuple(key for key, most in chosen.items() if not most and not settings.has(key))
        found = found_prefixes(settings)
        if Role.QUERY in found:
            found[Role.QUERY] = f"Query: {found[Role.QUERY]}"
        usual = {Role.NONE: "", Role.QUERY: "Query: query: ", Role.PASSAGE: "passage: "}
        self.prompts = role_prompts(self.declared, usual, found=found)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """A user's turn of the images, then the text behind its prefix, and the beginning of an answer."""
        return self._chat.segments(
            "",
            [*content.images, content.text],
            # Without the marks around it, which the template writes.
            lambda image: [image],
            prefix=content.prompt_of(self.prompts),
            param=param,
        )

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """As the base, within the bound of a query. The reference cuts its template's end, too."""
        if content.role is Role.QUERY:
            max_tokens = min(max_tokens, self._most_of_query)
        return super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)

    def stored_name(self, name: str) -> str | None:
        """The final norm is there, and has no part."""
        found = super().stored_name(name)
        return None if found == "text.norm.weight" else found


def read_limits(path: Path, config: ModelConfig, options: Options) -> ImageOptions:
    """The limits of areas and tokens: options, else those of the files, else those of their classes.

    ``min_pixels`` and ``max_pixels`` of a file win over its ``size``. An image has at most the tokens that
    the reference leaves for it. Raises ``CheckpointError``, or ``ConfigError`` for ``max_tokens`` of none.
    """
    processor, settings = read_processor(path), Section.read(path / SETTINGS_FILE, optional=True)
    size = processor.section("size") if processor.has("size") else processor
    least = processor.integer("min_pixels", size.integer("shortest_edge", 3_136))
    most = processor.integer("max_pixels", size.integer("longest_edge", 1_003_520))
    tokens = options.max_tokens or settings.integer("p_max_length", 4_096)
    room = tokens - settings.integer("reserve_tokens_for_images", 100) - 1
    area, smallest = config.vision.edge**2, options.min_pixels or least
    if not options.max_pixels and room * area < smallest:
        wanted = f"is {tokens}, of which an image has {room}; one of {smallest} pixels takes more"
        if options.max_tokens:
            raise ConfigError(f"model option max_tokens {wanted}")
        raise settings.error("p_max_length", wanted)
    return ImageOptions(
        min_pixels=smallest,
        max_pixels=options.max_pixels or min(most, room * area),
        max_tokens=tokens,
    )


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration in ``directory``: Qwen3-VL's, both ways and without the final norm.

    Raises ``CheckpointError``.
    """
    config = read_body(directory, (_ARCHITECTURE,))
    section = Section.read(directory / CONFIG_FILE)
    section.string("pooling", "colbert", among=("colbert",))
    text = config.text
    layer = replace(text.layer, causal=section.flag("is_causal", False))
    return replace(config, text=replace(text, layer=layer, pooling="none", final_norm=False))


FAMILY: Family = OptionsFamily(
    model_types=("qwen3_vl_nemotron_embed",),
    hub_models=("nvidia/nemotron-colembed-vl-4b-v2", "nvidia/nemotron-colembed-vl-8b-v2"),
    options=Options,
    opened=NemotronColEmbedVL,
    architectures=(_ARCHITECTURE,),
)
