"""Adapters of PEFT: what is loaded is what the formulas make of base and adapter; others are refused by name.

The formulas are those of ``merge_and_unload`` of peft 0.21, written here once more in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import Model
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, TINY
from tessera_tools.random_checkpoint.qwen3 import RERANK_TINY as QWEN3_RERANK
from tessera_tools.random_checkpoint.qwen3 import TINY as QWEN3
from tests.models.adapting import WRAPPER, Tensors, adapt, changed, config, linked, low_rank
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import write
from tests.models.running import Given, batch_of, cosines, vectors

HIDDEN, WIDE = TINY.hidden, TINY.intermediate
QUERY, VALUE = (f"encoder.layer.1.attention.self.{name}" for name in ("query", "value"))
UP = "encoder.layer.0.intermediate.dense"
WORDS, NORM = "embeddings.word_embeddings", "encoder.layer.2.output.LayerNorm"
CASES = [Given(parts=(text,)) for text in ("river", "the bridge by the old temple", "été naïve 東京 " * 9)]

Merge = Callable[[Tensors, Tensors], Mapping[str, np.ndarray]]
"""Of the base's tensors and the adapter's, those that change."""


def product(adapter: Tensors, module: str) -> np.ndarray:
    a, b = (adapter[f"{WRAPPER}{module}.lora_{letter}.weight"] for letter in "AB")
    return b.astype(np.float64) @ a


def plain(scale: float, *modules: str) -> Merge:
    return lambda base, adapter: {
        f"{module}.weight": (base[f"{module}.weight"] + scale * product(adapter, module)).astype(np.float32)
        for module in modules
    }


def turned(base: Tensors, adapter: Tensors) -> Tensors:
    return {f"{QUERY}.weight": (base[f"{QUERY}.weight"] + 2 * product(adapter, QUERY).T).astype(np.float32)}


def dora(base: Tensors, adapter: Tensors) -> Tensors:
    whole = base[f"{UP}.weight"] + 2 * product(adapter, UP)
    rows = adapter[f"{WRAPPER}{UP}.lora_magnitude_vector"] / np.sqrt((whole**2).sum(1))
    return {f"{UP}.weight": (whole * rows[:, None]).astype(np.float32)}


def embeddings(base: Tensors, adapter: Tensors) -> Tensors:
    a, b = (adapter[f"{WRAPPER}{WORDS}.lora_embedding_{letter}"] for letter in "AB")
    return {f"{WORDS}.weight": base[f"{WORDS}.weight"] + 2 * (b @ a).T}


def whole(base: Tensors, adapter: Tensors) -> Tensors:
    return {
        **plain(2, QUERY)(base, adapter),
        f"{QUERY}.bias": adapter[f"{WRAPPER}{QUERY}.base_layer.bias"],
        f"{VALUE}.bias": adapter[f"{WRAPPER}{VALUE}.bias"],
        f"{NORM}.weight": adapter[f"{WRAPPER}{NORM}.weight"],
    }


def added_bias(base: Tensors, adapter: Tensors) -> Tensors:
    bias = base[f"{QUERY}.bias"] + 2 * adapter[f"{WRAPPER}{QUERY}.lora_B.bias"]
    return {**plain(2, QUERY)(base, adapter), f"{QUERY}.bias": bias}


def both(base: Tensors, adapter: Tensors) -> Tensors:
    """The rank of one module is 2 and its alpha 64; the other has the general ones."""
    return {**plain(32, QUERY)(base, adapter), **plain(2, VALUE)(base, adapter)}


ROW = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
RANDOM = np.random.default_rng(7)
ADAPTERS: dict[str, tuple[dict[str, Any], Tensors, Merge]] = {
    "plain": (
        {},
        low_rank(QUERY, HIDDEN, HIDDEN) | low_rank(VALUE, HIDDEN, HIDDEN, seed=1),
        plain(2, QUERY, VALUE),
    ),
    "rslora": ({"use_rslora": True}, low_rank(QUERY, HIDDEN, HIDDEN), plain(4, QUERY)),
    "patterns of rank and alpha": (
        {
            "rank_pattern": {r"layer\.1\.attention\.self\.query": 2},
            "alpha_pattern": {"query": 64, ".*": 8},
            "target_modules": r".*\.(query|value)",
        },
        low_rank(QUERY, HIDDEN, HIDDEN, rank=2) | low_rank(VALUE, HIDDEN, HIDDEN, seed=1),
        both,
    ),
    "all-linear": ({"target_modules": "all-linear"}, low_rank(UP, WIDE, HIDDEN), plain(2, UP)),
    "fan in, fan out": ({"fan_in_fan_out": True}, low_rank(QUERY, HIDDEN, HIDDEN), turned),
    "dora": (
        {"use_dora": True, "target_modules": [UP]},
        low_rank(UP, WIDE, HIDDEN)
        | {f"{WRAPPER}{UP}.lora_magnitude_vector": np.linspace(0.5, 2, WIDE, dtype=np.float32)},
        dora,
    ),
    "embeddings": (
        {"target_modules": ["word_embeddings"]},
        {
            f"{WRAPPER}{WORDS}.lora_embedding_A": RANDOM.normal(size=(4, TINY.vocab_size)).astype(np.float32),
            f"{WRAPPER}{WORDS}.lora_embedding_B": RANDOM.normal(size=(HIDDEN, 4)).astype(np.float32) * 0.2,
        },
        embeddings,
    ),
    "what is stored whole": (
        {"bias": "all", "modules_to_save": ["LayerNorm"]},
        low_rank(QUERY, HIDDEN, HIDDEN)
        | {
            f"{WRAPPER}{QUERY}.base_layer.bias": ROW,
            f"{WRAPPER}{VALUE}.bias": ROW[::-1].copy(),
            f"{WRAPPER}{NORM}.weight": ROW,
            f"{WRAPPER}pooler.dense.bias": ROW,
        },
        whole,
    ),
    "a bias of its own": (
        {"lora_bias": True},
        low_rank(QUERY, HIDDEN, HIDDEN) | {f"{WRAPPER}{QUERY}.lora_B.bias": ROW},
        added_bias,
    ),
}


@pytest.fixture(scope="module")
def base(written: WriteCheckpoint) -> Path:
    return written(TINY)


def embedded(model: Model, dtype: str = "float32") -> np.ndarray:
    return vectors(model, model.load_text(dtype=dtype, device="cpu"), batch_of(model, None, CASES))


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_loaded_is_the_merged_model(name: str, base: Path, tmp_path: Path) -> None:
    changes, adapter, merge = ADAPTERS[name]
    model = open_model(adapt(base, tmp_path / "adapted", adapter, **changes))
    by_hand = open_model(changed(base, tmp_path / "merged", lambda stored: merge(stored, adapter)))
    found, expected = (
        dict(each.load_text(dtype="float32", device="cpu").named_parameters()) for each in (model, by_hand)
    )  # type: ignore[attr-defined]
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        np.testing.assert_allclose(found[parameter], value, atol=2e-6, err_msg=parameter)
    assert cosines(embedded(model), embedded(by_hand)).min() >= 1 - 1e-9
    assert cosines(embedded(model, "bfloat16"), embedded(by_hand)).min() >= 0.998
    # It is another model than the base by far.
    assert cosines(embedded(model), embedded(open_model(base))).min() < 0.9999


@pytest.mark.parametrize("stem", ["", "model."], ids=["of Qwen3Model", "of Qwen3ForCausalLM"])
def test_names_begin_with_the_class_that_was_wrapped(
    stem: str, written: WriteCheckpoint, tmp_path: Path
) -> None:
    source, module = written(QWEN3), "layers.0.mlp.down_proj"
    adapter = low_rank(module, QWEN3.hidden, QWEN3.intermediate)
    of_head = low_rank("lm_head", QWEN3.vocab_size, QWEN3.hidden)
    named = {name.replace(WRAPPER, WRAPPER + stem): value for name, value in adapter.items()}
    targets = {"target_modules": ["down_proj", "lm_head"]}
    model = open_model(adapt(source, tmp_path / "adapted", named | of_head, **targets))

    def merged(stored: Tensors) -> Tensors:
        (name,) = (name for name in stored if name.endswith(f"{module}.weight"))
        return {name: (stored[name] + 2 * product(adapter, module)).astype(np.float32)}

    by_hand = open_model(changed(source, tmp_path / "merged", merged))
    assert cosines(embedded(model), embedded(by_hand)).min() >= 1 - 1e-9
    assert cosines(embedded(model), embedded(open_model(source))).min() < 0.9999


def test_a_score_of_two_rows_has_what_is_added_to_them(written: WriteCheckpoint, tmp_path: Path) -> None:
    """The head of a Qwen3 reranker is two rows of its embeddings."""
    a, b = (
        RANDOM.normal(size=size).astype(np.float32) for size in ((4, QWEN3.vocab_size), (QWEN3.hidden, 4))
    )
    names = [f"{WRAPPER}model.embed_tokens.lora_embedding_{letter}" for letter in "AB"]
    adapter = dict(zip(names, (a, b), strict=True))
    source = written(QWEN3_RERANK)
    adapted = adapt(source, tmp_path / "adapted", adapter, target_modules=["embed_tokens"])

    def merged(stored: Tensors) -> Tensors:
        (name,) = (name for name in stored if name.endswith("embed_tokens.weight"))
        return {name: stored[name] + 2 * (b @ a).T}

    heads = []
    for path in (adapted, changed(source, tmp_path / "merged", merged)):
        model: Any = open_model(path, {"task": "score"})
        head = model.load_text(dtype="float32", device="cpu").head
        heads.append(np.concatenate([head.weight, head.against]))
    np.testing.assert_allclose(*heads, atol=1e-5)


def test_a_cross_encoder_may_have_its_head_from_an_adapter(written: WriteCheckpoint, tmp_path: Path) -> None:
    adapter = {
        f"{WRAPPER}classifier.weight": np.ones((1, RERANK_TINY.hidden), np.float32),
        f"{WRAPPER}classifier.bias": np.ones(1, np.float32),
    }
    path = adapt(written(RERANK_TINY), tmp_path / "adapted", adapter, modules_to_save=["classifier"])
    model: Any = open_model(path)
    head = model.load_text(dtype="float32", device="cpu").head
    assert head.weight.unique().tolist() == head.bias.tolist() == [1.0]


def test_the_fingerprint_knows_the_adapter(base: Path, tmp_path: Path) -> None:
    adapters: list[tuple[Tensors, dict[str, Any]]] = [
        (low_rank(QUERY, HIDDEN, HIDDEN), {}),
        (low_rank(QUERY, HIDDEN, HIDDEN, seed=1), {}),
        (low_rank(QUERY, HIDDEN, HIDDEN), {"lora_alpha": 9}),
    ]
    paths = [
        adapt(base, tmp_path / str(number), tensors, **more)
        for number, (tensors, more) in enumerate(adapters)
    ]
    assert len({open_model(path).fingerprint for path in (base, *paths)}) == 4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING'; of adapters only 'LORA' is done"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]], which is not done"),
        ({"target_parameters": ["x"]}, "target_parameters is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"kasa_config": {"a": 1}}, "kasa_config is"),
        ({"of_next_year": True}, "of_next_year is True, which is not done"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base's weights"),
        ({"bias": "some"}, "bias must be one of"),
        ({"use_dora": True, "fan_in_fan_out": True}, "use_dora is true beside fan_in_fan_out"),
        ({"r": 0}, "r must be at least 1"),
        ({"rank_pattern": {"a": "b"}}, "rank_pattern.a must be an integer"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern has"),
        ({"target_modules": "("}, "target_modules has '(', which is no pattern"),
        ({"target_modules": [1]}, "target_modules must be a string or a list of strings"),
    ],
)
def test_an_adapter_that_is_not_done_is_refused_before_weights_are_read(
    changes: dict[str, Any], complaint: str, base: Path, tmp_path: Path
) -> None:
    path = linked(base, tmp_path / "adapted", without="model.safetensors")
    write(path / "adapter_config.json", config(**changes))
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    assert f"{path.resolve()}/adapter_config.json: {complaint}" in caught.value.message


A, B = (f"{WRAPPER}{QUERY}.lora_{letter}.weight" for letter in "AB")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({B: None}, "is without its fellow lora_B.weight"),
        ({A: np.zeros((2, HIDDEN), np.float32)}, "of rank 4 for a weight of [128, 128] they do not fit"),
        ({A: np.zeros((4, HIDDEN), np.int8)}, "must be of floats, found I8"),
        ({"lora_A": ROW}, "is none of PEFT's, which begin with base_model.model."),
        ({f"{WRAPPER}encoder.layer.9.output.dense.bias": ROW}, "has no place in the model"),
        ({f"{WRAPPER}{NORM}.weight": ROW[:3]}, "has no place in the model with its shape [3]"),
        (low_rank("encoder.layer.9.attention.self.query", HIDDEN, HIDDEN), "which the model does not have"),
        (low_rank(UP, WIDE, HIDDEN), "none of the target_modules of adapter_config.json"),
        ({f"{WRAPPER}{QUERY}.lora_magnitude_vector": ROW}, "fits no use_dora"),
        ({f"{WRAPPER}{QUERY}.lora_B.bias": ROW[:3]}, "is added to a bias of"),
    ],
)
def test_tensors_that_fit_nothing_are_refused(
    change: Mapping[str, np.ndarray | None], complaint: str, base: Path, tmp_path: Path
) -> None:
    tensors = {**low_rank(QUERY, HIDDEN, HIDDEN), **change}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = adapt(base, tmp_path / "adapted", given)
    with pytest.raises(CheckpointError) as caught:
        open_model(path).load_text(dtype="float32", device="cpu")
    assert complaint in caught.value.message


def test_an_adapter_without_its_weights_is_refused(base: Path, tmp_path: Path) -> None:
    path = linked(base, tmp_path / "adapted")
    write(path / "adapter_config.json", config())
    (path / "adapter_model.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(
        CheckpointError,
        match=r"without adapter_model\.safetensors or adapter_model\.bin; no other weight format",
    ):
        open_model(path).load_text(dtype="float32", device="cpu")
