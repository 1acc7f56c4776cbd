"""Vectors against transformers' own modules reading the same files, and against the same with mistakes.

Of families whose references have this in common; the others have tests of their own in their folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from tessera.models import Model, open_model
from tessera.models.base import Pixels
from tessera_tools.random_checkpoint import distilbert, encoder, llama, llama_nemotron_vl, ministral3, qwen3
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.bert import cases as bert_cases
from tests.models.colqwen3 import cases as colqwen3_cases
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_colembed_vl import cases as llama_page_cases
from tests.models.llama_nemotron_embed import cases as llama_cases
from tests.models.nemotron_3_embed import cases as ministral3_cases
from tests.models.nemotron_colembed_vl import cases as qwen3_page_cases
from tests.models.parity import (
    BARS,
    Parity,
    Record,
    attention_both_ways,
    attention_to_the_left_alone,
    first_token_left_out_of_the_mean,
    last_token,
    mean_pooling,
    no_first_token,
    no_last_token,
    no_norm_of_queries_and_keys,
    no_prefixes,
    plain_rope,
    state_before_the_final_norm,
)
from tests.models.qwen3_embedding import cases as qwen3_cases
from tests.models.qwen3_vl_embedding.stages import as_the_largest
from tests.models.qwen3_vl_embedding.test_mistakes import MISTAKES as OF_QWEN3_VL
from tests.models.running import Given, batch_of, company, cosines, nearest, preprocessed, prompts, vectors
from tests.references.colembed import NemotronColEmbedReference
from tests.references.encoder import EncoderReference
from tests.references.llama_nemotron_embed import LlamaReference
from tests.references.llama_nemotron_vl import ColEmbedReference
from tests.references.ministral3 import Ministral3Reference
from tests.references.qwen3 import ColQwen3Reference, Qwen3Reference

pytestmark = pytest.mark.parity

Mistake = Callable[[Any], None]
Tokens = Callable[[Any, Given, Mapping[bytes, Pixels]], list[int]]


def named(*mistakes: Mistake) -> dict[str, Mistake]:
    return {mistake.__name__.replace("_", " "): mistake for mistake in mistakes}


def text_of(given: Given) -> str:
    return "".join(part for part in given.parts if isinstance(part, str))


def by_role(reference: Any, given: Given, _: Mapping[bytes, Pixels]) -> list[int]:
    tokens: list[int] = reference.tokens(text_of(given), given.role.value)
    return tokens


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a family is compared by; the first of its ``configurations`` fails with each of the mistakes.

    ``tokens`` are those of the reference for an input, with the pixels of its images; None where its answer
    checks them. ``bar`` is the one that mistakes fail, and ``apart`` the most that two inputs may be alike.
    """

    configurations: Mapping[str, Spec]
    reference: Callable[[Path], Any]
    cases: Sequence[Given]
    mistakes: Mapping[str, Mistake]
    tokens: Tokens | None = by_role
    bars: Mapping[str, float] = field(default_factory=lambda: BARS)
    bar: str = "bfloat16"
    apart: float = 0.98
    dtype: str = "bfloat16"


# Mistakes of one family, or of two.


def positions_from_the_next_row(reference: Any) -> None:
    table = reference.model.embeddings.position_embeddings.weight
    table.data = table.data.roll(-1, 0)


def tanh_form_of_gelu(reference: Any) -> None:
    for layer in reference.model.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


def no_token_type(reference: Any) -> None:
    reference.model.embeddings.token_type_embeddings.weight.data.zero_()


def another_epsilon(reference: Any) -> None:
    for module in reference.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.1


def first_token(reference: Any) -> None:
    reference.pool = lambda hidden: hidden[0]


def control_tokens_left_out_of_the_mean(reference: Any) -> None:
    reference.pool = lambda hidden: hidden[1:-1].mean(0)


def queries_without_their_scale(reference: Any) -> None:
    reference.model.config.rope_parameters["llama_4_scaling_beta"] = 0.0


def queries_scaled_by_another_context(reference: Any) -> None:
    reference.model.config.rope_parameters["original_max_position_embeddings"] = 32


def attention_factor_without_the_second_scale(reference: Any) -> None:
    reference.model.rotary_emb.attention_scaling = 0.1 * float(np.log(16)) + 1


def a_space_behind_the_prompt(reference: Any) -> None:
    whole = reference.tokens
    reference.tokens = lambda text, role, said: whole(f" {text}" if role == "query" else text, role, said)


def no_bias(reference: Any) -> None:
    reference.projection.bias = None


def no_final_norm_of_the_decoder(reference: Any) -> None:
    reference.model.language_model.norm = nn.Identity()


def state_behind_the_final_norm(reference: Any) -> None:
    reference.model.language_model.norm = reference.norm


def text_before_the_images(reference: Any) -> None:
    whole = reference.prompt

    def moved(*given: Any) -> list[int]:
        tokens: list[int] = whole(*given)
        start = reference.tokenizer.token_to_id("<|vision_start|>")
        stop = reference.tokenizer.token_to_id("<|im_end|>")
        if start not in tokens:
            return tokens
        first, last = tokens.index(start), tokens.index(stop)
        behind = len(tokens) - tokens[::-1].index(reference.tokenizer.token_to_id("<|vision_end|>"))
        return [*tokens[:first], *tokens[behind:last], *tokens[first:behind], *tokens[last:]]

    reference.prompt = moved


def causal_pages(reference: Any) -> None:
    def last_hidden(embedded: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = reference.text(inputs_embeds=embedded[None], use_cache=False)[0][0]
            return found

    reference.last_hidden = last_hidden


def pages_before_the_final_norm(reference: Any) -> None:
    reference.text.norm = nn.Identity()


def no_norm_behind_the_encoder(reference: Any) -> None:
    reference.vision.post_layernorm = nn.Identity()


ENCODER: Final = Compared(
    configurations={
        "bert": encoder.TINY,
        "bert. before names, shards": replace(encoder.TINY, layers=2, prefix="bert.", shards=2),
        "bert, one token type": replace(encoder.TINY, types=1, heads=8),
        "distilbert": distilbert.TINY_DISTILLED,
        "distilbert. before names": replace(distilbert.TINY_DISTILLED, prefix="distilbert."),
    },
    reference=EncoderReference,
    cases=bert_cases.CASES,
    mistakes=named(
        positions_from_the_next_row,
        tanh_form_of_gelu,
        no_token_type,
        another_epsilon,
        first_token,
        control_tokens_left_out_of_the_mean,
        no_last_token,
    ),
    tokens=lambda reference, given, _: reference.tokens(text_of(given)),
    # The tanh form of GELU, the smallest of the mistakes, leaves 1.3e-8 of a cosine; the right one 2e-13.
    bars={"float32": 1 - 1e-9, "bfloat16": 0.998},
    bar="float32",
    dtype="float32",
)
_SHORT: Final = {**ministral3.YARN, "original_max_position_embeddings": 256, "factor": 4.0}
FAMILIES: Final[dict[str, Compared]] = {
    "bert": ENCODER,
    "xlm_roberta": replace(
        ENCODER,
        configurations={
            "xlm-roberta": encoder.ROBERTA_TINY,
            "roberta. before names": replace(encoder.ROBERTA_TINY, prefix="roberta.", hidden=64),
        },
    ),
    "llama_nemotron_embed": Compared(
        configurations={
            "tiny": llama.TINY,
            "model. before names, shards": replace(
                llama.TINY, layers=3, kv_heads=4, text_prefix="model.", shards=2
            ),
            "last, rope_parameters": replace(
                llama.TINY, hidden=256, pooling="last", rope_key="rope_parameters"
            ),
            "cls, no scaling": replace(llama.TINY, hidden=256, head_dim=32, pooling="cls", rope=None),
            "no pooling named": replace(llama.TINY, hidden=256, pooling=None),
        },
        reference=LlamaReference,
        cases=llama_cases.CASES,
        mistakes={
            **named(
                attention_to_the_left_alone,
                last_token,
                first_token_left_out_of_the_mean,
                state_before_the_final_norm,
                no_first_token,
                no_prefixes,
            ),
            "rope without its scaling": plain_rope(5e5),
            "another theta": plain_rope(1e4),
        },
    ),
    "nemotron_3_embed": Compared(
        configurations={
            "tiny": ministral3.TINY,
            "model. before names, shards, no marks": replace(
                ministral3.TINY, layers=3, kv_heads=4, text_prefix="model.", shards=2, marks="none"
            ),
            "attention factor of the scaling, both marks": replace(
                ministral3.TINY,
                hidden=256,
                head_dim=64,
                marks="bos and eos",
                rope={key: value for key, value in _SHORT.items() if not key.startswith("mscale")},
            ),
            "no scaling, causal, last": replace(
                ministral3.TINY,
                causal=True,
                pooling="last",
                declares=False,
                rope={"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3}
                | {"original_max_position_embeddings": 100},
            ),
        },
        reference=Ministral3Reference,
        cases=ministral3_cases.CASES,
        mistakes={
            **named(
                attention_to_the_left_alone,
                last_token,
                first_token_left_out_of_the_mean,
                state_before_the_final_norm,
                no_first_token,
                no_prefixes,
                queries_without_their_scale,
                queries_scaled_by_another_context,
                attention_factor_without_the_second_scale,
            ),
            "rope without its scaling": plain_rope(1e6),
            "rope divided by the factor": plain_rope(1e6, divided_by=16),
        },
        bar="float32",
        apart=0.99,
    ),
    "qwen3_embedding": Compared(
        configurations={
            "tiny": qwen3.TINY,
            "real heads, bare names": replace(
                qwen3.TINY,
                head_dim=128,
                heads=2,
                kv_heads=1,
                layers=3,
                text_prefix="",
                appends_end=False,
                shards=2,
            ),
            "other theta": replace(
                qwen3.TINY, hidden=192, kv_heads=4, theta=10_000.0, rope_key="rope_parameters"
            ),
        },
        reference=Qwen3Reference,
        cases=qwen3_cases.CASES,
        mistakes={
            **named(
                attention_both_ways,
                mean_pooling,
                state_before_the_final_norm,
                no_norm_of_queries_and_keys,
                no_last_token,
                a_space_behind_the_prompt,
            ),
            "theta of the larger family": plain_rope(5e6),
        },
        tokens=lambda reference, given, _: reference.tokens(
            text_of(given), given.role.value, given.instruction
        ),
    ),
    "colqwen3": Compared(
        configurations={
            "tomoro": qwen3.COL_TINY,
            "tomoro, no bias": replace(qwen3.COL_TINY, bias=False, width=64, shards=2),
            "ops": replace(
                qwen3.COL_TINY, ops=True, text_prefix="language_model.", vision_prefix="visual.", width=96
            ),
        },
        reference=ColQwen3Reference,
        cases=colqwen3_cases.CASES,
        mistakes={
            **named(no_bias, no_final_norm_of_the_decoder, attention_both_ways),
            **{
                name: OF_QWEN3_VL[name]
                for name in ("one dimensional positions", "deepstack dropped", "chunked mrope")
            },
        },
        tokens=None,
    ),
    "llama_nemotron_colembed_vl": Compared(
        configurations={"small": replace(llama_nemotron_vl.COLEMBED_TINY, image_size=64, base_vocab=600)},
        reference=ColEmbedReference,
        cases=llama_page_cases.CASES,
        mistakes=named(causal_pages, pages_before_the_final_norm, no_norm_behind_the_encoder),
        tokens=lambda reference, given, pixels: reference.tokens(
            text_of(given), [len(pixels[image].values) for image in given.images], given.role.value
        ),
    ),
    "nemotron_colembed_vl": Compared(
        configurations={
            "tiny": qwen3.COLEMBED_TINY,
            "more heads, shards": replace(qwen3.COLEMBED_TINY, hidden=192, heads=6, kv_heads=3, shards=2),
            "as the 8b": as_the_largest(qwen3.COLEMBED_TINY),
        },
        reference=NemotronColEmbedReference,
        cases=qwen3_page_cases.CASES,
        mistakes={
            **named(attention_to_the_left_alone, state_behind_the_final_norm, text_before_the_images),
            **{
                name: OF_QWEN3_VL[name]
                for name in (
                    *("one dimensional positions", "deepstack dropped", "deepstack levels in reverse"),
                    *("chunked mrope", "no norm of queries and keys"),
                    "rows and columns exchanged in the vision rotation",
                )
            },
        },
        tokens=lambda reference, given, _: reference.prompt(
            given, [reference.pixels(image)[1] for image in given.images]
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model and its reference, which reads the same files, with the reference's rows of all cases."""

    name: str
    compared: Compared
    parity: Parity
    model: Model
    reference: Any
    rows: np.ndarray


def in_group(family: str, *values: str) -> Any:
    """Keep a family's tests in one process, and those of another apart."""
    return pytest.param((family, *values), marks=pytest.mark.xdist_group(f"parity of {family}"))


def parity_of(family: str) -> Parity:
    compared = FAMILIES[family]
    return Parity(title=family, cases=compared.cases, bars=compared.bars)


EACH: Final = [
    in_group(family, name) for family, compared in FAMILIES.items() for name in compared.configurations
]
READS_TEXT: Final = [
    family for family, compared in FAMILIES.items() if not any(given.images for given in compared.cases)
]
EACH_OF_TEXT: Final = [
    in_group(family, name) for family in READS_TEXT for name in FAMILIES[family].configurations
]
FIRST_OF_TEXT: Final = [
    in_group(family, next(iter(FAMILIES[family].configurations))) for family in READS_TEXT
]


@pytest.fixture(scope="module", params=EACH, ids="-".join)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    family, name = request.param
    compared, parity = FAMILIES[family], parity_of(family)
    path = written(compared.configurations[name], dtype=compared.dtype)
    reference, model = compared.reference(path), open_model(path)
    assert model.family == family
    rows = parity.expected(reference)
    return Built(name=name, compared=compared, parity=parity, model=model, reference=reference, rows=rows)


def test_tokens(built: Built) -> None:
    cases, pixels = built.compared.cases, preprocessed(built.model, built.compared.cases)
    for given, made in zip(cases, prompts(built.model, cases, pixels), strict=True):
        if built.compared.tokens is not None:
            assert made.tokens.tolist() == built.compared.tokens(built.reference, given, pixels)


@pytest.mark.parametrize("dtype", BARS)
def test_rows(built: Built, dtype: str, record_property: Record) -> None:
    built.parity.check(built.name, built.model, built.rows, dtype, record_property)


@pytest.mark.parametrize("built", EACH_OF_TEXT, ids="-".join, indirect=True)
def test_company_changes_nothing(built: Built) -> None:
    assert company(built.model, built.compared.cases[:8]) >= 0.999999


@pytest.mark.parametrize("built", EACH_OF_TEXT, ids="-".join, indirect=True)
def test_a_single_token(built: Built) -> None:
    text = built.model.load_text(dtype="float32", device="cpu")
    found = vectors(built.model, text, batch_of(built.model, None, [Given(parts=((7,),))]))
    assert cosines(found, built.reference.vector([7])[None])[0] >= built.parity.bars["float32"]


@pytest.mark.parametrize("built", FIRST_OF_TEXT, ids="-".join, indirect=True)
def test_the_cases_are_far_apart(built: Built) -> None:
    assert nearest(built.rows) < built.compared.apart


@pytest.fixture(scope="module")
def ours(written: WriteCheckpoint) -> Callable[[str], tuple[Path, np.ndarray]]:
    """Our rows of a family's first configuration, to be compared with references that make a mistake."""
    made: dict[str, tuple[Path, np.ndarray]] = {}

    def rows_of(family: str) -> tuple[Path, np.ndarray]:
        if family not in made:
            compared = FAMILIES[family]
            path = written(next(iter(compared.configurations.values())), dtype=compared.dtype)
            made[family] = path, parity_of(family).found(open_model(path))
        return made[family]

    return rows_of


@pytest.mark.parametrize(
    "case",
    [in_group(family, name) for family, compared in FAMILIES.items() for name in compared.mistakes],
    ids="-".join,
)
def test_a_mistake_fails_the_bar(
    case: tuple[str, str], ours: Callable[[str], tuple[Path, np.ndarray]], record_property: Record
) -> None:
    family, name = case
    compared, (path, found) = FAMILIES[family], ours(family)
    reference = compared.reference(path)
    compared.mistakes[name](reference)
    parity_of(family).check_mistake(name, reference, found, record_property, bar=compared.bar)
