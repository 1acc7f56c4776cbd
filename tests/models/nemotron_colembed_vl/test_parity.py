"""Stages, prompts and files of Nemotron ColEmbed VL, against transformers' Qwen3-VL run both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError, ConfigError, InvalidInput
from tessera.models import Model, open_model
from tessera.models.base import Content, Role, Truncate
from tessera.models.nemotron_colembed_vl.model import NemotronColEmbedVL, Options
from tessera_tools.random_checkpoint.qwen3 import COLEMBED_TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.nemotron_colembed_vl.cases import CASES
from tests.models.parity import BARS, Record
from tests.models.qwen3_vl_embedding.stages import as_the_largest, check, stages
from tests.references.colembed import NemotronColEmbedReference

pytestmark = pytest.mark.parity

SPECS = {"tiny": COLEMBED_TINY, "as the 8b": as_the_largest(COLEMBED_TINY)}


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(COLEMBED_TINY, dtype="bfloat16")


@pytest.mark.parametrize("name", SPECS)
def test_every_stage(name: str, written: WriteCheckpoint, record_property: Record) -> None:
    path = written(SPECS[name], dtype="bfloat16")
    model, reference = NemotronColEmbedVL(path, Options()), NemotronColEmbedReference(str(path))
    check(name, "nemotron_colembed_vl", stages(model, reference, CASES), BARS["float32"], record_property)


def test_what_it_is(path: Path) -> None:
    model = open_model(path)
    assert (model.family, model.max_tokens, model.dimensions) == ("nemotron_colembed_vl", 4096, frozenset())
    # As preprocessor_config.json says, and no more tokens than the reference leaves for an image.
    assert model.plan(3000, 3000, param="x").rows == 1225
    assert open_model(path, {"max_pixels": 65_536}).plan(3000, 3000, param="x").rows == 64


def test_an_image_has_the_tokens_that_are_left_for_it(path: Path, tmp_path: Path) -> None:
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    model = open_model(changed(path, tmp_path / "changed", "preprocessor_config.json", size=size))
    assert model.plan(9000, 9000, param="x").rows <= 4096 - 100
    assert model.plan(10, 10, param="x").rows == 64


def test_the_older_names_of_limits_win(path: Path, tmp_path: Path) -> None:
    """As in transformers, whose processor writes them into its ``size``."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = {"min_pixels": 65_536, "max_pixels": 262_144}
    copy = changed(path, tmp_path / "changed", "preprocessor_config.json", **limits)
    size = Qwen2VLImageProcessorPil.from_pretrained(copy).size
    model = NemotronColEmbedVL(copy, Options())
    assert (model.limits.min_pixels, model.limits.max_pixels) == (size.shortest_edge, size.longest_edge)
    assert (size.shortest_edge, size.longest_edge) == tuple(limits.values())


def test_tokens_that_leave_no_image_any(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 100, of which an image has -1; one of 4096 pixels"):
        open_model(path, {"max_tokens": 100})
    with pytest.raises(CheckpointError, match=r"processor_config.json: p_max_length is 104"):
        open_model(changed(path, tmp_path / "changed", "processor_config.json", p_max_length=104))
    assert open_model(path, {"max_tokens": 105}).plan(999, 999, param="x").rows == 4


def test_prefixes_and_limits_are_those_of_the_files(path: Path, tmp_path: Path) -> None:
    copy = changed(
        path,
        tmp_path / "changed",
        "processor_config.json",
        query_prefix="",
        passage_prefix="p:",
        p_max_length=600,
    )
    model = open_model(copy)
    plain = NemotronColEmbedReference(str(path)).renderer
    for role, text in ((Role.QUERY, "Query: river"), (Role.PASSAGE, "p: river"), (Role.NONE, "river")):
        spelled = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        found = model.prompt(
            Content(parts=("river",), role=role), max_tokens=99, truncate=Truncate.NONE, param="x"
        )
        assert found.tokens.tolist() == plain(spelled).input_ids
    assert model.max_tokens == 600
    long = Content(parts=("river " * 900,), role=Role.PASSAGE)
    with pytest.raises(InvalidInput, match="over the limit of 600"):
        model.prompt(long, max_tokens=600, truncate=Truncate.NONE, param="x")
    cut = model.prompt(long, max_tokens=600, truncate=Truncate.END, param="x").tokens.tolist()
    assert cut[-5:] == plain("river<|im_end|>\n<|im_start|>assistant\n").input_ids[-5:] and len(cut) == 600


def test_a_query_is_bounded_by_its_own_length(path: Path, tmp_path: Path) -> None:
    query = Content(parts=("river " * 600,), role=Role.QUERY)

    def tokens(model: Model, content: Content, truncate: Truncate = Truncate.NONE) -> list[int]:
        return model.prompt(content, max_tokens=4096, truncate=truncate, param="x").tokens.tolist()

    model = open_model(path)
    whole = tokens(open_model(path, {"max_query_tokens": 4096}), query)
    assert len(whole) > 600
    with pytest.raises(InvalidInput, match="over the limit of 512; truncation is off"):
        tokens(model, query)
    # Cut in its text: the reference's cut would take the end of the turn.
    cut = tokens(model, query, Truncate.END)
    end = NemotronColEmbedReference(str(path)).renderer("<|im_end|>\n<|im_start|>assistant\n").input_ids
    assert len(cut) == 512 and cut[-len(end) :] == whole[-len(end) :] == end
    assert cut[: 512 - len(end)] == whole[: 512 - len(end)]
    # What is no query has the room of a document.
    for role in (Role.PASSAGE, Role.NONE):
        assert len(tokens(model, replace(query, role=role))) > 600
    shorter = open_model(changed(path, tmp_path / "changed", "processor_config.json", q_max_length=40))
    assert len(tokens(shorter, query, Truncate.END)) == 40


def test_a_causal_file_is_run_causally(path: Path, tmp_path: Path) -> None:
    assert open_model(changed(path, tmp_path / "changed", is_causal=True)).text.layer.causal


def test_tensors_that_have_no_part(path: Path, tmp_path: Path) -> None:
    copy = changed(path, tmp_path / "without")
    tensors = load_file(copy / "model.safetensors")
    for name in ("lm_head.weight", "model.language_model.norm.weight"):
        del tensors[name]
    save_file(tensors, copy / "model.safetensors")
    assert open_model(copy).load_text(dtype="float32", device="cpu").norm is None
    save_file(tensors | {"head.weight": torch.ones(3)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected tensor"):
        open_model(copy).load_text(dtype="float32", device="cpu")
