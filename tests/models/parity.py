"""The frame of parity tests: a family against an independent reference, and against mistakes in that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tessera.models.base import Model
from tests.models.running import Given, batch_of, cosines, vectors

BARS: Mapping[str, float] = {"float32": 0.99999, "bfloat16": 0.998}
"""Those of families without their own."""

Record = Callable[[str, Any], None]


class Reference(Protocol):
    """What the families' references have in common."""

    def answer(self, given: Given, /) -> np.ndarray:
        """Float32, the vector of an input or those of its tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The inputs that a family is compared on; ``title`` names it in the tables that are printed.

    ``bars`` are the least cosines of an output with the reference's, by the type that is computed in.
    """

    title: str
    cases: Sequence[Given]
    bars: Mapping[str, float] = field(default_factory=lambda: BARS)

    def expected(self, reference: Reference) -> np.ndarray:
        """The reference's rows of all inputs, float32 ``[rows, width]``."""
        return np.concatenate([np.atleast_2d(reference.answer(each)) for each in self.cases])

    def found(self, model: Model, dtype: str = "float32") -> np.ndarray:
        """Ours, from one batch of all inputs."""
        vision = None if model.vision is None else model.load_vision(dtype=dtype, device="cpu")
        text = model.load_text(dtype=dtype, device="cpu")
        return vectors(model, text, batch_of(model, vision, self.cases))

    def check(self, name: str, model: Model, expected: np.ndarray, dtype: str, record: Record) -> None:
        """Check the worst row against the bar of ``dtype``; ``name`` is that of a configuration."""
        cosine = cosines(self.found(model, dtype), expected).min()
        line = f"{name:46}{dtype:10}1 - worst cosine {1 - cosine:.2e} of {len(expected)}"
        record(f"parity of {self.title} with transformers in float32", line)
        assert cosine >= self.bars[dtype], line

    def check_mistake(
        self, name: str, reference: Reference, found: np.ndarray, record: Record, *, bar: str = "bfloat16"
    ) -> None:
        """Check that our rows fail a bar against the reference, which makes the mistake of this name.

        The first input with a row that fails ends it. The cases begin with the short ones, and few mistakes
        need the long ones.
        """
        worst, rows, tried = 1.0, 0, 0
        while worst >= self.bars[bar] and tried < len(self.cases):
            wrong = np.atleast_2d(reference.answer(self.cases[tried]))
            worst = min(worst, float(cosines(found[rows : rows + len(wrong)], wrong).min()))
            rows, tried = rows + len(wrong), tried + 1
        line = f"{name.replace('_', ' '):52}1 - worst cosine {1 - worst:.2e} in {tried} of {len(self.cases)}"
        record(f"parity of {self.title} with references that make one mistake", line)
        assert worst < self.bars[bar], line


# Mistakes of references around a text backbone of transformers.


def attention_to_the_left_alone(reference: Any) -> None:
    reference.causal = True


def attention_both_ways(reference: Any) -> None:
    reference.causal = False


def last_token(reference: Any) -> None:
    reference.pool = lambda hidden: hidden[-1]


def mean_pooling(reference: Any) -> None:
    reference.pool = lambda hidden: hidden.mean(0)


def first_token_left_out_of_the_mean(reference: Any) -> None:
    reference.pool = lambda hidden: hidden[1:].mean(0)


def state_before_the_final_norm(reference: Any) -> None:
    reference.model.norm = nn.Identity()


def no_norm_of_queries_and_keys(reference: Any) -> None:
    for layer in reference.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


def no_first_token(reference: Any) -> None:
    whole = reference.tokens
    reference.tokens = lambda *given: whole(*given)[1:]


def no_last_token(reference: Any) -> None:
    whole = reference.tokens
    reference.tokens = lambda *given: whole(*given)[:-1]


def no_prefixes(reference: Any) -> None:
    whole = reference.tokens
    reference.tokens = lambda text, role: whole(text, "none")


def plain_rope(theta: float, *, divided_by: float = 1.0) -> Callable[[Any], None]:
    """Frequencies of this theta, without any scaling or all divided alike."""

    def change(reference: Any) -> None:
        count = len(reference.model.rotary_emb.inv_freq)
        reference.model.rotary_emb.inv_freq = theta ** -(torch.arange(count) / count) / divided_by

    return change
