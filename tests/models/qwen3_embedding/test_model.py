"""Prompts, limits and files of the family that reads text alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.errors import ConfigError, InvalidInput
from tessera.imaging import Picture
from tessera.models import open_model
from tessera.models.base import Role, Truncate
from tessera.models.qwen3_embedding.model import Options, Qwen3Embedding
from tessera_tools.random_checkpoint.qwen3 import TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.qwen3_vl_embedding.pictures import picture
from tests.models.running import prompt_of
from tests.references.qwen3 import Qwen3Reference

TASK = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(TINY)


@pytest.fixture(scope="module")
def model(path: Path) -> Qwen3Embedding:
    return Qwen3Embedding(path, Options())


def plain(path: Path, text: str) -> list[int]:
    return Qwen3Reference(path).tokens(text, "none")


def test_what_it_is(model: Qwen3Embedding) -> None:
    assert model.family == "qwen3_embedding"
    assert model.vision is None
    assert model.output.width == 128
    assert model.max_tokens == 32768
    assert model.dimensions == frozenset(range(32, 128))
    assert model.vision_nbytes("float32") == 0


@pytest.mark.parity
@pytest.mark.parametrize(
    ("role", "instruction", "expected"),
    [
        (Role.QUERY, None, f"Instruct: {TASK}\nQuery:what?"),
        (Role.QUERY, "Find a page", "Instruct: Find a page\nQuery:what?"),
        (Role.NONE, "Find a page", "Instruct: Find a page\nQuery:what?"),
        (Role.NONE, None, "what?"),
        (Role.PASSAGE, None, "what?"),
        (Role.QUERY, "", "what?"),
    ],
)
def test_prompts(
    model: Qwen3Embedding, path: Path, role: Role, instruction: str | None, expected: str
) -> None:
    assert prompt_of(model, "what?", role=role, instruction=instruction).tokens.tolist() == plain(
        path, expected
    )


@pytest.mark.parity
def test_queries_without_a_default_task(path: Path) -> None:
    bare = open_model(path, {"query_instruction": ""})
    assert prompt_of(bare, "what?", role=Role.QUERY).tokens.tolist() == plain(path, "what?")
    assert bare.fingerprint != open_model(path).fingerprint


def test_truncation_keeps_the_task_and_the_end(model: Qwen3Embedding) -> None:
    text = "one two three four five six seven eight"
    whole = prompt_of(model, text, role=Role.QUERY).tokens
    head = len(prompt_of(model, "x", role=Role.QUERY).tokens) - 2
    for truncate in (Truncate.START, Truncate.END):
        for limit in range(head + 2, len(whole)):
            cut = prompt_of(model, text, role=Role.QUERY, limit=limit, truncate=truncate)
            assert cut.truncated and len(cut.tokens) == limit
            assert cut.tokens[:head].tolist() == whole[:head].tolist()
            assert cut.tokens[-1] == whole[-1]
            kept = whole[head:-1]
            kept = kept[-(limit - head - 1) :] if truncate is Truncate.START else kept[: limit - head - 1]
            assert cut.tokens[head:-1].tolist() == kept.tolist()
    with pytest.raises(InvalidInput, match="cannot be truncated"):
        prompt_of(model, text, role=Role.QUERY, limit=head + 1, truncate=Truncate.END)


def test_images_are_refused_by_name(model: Qwen3Embedding) -> None:
    with pytest.raises(InvalidInput, match="qwen3_embedding reads text alone"):
        model.plan(64, 64, param="input[0]")
    with pytest.raises(InvalidInput, match="qwen3_embedding reads text alone"):
        model.preprocess(Picture(picture(64, 64), param="input[0]"))
    with pytest.raises(ConfigError, match="no vision stage"):
        model.load_vision(dtype="float32", device="cpu")


def test_one_position_for_each_token(model: Qwen3Embedding) -> None:
    assert np.array_equal(model.positions(np.zeros(5, np.int32), ()), [[0, 1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_pixels": 1}, "unknown to qwen3_embedding"), ({"max_tokens": 3}, "max_tokens")],
)
def test_options_that_there_are_not(path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_model(path, options)


def test_a_stored_head_is_left_alone(written: WriteCheckpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = changed(written(TINY), tmp_path / "with-head")
    tensors = load_file(copy / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, copy / "model.safetensors"
    )
    open_model(copy).load_text(dtype="float32", device="cpu")


def test_opening_and_prompts_need_no_torch(path: Path) -> None:
    code = (
        "import sys\n"
        "from tessera.models import open_model\n"
        "from tessera.models.base import Content, Truncate\n"
        "model = open_model(sys.argv[1])\n"
        "model.prompt(Content(parts=('a',)), max_tokens=9, truncate=Truncate.NONE, param='x')\n"
        "model.text_activation_nbytes('bfloat16', 10), model.fingerprint\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=180)
