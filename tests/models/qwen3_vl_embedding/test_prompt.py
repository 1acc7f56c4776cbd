"""Prompts, beside the tokenizer's own reading of the whole template."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tessera.errors import InvalidInput
from tessera.image_plan import ImagePlan
from tessera.models.base import Content, Prompt, Role, Truncate
from tessera.models.qwen3_vl_embedding.model import Options, Qwen3VLEmbedding, punctuated
from tessera_tools.random_checkpoint.qwen3 import VL_TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.running import with_ids
from tests.references.qwen3 import Qwen3VLReference

SMALL = ImagePlan(units=24, rows=6, grid=(1, 4, 6))
TALL = ImagePlan(units=16, rows=4, grid=(1, 8, 2))
PAD = VL_TINY.id_of("<|image_pad|>")


def prompt(
    model: Qwen3VLEmbedding, *parts: Any, limit: int = 8192, truncate: Truncate = Truncate.NONE, **more: Any
) -> Prompt:
    return model.prompt(
        Content(parts=with_ids(parts), **more), max_tokens=limit, truncate=truncate, param="input[3]"
    )


def spelled(path: Path, ids: Any) -> str:
    return Tokenizer.from_file(str(path / "tokenizer.json")).decode(list(ids), skip_special_tokens=False)


@pytest.fixture(scope="module")
def reference(path: Path) -> Qwen3VLReference:
    return Qwen3VLReference(path)


@pytest.mark.parity
@pytest.mark.parametrize(
    "parts",
    [
        ("a river",),
        (SMALL,),
        (SMALL, "a river under the bridge"),
        ("first", SMALL, "between", TALL, "last"),
        (SMALL, TALL, SMALL),
        ("two ", "texts ", SMALL, "and", " more"),
        ("\n\n line breaks \n", SMALL, "\n"),
        ("  spaces  ", SMALL, "  "),
        ("été naïve 東京 e\u0301",),
        (SMALL, "", TALL, ""),
    ],
)
@pytest.mark.parametrize("instruction", [None, "Find the page that answers."])
def test_the_template(
    model: Qwen3VLEmbedding, reference: Qwen3VLReference, parts: tuple[Any, ...], instruction: str | None
) -> None:
    found = prompt(model, *parts, instruction=instruction)
    grids = [part if isinstance(part, str) else part.grid for part in parts]
    assert found.tokens.tolist() == reference.tokens(grids, instruction)
    assert found.image_tokens == sum(part.rows for part in parts if isinstance(part, ImagePlan))
    assert len(model.vision_index(found.tokens)) == found.image_tokens
    assert not found.truncated


@pytest.mark.parametrize("appends_end", [True, False])
def test_one_end_token_whatever_the_post_processor_does(written: WriteCheckpoint, appends_end: bool) -> None:
    spec = dataclasses.replace(VL_TINY, appends_end=appends_end)
    path = written(spec)
    model = Qwen3VLEmbedding(path, Options())
    whole = Tokenizer.from_file(str(path / "tokenizer.json")).encode("text").ids
    assert (whole[-1] == spec.id_of("<|endoftext|>")) is appends_end
    tokens = prompt(model, "text", SMALL).tokens.tolist()
    assert tokens[-1] == spec.id_of("<|endoftext|>")
    assert tokens.count(tokens[-1]) == 1


def test_the_role_changes_nothing(model: Qwen3VLEmbedding) -> None:
    made = [prompt(model, "text", role=role).tokens.tolist() for role in Role]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("Find pages", "Find pages."),
        ("  Find pages \n", "Find pages."),
        ("Find pages!", "Find pages!"),
        ("検索する。", "検索する。"),
        ("(in brackets)", "(in brackets)"),
        ("a sum of 5+", "a sum of 5+."),
        ("", ""),
        ("   ", ""),
    ],
)
def test_instructions_end_in_punctuation(model: Qwen3VLEmbedding, given: str, used: str) -> None:
    assert punctuated(given) == used
    assert prompt(model, "x", instruction=given).tokens.tolist() == (
        prompt(model, "x", instruction=used or None).tokens.tolist()
    )


def test_another_default_instruction_is_another_model(path: Path, model: Qwen3VLEmbedding) -> None:
    other = Qwen3VLEmbedding(path, Options(instruction="Find pages."))
    assert prompt(other, "x").tokens.tolist() == prompt(model, "x", instruction="Find pages.").tokens.tolist()
    assert other.fingerprint != model.fingerprint


@pytest.mark.parametrize("where", ["text", "instruction"])
@pytest.mark.parametrize("name", ["<|im_end|>", "<|image_pad|>", "<|endoftext|>", "<think>"])
def test_a_special_token_in_a_text_stays_text(
    model: Qwen3VLEmbedding, path: Path, where: str, name: str
) -> None:
    hidden = f"before {name} behind."
    found = prompt(model, hidden) if where == "text" else prompt(model, "x", instruction=hidden)
    plain = prompt(model, "x")
    token = VL_TINY.id_of(name)
    assert found.tokens.tolist().count(token) == plain.tokens.tolist().count(token)
    assert hidden in spelled(path, found.tokens)
    assert found.image_tokens == 0


def test_cut_at_the_end(model: Qwen3VLEmbedding, path: Path) -> None:
    whole = prompt(model, "one two three", SMALL, "four five six seven eight nine ten")
    cut = prompt(
        model,
        *("one two three", SMALL, "four five six seven eight nine ten"),
        limit=len(whole.tokens) - 5,
        truncate=Truncate.END,
    )
    assert cut.truncated and len(cut.tokens) == len(whole.tokens) - 5
    text = spelled(path, cut.tokens)
    assert text.startswith("<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n")
    assert "user\none two three<|vision_start|>" in text
    assert "<|vision_end|>four" in text and "nine" not in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<|endoftext|>")


def test_cut_at_the_start(model: Qwen3VLEmbedding, path: Path) -> None:
    parts = ("one two three", SMALL, "four five six seven eight nine ten")
    whole = prompt(model, *parts)
    cut = prompt(model, *parts, limit=len(whole.tokens) - 4, truncate=Truncate.START)
    text = spelled(path, cut.tokens)
    assert cut.truncated and len(cut.tokens) == len(whole.tokens) - 4
    assert "user\n" in text and "one" not in text
    assert text.endswith("nine ten<|im_end|>\n<|im_start|>assistant\n<|endoftext|>")


@pytest.mark.parametrize("truncate", [Truncate.START, Truncate.END])
def test_every_limit(model: Qwen3VLEmbedding, truncate: Truncate) -> None:
    """Whatever is kept: the template, both images, the end token, and no more than was allowed."""
    parts = ("one two three", SMALL, "four five", TALL, "six seven")
    whole = prompt(model, *parts).tokens.tolist()
    least = prompt(model, SMALL, TALL).tokens.tolist()
    for limit in range(len(least), len(whole)):
        cut = prompt(model, *parts, limit=limit, truncate=truncate)
        assert len(cut.tokens) == limit
        assert cut.truncated and cut.image_tokens == 10
        assert set(least) <= set(cut.tokens.tolist())
    assert prompt(model, *parts, limit=len(least), truncate=truncate).tokens.tolist() == least
    with pytest.raises(InvalidInput, match="cannot be truncated") as caught:
        prompt(model, *parts, limit=len(least) - 1, truncate=truncate)
    assert caught.value.param == "input[3]"


def test_a_text_alone_keeps_one_token(model: Qwen3VLEmbedding) -> None:
    fixed = len(prompt(model, "x").tokens) - 1
    assert len(prompt(model, "one two three", limit=fixed + 1, truncate=Truncate.END).tokens) == fixed + 1
    with pytest.raises(InvalidInput, match=f"the prompt takes {fixed} tokens"):
        prompt(model, "one two three", limit=fixed, truncate=Truncate.END)


@pytest.mark.parametrize(
    ("parts", "limit", "words"),
    [
        ((), 100, "is empty"),
        (("", ""), 100, "is empty"),
        (("a river " * 50,), 60, "truncation is off"),
        ((SMALL, TALL), 20, "2 image.* not truncated"),
        (("a \ud800",), 100, "lone surrogate"),
        (((1, 2), "text"), 100, "combines token ids"),
        (((1, 2, 5000),), 100, r"\[2\] is 5000, outside"),
        ((ImagePlan(units=0, rows=6),), 100, "without their grid"),
        ((ImagePlan(units=0, rows=6, grid=(1, 4, 4)),), 100, r"\[1, 4, 4\] patches does not make 6"),
        ((ImagePlan(units=0, rows=6, grid=(1, 3, 8)),), 100, "does not make 6"),
        ((ImagePlan(units=0, rows=6, grid=(2, 2, 6)),), 100, "does not make 6"),
        (((PAD,) * 6, ImagePlan(units=0, rows=6)), 100, "without their grid"),
        (((PAD,) * 6, ImagePlan(units=0, rows=6, grid=(1, 4, 4))), 100, "does not make 6"),
    ],
)
def test_what_is_refused(model: Qwen3VLEmbedding, parts: tuple[Any, ...], limit: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        prompt(model, *parts, limit=limit)
    assert caught.value.param == "input[3]"


def test_rows_that_a_client_computed_need_no_units(model: Qwen3VLEmbedding) -> None:
    computed = dataclasses.replace(SMALL, units=0)
    assert prompt(model, computed).tokens.tolist() == prompt(model, SMALL).tokens.tolist()


def test_token_ids_stand_as_they_are(model: Qwen3VLEmbedding) -> None:
    assert prompt(model, (5, 6, 7)).tokens.tolist() == [5, 6, 7]
    with pytest.raises(InvalidInput, match="the image placeholder"):
        prompt(model, (5, PAD))


def test_pieces_spell_the_prompt(model: Qwen3VLEmbedding) -> None:
    text = "naïve 東京 <|im_end|>"
    pieces = model.pieces(text, role=Role.QUERY, instruction="Find it", param="x")
    assert [piece.token for piece in pieces] == prompt(model, text, instruction="Find it").tokens.tolist()
    texts = "system\nFind it.\nuser\n" + text + "\nassistant\n"
    for piece in pieces:
        if piece.start is None:
            assert piece.text.startswith("<|")
        else:
            assert texts[piece.start : piece.stop] == piece.text
    assert "".join(piece.text for piece in pieces if piece.text in ("<|im_start|>", "<|im_end|>")) != ""
    assert pieces[-1].text == "<|endoftext|>"
