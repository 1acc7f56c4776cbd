"""Token vectors of ColBERT against PyLate's definition and sentence-transformers, and with mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.batch import PackedInput, pack
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.errors import CheckpointError, InvalidInput
from tessera.models import Model, family_of, open_model
from tessera.models.base import Content, Prompt, Role, Truncate
from tessera.worker.max_sim import max_sim
from tessera_tools.random_checkpoint.colbert import PYLATE_TINY, ROBERTA_TINY, TINY, ColbertSpec
from tessera_tools.random_checkpoint.encoder import TINY as DENSE
from tests.models.changing import changed
from tests.models.colbert.cases import SIDES, TEXTS
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import write
from tests.references.colbert import ColbertReference

pytestmark = pytest.mark.parity

BAR = 1e-5
SPECS: dict[str, ColbertSpec] = {
    "stanford": TINY,
    "stanford, attended": replace(TINY, attended=True),
    "pylate": replace(PYLATE_TINY, query_length=24, document_length=60, width=24),
    "pylate, xlm-roberta": ROBERTA_TINY,
    "pylate, xlm-roberta, attended": replace(ROBERTA_TINY, attended=True),
}
Rows = list[list[np.ndarray]]
"""The rows of each text as a query, then as a document."""


@pytest.fixture(scope="module", params=SPECS)
def path(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Path:
    return written(SPECS[request.param])


def prompt_of(model: Model, text: str, role: Role = Role.NONE, **more: Any) -> Prompt:
    limits = {"max_tokens": model.max_tokens, "truncate": Truncate.NONE, "param": "input"} | more
    return model.prompt(Content(parts=(text,), role=role), **limits)


def computed(path: Path, texts: list[str] = TEXTS, **options: object) -> Rows:
    """What an engine gives for all of them in one batch."""
    model = open_model(path, options)
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    engine = TorchTextEngine(model, settings, Placement(device="cpu", dtype="float32"))
    tokens = [prompt_of(model, text, role).tokens for role in SIDES for text in texts]
    inputs = [PackedInput(tokens=each, positions=model.positions(each, ())) for each in tokens]
    together = engine.launch(pack(inputs)).result()
    assert together.faulty(unit_length=model.output.unit_length) is None
    # The same inputs alone, and those that ask for the output by its name.
    for each, one in zip(inputs, together, strict=True):
        (alone,) = engine.launch(pack([each])).result()
        named = replace(each, asked=("multivector",))
        (by_name,) = engine.launch_named(pack([named])).result()
        for other in (alone, by_name):
            np.testing.assert_allclose(other.held().values, one.held().values, atol=1e-5)
    engine.close()
    rows = [one.held().values for one in together]
    return [rows[: len(texts)], rows[len(texts) :]]


def expected(reference: ColbertReference, texts: list[str] = TEXTS) -> Rows:
    return [[reference.token_vectors(text, query=query) for text in texts] for query in (True, False)]


def distance(found: Rows, wanted: Rows) -> float:
    """The largest difference of two values; infinite where numbers of rows differ."""
    pairs = [pair for sides in zip(found, wanted, strict=True) for pair in zip(*sides, strict=True)]
    if any(mine.shape != theirs.shape for mine, theirs in pairs):
        return np.inf
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)


def test_rows_are_those_of_the_definition(path: Path) -> None:
    model, reference = open_model(path), ColbertReference(path)
    for text in TEXTS:
        for role in SIDES:
            prompt = prompt_of(model, text, role)
            tokens, seen = reference.side(text, query=role is Role.QUERY)
            assert prompt.tokens.tolist() == tokens
            keys = model.positions(prompt.tokens, ())[-1] if len(tokens) != seen else [seen]
            assert set(keys) == {seen}
    found = computed(path)
    assert distance(found, expected(reference)) <= BAR
    for document, text in zip(found[1], TEXTS, strict=True):
        assert max_sim(found[0][0], document) == pytest.approx(reference.score(TEXTS[0], text), abs=1e-4)


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
def test_rows_are_those_of_sentence_transformers(path: Path) -> None:
    assert distance(computed(path), of_library(path)) <= BAR


def of_library(path: Path) -> Rows:
    from sentence_transformers import MultiVectorEncoder

    reference: Any = MultiVectorEncoder(str(path), device="cpu")
    # In one batch a shorter text is padded, which changes nothing.
    return [
        list(map(np.asarray, encode(TEXTS))) for encode in (reference.encode_query, reference.encode_document)
    ]


def saved_by_sentence_transformers(source: Path, target: Path, expansion: Any, **changes: Any) -> Path:
    """The form of ``MultiVectorEncoder`` 6.2, whose markers are special tokens that begin its prompts."""
    shutil.copytree(source, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token |= {"normalized": False, "special": True}
    write(target / "tokenizer.json", tokenizer)
    names = ("Transformer", "Dense", "MultiVectorMask", "Normalize")
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{name}" if place else "", "type": name}
        for place, name in enumerate(names)
    ]
    places = ("base", "base", "multi_vector_encoder", "sentence_transformer")
    for module, place in zip(modules, places, strict=True):
        module["type"] = f"sentence_transformers.{place}.modules.{module['type']}"
    write(target / "modules.json", modules)
    dense = json.loads((target / "1_Dense" / "config.json").read_text())
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    del dense["use_residual"]
    write(target / "1_Dense" / "config.json", dense | tokens)
    (target / "2_MultiVectorMask").mkdir()
    mask = {"skiplist_words": [".", ",", "?"], "skiplist_tasks": ["document"]}
    write(target / "2_MultiVectorMask" / "config.json", mask | changes.pop("mask", {}))
    (target / "3_Normalize").mkdir()
    write(target / "3_Normalize" / "config.json", tokens)
    write(
        target / "config_sentence_transformers.json",
        {
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": "[Q] ", "document": "[D] "} | changes.pop("prompts", {}),
            "default_prompt_name": None,
            "similarity_fn_name": "maxsim",
        },
    )
    write(
        target / "sentence_bert_config.json",
        {"transformer_task": "feature-extraction", "document_length": 50, "query_expansion": expansion}
        | changes,
    )
    return target


FIXED = {"strategy": "fixed", "length": 16, "attend": False}


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
@pytest.mark.parametrize(
    ("expansion", "changes"),
    [
        (FIXED, {}),
        (FIXED | {"strategy": "min", "attend": True}, {}),
        (FIXED | {"strategy": "min"}, {"query_length": 40}),
        (FIXED | {"token": "[UNK]"}, {"mask": {"skiplist_tasks": ["query", "document"]}}),
        (None, {"query_length": 12, "mask": {"skiplist_words": []}}),
        (None, {"prompts": {"query": "[Q] query: ", "document": "passage: "}}),
    ],
    ids=["fixed", "at least, attended", "at least", "another token", "none", "prompts"],
)
def test_files_of_sentence_transformers(
    expansion: Any, changes: dict[str, Any], written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = saved_by_sentence_transformers(written(PYLATE_TINY), tmp_path / "saved", expansion, **changes)
    assert distance(computed(path), of_library(path)) <= BAR


def markers_as_text(reference: ColbertReference) -> None:
    spelled = (reference.tokenizer.encode(word, add_special_tokens=False).ids for word in ("(Q)", "(D)"))
    reference.markers = list(spelled)


def no_markers(reference: ColbertReference) -> None:
    reference.markers = [[], []]


def markers_changed_over(reference: ColbertReference) -> None:
    reference.markers.reverse()


def no_expansion(reference: ColbertReference) -> None:
    reference.expands = False


def expansion_attended_the_other_way(reference: ColbertReference) -> None:
    reference.attends = not reference.attends


def expanded_with_padding(reference: ColbertReference) -> None:
    reference.mask = 0


def no_skiplist(reference: ColbertReference) -> None:
    reference.skipped = set()


def control_tokens_skipped(reference: ColbertReference) -> None:
    reference.skipped |= {reference.first, reference.last}


def no_normalisation(reference: ColbertReference) -> None:
    reference.normalizes = False


def no_room_for_the_marker(reference: ColbertReference) -> None:
    reference.lengths = [length - 1 for length in reference.lengths]


MISTAKES: list[Callable[[ColbertReference], None]] = [
    markers_as_text,
    no_markers,
    markers_changed_over,
    no_expansion,
    expansion_attended_the_other_way,
    expanded_with_padding,
    no_skiplist,
    control_tokens_skipped,
    no_normalisation,
    no_room_for_the_marker,
]


@pytest.fixture(scope="module")
def own(path: Path) -> Rows:
    return computed(path)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_bar(path: Path, own: Rows, mistake: Callable[[ColbertReference], None]) -> None:
    reference = ColbertReference(path)
    mistake(reference)
    assert distance(own, expected(reference)) > 100 * BAR


def test_texts_that_spell_tokens_are_texts(path: Path) -> None:
    model, reference = open_model(path), ColbertReference(path)
    controls = {reference.mask, *reference.markers[0], *reference.markers[1]}
    for text in ("[Q] [D] river", "[unused0] [unused1] [MASK]", "<mask> <s> [CLS] [SEP] </s>"):
        (document, query) = (prompt_of(model, text, role).tokens.tolist() for role in (Role.NONE, Role.QUERY))
        assert document[:2] == [reference.first, *reference.markers[1]]
        assert not controls & set(document[2:])
        # A long one is cut before its end where it is a query.
        assert query[2:20] == document[2:20] + [reference.mask] * (20 - len(document))


def test_longer_texts_are_cut_at_the_end_to_the_length_of_their_side(path: Path) -> None:
    model, reference = open_model(path), ColbertReference(path)
    query, document = reference.lengths
    assert model.max_tokens == max(query, document)
    for role, length in ((Role.QUERY, query), (Role.PASSAGE, document)):
        cut = prompt_of(model, TEXTS[3], role)
        assert cut.truncated and len(cut.tokens) == length
        beginning = prompt_of(model, TEXTS[3], role, truncate=Truncate.START)
        assert beginning.truncated and len(beginning.tokens) == length
        assert beginning.tokens[:2].tolist() == cut.tokens[:2].tolist()
        assert beginning.tokens.tolist() != cut.tokens.tolist()
    with pytest.raises(InvalidInput, match="over the limit of 16"):
        prompt_of(model, TEXTS[3], Role.PASSAGE, max_tokens=16)
    # The limit is of what is written: a query is expanded all the same.
    asked = prompt_of(model, TEXTS[3], Role.QUERY, max_tokens=16, truncate=Truncate.END).tokens.tolist()
    assert asked[16:] == [reference.mask] * (query - 16) and asked[15] == reference.last


def test_options_set_the_lengths(written: WriteCheckpoint) -> None:
    path = written(TINY)
    model = open_model(path, {"query_length": 48, "document_length": 300})
    assert model.max_tokens == 300
    assert len(prompt_of(model, "river", Role.QUERY).tokens) == 48
    assert len(prompt_of(model, TEXTS[3] * 3, Role.PASSAGE).tokens) == 300
    reference = ColbertReference(path)
    reference.lengths = [48, 300]
    found = computed(path, query_length=48, document_length=300)
    assert distance(found, expected(reference)) <= BAR
    assert open_model(path, {"document_length": 10_000}).max_tokens == 512


def test_pieces_are_what_is_embedded(path: Path) -> None:
    model = open_model(path)
    for role in (*SIDES, Role.NONE):
        pieces = model.pieces("what is the river?", role=role, param="input")
        assert [piece.token for piece in pieces] == prompt_of(
            model, "what is the river?", role
        ).tokens.tolist()


def test_token_ids_are_of_the_side_that_they_begin_as(written: WriteCheckpoint) -> None:
    path = written(TINY)
    model, reference = open_model(path), ColbertReference(path)
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    engine = TorchTextEngine(model, settings, Placement(device="cpu", dtype="float32"))
    inputs = []
    for query in (True, False):
        ids = tuple(reference.side(TEXTS[0], query=query)[0])
        given = Content(parts=(np.array(ids),), role=Role.PASSAGE)
        tokens = model.prompt(given, max_tokens=180, truncate=Truncate.NONE, param="input").tokens
        assert tokens.tolist() == list(ids)
        inputs.append(PackedInput(tokens=tokens, positions=model.positions(tokens, ())))
    found = [rows.held().values for rows in engine.launch(pack(inputs)).result()]
    wanted = [reference.token_vectors(TEXTS[0], query=query) for query in (True, False)]
    assert distance([found], [wanted]) <= BAR


def test_the_family_is_that_of_the_declared_task(written: WriteCheckpoint) -> None:
    assert family_of(written(TINY)).name == family_of(written(PYLATE_TINY)).name == "bert_colbert"
    assert family_of(written(ROBERTA_TINY)).name == "xlm_roberta_colbert"
    assert family_of(written(DENSE)).name == "bert"


ST = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("expansion", "changes", "words"),
    [
        (FIXED, {"mask": {"keep_only_token_ids": [5]}}, "keep_only_token_ids is not supported"),
        (FIXED, {"mask": {"skiplist_tasks": ["page"]}}, "skiplist_tasks must be of"),
        (FIXED | {"strategy": "soft"}, {}, "strategy must be one of"),
        (FIXED | {"times": 3}, {}, "times is unknown"),
        (FIXED | {"token": "[X]"}, {}, r"has no token '\[X\]'"),
    ],
)
def test_files_of_sentence_transformers_that_are_refused(
    expansion: Any, changes: dict[str, Any], words: str, written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = saved_by_sentence_transformers(written(PYLATE_TINY), tmp_path / "saved", expansion, **changes)
    with pytest.raises(CheckpointError, match=words):
        open_model(path)


def test_what_declares_no_projection_is_refused(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(PYLATE_TINY), tmp_path / "it", ST)
    write(path / "modules.json", json.loads((path / "modules.json").read_text())[:1])
    with pytest.raises(CheckpointError, match="has no Dense"):
        open_model(path)


def test_checkpoints_are_told_apart_by_what_they_declare(written: WriteCheckpoint, tmp_path: Path) -> None:
    source = written(TINY)
    other = changed(source, tmp_path / "it", "artifact.metadata", attend_to_mask_tokens=True)
    assert open_model(source).fingerprint != open_model(other).fingerprint


def test_without_the_file_of_metadata_the_defaults_are_pylates(
    written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = changed(written(replace(TINY, width=128)), tmp_path / "it")
    (path / "artifact.metadata").unlink()
    model = open_model(path)
    assert (model.output.width, len(prompt_of(model, "a", Role.QUERY).tokens), model.max_tokens) == (
        128,
        32,
        180,
    )
