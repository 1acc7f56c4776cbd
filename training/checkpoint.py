"""The files of the demonstration checkpoint: the layout of the real model, at a hundredth of its size."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import SINGLE_FILE
from tessera.models.llama_nemotron_vl.config import PROCESSOR_FILE
from tessera_tools.random_checkpoint.llama import (
    SENTENCE_TRANSFORMERS_FILE,
    sentence_transformers_json,
    tokenizer_config_json,
    tokenizer_json,
)
from tessera_tools.random_checkpoint.llama_nemotron_vl import CheckpointSpec, config_json, processor_json
from training.files import replacing
from training.network import Network
from training.world.grammar import ask, describe
from training.world.notes import add, sample_note, write
from training.world.sampling import sample
from training.world.words import CITIES, PEOPLE, WORDS

DEMO = CheckpointSpec(
    image_size=256,
    vision_hidden=192,
    vision_layers=6,
    vision_heads=6,
    vision_intermediate=576,
    vision_head=False,
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=640,
    base_vocab=1400,
    p_max_length=2048,
)

SETTINGS = (
    CONFIG_FILE,
    PROCESSOR_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SENTENCE_TRANSFORMERS_FILE,
)

_SENTENCES = 20_000


def write_settings(directory: Path, spec: CheckpointSpec = DEMO, *, dtype: str = "bfloat16") -> None:
    """Everything but the weights, into ``directory``; what the service opens to tokenise and to tile."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {
        CONFIG_FILE: config_json(spec, dtype),
        PROCESSOR_FILE: processor_json(spec),
        TOKENIZER_FILE: tokenizer_json(spec, 0, _sentences()),
        TOKENIZER_CONFIG_FILE: tokenizer_config_json(spec),
        SENTENCE_TRANSFORMERS_FILE: sentence_transformers_json(),
    }
    for name, content in files.items():
        # The tokenizer is most of it, and is read by programs only.
        indent = None if name == TOKENIZER_FILE else 2
        (directory / name).write_text(
            json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def write_weights(directory: Path, network: Network, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """``model.safetensors`` with the tensor names that the real checkpoint has."""
    tensors = {name: value.to(dtype).contiguous().cpu() for name, value in network.stored().items()}
    with replacing(directory / SINGLE_FILE) as fresh:
        save_file(tensors, fresh, metadata={"format": "pt"})


def copy_settings(origin: Path, directory: Path) -> None:
    """The files that ``write_settings`` makes, as they are in another checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS:
        shutil.copyfile(origin / name, directory / name)


def _sentences() -> Iterator[str]:
    """The world's English, every word of it often enough to become a token."""
    source = random.Random(0)
    for _ in range(_SENTENCES):
        composition = sample(source, held_out=False)
        note = sample_note(source)
        caption = describe(composition, source)
        yield from (caption, ask(composition, source), add(caption, note, source), write(note, source))
    names = [*WORDS, *PEOPLE, *CITIES]
    for _ in range(40):
        source.shuffle(names)
        yield " " + " ".join(names)
