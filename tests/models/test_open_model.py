"""Finding the family of a checkpoint directory."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tessera.models
from tessera.errors import CheckpointError, ConfigError
from tessera.models import families, family_of, open_model
from tessera.models.options import OptionsFamily
from tessera.siblings import siblings
from tessera_tools.random_checkpoint.checkpoint import main
from tests.distribution import write_distribution


def test_the_built_in_family_opens_its_checkpoint(checkpoint: Path) -> None:
    assert open_model(checkpoint).family == "llama_nemotron_vl"


def test_every_family_below_models_is_built_in() -> None:
    """A module that declares one, and is not in the list, would never be asked."""
    declared = {
        value.name
        for path in Path(tessera.models.__path__[0]).glob("*/model.py")
        for value in vars(import_module(f"tessera.models.{path.parent.name}.model")).values()
        if isinstance(value, OptionsFamily)
    }
    assert declared and declared == {family.name for family in families()}


@pytest.mark.parametrize("family", [family.name for family in families()])
def test_a_random_checkpoint_of_every_family(tmp_path: Path, family: str) -> None:
    for directory in ("one", "same"):
        main(["--out", str(tmp_path / directory), "--family", family, "--dtype", "bfloat16"])
    model = open_model(tmp_path / "one")
    assert model.family == family
    assert model.fingerprint == open_model(tmp_path / "same").fingerprint
    assert json.loads((tmp_path / "one" / "config.json").read_text())["tessera_checkpoint"] == "random"


@pytest.mark.parametrize("family", [family.name for family in families()])
def test_a_token_that_no_embedding_is_for_is_named(tmp_path: Path, family: str) -> None:
    directory = tmp_path / "checkpoint"
    main(["--out", str(directory), "--family", family])
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config") or config.get("llm_config") or config
    beyond = text["vocab_size"] + 1000
    path = directory / "tokenizer.json"
    content = path.read_text()
    good = json.loads(content)
    vocab = good["model"]["vocab"]
    if isinstance(vocab, list):  # the ids of Unigram's pieces are their places
        good["model"]["vocab"] = [*vocab, *([f"Z{place}", -9.0] for place in range(len(vocab), beyond))]
        good["model"]["vocab"].append(["Z", -9.0])
    else:
        vocab["Z"] = beyond
    path.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=f"the token 'Z' has id {beyond}, but vocab_size is"):
        open_model(directory)
    good["model"]["vocab"] = json.loads(content)["model"]["vocab"]
    good["added_tokens"].append({"id": beyond, "content": "<beyond>", "special": True})
    path.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=f"the token '<beyond>' has id {beyond}, but vocab_size is"):
        open_model(directory)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        (json.dumps({"model_type": "t5"}), "'t5' is none of"),
        (json.dumps({}), "model_type is missing"),
        (
            json.dumps({"model_type": "llama_bidirec", "architectures": ["LlamaForCausalLM"]}),
            r"'llama_bidirec' is served with .*LlamaBidirectionalModel.*not \['LlamaForCausalLM'\]",
        ),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_model(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("named", "family"),
    [
        ({"architectures": ["LlamaBidirectionalModel"]}, "llama_nemotron_embed"),
        ({"architectures": ["LlamaBidirectionalForSequenceClassification"]}, "llama_nemotron_rerank"),
        ({}, "llama_nemotron_embed"),
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "bert"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "bert_rerank"),
        ({"model_type": "distilbert", "architectures": ["DistilBertModel"]}, "bert"),
        ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, "bert"),
        (
            {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"]},
            "bert_rerank",
        ),
        ({"model_type": "bert", "architectures": ["HF_ColBERT"]}, "bert_colbert"),
        ({"model_type": "xlm-roberta", "architectures": ["HF_ColBERT"]}, "xlm_roberta_colbert"),
        ({"model_type": "roberta", "architectures": ["RobertaModel"]}, "xlm_roberta"),
        (
            {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]},
            "xlm_roberta_rerank",
        ),
    ],
)
def test_families_of_one_model_type(tmp_path: Path, named: dict[str, object], family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama_bidirec", **named}))
    assert family_of(tmp_path).name == family


OF_ANOTHER = """
class FAMILY:
    name = {name!r}
    model_types = ({model_type!r},)
    architectures = ("BertModel",)
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nothing_of_this_name", r"ModuleNotFoundError: .*nothing_of_this_name.*theirs\.py:1\)"),
        ("\nFAMILY = 1 / 0", r"ZeroDivisionError: division by zero .*theirs\.py:2\)"),
        ("FAMILIES = []", "has no attribute 'FAMILY'"),
        (
            OF_ANOTHER.format(name="bert", model_type="theirs"),
            "adds a family 'bert', and there is one already",
        ),
        (
            OF_ANOTHER.format(name="theirs", model_type="bert"),
            "'bert' .* by the families bert, theirs; uninst",
        ),
    ],
)
def test_a_family_of_another_package_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    """The package is named; which of two families makes the vectors is never left to the order of a list."""
    write_distribution(tmp_path, "their-package", "[tessera.models]\ntheirs = theirs:FAMILY\n")
    (tmp_path / "theirs.py").write_text(code)
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    siblings.cache_clear()
    try:
        with pytest.raises(ConfigError, match=words) as caught:
            family_of(tmp_path)
        assert "their" in caught.value.message
        # Of one that cannot be reached by this checkpoint nothing is said.
        if "by the families" in words:
            config["architectures"] = ["BertForSequenceClassification"]
            (tmp_path / "config.json").write_text(json.dumps(config))
            assert family_of(tmp_path).name == "bert_rerank"
    finally:
        siblings.cache_clear()
        sys.modules.pop("theirs", None)
