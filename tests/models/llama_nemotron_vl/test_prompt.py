from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tessera.errors import InvalidInput
from tessera.models.base import Role, Truncate
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint
from tests.models.llama_nemotron_vl.packing import prompt
from tests.references.llama_nemotron_vl import Reference

TEXTS = [
    "What is the capital of France?",
    "a",
    " leading and trailing ",
    "\n\nlines\r\n\tand tabs  ",
    "123456 7.5% — naïve café größe",
    "東京 日本 你好 привет 🙂👩‍👩‍👧",
    "it's they're WE'LL",
    "x" * 500,
    "\x00\x01control",
]


@pytest.fixture(scope="module")
def path(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(base_vocab=2000)


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaNemotronVL:
    return LlamaNemotronVL(path)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


@pytest.fixture(scope="module")
def full_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parity
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("tiles", [[], [1], [3], [1, 2], [2, 1, 3]], ids=str)
def test_tokens_equal_the_reference(
    model: LlamaNemotronVL, reference: Reference, role: Role, tiles: list[int]
) -> None:
    for text in TEXTS + ([""] if tiles else []):
        made = prompt(model, text, tiles, role=role)
        assert made.tokens.tolist() == reference.tokens(text, tiles, role.value), text
        assert made.tokens.dtype == np.int32
        assert made.image_tokens == sum(tiles) * model.config.tokens_per_tile
        assert made.text_tokens == len(made.tokens) - made.image_tokens
        assert not made.truncated


@pytest.mark.parity
def test_tokens_equal_those_of_transformers(model: LlamaNemotronVL, path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    for text in TEXTS:
        assert prompt(model, text, role=Role.QUERY).tokens.tolist() == tokenizer(f"query: {text}").input_ids


def test_layout_of_an_image(model: LlamaNemotronVL, full_tokenizer: Tokenizer) -> None:
    ids = full_tokenizer.token_to_id
    made = prompt(model, "", [2]).tokens.tolist()
    placeholders = [ids("<IMG_CONTEXT>")] * 2 * model.config.tokens_per_tile
    start = [ids("<|begin_of_text|>"), *full_tokenizer.encode("passage: ", add_special_tokens=False).ids]
    space = full_tokenizer.encode(" ", add_special_tokens=False).ids
    assert made == [*start, ids("<img>"), *placeholders, ids("</img>"), *space]


def test_no_end_token(model: LlamaNemotronVL, full_tokenizer: Tokenizer) -> None:
    assert full_tokenizer.token_to_id("<|end_of_text|>") not in prompt(model, "text").tokens


def test_literal_special_tokens_stay_text(
    model: LlamaNemotronVL, path: Path, full_tokenizer: Tokenizer
) -> None:
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    assert len(added) == 26
    ids = {token["id"] for token in added}
    for token in added:
        literal = token["content"]
        for text in (literal, f"before {literal} after", f"a{literal}{literal}b", f" {literal}\n"):
            assert full_tokenizer.encode(text, add_special_tokens=False).ids != []
            made = prompt(model, text, role=Role.NONE).tokens
            assert made[0] == full_tokenizer.token_to_id("<|begin_of_text|>")
            assert not ids & set(made[1:].tolist()), literal
            assert full_tokenizer.decode(made[1:].tolist()) == text
            with_image = prompt(model, text, [1])
            assert with_image.image_tokens == model.config.tokens_per_tile
            assert len(model.vision_index(with_image.tokens)) == model.config.tokens_per_tile


def test_vision_index(model: LlamaNemotronVL) -> None:
    made = prompt(model, "and text", [1, 2])
    index = model.vision_index(made.tokens)
    assert index.dtype == np.int32
    context = made.tokens[index[0]]
    assert index.tolist() == [at for at, token in enumerate(made.tokens) if token == context]
    assert len(index) == 3 * model.config.tokens_per_tile
    assert len(model.vision_index(prompt(model, "text").tokens)) == 0


@pytest.mark.parametrize("text", ["one two three four five six seven", "1234567890 1234567890", "x" * 60])
@pytest.mark.parametrize("role", list(Role))
def test_truncating_text_keeps_start_and_prefix(model: LlamaNemotronVL, text: str, role: Role) -> None:
    whole = prompt(model, text, role=role).tokens
    image = prompt(model, "", [1], role=role).tokens
    fixed = len(image) - model.config.tokens_per_tile - 3
    # the space after the prefix is a token of its own before an image, but may be part of a first word
    if role is not Role.NONE and whole[fixed - 1] != image[-1]:
        fixed -= 1
    for limit in range(fixed + 1, len(whole)):
        end = prompt(model, text, role=role, max_tokens=limit, truncate=Truncate.END)
        start = prompt(model, text, role=role, max_tokens=limit, truncate=Truncate.START)
        for made in (end, start):
            assert made.truncated
            assert len(made.tokens) == limit
            assert made.tokens[:fixed].tolist() == whole[:fixed].tolist()
        assert end.tokens.tolist() == whole[:limit].tolist()
        assert start.tokens[fixed:].tolist() == whole[len(whole) - (limit - fixed) :].tolist()
    with pytest.raises(InvalidInput, match=r"input\[3\] cannot be truncated to"):
        prompt(model, text, role=role, max_tokens=fixed, truncate=Truncate.END)


def test_an_input_that_fits_is_not_truncated(model: LlamaNemotronVL) -> None:
    whole = prompt(model, "one two three")
    same = prompt(model, "one two three", max_tokens=len(whole.tokens), truncate=Truncate.START)
    assert not same.truncated
    assert same.tokens.tolist() == whole.tokens.tolist()


def test_truncating_beside_images_drops_text_only(model: LlamaNemotronVL) -> None:
    whole = prompt(model, "one two three four", [2, 1])
    images = len(prompt(model, "", [2, 1]).tokens) - 1
    for limit in range(images, len(whole.tokens)):
        end = prompt(model, "one two three four", [2, 1], max_tokens=limit, truncate=Truncate.END)
        start = prompt(model, "one two three four", [2, 1], max_tokens=limit, truncate=Truncate.START)
        for made in (end, start):
            assert made.truncated
            assert made.image_tokens == whole.image_tokens
            assert made.tokens[:images].tolist() == whole.tokens[:images].tolist()
        assert end.tokens.tolist() == whole.tokens[:limit].tolist()
        assert start.tokens[images:].tolist() == whole.tokens[len(whole.tokens) - (limit - images) :].tolist()


@pytest.mark.parametrize("truncate", list(Truncate))
def test_images_that_do_not_fit(model: LlamaNemotronVL, truncate: Truncate) -> None:
    images = len(prompt(model, "", [2, 1]).tokens) - 1
    with pytest.raises(InvalidInput) as caught:
        prompt(model, "", [2, 1], max_tokens=images - 1, truncate=truncate)
    assert caught.value.param == "input[3]"
    assert str(images) in str(caught.value)
    assert str(images - 1) in str(caught.value)


def test_too_many_tiles_cost_no_memory(model: LlamaNemotronVL) -> None:
    with pytest.raises(InvalidInput, match="over the limit of 100"):
        prompt(model, "", [10**12], max_tokens=100)


def test_too_long_names_length_and_limit(model: LlamaNemotronVL) -> None:
    length = len(prompt(model, "one two three").tokens)
    for tiles in ([], [1]):
        extra = len(prompt(model, "one two three", tiles).tokens)
        with pytest.raises(InvalidInput, match=rf"input\[3\] has {extra} tokens .* limit of {extra - 1}"):
            prompt(model, "one two three", tiles, max_tokens=extra - 1)
    with pytest.raises(InvalidInput, match=f"has {length} tokens") as caught:
        prompt(model, prompt(model, "one two three").tokens.tolist(), max_tokens=length - 1)
    assert caught.value.param == "input[3]"


def test_token_ids_are_taken_as_they_are(model: LlamaNemotronVL) -> None:
    ids = [5, 0, model.vocab_size - 1, 5]
    for role in Role:
        made = prompt(model, ids, role=role)
        assert made.tokens.tolist() == ids
        assert made.image_tokens == 0
    assert prompt(model, np.array([1, 2])).tokens.tolist() == [1, 2]
    assert prompt(model, ids, max_tokens=3, truncate=Truncate.END).tokens.tolist() == ids[:3]
    shortened = prompt(model, ids, max_tokens=3, truncate=Truncate.START)
    assert shortened.tokens.tolist() == ids[1:]
    assert shortened.truncated


@pytest.mark.parametrize(
    ("ids", "tiles", "message"),
    [
        ([], [], "is empty"),
        ([1, -1], [], r"input\[3\]\[1\] is -1, outside the vocabulary"),
        ([1, 10**6], [], r"input\[3\]\[1\] is 1000000, outside the vocabulary"),
        ([1], [1], r"has 0 image placeholders, and its images become \d+ rows"),
    ],
)
def test_token_ids_that_are_refused(model: LlamaNemotronVL, ids: list, tiles: list, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        prompt(model, ids, tiles)
    assert caught.value.param == "input[3]"


def test_placeholders_without_an_image_are_refused(model: LlamaNemotronVL) -> None:
    image = prompt(model, "", [1]).tokens
    context = int(image[model.vision_index(image)[0]])
    with pytest.raises(InvalidInput, match=rf"input\[3\]\[1\] is {context}, the image placeholder"):
        prompt(model, [1, context])


def test_token_ids_stand_with_the_images_of_their_placeholders(model: LlamaNemotronVL) -> None:
    made = prompt(model, "a page", [1, 2])
    given = prompt(model, made.tokens.tolist(), [1, 2])
    assert given.tokens.tolist() == made.tokens.tolist()
    each = model.config.tokens_per_tile
    assert given.image_tokens == made.image_tokens == 3 * each
    with pytest.raises(
        InvalidInput, match=f"has {3 * each} image placeholders, and its images become {2 * each} rows"
    ):
        prompt(model, made.tokens.tolist(), [2])
    # Their end may hold placeholders, so they are not cut.
    with pytest.raises(InvalidInput, match="truncat"):
        prompt(model, made.tokens.tolist(), [1, 2], max_tokens=3 * each, truncate=Truncate.END)


def test_nothing_at_all_is_refused(model: LlamaNemotronVL) -> None:
    with pytest.raises(InvalidInput, match="neither text nor an image"):
        prompt(model, "")


@pytest.mark.parametrize("tiles", [[], [1]])
def test_a_lone_surrogate_is_refused(model: LlamaNemotronVL, tiles: list[int]) -> None:
    with pytest.raises(InvalidInput, match="lone surrogate at character"):
        prompt(model, "ab\ud800c", tiles)
