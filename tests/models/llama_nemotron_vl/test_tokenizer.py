from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import CheckpointError
from tessera.models.base import Content, Truncate
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint
from tests.models.llama_nemotron_vl.packing import prompt
from tests.references.llama_nemotron_vl import Reference

Edit = Callable[[dict[str, Any]], None]


def edited(source: Path, target: Path, edit: Edit, name: str = "tokenizer.json") -> Path:
    shutil.copytree(source, target)
    parsed = json.loads((target / name).read_text())
    edit(parsed)
    (target / name).write_text(json.dumps(parsed))
    return target


def without(name: str) -> Edit:
    def edit(parsed: dict[str, Any]) -> None:
        parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["content"] != name]

    return edit


@pytest.mark.parametrize("name", ["<img>", "</img>", "<IMG_CONTEXT>", "<|begin_of_text|>"])
def test_a_control_token_must_be_there(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    path = edited(make_checkpoint(), tmp_path / "c", without(name))
    with pytest.raises(
        CheckpointError, match=rf"tokenizer.json: added_tokens lacks {name!r}".replace("|", r"\|")
    ):
        LlamaNemotronVL(path)


def test_placeholder_id_must_be_the_configured_one(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = edited(
        make_checkpoint(),
        tmp_path / "c",
        lambda parsed: parsed.update(img_context_token_id=7),
        "config.json",
    )
    with pytest.raises(CheckpointError, match="<IMG_CONTEXT> has id 618, but img_context_token_id is 7"):
        LlamaNemotronVL(path)


def test_what_is_no_tokenizer(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for number, edit in enumerate(
        (
            lambda parsed: parsed.update(model={"type": "nothing"}),
            lambda parsed: parsed.update(added_tokens=[{"content": "<img>"}]),
            lambda parsed: parsed.update(added_tokens={}),
        )
    ):
        path = edited(make_checkpoint(), tmp_path / str(number), edit)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            LlamaNemotronVL(path)


def test_more_tokens_than_embeddings(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def edit(parsed: dict[str, Any]) -> None:
        parsed["llm_config"]["vocab_size"] = 500
        parsed["img_context_token_id"] = 400

    path = edited(make_checkpoint(), tmp_path / "c", edit, "config.json")
    with pytest.raises(CheckpointError, match="has id 599, but vocab_size is 500"):
        LlamaNemotronVL(path)


def test_begin_token_may_be_an_object(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = edited(
        make_checkpoint(),
        tmp_path / "c",
        lambda parsed: parsed.update(bos_token={"content": "<|end_of_text|>", "lstrip": False}),
        "tokenizer_config.json",
    )
    assert prompt(LlamaNemotronVL(path), "a").tokens[0] == 601


def test_the_first_token_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(make_checkpoint(), path)
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: bos_token is missing"):
        LlamaNemotronVL(path)


@pytest.mark.parity
def test_markers_that_strip_their_neighbours(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def edit(parsed: dict[str, Any]) -> None:
        for token in parsed["added_tokens"]:
            if token["content"] in ("<img>", "</img>"):
                token.update(lstrip=True, rstrip=True)

    path = edited(make_checkpoint(), tmp_path / "c", edit)
    model, reference = LlamaNemotronVL(path), Reference(path)
    for text in ("", "text", "  more text"):
        for tiles in ([1], [1, 2]):
            assert prompt(model, text, tiles).tokens.tolist() == reference.tokens(text, tiles, "passage")


@pytest.mark.parametrize("truncate", [Truncate.NONE, Truncate.END])
def test_a_long_text_does_not_hold_up_other_threads(
    make_checkpoint: MakeCheckpoint, truncate: Truncate
) -> None:
    model = LlamaNemotronVL(make_checkpoint())
    text = "several words of a long text " * 20_000
    limit = 10_000_000 if truncate is Truncate.NONE else 100

    def tokenise() -> None:
        model.prompt(Content(parts=(text,)), max_tokens=limit, truncate=truncate, param="input[0]")

    working = threading.Thread(target=tokenise)
    working.start()
    looks = 0
    while working.is_alive():
        time.sleep(0.0005)
        looks += 1
    # With the interpreter's lock held to the end there would be one or two.
    assert looks > 10
