"""Random checkpoints of ColBERT: Stanford's form with the body of BERT, PyLate's with any."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from tessera.checkpoint.declared import MODULES_FILE, PROMPTS_FILE, STANFORD, STANFORD_FILE
from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.tokenizer import TOKENIZER_FILE
from tessera_tools.random_checkpoint.encoder import BASE, MULTILINGUAL, ROBERTA, UNCASED, EncoderSpec
from tessera_tools.random_checkpoint.spec import Sizes, modules_json, prompts_json
from tessera_tools.random_checkpoint.weights import RandomTensor

_FOLDER: Final = "1_Dense"
_MARKERS: Final = ("[Q] ", "[D] ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColbertSpec(EncoderSpec):
    """A checkpoint of ColBERT whose token vectors are ``width`` wide.

    In Stanford's ``form`` the projection is among the weights, and ``[unused0]`` and ``[unused1]`` mark the
    sides; in PyLate's it is a module, and the markers are the last tokens. ``attended`` says whether tokens
    attend to those that expand a query.
    """

    form: Literal["stanford", "pylate"] = "stanford"
    width: int = 32
    query_length: int = 32
    document_length: int = 180
    attended: bool = False

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        # By name: a dataclass with slots is another class than the one that super() finds.
        files = EncoderSpec.files(self, dtype, seed)
        for name in [name for name in files if name in (MODULES_FILE, PROMPTS_FILE) or "/" in name]:
            del files[name]
        if self.form == "stanford":
            return files | self._stanford(files[CONFIG_FILE])
        return files | self._pylate(files)

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        if self.form == "stanford":
            yield from EncoderSpec.tensors(self, directory)
            yield self._projection()
            return
        marked = replace(self, vocab_size=self.vocab_size + len(_MARKERS))
        yield from EncoderSpec.tensors(marked, directory)

    def modules(self) -> Mapping[str, Iterable[RandomTensor]]:
        """The tensors of each module by its folder."""
        return {_FOLDER: [self._projection()]} if self.form == "pylate" else {}

    def _projection(self) -> RandomTensor:
        shape = (self.width, self.hidden)
        return RandomTensor(name="linear.weight", shape=shape, mean=0.0, deviation=1 / math.sqrt(self.hidden))

    def _stanford(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            CONFIG_FILE: config | {"architectures": [STANFORD]},
            STANFORD_FILE: {
                "query_token_id": "[unused0]",
                "doc_token_id": "[unused1]",
                "query_maxlen": self.query_length,
                "doc_maxlen": self.document_length,
                "dim": self.width,
                "similarity": "cosine",
                "attend_to_mask_tokens": self.attended,
                "mask_punctuation": True,
            },
        }

    def _pylate(self, files: dict[str, Any]) -> dict[str, Any]:
        """Return the files with the markers behind the vocabulary, and the projection as a module."""
        tokenizer = files[TOKENIZER_FILE]
        like = tokenizer["added_tokens"][0] | {"special": False, "normalized": True}
        markers = [
            like | {"id": self.vocab_size + place, "content": name} for place, name in enumerate(_MARKERS)
        ]
        return {
            CONFIG_FILE: files[CONFIG_FILE] | {"vocab_size": self.vocab_size + len(_MARKERS)},
            TOKENIZER_FILE: tokenizer | {"added_tokens": [*tokenizer["added_tokens"], *markers]},
            MODULES_FILE: modules_json(
                ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
            ),
            f"{_FOLDER}/{CONFIG_FILE}": {
                "in_features": self.hidden,
                "out_features": self.width,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
                "use_residual": False,
            },
            PROMPTS_FILE: prompts_json(
                {},
                similarity="MaxSim",
                model_type="ColBERT",
                query_prefix=_MARKERS[0],
                document_prefix=_MARKERS[1],
                query_length=self.query_length,
                document_length=self.document_length,
                attend_to_expansion_tokens=self.attended,
                skiplist_words=list(string.punctuation),
                do_query_expansion=True,
            ),
        }


TINY: Final = ColbertSpec(prefix="bert.")
FULL: Final = ColbertSpec(prefix="bert.", width=128, **BASE, **UNCASED)
PYLATE_TINY: Final = ColbertSpec(form="pylate")
ROBERTA_TINY: Final = ColbertSpec(form="pylate", **ROBERTA)
ROBERTA_FULL: Final = ColbertSpec(form="pylate", width=128, **{**ROBERTA, **BASE, **MULTILINGUAL})

SIZES: Final = Sizes(tiny=TINY, full=FULL)
ROBERTA_SIZES: Final = Sizes(tiny=ROBERTA_TINY, full=ROBERTA_FULL)
