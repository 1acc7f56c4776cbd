"""Outputs by name in a program: dense, sparse and token vectors of one pass, as the definitions have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tessera import Embedder
from tessera.errors import InvalidInput
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tests.references.m3 import M3Reference

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("python")]

# More than one call of an engine takes.
TEXTS = ["the river under the bridge", "été naïve 東京 the the", *[f"market number {at}" for at in range(80)]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m3") / "checkpoint"
    write_checkpoint(path, M3_TINY, seed=7)
    return path


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Iterator[Embedder]:
    with Embedder(checkpoint) as running:
        yield running


def test_three_outputs_by_their_names(embedder: Embedder, checkpoint: Path) -> None:
    reference = M3Reference(checkpoint)
    found = embedder.embed(iter(TEXTS), outputs=["sparse", "dense", "multivector"])
    assert list(found) == ["sparse", "dense", "multivector"]
    for text, dense, sparse, vectors in zip(
        TEXTS, found["dense"], found["sparse"], found["multivector"], strict=True
    ):
        tokens = reference.tokens(text)
        np.testing.assert_allclose(dense, reference.dense(tokens), atol=1e-5)
        weights = reference.weights(tokens)
        assert sparse.indices.tolist() == list(weights)
        np.testing.assert_allclose(sparse.values, list(weights.values()), atol=1e-5)
        np.testing.assert_allclose(vectors, reference.vectors(tokens), atol=1e-5)


def test_without_names_there_are_vectors_as_ever(embedder: Embedder) -> None:
    plain = embedder.embed(TEXTS[:3])
    assert np.array_equal(plain, embedder.embed(TEXTS[:3], outputs=["dense"])["dense"])
    assert [output.name for output in embedder.model.outputs] == ["dense", "sparse", "multivector"]


def test_an_output_that_is_not_there_is_refused_by_its_name(embedder: Embedder) -> None:
    with pytest.raises(
        InvalidInput, match=r"no output 'colbert'; it has dense, sparse, multivector"
    ) as raised:
        embedder.embed(TEXTS, outputs=["dense", "colbert"])
    assert raised.value.param == "outputs"
    wrong: list[object] = ["dense", [], [7]]
    for outputs in wrong:
        with pytest.raises(InvalidInput, match=r"^outputs: expected a list of names"):
            embedder.embed(TEXTS, outputs=outputs)  # type: ignore[call-overload]


def test_an_input_that_fails_is_named_with_any_output(embedder: Embedder) -> None:
    with pytest.raises(InvalidInput) as raised:
        embedder.embed(["good", "river " * 10_000], outputs=["sparse"])
    assert raised.value.param == "input[1]"
