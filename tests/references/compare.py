"""Compares the outputs of a checkpoint with those of transformers, both in float32 on the CPU.

    python -m tests.references.compare DIR ['{"task": "score"}']

For checkpoints of each family, whatever wrote them; behind the directory there may be the family's options.
It takes the memory of two copies in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tessera.models import open_model
from tessera.models.base import OutputKind
from tests.models.bert import cases as encoder
from tests.models.colbert import cases as colbert
from tests.models.colqwen3 import cases as colqwen3
from tests.models.llama_nemotron_colembed_vl import cases as colembed
from tests.models.llama_nemotron_embed import cases as llama
from tests.models.llama_nemotron_rerank import cases as rerank
from tests.models.llama_nemotron_rerank_vl import cases as rerank_vl
from tests.models.nemotron_3_5_embed import cases as nemotron_3_5
from tests.models.nemotron_3_embed import cases as nemotron_3
from tests.models.nemotron_colembed_vl import cases as nemotron_colembed
from tests.models.qwen3_embedding import cases as embedding
from tests.models.qwen3_rerank import cases as qwen3_rerank
from tests.models.qwen3_vl_embedding import cases as vl
from tests.models.qwen3_vl_rerank import cases as qwen3_vl_rerank
from tests.models.running import Given, Pair, batch_of, cosines, vectors
from tests.models.two_towers import cases as two_towers
from tests.references.families import reference_of

INPUTS: dict[str, Sequence[Given | Pair]] = {
    "bert": encoder.CASES,
    "bert_colbert": colbert.CASES,
    "bert_rerank": rerank.CASES,
    "colqwen3": colqwen3.CASES,
    "llama_nemotron_colembed_vl": colembed.CASES,
    "llama_nemotron_rerank": rerank.CASES,
    "llama_nemotron_rerank_vl": rerank_vl.CASES,
    "llama_nemotron_embed": llama.CASES,
    "llama_nemotron_vl": colembed.CASES,
    "nemotron_3_5_embed": nemotron_3_5.CASES,
    "nemotron_3_embed": nemotron_3.CASES,
    "nemotron_colembed_vl": nemotron_colembed.CASES,
    "qwen3_embedding": embedding.CASES,
    "qwen3_rerank": qwen3_rerank.CASES,
    "qwen3_vl_embedding": list(vl.CASES.values()),
    "qwen3_vl_rerank": qwen3_vl_rerank.CASES,
    **dict.fromkeys(("clip", "siglip", "siglip2"), two_towers.CASES),
    "splade": encoder.CASES,
    "xlm_roberta": encoder.CASES,
    "xlm_roberta_colbert": colbert.CASES,
    "xlm_roberta_rerank": rerank.CASES,
}


def main(directory: str, options: Mapping[str, object] = {}) -> None:
    model = open_model(directory, options)
    inputs = INPUTS[model.family]
    vision = model.load_vision(dtype="float32", device="cpu") if model.vision else None
    text = model.load_text(dtype="float32", device="cpu")
    reference = reference_of(Path(directory), model.family)
    for each in inputs:
        found = vectors(model, text, batch_of(model, vision, [each]))
        expected = np.atleast_2d(reference.answer(each))
        sides = [each] if isinstance(each, Given) else [each.query, each.document]
        shown = " / ".join(
            " ".join(part.strip() if isinstance(part, str) else "(image)" for part in side.parts)
            for side in sides
        )
        if model.output.kind is OutputKind.SCORE:
            print(f"{found.item():10.6f} for {expected.item():10.6f}  {shown[:80]}", flush=True)
        else:
            print(f"{cosines(found, expected).min():.7f}  {sides[0].role.value:8}{shown[:80]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
