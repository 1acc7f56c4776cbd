"""The chunks of a document: their bounds in its prompt, and their rows beside those of other inputs.

References are formulas over the hidden states of transformers' own model, token by token.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from tessera.engine.batch import PackedInput, pack
from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.errors import InvalidInput
from tessera.models import open_model
from tessera.models.base import CHUNKS, Content, Model, Outputs, Prompt, Role, Truncate, chunks_of
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, ROBERTA_TINY
from tessera_tools.random_checkpoint.encoder import TINY as BERT
from tessera_tools.random_checkpoint.llama import LlamaSpec
from tessera_tools.random_checkpoint.qwen3 import TINY as QWEN
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import declare
from tests.models.test_declared import DECLARED, MEAN, NORMALIZE
from tests.references.encoder import EncoderReference
from tests.references.qwen3 import Qwen3Reference

CHUNKS_OF_TEXT = ("the river under the bridge.", " a market", " by the old temple, and over 12 more of them.")
SETTINGS = EngineSettings(device="cpu", dtype="float32", max_batch_cost=8192, max_queue_cost=8192)
CUTTING = [
    "mean",
    "dense",
    "two dense, of which the first has no activation",
    "layer norm",
    "unit length before a product",
]


def document(
    model: Model,
    *chunks: str,
    role: Role = Role.NONE,
    max_tokens: int | None = None,
    truncate: Truncate = Truncate.NONE,
) -> Prompt:
    content = Content(parts=chunks or CHUNKS_OF_TEXT, role=role, chunked=True)
    most = model.max_tokens if max_tokens is None else max_tokens
    return model.prompt(content, max_tokens=most, truncate=truncate, param="x")


def packed(model: Model, prompt: Prompt, *asked: str) -> PackedInput:
    made = PackedInput(tokens=prompt.tokens, positions=model.positions(prompt.tokens, ()), asked=asked)
    return made if prompt.chunks is None else replace(made, chunks=prompt.chunks)


def plain(model: Model, text: str) -> Prompt:
    return model.prompt(
        Content(parts=(text,)), max_tokens=model.max_tokens, truncate=Truncate.NONE, param="x"
    )


def rows_of(model: Model, inputs: list[PackedInput]) -> list[np.ndarray]:
    engine = make_text_engine(model, SETTINGS, place(SETTINGS))
    try:
        assert CHUNKS in engine.gives
        return [rows.values for rows in engine.launch_named(pack(inputs)).result()]
    finally:
        engine.close()


@pytest.mark.parity
@pytest.mark.parametrize("name", CUTTING)
def test_what_follows_pooling_follows_that_of_chunks(
    name: str, written: WriteCheckpoint, tmp_path: Path
) -> None:
    modules, finish = DECLARED[name]
    base = written(QWEN)
    model, reference = open_model(declare(base, tmp_path / "declared", *modules)), Qwen3Reference(base)
    made = document(model)
    assert made.chunks is not None
    states = reference.hidden(made.tokens.tolist())
    spans = pairwise(made.chunks)
    expected = [functional.normalize(finish(states[first:last]), dim=0).numpy() for first, last in spans]
    (found,) = rows_of(model, [packed(model, made, CHUNKS)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("spec", [BERT, ROBERTA_TINY], ids=["bert", "roberta"])
@pytest.mark.parametrize("many", [1, 40], ids=["one batch", "in pieces"])
def test_rows_of_chunks_beside_other_inputs(spec: Spec, many: int, written: WriteCheckpoint) -> None:
    path = written(spec)
    model, reference = open_model(path), EncoderReference(path)
    given = [
        document(model, role=Role.PASSAGE),
        plain(model, "the river " * 20),
        document(model, "été naïve", " 東京"),
    ]
    inputs = [
        packed(model, given[0], CHUNKS),
        packed(model, given[1]),
        packed(model, given[2], "", CHUNKS),
        packed(model, given[2], CHUNKS),
    ] * many
    # The outputs beside the first are in the rows of their input.
    engine = make_text_engine(model, SETTINGS, place(SETTINGS))
    answers = engine.launch_named(pack(inputs)).result()
    engine.close()
    assert [len(rows.values) for rows in answers] == [3, 1, 1, 2] * many

    def states(prompt: Prompt) -> torch.Tensor:
        with torch.no_grad():
            hidden: torch.Tensor = reference.model(
                **reference.arguments(prompt.tokens.tolist())
            ).last_hidden_state[0]
        return hidden

    def means(prompt: Prompt) -> np.ndarray:
        assert prompt.chunks is not None
        parts = states(prompt).tensor_split(torch.from_numpy(prompt.chunks.astype(np.int64)))[1:-1]
        return functional.normalize(torch.stack([part.mean(0) for part in parts])).numpy()

    whole = [functional.normalize(states(prompt).mean(0), dim=0).numpy() for prompt in given]
    for first in range(0, len(answers), 4):
        chunked, other, both, alone = answers[first : first + 4]
        np.testing.assert_allclose(chunked.values, means(given[0]), atol=1e-5)
        np.testing.assert_allclose(other.values[0], whole[1], atol=1e-5)
        np.testing.assert_allclose(both.values[0], whole[2], atol=1e-5)
        np.testing.assert_allclose(both.others[0].values, means(given[2]), atol=1e-5)
        np.testing.assert_allclose(alone.values, means(given[2]), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("role", [Role.NONE, Role.QUERY, Role.PASSAGE])
def test_a_prompt_and_control_tokens_are_in_no_chunk(role: Role, written: WriteCheckpoint) -> None:
    path = written(BERT)
    model, tokenizer = open_model(path), EncoderReference(path).tokenizer
    prefix = {Role.QUERY: "query: ", Role.PASSAGE: "passage: "}.get(role, "")
    encoding = tokenizer.encode(prefix + "".join(CHUNKS_OF_TEXT))
    made = document(model, role=role)
    assert made.tokens.tolist() == encoding.ids
    ends = len(prefix) + np.cumsum([0, *map(len, CHUNKS_OF_TEXT)])
    own = [
        [
            at
            for at, (start, stop) in enumerate(encoding.offsets)
            if start < stop and first <= start and stop <= last
        ]
        for first, last in pairwise(ends)
    ]
    assert made.chunks is not None
    bounds = made.chunks.tolist()
    assert [list(range(*pair)) for pair in pairwise(bounds)] == own


@pytest.mark.parametrize("spec", [BERT, ROBERTA_TINY, LlamaSpec()], ids=["bert", "roberta", "llama"])
def test_no_chunk_shares_a_token_with_another(spec: Spec, written: WriteCheckpoint) -> None:
    model = open_model(written(spec))
    made, alone = (
        document(model, "riv", "er", "bridge"),
        [plain(model, text) for text in ("riv", "er", "bridge")],
    )
    assert made.chunks is not None
    around = len(plain(model, "riv").tokens) - (made.chunks[1] - made.chunks[0])
    assert np.diff(made.chunks).tolist() == [len(prompt.tokens) - around for prompt in alone]


def test_a_document_that_is_cut_has_a_token_of_each_chunk(written: WriteCheckpoint) -> None:
    model = open_model(written(BERT))
    whole = document(model, "river", " bridge " * 30)
    for truncate, kept in ((Truncate.END, [1, 2, 19]), (Truncate.START, None)):
        if kept is None:
            with pytest.raises(InvalidInput) as refused:
                document(model, "river", " bridge " * 30, max_tokens=20, truncate=truncate)
            assert refused.value.param == "x[0]"
            continue
        cut = document(model, "river", " bridge " * 30, max_tokens=20, truncate=truncate)
        assert cut.chunks is not None and whole.chunks is not None
        first = int(whole.chunks[1])
        assert (len(cut.tokens), cut.chunks.tolist(), cut.truncated) == (20, [1, first, 19], True)
    for chunks, param in (
        (("river", " "), "x[1]"),
        (("", "river"), "x[0]"),
        (("river " * 40, "bridge"), "x[1]"),
    ):
        with pytest.raises(InvalidInput) as refused:
            document(model, *chunks, max_tokens=20, truncate=Truncate.END)
        assert refused.value.param == param


POOLED_OTHERWISE = [
    name
    for name, (modules, _) in DECLARED.items()
    if modules[0] is not MEAN and not name.startswith("mean, ")
]


@pytest.mark.parametrize("name", POOLED_OTHERWISE)
def test_models_that_pool_otherwise_have_none(name: str, written: WriteCheckpoint, tmp_path: Path) -> None:
    modules, _ = DECLARED[name]
    model = open_model(declare(written(QWEN), tmp_path / "declared", *modules))
    assert chunks_of(model) is None and CHUNKS not in Outputs.of_model(model).by_name


def test_rerankers_and_models_of_a_last_token_have_none(written: WriteCheckpoint, tmp_path: Path) -> None:
    assert chunks_of(open_model(written(RERANK_TINY))) is None
    assert chunks_of(open_model(written(replace(BERT, pooling="cls_token")))) is None
    assert chunks_of(open_model(declare(written(QWEN), tmp_path / "mean", MEAN, NORMALIZE))) is not None
