"""BGE M3's heads beside its pooled vector: token weights and token vectors, in two files of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tessera.checkpoint.pickled import read_state
from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.checkpoint.weight_names import HEAD_FILES
from tessera.errors import CheckpointError
from tessera.models.base import TOKEN_WEIGHTS, Output, OutputKind

if TYPE_CHECKING:
    from tessera.nn.outputs import OutputHead

# What no weight is given for, by its key and its name where the configuration of the tokenizer has none.
_DROPPED: Final = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class M3Heads:
    """The files of the heads that a checkpoint has; ``dropped`` are the ids that have no weight."""

    sparse: Path | None
    vectors: Path | None
    dropped: frozenset[int]

    @classmethod
    def find(cls, path: Path, tokenizer: PlainTokenizer) -> M3Heads | None:
        """Return the heads of a checkpoint, None where it has neither file; raises ``CheckpointError``."""
        sparse, vectors = (file if (file := path / name).exists() else None for name in HEAD_FILES)
        if sparse is None and vectors is None:
            return None
        dropped = frozenset(tokenizer.id_of(token_name(path, *token)) for token in _DROPPED.items())
        return cls(sparse=sparse, vectors=vectors, dropped=dropped)

    def outputs(self, hidden: int) -> Sequence[Output]:
        """The outputs of the heads; token vectors are as wide as the states, which ``load`` checks."""
        found = []
        if self.sparse is not None:
            found.append(Output(kind=OutputKind.SPARSE, width=1, unit_length=False))
        if self.vectors is not None:
            found.append(Output(kind=OutputKind.TOKENS, width=hidden, pooling="none"))
        return found

    @property
    def token_weights(self) -> Output | None:
        """The output of the weights that the sparse one is made of; None without the file of that."""
        if self.sparse is None:
            return None
        return Output(kind=OutputKind.TOKENS, width=1, unit_length=False, name=TOKEN_WEIGHTS)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in float32, at most: files may have them in half precision."""
        return sum(2 * file.stat().st_size for file in (self.sparse, self.vectors) if file is not None)

    def load(self, hidden: int, *, device: str) -> Mapping[str, OutputHead]:
        """Read the weights; raises ``CheckpointError`` for other shapes than the tower's states ask for."""
        import torch

        from tessera.nn.token_heads import EachWeight, TokenVectors, TokenWeights

        def linear(file: Path, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            state = read_state(file)
            found = {name: values.shape for name, values in state.items()}
            if found != {"weight": (width, hidden), "bias": (width,)}:
                raise CheckpointError(f"{file}: expected weight [{width}, {hidden}] and bias, found {found}")
            weight, bias = (torch.from_numpy(state[name].astype(np.float32)) for name in ("weight", "bias"))
            return weight, bias

        heads: dict[str, OutputHead] = {}
        if self.sparse is not None:
            for name, kind in (("sparse", TokenWeights), (TOKEN_WEIGHTS, EachWeight)):
                heads[name] = kind(*linear(self.sparse, 1), self.dropped).to(device)
        if self.vectors is not None:
            heads["multivector"] = TokenVectors(*linear(self.vectors, hidden)).to(device)
        return heads
