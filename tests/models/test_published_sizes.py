"""Checkpoints of the published models' shapes have as many parameters as these."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.models import open_model
from tessera.models.base import parameters_of
from tessera_tools.random_checkpoint import (
    distilbert,
    encoder,
    llama,
    llama_nemotron_vl,
    llama_rerank,
    ministral3,
    qwen3,
    towers,
)
from tessera_tools.random_checkpoint.spec import Spec

# Of the 8B, beside the 2B and the 4B.
_EIGHT: Final[dict[str, Any]] = {
    "hidden": 4096,
    "layers": 36,
    "heads": 32,
    "intermediate": 12288,
    "vision_hidden": 1152,
    "vision_layers": 27,
    "vision_intermediate": 4304,
    "deepstack": (8, 16, 24),
}
# Fewer pairs of bytes, which take seconds to find, and as many more control tokens.
_LLAMA: Final[dict[str, Any]] = {"base_vocab": 2000, "control_tokens": 126_256}
_QWEN: Final[dict[str, Any]] = {"base_vocab": 2000}

SIZES: Final[dict[str, tuple[Spec, int]]] = {
    "bert": (encoder.FULL, 109_482_240),
    "bert, MiniLM": (replace(encoder.FULL, hidden=384, layers=6, intermediate=1536), 22_713_216),
    "splade": (encoder.SPLADE_FULL, 109_514_298),
    "splade, distilled": (distilbert.SPLADE_FULL_DISTILLED, 66_985_530),
    "xlm_roberta": (encoder.ROBERTA_FULL, 567_754_752),
    "clip": (towers.CLIP_FULL, 427_616_513),
    "siglip": (towers.SIGLIP_FULL, 1_136_008_498),
    "siglip2": (towers.SIGLIP2_FULL, 1_135_670_962),
    "llama_nemotron_embed": (replace(llama.FULL, **_LLAMA), 1_235_814_400),
    "llama_nemotron_rerank": (replace(llama_rerank.FULL, **_LLAMA), 1_235_816_448),
    # That of the embedding model, a token more, and the head.
    "llama_nemotron_rerank_vl": (
        replace(llama_nemotron_vl.RERANK_FULL, **_LLAMA),
        1_678_252_480 + 2048 + 2048,
    ),
    "llama_nemotron_colembed_vl": (replace(llama_nemotron_vl.COLEMBED_FULL, **_LLAMA), 4_405_458_432),
    # 1,141 and 872 million are published, with and without embeddings.
    "nemotron_3_embed": (ministral3.FULL, 1_140_918_272),
    # 413.79 million are published of the vision tower with the projector.
    "nemotron_3_5_embed": (ministral3.VL_FULL, 1_140_918_272 + 413_792_256),
    "qwen3_embedding": (replace(qwen3.FULL, **_QWEN), 595_776_512),
    "qwen3_vl_embedding, 2B": (replace(qwen3.VL_FULL, **_QWEN), 2_127_532_032),
    "qwen3_vl_embedding, 8B": (replace(qwen3.VL_FULL, **_QWEN, **_EIGHT), 8_144_793_840),
    # The body of Qwen3-VL-4B, and the projection with its bias.
    "colqwen3": (replace(qwen3.COL_FULL, **_QWEN), 4_437_815_808 + 2560 * 320 + 320),
    "nemotron_colembed_vl, 4B": (replace(qwen3.COLEMBED_FULL, **_QWEN), 4_826_771_968),
    "nemotron_colembed_vl, 8B": (replace(qwen3.COLEMBED_FULL, **_QWEN, **_EIGHT), 8_767_123_696),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    spec, parameters = SIZES[name]
    _write(spec, tmp_path)
    assert sum(math.prod(tensor.shape) for tensor in spec.tensors(tmp_path)) == parameters


@pytest.mark.parametrize(
    ("name", "millions"), [("bert", 109), ("clip", 304), ("siglip2", 428), ("nemotron_3_5_embed", 1555)]
)
def test_an_input_passes_both_stages_or_one_of_two_towers(name: str, millions: int, tmp_path: Path) -> None:
    _write(SIZES[name][0], tmp_path)
    assert parameters_of(open_model(tmp_path)) / 1e6 == pytest.approx(millions, rel=0.01)


def _write(spec: Spec, folder: Path) -> None:
    for file, content in spec.files("bfloat16", 0).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(content))
