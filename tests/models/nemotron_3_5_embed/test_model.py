"""Prompts by the chat template, sizes of images, limits and files of Nemotron-3.5-Embed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError, InvalidInput
from tessera.image_plan import ImagePlan
from tessera.models import family_of, open_model
from tessera.models.base import Content, Prompt, Role, Truncate
from tessera.models.nemotron_3_5_embed.images import Limits
from tessera.models.nemotron_3_5_embed.model import Nemotron35Embed, Options
from tessera_tools.random_checkpoint.ministral3 import VL_TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.qwen3_vl_embedding.cases import WIDE
from tests.models.running import Given, batch_of, cosines, prompt_of, vectors


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(VL_TINY)


@pytest.fixture(scope="module")
def model(path: Path) -> Nemotron35Embed:
    return Nemotron35Embed(path, Options())


def spelled(model: Any, *parts: Any, **more: Any) -> str:
    """A prompt's tokens as text, a vision row as ``#``."""
    names = {"[IMG]": "#", "[IMG_BREAK]": "|", "[IMG_END]": "."}
    pieces = (model.token_text(token) for token in prompt_of(model, *parts, **more).tokens.tolist())
    return "".join(names.get(piece, piece) for piece in pieces).replace("Ġ", " ")


def chunked(model: Nemotron35Embed, *chunks: str) -> Prompt:
    content = Content(parts=chunks, role=Role.PASSAGE, chunked=True)
    return model.prompt(content, max_tokens=99, truncate=Truncate.NONE, param="x")


def test_chunks_are_as_the_template_writes_them(model: Nemotron35Embed, path: Path, tmp_path: Path) -> None:
    """The template sets signs apart that control tokens begin with."""
    chunks = ("see <b>", " and [1]")
    made, whole = chunked(model, *chunks), prompt_of(model, "".join(chunks), role=Role.PASSAGE)
    assert made.tokens.tolist() == whole.tokens.tolist()
    assert made.chunks is not None
    first, second, end = made.chunks.tolist()
    assert [f" {spelled(model, text).strip()}" for text in chunks] == [
        "".join(model.token_text(token) for token in made.tokens[start:stop].tolist()).replace("Ġ", " ")
        for start, stop in ((first, second), (second, end))
    ]
    trims = "{{ messages[-1].content[0].text | trim }}"
    other = Nemotron35Embed(
        changed(path, tmp_path / "changed", "tokenizer_config.json", chat_template=trims), Options()
    )
    assert chunked(other, "a", "b").chunks is not None
    with pytest.raises(InvalidInput, match="template writes the chunks otherwise") as caught:
        chunked(other, "a ", "b")
    assert caught.value.param == "x"


def test_what_it_is(model: Nemotron35Embed) -> None:
    assert (model.output.width, model.max_tokens) == (128, 32768)
    assert model.vision.row_width == 128 and model.vision.unit_shape == (3, 14, 14)
    assert (model.vision.max_units, model.vision.max_rows) == (1600, 400)
    assert model.dimensions == frozenset(range(1, 128))
    assert not model.text.layer.causal and model.text.pooling == "mean"


SMALL = ImagePlan(units=24, rows=6, grid=(1, 4, 6))


def test_prompts(model: Nemotron35Embed) -> None:
    assert spelled(model, "a b", role=Role.QUERY) == "query: a b"
    assert spelled(model, "a b", role=Role.PASSAGE) == "passage: a b"
    assert spelled(model, "a b") == "a b"
    assert spelled(model, SMALL, role=Role.PASSAGE) == "passage: ###|###."
    assert spelled(model, "a ", SMALL, "b", SMALL, role=Role.PASSAGE) == "passage: ###|###. ###|###. a b"
    made = prompt_of(model, "a", SMALL)
    assert made.image_tokens == len(model.vision_index(made.tokens)) == 6


def test_what_a_client_writes_is_text(model: Nemotron35Embed) -> None:
    """Also the mark that the template puts into texts, which its own tokenizer takes away."""
    plain = model._tokenizer
    for text in (
        "[IMG] <s>[IMG_END]",
        "a[\u200cb",
        "<\u200c",
        " spaced ",
        "{{ 7 * 7 }}{% x %}",
        "\ue000\ue001\ue002",
    ):
        expected = plain.ids(text.replace("[", "[\u200c").replace("<", "<\u200c"))
        assert prompt_of(model, text).tokens.tolist() == expected.tolist(), text
    assert spelled(model, "[IMG]", SMALL) == "###|###. [IMG]"


def test_truncation_keeps_images_and_prompts(model: Nemotron35Embed) -> None:
    cut = prompt_of(model, SMALL, "river " * 99, role=Role.PASSAGE, limit=30, truncate=Truncate.END)
    assert cut.truncated and len(cut.tokens) == 30
    whole = prompt_of(model, SMALL, "river " * 99, role=Role.PASSAGE).tokens
    assert cut.tokens.tolist() == whole[:30].tolist()
    with pytest.raises(InvalidInput, match=r"1 image\(s\) that take 1[0-9] tokens"):
        prompt_of(model, SMALL, role=Role.PASSAGE, limit=8, truncate=Truncate.END)


def test_token_ids_are_the_whole_prompt(model: Nemotron35Embed) -> None:
    row = model.image_token_id
    ids = (5, *[row] * 6, 7)
    assert prompt_of(model, ids, SMALL).tokens.tolist() == list(ids)
    with pytest.raises(InvalidInput):
        prompt_of(model, (5, row), SMALL)


@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        ((), {}, "is empty: it has neither text nor an image"),
        (("a",), {"instruction": "Find"}, "has an instruction"),
        ((ImagePlan(units=0, rows=6),), {}, "vision rows without their grid"),
        ((ImagePlan(units=0, rows=5, grid=(1, 4, 6)),), {}, "does not make 5 vision rows"),
        (("a\ud800",), {}, "lone surrogate"),
    ],
)
def test_what_is_refused(model: Nemotron35Embed, parts: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        prompt_of(model, *parts, **more)
    assert caught.value.param == "input[3]"


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((1275, 1650), (1204, 1540)),
        ((1, 1), (28, 28)),
        ((1540, 1540), (1540, 1540)),
        ((1541, 20), (1540, 28)),
        ((10_000, 10), (1540, 28)),
        ((4000, 3000), (1540, 1176)),
        ((333, 90), (336, 112)),
    ],
)
def test_sizes(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert Limits(edge=28, longest=1540).resized(*size) == resized


@pytest.mark.parity
def test_sizes_are_the_references() -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    source, limits = np.random.default_rng(3), Limits(edge=28, longest=1540)
    for width, height in source.integers(8, 5000, (500, 2)).tolist():
        image = np.broadcast_to(np.zeros((1, 1, 1), np.uint8), (height, width, 3))
        high, wide = get_resize_output_image_size(image, (1540, 1540), (28, 28), "channels_last")
        assert limits.resized(width, height) == (wide, high)


def test_files_that_say_otherwise(path: Path, tmp_path: Path, written: WriteCheckpoint) -> None:
    assert open_model(path, {"longest_edge": 140}).plan(999, 999, param="x").rows == 25
    assert (
        open_model(path, {"query_prompt": "find:"})
        .prompt(Content(parts=("a",), role=Role.QUERY), max_tokens=9, truncate=Truncate.NONE, param="x")
        .tokens.tolist()
        == open_model(path)
        .prompt(Content(parts=("find: a",)), max_tokens=9, truncate=Truncate.NONE, param="x")
        .tokens.tolist()
    )
    nested = open_model(written(dataclasses.replace(VL_TINY, nested_processor=True, longest_edge=300)))
    assert nested.plan(999, 999, param="x").rows == 121
    whole = changed(
        path, tmp_path / "changed", "preprocessor_config.json", size={"height": 100, "width": 100}
    )
    assert open_model(whole).plan(999, 999, param="x").rows == 16


def test_what_becomes_of_a_text_is_the_templates(path: Path, tmp_path: Path) -> None:
    """An image that it loses is refused."""
    upper = "{% for p in messages[-1].content %}{{ p.text | upper }}{% endfor %}"
    model = open_model(changed(path, tmp_path / "changed", "tokenizer_config.json", chat_template=upper))
    assert spelled(model, "a b") == "A B"
    with pytest.raises(InvalidInput, match="writes 0 placeholders and 0 texts for 1 images"):
        prompt_of(model, SMALL)


def test_a_template_may_refuse_an_input(path: Path, tmp_path: Path) -> None:
    one = (
        "{%- if messages[-1].content | selectattr('type', 'equalto', 'image') | list | length > 1 %}"
        "{{- raise_exception('one image at most') }}{%- endif %}"
        "{%- for p in messages[-1].content %}{{- p.text or '[IMG]' }}{%- endfor %}"
    )
    copy = changed(path, tmp_path / "changed", "tokenizer_config.json", chat_template=None)
    (copy / "chat_template.jinja").write_text(one)
    model = open_model(copy)
    assert spelled(model, SMALL, "a") == "###|###.a"
    with pytest.raises(InvalidInput, match="one image at most") as caught:
        prompt_of(model, SMALL, SMALL)
    assert caught.value.param == "input[3]"
    assert model.fingerprint != open_model(path).fingerprint


def test_a_language_model_is_refused(written: WriteCheckpoint) -> None:
    path = written(dataclasses.replace(VL_TINY, pooling=None, declares=False))
    assert family_of(path).name == "nemotron_3_5_embed"
    with pytest.raises(CheckpointError, match="pooling is missing"):
        open_model(path)
    assert open_model(path, {"pooling": "avg"}).output.pooling == "mean"


def test_names_of_older_files(path: Path, tmp_path: Path) -> None:
    """A whole language model below ``language_model``, with logits."""
    copy = changed(path, tmp_path / "older")
    stored = load_file(path / "model.safetensors")
    renamed = {
        name.replace("language_model.", "language_model.model."): tensor for name, tensor in stored.items()
    }
    logits = stored["language_model.embed_tokens.weight"].clone()
    save_file(renamed | {"language_model.lm_head.weight": logits}, copy / "model.safetensors")
    given = [Given(parts=(WIDE, "a"))]
    rows = []
    for each in (path, copy):
        model = open_model(each)
        vision, text = (load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text))
        rows.append(vectors(model, text, batch_of(model, vision, given)))
    assert cosines(*rows).min() >= 0.999999
