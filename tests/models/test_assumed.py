"""What a checkpoint's files lack is refused, or people are told what was assumed in its place."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.errors import CheckpointError, ConfigError
from tessera.models import families, open_model, try_out
from tessera.models.declared import assumed, pooling_modes
from tessera_tools.random_checkpoint.checkpoint import families as random_checkpoints
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, ROBERTA_TINY, SPLADE_TINY, TINY, EncoderSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare
from tests.models.variations import ABSENT


def opened(
    path: Path, caplog: pytest.LogCaptureFixture, **options: str
) -> tuple[list[str] | None, list[str], str]:
    """The pooling, what is assumed, and what the log says when the model is opened and tried."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try_out(model := open_model(path, options))
    return pooling_modes(model), assumed(model), caplog.text


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
def test_the_mean_is_assumed_aloud(
    spec: EncoderSpec, written: WriteCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Path(shutil.copytree(written(spec), tmp_path / "bare"))
    (bare / "modules.json").unlink()
    modes, lacking, said = opened(bare, caplog)
    assert (modes, lacking) == (["mean"], ["pooling"])
    assert f"{bare}: declares no pooling" in said
    for mode in ("mean", "cls", "lasttoken"):
        assert opened(bare, caplog, pooling=mode) == ([mode], [], "")
    pooling = Module("Pooling", {"word_embedding_dimension": spec.hidden, "pooling_mode_cls_token": True})
    assert opened(declare(bare, tmp_path / "declared", pooling), caplog) == (["cls"], [], "")


@pytest.mark.parametrize("spec", [RERANK_TINY, SPLADE_TINY], ids=["bert_rerank", "splade"])
def test_what_gives_no_vectors_assumes_nothing(
    spec: EncoderSpec, written: WriteCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(written(spec), caplog) == (None, [], "")


PICTURES: Final = "preprocessor_config.json"
PROCESSORS: Final = {
    "clip": "clip.image_processing_pil_clip.CLIPImageProcessorPil",
    "siglip": "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
    "siglip2": "siglip2.image_processing_pil_siglip2.Siglip2ImageProcessorPil",
    "mistral3": "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
    "qwen3_vl": "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
}
"""The class of the image processor in transformers, by the type of the model."""
CLASSES: Final = {
    "llama_bidirec": "llama",
    "colqwen3": "qwen3_vl",
    "ops_colqwen3": "qwen3_vl",
    "qwen3_vl_nemotron_embed": "qwen3_vl",
}
"""Types of models that transformers has no class for, and the class theirs is derived from."""
SECTIONS: Final = {"llm_config": "llama", "vision_config": "siglip_vision_model"}
"""Those of Nemotron's first vision models, whose own class is in the checkpoints."""
FOLLOWS: Final = {"llama": ("num_key_value_heads", "head_dim")}
"""What classes make of the keys beside it."""

OWN: Final[Mapping[str, frozenset[str]]] = {
    "config.json": frozenset(
        (
            # Whose default the class in the checkpoint's own code has (the published files of Nemotron).
            *("pooling", "temperature", "bidirectional_attention", "downsample_ratio", "select_layer"),
            *("ps_version", "force_image_size", "dynamic_image_size", "use_thumbnail", "p_max_length"),
            # The family's class; the weights have no other width.
            *("architectures", "embed_dim"),
            # Of classes before transformers 5, and of its modules: attention is causal without it.
            *("position_embedding_type", "is_causal"),
            # Which class reads the section; refused where it is another.
            *("model_type", "in_channels", "temporal_patch_size"),
            # Of sentence-transformers, which takes the sigmoid.
            "sbert_ce_default_activation_function",
        )
    ),
    # The file that wins over config.json has these or that one.
    "processor_config.json": frozenset(
        (
            *("max_input_tiles", "num_image_token", "image_size", "use_thumbnail", "dynamic_image_size"),
            *("query_prefix", "passage_prefix"),
            # Of the reranker's, which has one norm and takes no other.
            "norm_type",
            # Of transformers' PixtralProcessor.
            *("image_token", "image_break_token", "image_end_token"),
        )
    ),
    PICTURES: frozenset(),
}
"""Keys whose default no class of transformers' configurations has, by file."""


def files_of(path: Path) -> list[Path]:
    """The JSON files that a checkpoint declares itself by, without its vocabulary."""
    weights = ("index.json", "tokenizer.json", "vocab.json")
    return sorted(file.relative_to(path) for file in path.rglob("*.json") if not file.name.endswith(weights))


def keys_of(values: Mapping[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        # What scales positions is a whole.
        if isinstance(value, dict) and key.endswith("_config"):
            yield from keys_of(value, *above, key)


def with_key(values: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with another value of a key; without the key where it is ``ABSENT``."""
    copied: dict[str, Any] = json.loads(json.dumps(values))
    inner = copied
    for key in keys[:-1]:
        inner = inner[key]
    inner.pop(keys[-1], None)
    if value is not ABSENT:
        inner[keys[-1]] = value
    return copied


class Opener:
    """Opens copies of a checkpoint of which one file is another one."""

    def __init__(self, source: Path, copy: Path) -> None:
        self.source, self.copy = source, copy

    def __call__(self, file: Path, content: Mapping[str, Any] | None) -> dict[str, str] | str:
        """What a model is, by its attributes; the complaint about a checkpoint that is refused."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.source, self.copy, copy_function=os.link)
        (self.copy / file).unlink()
        if content is not None:
            (self.copy / file).write_text(json.dumps(content))
        try:
            model = open_model(self.copy)
        except (CheckpointError, ConfigError) as error:
            return error.message
        of_files = {"path", "declared", "_tokenizer", "_chat", "_options"}
        kept = {name: repr(value) for name, value in vars(model).items() if name not in of_files}
        return {
            **kept,
            "family": model.family,
            "assumed": repr(assumed(model)),
            "prompts": repr(model.prompts),
        }


@cache
def defaults(family: str, file: str) -> Mapping[str, Any]:
    """The values of the class in transformers that reads a file of a family, those of sections below them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = next(each.model_types[0] for each in families() if each.name == family)
    kind = CLASSES.get(kind, kind)
    if file == PICTURES:
        module, _, name = PROCESSORS[kind].rpartition(".")
        made = getattr(import_module(f"transformers.models.{module}"), name)()
        sizes = {key: dict(getattr(made, key)) for key in ("size", "crop_size") if getattr(made, key, None)}
        kept = {key: {name: side for name, side in size.items() if side} for key, size in sizes.items()}
        return json.loads(json.dumps({**vars(made), **kept}, default=str))
    if file == "processor_config.json":
        return {"patch_size": 16, "spatial_merge_size": 1}
    sections = SECTIONS if kind.startswith("llama_nemotron") else {"": kind}
    found = {key: CONFIG_MAPPING[name]().to_dict() for key, name in sections.items()}
    if kind == "mistral3":
        # The type that the section names has its own.
        found[""]["text_config"] = CONFIG_MAPPING["ministral3"]().to_dict()
    for key, name in sections.items():
        for follows in FOLLOWS.get(name, ()):
            found[key][follows] = None
    return dict(found.get("", found))


def default_of(family: str, file: str, keys: Sequence[str]) -> Any:
    value: Any = defaults(family, file)
    if keys[-1] == "rope_theta":
        keys = (*keys[:-1], "rope_parameters", "rope_theta")
    if keys[-1] == "rope_scaling":
        return {"rope_type": default_of(family, file, (*keys[:-1], "rope_parameters", "rope_type"))}
    for key in keys:
        value = value.get(key, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_what_is_not_there_is_refused_or_said(name: str, written: WriteCheckpoint, tmp_path: Path) -> None:
    """Each file, and each key that is read, is taken away in turn.

    Either it is refused by name, or it is said to be assumed, or it has the default of its class in
    ``transformers``, which is tried by writing that one down.
    """
    source = written(random_checkpoints()[name].load().tiny)
    opened = Opener(source, tmp_path / "copy")
    for file in files_of(source):
        content = json.loads((source / file).read_text())
        if not isinstance(content, dict):
            continue
        whole = opened(file, content)
        assert isinstance(whole, dict)
        without = opened(file, None)
        if str(file) not in OWN:
            said = isinstance(without, str) or without["assumed"] != whole["assumed"]
            assert said or without == {**whole, "prompts": without["prompts"]}, file
            continue
        if isinstance(without, str):
            assert file.name in without, (file, without)
        else:
            assert without["assumed"] != whole["assumed"], file
        for keys in keys_of(content):
            lacking = opened(file, with_key(content, keys, ABSENT))
            if isinstance(lacking, str) or opened(file, with_key(content, keys, ["no such"])) == whole:
                continue
            said = f"{name}: {file} without {'.'.join(keys)}"
            if (value := default_of(name, str(file), keys)) is not ABSENT:
                assert lacking == opened(file, with_key(content, keys, value)), (
                    f"{said}, by default {value!r}"
                )
            elif lacking["assumed"] == whole["assumed"]:
                assert keys[-1] in OWN[file.name], said


PROMPTED: Final = (
    *("llama_nemotron_embed", "llama_nemotron_vl", "llama_nemotron_colembed_vl", "nemotron_3_embed"),
    *("nemotron_3_5_embed", "nemotron_colembed_vl", "qwen3_embedding", "colqwen3"),
)
"""The families that have prompts of their own."""
PROMPT_KEYS: Final = ("prompts", "query_prefix", "passage_prefix")


@pytest.mark.parametrize("name", PROMPTED)
def test_prompts_are_assumed_aloud(
    name: str, written: WriteCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Path(shutil.copytree(written(random_checkpoints()[name].load().tiny), tmp_path / "bare"))
    for file in (bare / each for each in files_of(bare)):
        if isinstance(content := json.loads(file.read_text()), dict):
            file.write_text(json.dumps({key: content[key] for key in content if key not in PROMPT_KEYS}))
    _, lacking, said = opened(bare, caplog)
    assert lacking == ["prompts"] and f"{bare}: declares no prompts" in said
    if not (bare / "modules.json").exists():
        # Prompts of sentence-transformers count beside it.
        return
    declared = {"prompts": {"query": "query: ", "document": "passage: "}}
    (bare / "config_sentence_transformers.json").write_text(json.dumps(declared))
    assert opened(bare, caplog)[1:] == ([], "")
