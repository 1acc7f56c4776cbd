"""What a checkpoint declares of its vectors is what comes out, and what is not done is refused by name.

References are the formulas, over the hidden states of transformers' own model; and ``sentence-transformers``
on the same directory where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tessera.errors import CheckpointError, InvalidInput, TesseraError
from tessera.frontend.api.openai import parse_embeddings
from tessera.frontend.request import RequestLimits
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.prompts import Prompter
from tessera.models import open_model
from tessera.models.base import Content, Model, Role, Truncate
from tessera.tasks import Deadline
from tessera_apis.tei import EMBED, parse_tei
from tessera_tools.random_checkpoint.llama import LlamaSpec
from tessera_tools.random_checkpoint.qwen3 import TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare, dense, layer_norm, write
from tests.models.running import Given, batch_of, cosines, vectors
from tests.references.qwen3 import Qwen3Reference

pytestmark = pytest.mark.parity

WIDTH = TINY.hidden
LLAMA = LlamaSpec()
TEXTS = ("a short text", "x", "The quick brown fox jumps over the lazy dog, and over 12 more of them.")
CASES = [Given(parts=(text,)) for text in TEXTS]
IDENTITY = "torch.nn.modules.linear.Identity"
MEAN = Module("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "mean"})
NORMALIZE = Module("Normalize")


def old(**modes: int) -> Module:
    return Module(
        "Pooling",
        {
            "word_embedding_dimension": WIDTH,
            **{f"pooling_mode_{name}": value for name, value in modes.items()},
        },
    )


Finish = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states ``[tokens, width]`` to a vector."""

PROJECTION = dense(WIDTH, 16, bias=False, activation_function=IDENTITY)
TANH = dense(WIDTH, 24)
SECOND = dense(24, 8, seed=1, activation_function="torch.nn.modules.activation.GELU")
RESIDUAL = dense(WIDTH, 24, use_residual=True)
NORM = layer_norm(WIDTH)


def product(module: Module, rows: torch.Tensor) -> torch.Tensor:
    return functional.linear(rows, module.tensors["linear.weight"], module.tensors.get("linear.bias"))


def projected(states: torch.Tensor) -> torch.Tensor:
    return product(PROJECTION, states.mean(0))


def weighted(states: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1.0, len(states) + 1)[:, None]
    return (states * places).sum(0) / places.sum()


def twice(states: torch.Tensor) -> torch.Tensor:
    return functional.gelu(product(SECOND, torch.tanh(product(TANH, states.mean(0)))))


def residual(states: torch.Tensor) -> torch.Tensor:
    mean = states.mean(0)
    return torch.tanh(product(RESIDUAL, mean)) + RESIDUAL.tensors["residual.weight"] @ mean


FLAGGED = dense(WIDTH, 16, bias=0, use_residual=1, seed=2)


def flagged(row: torch.Tensor) -> torch.Tensor:
    return torch.tanh(product(FLAGGED, row)) + FLAGGED.tensors["residual.weight"] @ row


def normed(states: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(
        states.mean(0), (WIDTH,), NORM.tensors["norm.weight"], NORM.tensors["norm.bias"]
    )


def unit_between(states: torch.Tensor) -> torch.Tensor:
    return torch.tanh(product(TANH, functional.normalize(states.mean(0), dim=0)))


DECLARED: dict[str, tuple[tuple[Module, ...], Finish]] = {
    "mean": ((MEAN, NORMALIZE), lambda states: states.mean(0)),
    "mean, old keys": ((old(mean_tokens=True, cls_token=False),), lambda states: states.mean(0)),
    "mean, numbers as flags": (
        (old(mean_tokens=1, cls_token=0), FLAGGED, NORMALIZE),
        lambda states: flagged(states.mean(0)),
    ),
    "mean, of another width": (
        (Module("Pooling", {"embedding_dimension": 64, "pooling_mode": "mean"}), TANH),
        lambda states: torch.tanh(product(TANH, states.mean(0))),
    ),
    "dropout": (
        (MEAN, Module("Dropout", {"dropout": 0.5}), TANH),
        lambda states: torch.tanh(product(TANH, states.mean(0))),
    ),
    "cls": ((old(cls_token=True), NORMALIZE), lambda states: states[0]),
    "last": (
        (Module("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken"}),),
        lambda states: states[-1],
    ),
    "cls beside mean": (
        (old(mean_tokens=True, cls_token=True),),
        lambda states: torch.cat([states[0], states.mean(0)]),
    ),
    "mean before cls": (
        (Module("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": ["mean", "cls"]}),),
        lambda states: torch.cat([states.mean(0), states[0]]),
    ),
    "max": ((old(max_tokens=True), NORMALIZE), lambda states: states.amax(0)),
    "sums over the root of the length, behind a product": (
        (old(mean_sqrt_len_tokens=True), TANH),
        lambda states: torch.tanh(product(TANH, states.sum(0) / len(states) ** 0.5)),
    ),
    "weighted mean": ((old(weightedmean_tokens=True),), weighted),
    "all in their order": (
        (old(lasttoken=True, weightedmean_tokens=True, mean_tokens=True, max_tokens=True, cls_token=True),),
        lambda states: torch.cat(
            [states[0], states.amax(0), states.mean(0), weighted(states), states[-1]],
        ),
    ),
    "max behind the weighted mean": (
        (Module("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": ["weightedmean", "max"]}),),
        lambda states: torch.cat([weighted(states), states.amax(0)]),
    ),
    "dense": ((MEAN, PROJECTION, NORMALIZE), projected),
    "two dense, of which the first has no activation": ((MEAN, TANH, SECOND, NORMALIZE), twice),
    "a residual": ((MEAN, RESIDUAL), residual),
    "layer norm": ((MEAN, NORM, NORMALIZE), normed),
    "unit length before a product": ((MEAN, NORMALIZE, TANH), unit_between),
}


@pytest.fixture(scope="module")
def base(written: WriteCheckpoint) -> Path:
    return written(TINY)


@pytest.fixture(scope="module")
def reference(base: Path) -> Qwen3Reference:
    return Qwen3Reference(base)


def embedded(model: Model, cases: list[Given] = CASES, dtype: str = "float32") -> np.ndarray:
    return vectors(model, model.load_text(dtype=dtype, device="cpu"), batch_of(model, None, cases))


@pytest.mark.parametrize("name", DECLARED)
def test_vectors_are_those_that_are_declared(
    name: str, base: Path, reference: Qwen3Reference, tmp_path: Path
) -> None:
    modules, finish = DECLARED[name]
    path = declare(base, tmp_path / "declared", *modules)
    model = open_model(path)
    expected = [
        functional.normalize(finish(reference.hidden(reference.tokens(text, "none"))), dim=0).numpy()
        for text in TEXTS
    ]
    assert model.output.width == len(expected[0])
    assert model.text_nbytes("float32") == stored_bytes(path)
    assert cosines(embedded(model), np.stack(expected)).min() >= 0.99999
    assert cosines(embedded(model, dtype="bfloat16"), np.stack(expected)).min() >= 0.995


def stored_bytes(path: Path) -> int:
    """Four bytes for each number of all weight files."""
    from safetensors.torch import load_file

    return sum(
        4 * value.numel() for file in path.rglob("*.safetensors") for value in load_file(file).values()
    )


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
@pytest.mark.parametrize("name", DECLARED)
def test_vectors_are_those_of_sentence_transformers(name: str, base: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    modules, _ = DECLARED[name]
    path = declare(base, tmp_path / "declared", *modules)
    expected = SentenceTransformer(str(path), device="cpu").encode(list(TEXTS), normalize_embeddings=True)
    assert cosines(embedded(open_model(path)), expected).min() >= 0.99999


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
def test_prompts_are_those_of_sentence_transformers(base: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "Q: ", "document": "D: ", "s": "S: "}
    general = {"prompts": prompts, "default_prompt_name": "s"}
    path = declare(base, tmp_path / "declared", MEAN, NORMALIZE, config_sentence_transformers=general)
    reference, model = SentenceTransformer(str(path), device="cpu"), open_model(path)
    for role, encode in (
        (Role.QUERY, reference.encode_query),
        (Role.PASSAGE, reference.encode_document),
        (Role.NONE, reference.encode),
    ):
        cases = [Given(parts=(text,), role=role) for text in TEXTS]
        assert cosines(embedded(model, cases), encode(list(TEXTS))).min() >= 0.99999


def test_the_stages_for_compilers_have_what_is_declared(base: Path, tmp_path: Path) -> None:
    path = declare(base, tmp_path / "declared", MEAN, TANH, NORMALIZE)
    model: Any = open_model(path)
    batch = batch_of(model, None, CASES[:1])
    stage = model.load_stage("text", layout="packed", dtype="float32", device="cpu")
    rows, index = torch.zeros(1, WIDTH), torch.full((len(batch.input_ids),), -1, dtype=torch.int32)
    given = (torch.from_numpy(array) for array in (batch.input_ids, batch.positions, batch.cu_seqlens[1:]))
    with torch.no_grad():
        found, _ = stage.module(*given, rows, index)
    assert cosines(found.numpy(), embedded(model, CASES[:1])).min() >= 0.99999
    assert stage.outputs[0].axes[1] == 24
    states = torch.randn(1, 5, WIDTH)
    post = model.load_stage("post", layout="padded", dtype="float32", device="cpu")
    with torch.no_grad():
        last, _ = post.module(states, torch.ones(1, 5, dtype=torch.int32))
    by_hand = torch.tanh(product(TANH, states[0].mean(0)))
    assert cosines(last.numpy(), by_hand[None].numpy()).min() >= 0.99999
    assert {name.partition(".")[0] for name, _ in post.module.named_parameters()} == {"steps"}


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_causal_where_it_is_declared(
    causal: bool, base: Path, reference: Qwen3Reference, tmp_path: Path
) -> None:
    path = declare(base, tmp_path / "declared", config={"is_causal": causal})
    other = Qwen3Reference(base)
    other.causal = causal
    expected = np.stack([other.vector(other.tokens(text, "none")) for text in TEXTS])
    assert cosines(embedded(open_model(path)), expected).min() >= 0.99999


def test_a_declared_width_is_cut_and_has_length_1_again(base: Path, tmp_path: Path) -> None:
    whole = declare(base, tmp_path / "whole", MEAN, NORMALIZE)
    general = {"truncate_dim": 48}
    path = declare(base, tmp_path / "cut", MEAN, NORMALIZE, config_sentence_transformers=general)
    model = open_model(path)
    assert model.output.width == 48
    assert max(model.dimensions) < 48
    found = embedded(model)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert cosines(found, embedded(open_model(whole))[:, :48]).min() >= 0.99999


def test_the_longest_input_is_what_is_declared(base: Path, tmp_path: Path) -> None:
    path = declare(base, tmp_path / "explicit", sentence_bert_config={"max_seq_length": 32})
    assert open_model(path).max_tokens == 32
    longer = declare(base, tmp_path / "longer", sentence_bert_config={"max_seq_length": 1 << 20})
    assert open_model(longer).max_tokens == TINY.max_positions
    tokenizer = {"model_max_length": 64}
    assert open_model(declare(base, tmp_path / "t", MEAN, tokenizer_config=tokenizer)).max_tokens == 64


def tokens(path: Path, role: Role, options: Mapping[str, object] = {}) -> list[int]:
    model = open_model(path, options)
    content = Content(parts=("text",), role=role)
    return model.prompt(content, max_tokens=99, truncate=Truncate.NONE, param="x").tokens.tolist()


PROMPTS = {"query": "Q: ", "document": "", "passage": "P: ", "s": "S: "}


@pytest.mark.parametrize("family", ["qwen3_embedding", "llama_nemotron_embed"])
def test_prompts_are_those_that_are_declared(family: str, written: WriteCheckpoint, tmp_path: Path) -> None:
    spec, start, end = {
        "qwen3_embedding": (TINY, [], [TINY.id_of("<|endoftext|>")]),
        "llama_nemotron_embed": (LLAMA, [LLAMA.base_vocab], []),
    }[family]
    general = {"prompts": PROMPTS, "default_prompt_name": "s"}
    path = declare(written(spec), tmp_path / "declared", MEAN, config_sentence_transformers=general)
    if family == "llama_nemotron_embed":
        write(path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for role, prompt in ((Role.QUERY, "Q: "), (Role.PASSAGE, "P: "), (Role.NONE, "S: ")):
        ids = tokenizer.encode(f"{prompt}text", add_special_tokens=False).ids
        assert tokens(path, role) == [*start, *ids, *end]


async def test_prompts_have_names(base: Path, tmp_path: Path) -> None:
    general = {"prompts": PROMPTS | {"clustering": "identify: "}}
    model = open_model(declare(base, tmp_path / "declared", MEAN, config_sentence_transformers=general))
    prompter, served = Prompter(model, 99), RequestLimits()
    call = Call(request_id="r", deadline=Deadline.after(60))

    async def ids(name: str, **more: str) -> list[int]:
        body = {"inputs": "text", "prompt_name": name, **more}
        request = parse_tei(EMBED.read(body), served)
        (made,) = await prompter.build(request, [()], call)
        if isinstance(made, TesseraError):
            raise made
        return made.tokens.tolist()

    def role(role: Role) -> list[int]:
        content = Content(parts=("text",), role=role)
        return model.prompt(content, max_tokens=99, truncate=Truncate.NONE, param="x").tokens.tolist()

    assert await ids("query") == role(Role.QUERY)
    assert await ids("document") == await ids("passage") == role(Role.PASSAGE)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    expected = tokenizer.encode("identify: text", add_special_tokens=False).ids
    assert (await ids("clustering"))[:-1] == expected
    with pytest.raises(InvalidInput, match="expected one of query, passage, document, s, clustering, found"):
        await ids("classification")
    with pytest.raises(InvalidInput, match="prompt_name: contradicts instruction"):
        await ids("clustering", instruction="Find")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prompt_name": "s", "input_type": "query"}, "prompt_name: contradicts input_type"),
        ({"prompt_name": "document", "input_type": "query"}, "prompt_name: contradicts input_type"),
        ({"prompt_name": "query", "input_type": "query"}, ""),
        ({"prompt_name": "s"}, ""),
    ],
)
def test_a_prompts_name_does_not_contradict_the_role(more: dict[str, str], words: str) -> None:
    body = {"input": "text", "model": "m", **more}
    if words:
        with pytest.raises(InvalidInput, match=words):
            parse_embeddings(body)
        return
    (entry,) = parse_embeddings(body).inputs
    assert entry.prompt_name == more["prompt_name"]


def test_an_option_wins_over_a_declared_prompt(base: Path, tmp_path: Path) -> None:
    general = {"prompts": PROMPTS}
    path = declare(base, tmp_path / "declared", MEAN, config_sentence_transformers=general)
    assert tokens(path, Role.QUERY, {"query_instruction": ""}) == tokens(path, Role.NONE)


def test_pooling_without_prompts_is_refused_where_there_are_prompts(base: Path, tmp_path: Path) -> None:
    pooling = Module("Pooling", {"pooling_mode": "mean", "include_prompt": False})
    path = declare(base, tmp_path / "declared", pooling)
    with pytest.raises(CheckpointError, match="include_prompt is false"):
        open_model(path)
    none = {"config_sentence_transformers": {"prompts": {"query": "", "document": ""}}}
    assert open_model(declare(base, tmp_path / "none", pooling, **none)).output.pooling == "mean"


def test_a_language_model_that_declares_no_vector_is_no_embedder(base: Path, tmp_path: Path) -> None:
    path = declare(base, tmp_path / "chat")
    (path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"declares no way to make a vector.*--task embed"):
        open_model(path)
    assert open_model(path, {"task": "embed"}).output.pooling == "last"
    write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    with pytest.raises(CheckpointError, match="declares the task 'score'"):
        open_model(path, {"task": "embed"})


def test_the_fingerprint_knows_what_is_declared(base: Path, tmp_path: Path) -> None:
    declared = {
        "mean": declare(base, tmp_path / "a", MEAN),
        "last": declare(base, tmp_path / "b", old(lasttoken=True)),
        "dense": declare(base, tmp_path / "c", MEAN, dense(WIDTH, 16, seed=0)),
        "other weights": declare(base, tmp_path / "d", MEAN, dense(WIDTH, 16, seed=1)),
        "prompts": declare(
            base, tmp_path / "e", MEAN, config_sentence_transformers={"prompts": {"query": "q"}}
        ),
    }
    assert len({open_model(path).fingerprint for path in declared.values()}) == len(declared)


@pytest.mark.parametrize(
    ("modules", "files", "complaint"),
    [
        ((MEAN, dense(64, 16)), {}, "2_Dense/config.json: in_features is 64, and the row has 128"),
        ((MEAN, layer_norm(64)), {}, "2_LayerNorm/config.json: dimension is 64, and the row has 128"),
        (
            (MEAN,),
            {"config_sentence_transformers": {"model_type": "CrossEncoder"}},
            "1_Pooling/config.json: pooling_mode 'mean': a score of qwen3_rerank is of the last token",
        ),
        ((MEAN,), {"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case is true"),
        ((MEAN,), {"adapter_config": {"peft_type": "IA3"}}, "adapter_config.json: peft_type is 'IA3'"),
    ],
)
def test_what_is_declared_and_not_done_is_refused_before_weights_are_read(
    modules: tuple[Module, ...], files: dict[str, Any], complaint: str, base: Path, tmp_path: Path
) -> None:
    path = declare(base, tmp_path / "declared", *modules, **files)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    assert complaint in caught.value.message


def test_a_module_without_its_weights_is_refused_by_its_folder(base: Path, tmp_path: Path) -> None:
    path = declare(base, tmp_path / "declared", MEAN, TANH)
    (path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense: has neither"):
        open_model(path).load_text(dtype="float32", device="cpu")
