"""What the files of a checkpoint declare is read as ``sentence-transformers`` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.checkpoint.declared import (
    Declared,
    Dense,
    LayerNorm,
    LogitScore,
    Normalize,
    Splade,
    module_files,
    read_declared,
)
from tessera.errors import CheckpointError

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."
BASE = "sentence_transformers.base.modules."
POOLED = ("Transformer", ""), ("Pooling", "1_Pooling")


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(json.dumps(content))


def write_modules(directory: Path, *modules: tuple[str, str], package: str = OLD) -> None:
    entries = [
        {"idx": place, "name": str(place), "path": path, "type": package + name}
        for place, (name, path) in enumerate(modules)
    ]
    write(directory, "modules.json", entries)


def pooled(directory: Path, **config: Any) -> Declared:
    write_modules(directory, *POOLED)
    write(directory, "1_Pooling/config.json", config)
    return read_declared(directory)


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_declared(directory)
    return caught.value.message


def test_an_empty_directory_declares_nothing(tmp_path: Path) -> None:
    assert read_declared(tmp_path) == Declared(directory=tmp_path)
    assert read_declared(tmp_path).normalize is None


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, ("cls", "lasttoken")),
        (
            {
                "pooling_mode_weightedmean_tokens": True,
                "pooling_mode_mean_sqrt_len_tokens": True,
                "pooling_mode_max_tokens": True,
            },
            ("max", "mean_sqrt_len_tokens", "weightedmean"),
        ),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
        ({}, ("mean",)),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, ("cls",)),
    ],
)
def test_pooling_modes_of_both_forms_keep_their_order(
    tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]
) -> None:
    declared = pooled(tmp_path, **config)
    assert declared.pooling is not None
    assert declared.pooling.modes == modes
    assert declared.pooling.include_prompt
    assert declared.task == "embed"


@pytest.mark.parametrize("left_out", [False, 0])
def test_a_pooling_may_leave_the_prompt_out(tmp_path: Path, left_out: object) -> None:
    pooling = pooled(tmp_path, word_embedding_dimension=384, include_prompt=left_out).pooling
    assert pooling is not None and not pooling.include_prompt


def test_what_is_no_flag_is_refused_by_file_and_key(tmp_path: Path) -> None:
    write_modules(tmp_path, *POOLED)
    for value, words in ((2, "must be true or false, or 1 or 0, not 2"), ("1", "must be true or false")):
        write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": value})
        assert f"1_Pooling/config.json: pooling_mode_cls_token {words}" in refused(tmp_path)


def test_steps_behind_pooling_keep_their_order(tmp_path: Path) -> None:
    write_modules(tmp_path, *POOLED, ("Dense", "2_Dense"), ("LayerNorm", "3_LayerNorm"), ("Normalize", "4"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    dense = {"in_features": 128, "out_features": 16, "bias": False}
    write(tmp_path, "2_Dense/config.json", dense)
    write(tmp_path, "3_LayerNorm/config.json", {"dimension": 16})
    declared = read_declared(tmp_path)
    folder = tmp_path / "2_Dense"
    assert declared.steps == (
        # Without an activation it is Tanh.
        Dense(folder=folder, inner=128, width=16, bias=False, activation="tanh"),
        LayerNorm(folder=tmp_path / "3_LayerNorm", width=16),
        Normalize(),
    )
    assert declared.normalize
    assert not declared.of_tokens
    assert declared.modules == ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")
    assert set(declared.files) == {
        "modules.json",
        *(f"{name}/config.json" for name in ("1_Pooling", "2_Dense", "3_LayerNorm")),
    }
    assert module_files(tmp_path) == [
        ("1_Pooling/config.json",),
        ("2_Dense/config.json",),
        ("2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"),
        ("3_LayerNorm/config.json",),
        ("3_LayerNorm/model.safetensors", "3_LayerNorm/pytorch_model.bin"),
    ]
    # What is there and is not read says nothing of the vectors.
    for name in ("pytorch_model.bin", "model.safetensors"):
        (folder / name).touch()
        assert [file for file in read_declared(tmp_path).files if name[:4] in file] == [f"2_Dense/{name}"]


def test_the_pooling_of_logits_and_its_file(tmp_path: Path) -> None:
    write_modules(tmp_path, ("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling"))
    place = "1_SpladePooling/config.json"
    assert module_files(tmp_path) == [(place,)]
    given = {"pooling_strategy": "sum", "activation_function": "log1p_relu"}
    write(tmp_path, place, given)
    declared = read_declared(tmp_path)
    assert declared.splade == Splade(strategy="sum", activation="log1p_relu")
    assert (declared.task, declared.pooling, declared.steps) == ("sparse", None, ())
    assert place in declared.files
    write(tmp_path, place, {"word_embedding_dimension": None})
    assert read_declared(tmp_path).splade == Splade()


@pytest.mark.parametrize(
    ("dotted", "activation"),
    [
        ("torch.nn.modules.linear.Identity", "identity"),
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.modules.activation.GELU", "gelu"),
        ("torch.nn.LeakyReLU", "leaky_relu"),
        ("transformers.activations.NewGELUActivation", "gelu_tanh"),
    ],
)
def test_activations_are_of_torch_or_transformers(tmp_path: Path, dotted: str, activation: str) -> None:
    write_modules(tmp_path, *POOLED, ("Dense", "2_Dense"))
    write(tmp_path, "1_Pooling/config.json", {})
    dense = {"in_features": 8, "out_features": 4, "activation_function": dotted}
    write(tmp_path, "2_Dense/config.json", dense)
    (step,) = read_declared(tmp_path).dense
    assert step.activation == activation
    assert read_declared(tmp_path).normalize is False
    for other in ("acme.Tanh", "torch.nn.modules.activation.PReLU", "transformers.activations.Tanh"):
        write(tmp_path, "2_Dense/config.json", {**dense, "activation_function": other})
        assert "2_Dense/config.json: activation_function must be one of torch.nn's" in refused(tmp_path)


@pytest.mark.parametrize("package", [OLD, NEW, BASE])
def test_types_are_known_by_their_last_component(tmp_path: Path, package: str) -> None:
    write_modules(tmp_path, *POOLED, package=package)
    write(tmp_path, "1_Pooling/config.json", {})
    assert read_declared(tmp_path).modules == ("Transformer", "Pooling")


def test_token_vectors_have_their_steps_without_pooling(tmp_path: Path) -> None:
    entries = [
        {"idx": 0, "path": "", "type": OLD + "Transformer"},
        {"idx": 1, "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    write(tmp_path, "modules.json", entries)
    write(tmp_path, "1_Dense/config.json", {"in_features": 8, "out_features": 4, "bias": False})
    write(tmp_path, "config_sentence_transformers.json", {"model_type": "ColBERT"})
    declared = read_declared(tmp_path)
    assert declared.of_tokens
    assert declared.task == "tokens"
    assert [step.width for step in declared.dense] == [4]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"type": "acme.models.Pooling"}, "[1].type is 'acme.models.Pooling', from another package"),
        ({"type": OLD + "WordEmbeddings"}, "[1].type is WordEmbeddings, a module that is not served"),
        ({"type": 7}, "[1].type must be a string"),
        ({"path": "../elsewhere"}, "[1].path must lie inside the directory"),
        ({"path": "/etc"}, "[1].path must lie inside the directory"),
        ({"path": "out"}, "[1].path must lie inside the directory, which 'out' leads out of"),
        ({"name": 7}, "[1].name must be a string"),
        ({"type": OLD + "Transformer"}, "[1].type is Transformer; the first module must be a Transformer"),
    ],
)
def test_what_is_no_module_of_ours_is_refused_by_file_and_key(
    tmp_path: Path, entry: dict[str, Any], complaint: str
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "out").symlink_to(tmp_path)
    first = {"idx": 0, "path": "", "type": OLD + "Transformer"}
    second = {"idx": 1, "path": "1_Pooling", "type": OLD + "Pooling"} | entry
    write(directory, "modules.json", [first, second])
    assert f"{directory / 'modules.json'}: {complaint}" in refused(directory)


def test_modules_that_are_no_list_and_files_that_are_missing_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", {})
    assert "modules.json: must hold a JSON list" in refused(tmp_path)
    write_modules(tmp_path, *POOLED)
    assert "1_Pooling/config.json: there is no such file" in refused(tmp_path)
    write_modules(tmp_path, ("Transformer", "all/0_Transformer"), ("Pooling", "1_Pooling"))
    assert "[0].path is 'all/0_Transformer', which is not just below the directory" in refused(tmp_path)


def test_a_transformer_in_a_folder_has_its_files_there(tmp_path: Path) -> None:
    write_modules(tmp_path, ("Transformer", "0_Transformer"), ("Pooling", "1_Pooling"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "cls"})
    write(tmp_path, "config.json", {"is_causal": True})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 8})
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "Q: "}})
    folder = tmp_path / "0_Transformer"
    write(folder, "config.json", {"is_causal": False})
    write(folder, "sentence_bert_config.json", {"max_seq_length": 16})
    declared = read_declared(tmp_path)
    assert (declared.directory, declared.transformer) == (tmp_path, folder)
    assert (declared.max_tokens, declared.causal, declared.query_prompt) == (16, False, "Q: ")
    assert declared.files == (
        "../1_Pooling/config.json",
        "../config_sentence_transformers.json",
        "../modules.json",
        "sentence_bert_config.json",
    )
    assert module_files(tmp_path) == [("1_Pooling/config.json",)]
    assert read_declared(folder) == declared
    # Another folder of it is none of its own.
    assert read_declared(tmp_path / "1_Pooling") == Declared(directory=tmp_path / "1_Pooling")


@pytest.mark.parametrize("key", ["module_input_name", "module_output_name"])
def test_a_step_of_other_features_is_refused(tmp_path: Path, key: str) -> None:
    write_modules(tmp_path, *POOLED, ("Dense", "2_Dense"))
    write(tmp_path, "1_Pooling/config.json", {})
    write(tmp_path, "2_Dense/config.json", {"in_features": 8, "out_features": 4, key: "other"})
    assert f"2_Dense/config.json: {key} must be one of ['sentence_embedding'" in refused(tmp_path)


def test_the_longest_input_is_explicit_or_the_tokenizers(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 512})
    declared = read_declared(tmp_path)
    assert (declared.max_tokens, declared.limit_of_tokenizer) == (512, True)
    write(tmp_path, "sentence_roberta_config.json", {"max_seq_length": 256, "do_lower_case": True})
    declared = read_declared(tmp_path)
    assert (declared.max_tokens, declared.limit_of_tokenizer, declared.lower_case) == (512, True, False)
    write_modules(tmp_path, ("Transformer", ""))
    declared = read_declared(tmp_path)
    assert (declared.max_tokens, declared.limit_of_tokenizer, declared.lower_case) == (256, False, True)
    for none in (10**30, 1e30):
        write(tmp_path, "sentence_roberta_config.json", {"max_seq_length": None})
        write(tmp_path, "tokenizer_config.json", {"model_max_length": none})
        assert read_declared(tmp_path).max_tokens is None


def test_prompts_by_name_and_by_role(tmp_path: Path) -> None:
    name = "config_sentence_transformers.json"
    write(tmp_path, name, {"prompts": {"query": "Q: "}, "default_prompt_name": "s", "truncate_dim": 7})
    assert read_declared(tmp_path) == Declared(directory=tmp_path)
    write_modules(tmp_path, ("Transformer", ""))
    prompts = {"query": "Q: ", "document": "", "passage": "P: ", "corpus": "C: ", "other": None}
    write(tmp_path, name, {"prompts": prompts, "default_prompt_name": "passage", "truncate_dim": 64})
    declared = read_declared(tmp_path)
    assert declared.prompts == {"query": "Q: ", "document": "", "passage": "P: ", "corpus": "C: "}
    assert declared.query_prompt == "Q: "
    assert declared.document_prompt == "P: "
    assert declared.default_prompt == "passage"
    assert declared.truncate_dim == 64
    write(tmp_path, name, {"prompts": {"document": "D: ", "passage": "P: "}, "similarity_fn_name": "dot"})
    declared = read_declared(tmp_path)
    assert (declared.query_prompt, declared.document_prompt, declared.similarity) == (None, "D: ", "dot")
    write(tmp_path, name, {"prompts": {"document": ""}})
    assert read_declared(tmp_path).document_prompt == ""
    write(tmp_path, name, {"prompts": {}})
    assert read_declared(tmp_path).document_prompt is None
    write(tmp_path, name, {"prompts": {"a": 1}})
    assert f"{name}: prompts.a must be a string" in refused(tmp_path)
    write(tmp_path, name, {"default_prompt_name": "s"})
    assert f"{name}: default_prompt_name is 's'" in refused(tmp_path)


IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "general", "activation"),
    [
        ({}, {}, None),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, "identity"),
        (
            {
                "sbert_ce_default_activation_function": SIGMOID,
                "sentence_transformers": {"activation_fn": IDENTITY},
            },
            {},
            "identity",
        ),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, {"activation_fn": SIGMOID}, "sigmoid"),
    ],
)
def test_a_cross_encoder_has_its_activation_by_precedence(
    tmp_path: Path, config: dict[str, Any], general: dict[str, Any], activation: str | None
) -> None:
    classes = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    write(tmp_path, "config.json", classes | config)
    write(tmp_path, "config_sentence_transformers.json", general)
    without = read_declared(tmp_path).activation
    write(
        tmp_path,
        "modules.json",
        [{"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
    )
    declared = read_declared(tmp_path)
    assert (declared.task, declared.labels, declared.activation) == ("score", 1, activation)
    # The reference does not read the file without modules.json.
    assert (without == activation) is not bool(general)


@pytest.mark.parametrize(
    ("general", "transformer", "architecture", "task"),
    [
        ({"model_type": "CrossEncoder"}, {}, "Qwen3ForCausalLM", "score"),
        ({"model_type": "SparseEncoder"}, {}, "BertForMaskedLM", "sparse"),
        ({"model_type": "MultiVectorEncoder"}, {}, "BertModel", "tokens"),
        ({"model_type": "SentenceTransformer"}, {}, "Qwen3ForCausalLM", None),
        ({}, {"transformer_task": "sequence-classification"}, "BertModel", "score"),
        ({}, {}, "HF_ColBERT", "tokens"),
        ({}, {}, "BertModel", None),
    ],
)
def test_the_task_is_declared_in_several_places(
    tmp_path: Path, general: dict[str, Any], transformer: dict[str, Any], architecture: str, task: str | None
) -> None:
    write(tmp_path, "config.json", {"architectures": [architecture], "is_causal": False})
    write(tmp_path, "config_sentence_transformers.json", general)
    write(tmp_path, "sentence_bert_config.json", transformer)
    declared = read_declared(tmp_path)
    assert declared.task == task
    assert declared.causal is False


def test_a_reranker_of_logits_names_its_tokens(tmp_path: Path) -> None:
    write_modules(tmp_path, ("Transformer", ""), ("LogitScore", "1_LogitScore"))
    write(tmp_path, "1_LogitScore/config.json", {"true_token_id": 9693, "false_token_id": 2152})
    declared = read_declared(tmp_path)
    assert declared.task == "score"
    assert declared.logit_score == LogitScore(9693, 2152)
    write(tmp_path, "1_LogitScore/config.json", {"true_token_id": 0, "false_token_id": None})
    assert read_declared(tmp_path).logit_score == LogitScore(0)


def test_an_adapter_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, "adapter_config.json", {"peft_type": "LORA"})
    declared = read_declared(tmp_path)
    assert declared.adapter is not None
    assert declared.adapter.weights == tmp_path / "adapter_model.safetensors"
    assert declared.files == ("adapter_config.json",)
