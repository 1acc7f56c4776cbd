"""A checkpoint of Qwen3-Embedding as the rest of Tessera sees it; importing and opening need no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.errors import InvalidInput
from tessera.models.base import Content, Family, Role
from tessera.models.declared import check_embeds, role_prompts
from tessera.models.decoder import check_architecture, max_positions
from tessera.models.marks import Marks
from tessera.models.options import MaxTokens, OptionsFamily
from tessera.models.prompts import Run, Segment
from tessera.models.qwen3.config import DEFAULT_TASK, END_OF_TEXT, read_text
from tessera.models.tower import NO_PROMPTS, TowerModel
from tessera.nn.spec import TextSpec

_ARCHITECTURES: Final = ("Qwen3ForCausalLM", "Qwen3Model")
_SMALLEST: Final = 32  # the narrowest vector that it was trained to be cut to


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``query_instruction`` is the task of queries that name none; empty: they stay as they are.

    ``task`` takes a checkpoint for an embedder that does not declare how it makes a vector.
    """

    query_instruction: str = DEFAULT_TASK
    task: Literal["auto", "embed"] = "auto"
    max_tokens: MaxTokens = 32_768


class Qwen3Embedding(TowerModel):
    """Implements ``tessera.models.base.Model``."""

    family = "qwen3_embedding"
    takes_instructions = True

    def __init__(self, path: Path, options: Options) -> None:
        config = Section.read(path / CONFIG_FILE)
        text = read_config(config)
        max_tokens = min(options.max_tokens, max_positions(config))
        widths = range(_SMALLEST, text.layer.hidden)
        super().__init__(path, text, options, max_tokens=max_tokens, dimensions=widths)
        check_embeds(self.declared, options.task)
        own = {Role.QUERY: template(options.query_instruction)}
        # An option that was chosen wins over what is declared.
        chosen = own if options.query_instruction != DEFAULT_TASK else {}
        self.prompts = role_prompts(self.declared, {**NO_PROMPTS, **own}, found=chosen)
        self.marks = Marks(behind=(self._tokenizer.id_of(END_OF_TEXT),))

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The instruction before a query, or the role's prompt; documents stand as they are."""
        task = content.instruction
        if content.role is Role.PASSAGE and task is not None:
            raise InvalidInput(
                f"{param} is a document with an instruction; queries alone take one", param=param
            )
        if task is None:
            return super().segments(content, param=param)
        return [*self.marks.before, Run(template(task), content.text), *self.marks.behind]


def template(task: str) -> str:
    """``Instruct: task``, a line break and ``Query:``; nothing for no task."""
    return f"Instruct: {task}\nQuery:" if task else ""


def read_config(config: Section) -> TextSpec:
    """The decoder that ``config.json`` describes; raises ``CheckpointError``."""
    check_architecture(config, _ARCHITECTURES)
    return read_text(config, sections=False)


FAMILY: Family = OptionsFamily(
    model_types=("qwen3",),
    hub_models=("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-8B"),
    options=Options,
    opened=Qwen3Embedding,
    architectures=_ARCHITECTURES,
)
