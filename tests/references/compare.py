"""Compares the vectors of a checkpoint with those of transformers, both in float32 on the CPU.

    python -m tests.references.compare DIR

For checkpoints of each family but llama_nemotron_vl, whatever wrote them.
It takes the memory of two copies in float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tessera.models import open_model
from tests.models.llama_nemotron_embed import cases as llama
from tests.models.qwen3_embedding import cases as embedding
from tests.models.qwen3_vl_embedding import cases as vl
from tests.models.running import batch_of, cosines, vectors
from tests.references.families import reference_of

_INPUTS = {
    "llama_nemotron_embed": llama.CASES,
    "qwen3_embedding": embedding.CASES,
    "qwen3_vl_embedding": list(vl.CASES.values()),
}


def main(directory: str) -> None:
    model = open_model(directory)
    inputs = _INPUTS[model.family]
    vision = model.load_vision(dtype="float32", device="cpu") if model.vision else None
    text = model.load_text(dtype="float32", device="cpu")
    found = np.concatenate([vectors(model, text, batch_of(model, vision, [each])) for each in inputs])
    reference = reference_of(Path(directory))
    for each, vector in zip(inputs, found, strict=True):
        shown = " ".join(part if isinstance(part, str) else "(image)" for part in each.parts)
        cosine = cosines(vector[None], reference.answer(each)[None])[0]
        print(f"{cosine:.7f}  {each.role.value:8}{shown[:80]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
