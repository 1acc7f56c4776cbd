"""Weights over the vocabulary, in pieces and at once, by their definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from tessera.nn.spec import VocabularySpec
from tessera.nn.tensors import TextTensors
from tessera.nn.vocabulary import VocabularyWeights, pieces
from tests.nn.copying import randomise

LENGTHS = (7, 1, 5, 40, 3, 3)
TOKENS, HIDDEN, VOCAB = sum(LENGTHS), 16, 50


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ((4, 4, 4), 8, [(0, 2), (2, 3)]),
        ((4, 4, 4), 100, [(0, 3)]),
        ((9, 1, 9), 3, [(0, 1), (1, 2), (2, 3)]),
        ((1, 1, 9, 1), 3, [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_pieces_have_a_bound_but_for_one_input(
    lengths: tuple[int, ...], most: int, expected: list[tuple[int, int]]
) -> None:
    assert list(pieces(lengths, most)) == expected


@pytest.mark.parametrize("piece", [1, 6, 16, 1000])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@torch.inference_mode()
def test_weights_by_their_definition(piece: int, sums: bool, twice: bool) -> None:
    spec = VocabularySpec(
        vocab_size=VOCAB,
        hidden=HIDDEN,
        activation="gelu",
        eps=1e-12,
        tied=False,
        most=VOCAB,
        sums=sums,
        twice=twice,
        logits=piece * VOCAB,
    )
    assert spec.piece == piece
    head = VocabularyWeights(spec)
    randomise(head)
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    ids, none = torch.zeros(TOKENS, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    found = head(states, TextTensors(ids, ids[None], bounds, LENGTHS, none, none))
    rows = layer_norm(
        gelu(states @ head.dense.weight.T + head.dense.bias),
        (HIDDEN,),
        head.norm.weight,
        head.norm.bias,
        1e-12,
    )
    logits = rows @ head.weight.T + head.bias
    weights = logits.relu().log1p()
    weights = weights.log1p() if twice else weights
    assert found.indices is not None
    each = zip(
        weights.split(LENGTHS), found.values.view(-1, VOCAB), found.indices.view(-1, VOCAB), strict=True
    )
    for own, values, ids in each:
        expected = own.sum(0) if sums else own.amax(0)
        held = ids >= 0
        assert set(ids[held].tolist()) == set(expected.nonzero()[:, 0].tolist())
        assert not values[~held].any()
        torch.testing.assert_close(values[held], expected[ids[held].long()])
