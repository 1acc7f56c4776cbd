"""Whichever key of ``config.json`` has another value: the vectors are the reference's, or it is refused.

The keys are those of the file and those that its class in transformers has beside them. A key that a release
adds is tried without anybody thinking of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tessera.errors import CheckpointError, InvalidInput
from tessera.models import open_model
from tessera_tools.random_checkpoint import llama, qwen3, towers
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, ROBERTA_TINY, TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.running import Given, Pair, cosines, found_by
from tests.models.variations import CONFIG, inputs_of, varied
from tests.references.families import reference_of

pytestmark = pytest.mark.fuzzes

SPECS: Final = {
    "bert": TINY,
    "bert_rerank": RERANK_TINY,
    "xlm_roberta": ROBERTA_TINY,
    "qwen3": qwen3.TINY,
    "llama": llama.TINY,
    "clip": towers.CLIP_TINY,
    "siglip": towers.SIGLIP_TINY,
}

# What the model is called, and what changes no vector.
PASSED_OVER: Final = frozenset(
    (
        *("architectures", "model_type", "auto_map", "transformers_version", "dtype", "torch_dtype"),
        *("_name_or_path", "id2label", "label2id", "problem_type", "return_dict", "use_cache"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    )
)
# Which only some classes have.
BESIDE: Final = {
    "is_causal": False,
    "position_embedding_type": "absolute",
    "use_sliding_window": False,
    "attention_bias": False,
}


def others(value: Any) -> list[Any]:
    """Values of the same type, other than ``value``."""
    match value:
        case bool():
            return [not value]
        case int():
            return [other for other in (0, 1, value + 1, 2 * value) if other != value]
        case float():
            return [1.5 * value + 0.1]
        case str():
            return [other for other in ("gelu", "relu", "silu", "relative_key") if other != value]
        case None:
            return [1]
        case [float() | int(), *_]:
            return [[2 * each for each in value], value[::-1]]
    return []


def varieties(
    file: Mapping[str, Any], whole: Mapping[str, Any], *above: str
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key in sorted({*file, *whole} - PASSED_OVER):
        value = file.get(key, whole.get(key))
        if isinstance(value, dict) and key in file:
            yield from varieties(file[key], whole.get(key) or {}, *above, key)
        else:
            for other in others(value):
                yield (*above, key), other


@pytest.mark.parametrize("family", SPECS)
def test_each_key(family: str, written: WriteCheckpoint, tmp_path: Path) -> None:
    from transformers import AutoConfig

    source = written(SPECS[family])
    file = json.loads((source / "config.json").read_text())
    # Of code of its own there is none here.
    whole = {} if family == "llama" else AutoConfig.from_pretrained(source).to_dict()
    inputs = inputs_of(family)
    counts = {"equal": 0, "refused": 0}
    for number, (keys, value) in enumerate(varieties(file, {**BESIDE, **whole})):
        path = varied(source, tmp_path / str(number), {(CONFIG, *keys): value})
        try:
            found = found_by(open_model(path), inputs)
        except (CheckpointError, InvalidInput):
            counts["refused"] += 1
            continue
        try:
            expected = answers(path, inputs)
        except (TypeError, ValueError, AssertionError, IndexError):
            # The reference does not read it.
            continue
        said = f"{family}: {'.'.join(keys)} is {value!r}"
        assert found.shape == expected.shape, said
        if found.shape[1] == 1:
            assert np.abs(found - expected).max() <= 1e-4, said
        else:
            assert cosines(found, expected).min() >= 0.9999, said
        counts["equal"] += 1
    assert min(counts.values()) >= 15, counts


def answers(path: Path, inputs: list[Given | Pair]) -> np.ndarray:
    reference = reference_of(path)
    return np.concatenate([np.atleast_2d(reference.answer(each)) for each in inputs])
