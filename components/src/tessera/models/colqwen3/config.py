"""Reads ``config.json``: Qwen3-VL's, with a projection; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.config import read_config as read_body
from tessera.nn.spec import HeadSpec

TOMORO: Final = "colqwen3"
OPS: Final = "ops_colqwen3"

_ARCHITECTURES: Final = (["ColQwen3"], ["OpsColQwen3Model"])
_WIDTHS: Final = ("embed_dim", "dims", "dim", "projection_dim", "colbert_dim")
_DEFAULT_WIDTH: Final = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class ColQwen3Config:
    """``model_type`` is that of ``config.json``; ``body`` has the projection as the head of its tower."""

    model_type: str
    body: ModelConfig


def read_config(directory: Path) -> ColQwen3Config:
    """Read and cross-check the configuration in ``directory``; raises ``CheckpointError``.

    Tools call the projection's width by several names.
    """
    config = Section.read(directory / CONFIG_FILE)
    body = read_body(directory, _ARCHITECTURES)
    width = next((config.integer(key) for key in _WIDTHS if config.has(key)), _DEFAULT_WIDTH)
    text = replace(body.text, pooling="none", head=HeadSpec(width=width, bias=True))
    return ColQwen3Config(
        model_type=config.string("model_type", among=(TOMORO, OPS)), body=replace(body, text=text)
    )
