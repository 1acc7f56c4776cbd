"""What a random checkpoint is made of, said by the family whose layout it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tessera.checkpoint.declared import MODULES_FILE, PROMPTS_FILE
from tessera_tools.random_checkpoint.weights import RandomTensor


class Spec(Protocol):
    """What to write: the shapes of one family's checkpoint."""

    @property
    def shards(self) -> int: ...

    def files(self, dtype: str, seed: int) -> Mapping[str, Any]:
        """The JSON files by their place in the directory, at most one folder deep."""
        ...

    def tensors(self, directory: Path) -> Iterable[RandomTensor]:
        """The tensors in the files' order; the JSON files are in ``directory`` already."""
        ...


@runtime_checkable
class WithHeads(Spec, Protocol):
    """A spec with files of heads that ``torch.save`` writes."""

    def pickled(self, seed: int) -> Mapping[str, Mapping[str, npt.NDArray[np.float32]]]:
        """The tensors of each such file by name, by the name of the file."""
        ...


@runtime_checkable
class WithModules(Spec, Protocol):
    """A spec with modules of ``modules.json`` that have weights of their own."""

    def modules(self) -> Mapping[str, Iterable[RandomTensor]]:
        """The tensors of each such module by its folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A family's checkpoints: ``tiny`` runs anywhere, ``full`` has the published model's shapes."""

    tiny: Spec
    full: Spec


def declared_json(
    pooling: str, hidden: int, *, prompts: Mapping[str, str], normalize: bool = True
) -> dict[str, Any]:
    """The files by which ``sentence-transformers`` makes a vector: pooling, and what follows."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    return {
        MODULES_FILE: modules_json(f"sentence_transformers.models.{name}" for name in names),
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden,
            f"pooling_mode_{pooling}": True,
            "include_prompt": True,
        },
        PROMPTS_FILE: prompts_json(prompts),
    }


def splade_json(vocab_size: int, *, prompts: Mapping[str, str]) -> dict[str, Any]:
    """The files by which ``sentence-transformers`` makes weights of a vocabulary's logits."""
    package = "sentence_transformers.sparse_encoder.models"
    return {
        MODULES_FILE: modules_json([f"{package}.MLMTransformer", f"{package}.SpladePooling"]),
        "1_SpladePooling/config.json": {
            "pooling_strategy": "max",
            "activation_function": "relu",
            "word_embedding_dimension": vocab_size,
        },
        PROMPTS_FILE: prompts_json(
            {"query": "", "document": "", **prompts}, similarity="dot", model_type="SparseEncoder"
        ),
    }


def modules_json(types: Iterable[str]) -> list[dict[str, Any]]:
    """``modules.json`` of these classes, the first of which is in the directory itself."""
    return [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{type_.rpartition('.')[2]}" if place else "",
            "type": type_,
        }
        for place, type_ in enumerate(types)
    ]


def prompts_json(prompts: Mapping[str, str], *, similarity: str = "cosine", **own: Any) -> dict[str, Any]:
    """``config_sentence_transformers.json``, with further keys of some kinds of models."""
    return {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": similarity, **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """What checkpoints of decoders have in common; the defaults make one that runs on any machine.

    ``base_vocab`` are the byte-pair tokens of the vocabulary, and ``text_prefix`` stands before the names of
    the decoder's tensors.
    """

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    base_vocab: int = 2000
    max_positions: int = 131072
    text_prefix: str = ""
    shards: int = 1

    control: ClassVar[Sequence[str]] = ()

    def id_of(self, name: str) -> int:
        """The id of a control token, which stand behind the byte-pair tokens."""
        return self.base_vocab + self.control.index(name)

    def decoder_json(self, eps: float) -> dict[str, Any]:
        """What ``config.json`` says of the sizes, with the ``eps`` of the norms."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": eps,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
        }


def rope_json(key: str, theta: float, rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``config.json`` says of RoPE: below ``rope_scaling``, or ``rope_parameters`` as newer tools do."""
    if key == "rope_parameters":
        return {key: {"rope_theta": theta, "rope_type": "default", **(rope or {})}}
    return {"rope_theta": theta, "rope_scaling": None if rope is None else dict(rope)}
