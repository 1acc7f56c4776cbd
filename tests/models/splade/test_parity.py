"""Weights against sentence-transformers' SparseEncoder on the same files, and against likely mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

from tessera.engine.batch import PackedInput, pack
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.errors import CheckpointError, ConfigError
from tessera.models import Model, family_of, open_model
from tessera.models.base import Content, OutputKind, Outputs, Role, Truncate
from tessera.rows import Rows
from tessera_tools.random_checkpoint.distilbert import SPLADE_TINY_DISTILLED
from tessera_tools.random_checkpoint.encoder import ROBERTA_TINY, SPLADE_TINY, TINY
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.changing import changed, edit
from tests.models.conftest import WriteCheckpoint
from tests.references.splade import SpladeReference

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2"),
]

BAR = 1e-5
TEXTS = [
    "the river under the bridge by the old temple",
    "été naïve 東京 the the the",
    "a",
    "a market by the river " * 60,
]
UNTIED = replace(SPLADE_TINY, untied=True)
SPECS: dict[str, Spec] = {
    "bert": SPLADE_TINY,
    "no prefix": replace(SPLADE_TINY, prefix="", layers=2),
    "untied": UNTIED,
    "distilbert": SPLADE_TINY_DISTILLED,
    "distilbert, untied": replace(SPLADE_TINY_DISTILLED, bert=UNTIED),
}
Weights = dict[int, float]


def engine_of(model: Model, dtype: str = "float32") -> TorchTextEngine:
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    return TorchTextEngine(model, settings, Placement(device="cpu", dtype=dtype))


def computed(model: Model, texts: Sequence[str] = TEXTS, role: Role = Role.NONE) -> list[Weights]:
    """The weights of texts that are one batch, as the default output."""
    prompts = [
        model.prompt(
            Content(parts=(text,), role=role),
            max_tokens=model.max_tokens,
            truncate=Truncate.NONE,
            param="x",
        )
        for text in texts
    ]
    inputs = [
        PackedInput(tokens=prompt.tokens, positions=model.positions(prompt.tokens, ())) for prompt in prompts
    ]
    rows = engine_of(model).launch(pack(inputs)).result()
    assert np.diff(rows.bounds).tolist() == [model.output.rows(1)] * len(texts)
    return list(map(weights_of, rows))


def weights_of(rows: Rows) -> Weights:
    held = rows.held()
    assert held.indices is not None
    return dict(zip(held.indices.tolist(), held.values[:, 0].tolist(), strict=True))


def encoded(
    path: Path, texts: Sequence[str] = TEXTS, encode: str = "encode", **options: Any
) -> list[Weights]:
    """What the authors' library makes of texts."""
    from sentence_transformers import SparseEncoder

    reference = SparseEncoder(str(path), device="cpu")
    rows = getattr(reference, encode)(list(texts), convert_to_sparse_tensor=False, **options).numpy()
    return [{int(token): float(row[token]) for token in np.flatnonzero(row)} for row in rows]


def same(found: Sequence[Weights], expected: Sequence[Weights], *, relative: float = 0.0) -> bool:
    return all(
        list(own) == list(other)
        and np.allclose(list(own.values()), list(other.values()), atol=BAR, rtol=relative)
        for own, other in zip(found, expected, strict=True)
    )


@pytest.fixture
def copied(written: WriteCheckpoint, tmp_path: Path) -> Path:
    return changed(written(SPLADE_TINY), tmp_path / "copied")


@pytest.mark.parametrize("name", SPECS)
def test_weights(written: WriteCheckpoint, name: str) -> None:
    path = written(SPECS[name])
    model = open_model(path)
    assert model.family == "splade"
    found, expected = computed(model), encoded(path)
    assert same(found, expected)
    # Sparse, and not by a bias alone.
    assert all(10 < len(weights) < 1500 for weights in expected)
    assert all(left.keys() != right.keys() for left, right in pairwise(expected))
    reference = SpladeReference(path)
    assert same(found, list(map(reference.weights, TEXTS)))


def test_alone_and_in_company(written: WriteCheckpoint) -> None:
    model = open_model(written(SPLADE_TINY))
    assert same([computed(model, [text])[0] for text in TEXTS], computed(model))


def test_half_precision_is_near(written: WriteCheckpoint) -> None:
    model = open_model(written(SPLADE_TINY))
    tokens = np.array([2, 100, 200, 300, 3], np.int32)
    batch = pack([PackedInput(tokens=tokens, positions=model.positions(tokens, ()))])
    whole, half = (
        weights_of(engine_of(model, dtype).launch(batch).result()) for dtype in ("float32", "bfloat16")
    )
    rows = np.zeros((2, model.vocab_size))
    for row, weights in zip(rows, (whole, half), strict=True):
        row[list(weights)] = list(weights.values())
    assert rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1]) > 0.995


def special_tokens_dropped(reference: SpladeReference) -> None:
    reference.rows = lambda logits: logits[1:-1]


def first_token_dropped(reference: SpladeReference) -> None:
    reference.rows = lambda logits: logits[1:]


def sum_for_maximum(reference: SpladeReference) -> None:
    reference.pool = lambda weights: weights.sum(0)


def mean_for_maximum(reference: SpladeReference) -> None:
    reference.pool = lambda weights: weights.mean(0)


def no_logarithm(reference: SpladeReference) -> None:
    reference.weigh = torch.relu


def logarithm_twice(reference: SpladeReference) -> None:
    reference.weigh = lambda logits: torch.log1p(torch.log1p(torch.relu(logits)))


def untied_read_as_tied(reference: SpladeReference) -> None:
    model = reference.model
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


def bias_beside_the_decoder(reference: SpladeReference) -> None:
    head = reference.model.cls.predictions
    assert not torch.equal(head.decoder.bias, head.bias)
    head.decoder.bias = head.bias


def no_layer_norm(reference: SpladeReference) -> None:
    reference.model.cls.predictions.transform.LayerNorm = nn.Identity()


def tanh_form_of_gelu(reference: SpladeReference) -> None:
    reference.model.cls.predictions.transform.transform_act_fn = nn.GELU(approximate="tanh")


def no_bias(reference: SpladeReference) -> None:
    reference.model.get_output_embeddings().bias.data.zero_()


@pytest.mark.parametrize(
    "mistake",
    [
        special_tokens_dropped,
        first_token_dropped,
        sum_for_maximum,
        mean_for_maximum,
        no_logarithm,
        logarithm_twice,
        untied_read_as_tied,
        bias_beside_the_decoder,
        no_layer_norm,
        tanh_form_of_gelu,
        no_bias,
    ],
)
def test_a_mistake_fails_the_bar(
    written: WriteCheckpoint, mistake: Callable[[SpladeReference], None]
) -> None:
    path = written(UNTIED)
    reference, found = SpladeReference(path), computed(open_model(path))
    assert same(found, list(map(reference.weights, TEXTS)))
    mistake(reference)
    assert not same(found, list(map(reference.weights, TEXTS)))


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_the_pooling_that_is_declared(copied: Path, strategy: str, activation: str) -> None:
    before = open_model(copied)
    # Computed at its first use.
    assert before.fingerprint
    edit(
        copied / "1_SpladePooling/config.json",
        pooling_strategy=strategy,
        activation_function=activation,
        word_embedding_dimension=None,
        # Of another vocabulary; what pooling gives is as wide as its input.
        embedding_dimension=99,
    )
    model = open_model(copied)
    found, expected = computed(model), encoded(copied)
    # Sums are of 300 weights.
    assert same(found, expected, relative=BAR if strategy == "sum" else 0)
    if (strategy, activation) != ("max", "relu"):
        assert not same(computed(before), expected)
        assert model.fingerprint != before.fingerprint


def test_the_files_of_newer_versions(copied: Path) -> None:
    modules = json.loads((copied / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.base.modules.transformer.Transformer"
    modules[1]["type"] = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
    (copied / "modules.json").write_text(json.dumps(modules))
    edit(copied / "sentence_bert_config.json", transformer_task="fill-mask", do_lower_case=False)
    assert same(computed(open_model(copied)), encoded(copied))


@pytest.mark.parametrize("name", ["bert", "distilbert, untied"])
def test_a_masked_language_model_that_declares_nothing(
    written: WriteCheckpoint, tmp_path: Path, name: str
) -> None:
    path = changed(written(SPECS[name]), tmp_path / "plain")
    for file in ("modules.json", "config_sentence_transformers.json"):
        (path / file).unlink()
    shutil.rmtree(path / "1_SpladePooling")
    model = open_model(path, {"task": "sparse"})
    assert model.family == "splade"
    assert same(computed(model), encoded(path))
    # Without the task it is an embedder, whose vectors need no head.
    assert family_of(path).name == "bert"
    embedder = open_model(path)
    assert embedder.output.kind is OutputKind.VECTOR
    embedder.load_text(dtype="float32", device="cpu")


def test_prompts_by_role(copied: Path) -> None:
    prompts = {"query": "query: the ", "document": "passage "}
    edit(copied / "config_sentence_transformers.json", prompts=prompts)
    model = open_model(copied)
    for role, encode in ((Role.QUERY, "encode_query"), (Role.PASSAGE, "encode_document")):
        assert same(computed(model, role=role), encoded(copied, encode=encode))
    given = open_model(copied, {"query_prompt": "a "})
    assert same(computed(given, role=Role.QUERY), encoded(copied, [f"a {text}" for text in TEXTS]))


def test_a_decoder_that_is_stored_is_used_whatever_the_configuration_says(
    written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = changed(written(UNTIED), tmp_path / "stored")
    expected = encoded(path)
    edit(path / "config.json", tie_word_embeddings=True)
    assert same(computed(open_model(path)), expected) and same(encoded(path), expected)
    assert not same(computed(open_model(written(SPLADE_TINY))), expected)


def test_a_decoder_that_is_missing_is_named(copied: Path) -> None:
    edit(copied / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"vocabulary\.weight.* is missing"):
        open_model(copied).load_text(dtype="float32", device="cpu")


def test_one_bias_of_the_decoder_is_enough(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(UNTIED), tmp_path / "one")
    expected = computed(open_model(path))
    stored = load_file(path / "model.safetensors")
    stored["cls.predictions.bias"] = stored.pop("cls.predictions.decoder.bias")
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    assert same(computed(open_model(path)), expected)


@pytest.mark.parametrize("most", [1, 7, 5000])
def test_the_largest_weights(written: WriteCheckpoint, most: int) -> None:
    path = written(SPLADE_TINY)
    model = open_model(path, {"max_active_dims": most})
    assert model.output.most == min(most, 2000)
    assert same(computed(model), encoded(path, max_active_dims=most))


def test_what_it_declares(written: WriteCheckpoint) -> None:
    outputs = Outputs.of_model(open_model(written(SPLADE_TINY)))
    assert [(each.name, each.kind, each.width, each.most) for each in outputs.declared] == [
        ("sparse", OutputKind.SPARSE, 1, 2000)
    ]


def test_by_name_beside_the_states(written: WriteCheckpoint) -> None:
    model = open_model(written(SPLADE_TINY))
    tokens = np.array([2, 100, 200, 3], np.int32)
    inputs = [
        PackedInput(tokens=tokens, positions=model.positions(tokens, ()), asked=asked)
        for asked in ((), ("sparse",), ("states", "sparse"))
    ]
    default, named, both = engine_of(model).launch_named(pack(inputs)).result()
    assert weights_of(default) == weights_of(named) == weights_of(both.each()[1])
    assert both.each()[0].values.shape == (4, 128)


def test_a_logit_that_is_not_a_number_is_seen(written: WriteCheckpoint, tmp_path: Path) -> None:
    """Of weights that are numbers, and overflow."""
    path = changed(written(SPLADE_TINY), tmp_path / "broken")
    stored = load_file(path / "model.safetensors")
    # Tied to the products that give logits: one of the two signs is beyond float32.
    rows = next(value for name, value in stored.items() if name.endswith("word_embeddings.weight"))
    rows[77], rows[78] = 3e38, -3e38
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    (found,) = computed(open_model(path), TEXTS[:1])
    assert not np.isfinite([found.get(77, 0.0), found.get(78, 0.0)]).all()


PACKAGE = "sentence_transformers.sparse_encoder.models."


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["Router"], r"\[0\]\.type is Router, a module that is not served"),
        (["SparseStaticEmbedding"], r"type is SparseStaticEmbedding, a module that is not served"),
        (["Transformer", "Pooling", "SparseAutoEncoder"], "type is SparseAutoEncoder, a module"),
        (["MLMTransformer"], "logits of a masked language model need SpladePooling"),
        (["MLMTransformer", "Pooling"], "logits of a masked language model need SpladePooling"),
        (["Transformer", "SpladePooling"], "transformer_task must be fill-mask before SpladePooling"),
        (["MLMTransformer", "SpladePooling", "Normalize"], "type is a module behind SpladePooling"),
        (["MLMTransformer", "SpladePooling", "Pooling"], "type is Pooling behind another module"),
        (["MLMTransformer", "Pooling", "SpladePooling"], "type is SpladePooling behind another module"),
    ],
)
def test_modules_that_are_not_served(copied: Path, modules: list[str], words: str) -> None:
    entries: list[dict[str, Any]] = []
    for place, name in enumerate(modules):
        folder = f"{place}_{name}" if place else ""
        (copied / folder).mkdir(exist_ok=True)
        if place:
            edit(copied / folder / "config.json")
        entries.append({"idx": place, "name": str(place), "path": folder, "type": PACKAGE + name})
    (copied / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=words):
        open_model(copied)


def test_the_pooling_of_logits_needs_its_file(copied: Path) -> None:
    (copied / "1_SpladePooling/config.json").unlink()
    with pytest.raises(CheckpointError, match="1_SpladePooling"):
        open_model(copied)


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
def test_other_bodies_do_not_take_its_task(written: WriteCheckpoint, tmp_path: Path, spec: Spec) -> None:
    path = changed(written(spec), tmp_path / "other")
    shutil.rmtree(path / "1_Pooling")
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": f"{PACKAGE}MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{PACKAGE}SpladePooling"},
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_SpladePooling").mkdir()
    edit(path / "1_SpladePooling/config.json")
    with pytest.raises(CheckpointError, match="declares the task 'sparse'"):
        open_model(path)


def test_memory_is_counted_and_bounded(written: WriteCheckpoint, tmp_path: Path) -> None:
    tied, untied = (open_model(written(spec)) for spec in (SPLADE_TINY, UNTIED))
    assert untied.text_nbytes("float32") - tied.text_nbytes("float32") == 4 * 2000 * 128
    path = changed(written(SPLADE_TINY), tmp_path / "wide")
    edit(path / "config.json", vocab_size=30522)
    edit(path / "1_SpladePooling/config.json", word_embedding_dimension=30522)
    wide = open_model(path)
    # All logits of so many tokens are 2 GB. Half of what is counted are rows of inputs of one token each.
    all_logits = 4 * 30522 * 16384
    nbytes = wide.text_nbytes("float32")
    assert 4 * (1 << 25) < wide.text_activation_nbytes("float32", 16384) < all_logits
    (path / "model.safetensors").unlink()
    assert open_model(path).text_nbytes("float32") - nbytes == 4 * 30522 * 128


def test_nothing_is_compiled_or_recorded_of_it(written: WriteCheckpoint) -> None:
    model: Any = open_model(written(SPLADE_TINY))
    with pytest.raises(ConfigError, match="family splade offers no stages to compile or export"):
        model.load_stage("text", layout="packed", dtype="float32", device="cpu")
    assert {feature.value for feature in model.features} == {"fp8"}
