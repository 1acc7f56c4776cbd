"""A variation of a checkpoint's files gives the reference's vectors, or is refused by its key.

The reference reads the same directory with transformers' and sentence-transformers' own classes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import CheckpointError
from tessera.models import open_model
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import write
from tests.models.pinned import assert_pinned, variation
from tests.models.running import Given, Pair, cosines, found_by
from tests.models.variations import CASES, CONFIG, TEXTS, Case, inputs_of, read, varied
from tests.references.families import reference_of

pytestmark = [
    pytest.mark.fuzzes,
    pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2"),
]


@pytest.mark.parametrize(
    ("family", "varying"),
    [
        pytest.param(name, each, id=f"{name}-{each.name}")
        for name, (_, all_) in CASES.items()
        for each in all_
    ],
)
def test_vectors_are_the_references_or_the_key_is_refused(
    family: str, varying: Case, written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = varied(written(CASES[family][0]), tmp_path / "varied", varying.changes)
    if varying.refused:
        with pytest.raises(CheckpointError) as raised:
            open_model(path)
        assert varying.refused in str(raised.value)
        return
    model, given = open_model(path), inputs_of(family)
    found = found_by(model, given)
    if family == "bert_rerank":
        assert np.abs(found[:, 0] - _scores(path, given, tokens=model.max_tokens)).max() <= 1e-5
    elif family in ("clip", "siglip"):
        reference = reference_of(path)
        expected = np.stack([reference.answer(each) for each in given])
        assert cosines(found, expected).min() >= 0.99999
    else:
        assert cosines(found, _sentences(path)).min() >= 0.99999
    assert_pinned(model, variation(family, varying), found)


def _scores(path: Path, pairs: list[Given | Pair], *, tokens: int) -> np.ndarray:
    """Return the logits of pairs of texts; ``tokens`` is how long a pair may be here."""
    from sentence_transformers import CrossEncoder

    reference = CrossEncoder(str(path), device="cpu")
    assert reference.max_seq_length == tokens
    texts = [(pair.query.parts[0], pair.document.parts[0]) for pair in pairs if isinstance(pair, Pair)]
    found: np.ndarray = reference.predict(texts, batch_size=1)
    return found


def _sentences(path: Path) -> np.ndarray:
    """Return the vectors of the texts, each in a batch of its own: padding on the left moves positions."""
    from sentence_transformers import SentenceTransformer

    if not (path / "modules.json").exists():
        width = read(path, CONFIG)["hidden_size"]
        types = ("Transformer", "Pooling")
        write(
            path / "modules.json",
            [
                {
                    "idx": place,
                    "name": str(place),
                    "path": folder,
                    "type": f"sentence_transformers.models.{name}",
                }
                for place, (name, folder) in enumerate(zip(types, ("", "1_Pooling"), strict=True))
            ],
        )
        write(
            path / "1_Pooling" / "config.json",
            {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
        )
    reference = SentenceTransformer(str(path), device="cpu")
    found: np.ndarray = reference.encode(list(TEXTS), normalize_embeddings=True, batch_size=1)
    return found
