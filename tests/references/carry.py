"""Float32 vectors of transformers on the CPU, in files, for machines that cannot compute them.

A GPU machine may have another release of transformers, or none. So the vectors of a few inputs are computed
here and carried over as files; random checkpoints are made anew there, since equal specs give equal bytes.

    python -m tests.references.carry            # write all files anew
    python -m tests.references.carry NAME ...   # only these
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import RERANK_TINY as BERT_RERANK
from tessera_tools.random_checkpoint.encoder import ROBERTA_RERANK_TINY, ROBERTA_TINY, SPLADE_TINY
from tessera_tools.random_checkpoint.encoder import TINY as BERT
from tessera_tools.random_checkpoint.llama import TINY as LLAMA
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY, RERANK_TINY
from tessera_tools.random_checkpoint.llama_rerank import TINY as RERANK
from tessera_tools.random_checkpoint.ministral3 import TINY as NEMOTRON_3
from tessera_tools.random_checkpoint.ministral3 import VL_TINY as NEMOTRON_3_5
from tessera_tools.random_checkpoint.qwen3 import COL_TINY, FULL, TINY, VL_FULL, VL_RERANK_TINY, VL_TINY
from tessera_tools.random_checkpoint.qwen3 import COLEMBED_TINY as NEMOTRON_COLEMBED
from tessera_tools.random_checkpoint.qwen3 import RERANK_TINY as QWEN3_RERANK
from tessera_tools.random_checkpoint.spec import Spec
from tessera_tools.random_checkpoint.towers import CLIP_TINY, SIGLIP2_TINY, SIGLIP_TINY, Tower
from tests.models.bert import cases as encoder
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
from tests.models.two_towers import cases as two_towers

if TYPE_CHECKING:
    from tests.models.running import Given, Pair

FOLDER = Path(__file__).parent / "carried"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A checkpoint in bfloat16, inputs, and the file of what becomes of them, float32 ``[rows, width]``.

    A row is the unit vector of an input or of a token, the logit of a pair, or an input's weights of the
    whole vocabulary.
    """

    name: str
    spec: Spec
    inputs: tuple[Given | Pair, ...]
    full_size: bool = False

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.npy"

    def vectors(self) -> np.ndarray:
        return np.load(self.file)

    def checkpoint(self, folder: Path) -> Path:
        """Write the checkpoint below ``folder``, if it is not there."""
        path = folder / self.name
        if not path.exists():
            write_checkpoint(path, self.spec, dtype="bfloat16")
        return path

    def compute(self, folder: Path) -> np.ndarray:
        from tests.references.families import reference_of

        path = self.checkpoint(folder)
        reference = reference_of(path)
        return np.concatenate([np.atleast_2d(reference.answer(each)) for each in self.inputs])


_SMALL: Final = {"image_size": 64, "base_vocab": 600}
"""Tiles of 16 patches."""

_VL_SMALL = {
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "sections": (24, 20, 20),
    "vision_hidden": 128,
    "vision_heads": 2,
    "positions": 2304,
}

_TOWER: Final = Tower(hidden=256, layers=3, heads=4, intermediate=512)
_WIDE_HEADS: Final = Tower(hidden=288, layers=3, heads=4, intermediate=430)

ALL = {
    each.name: each
    for each in (
        Carried(name="llama_nemotron_embed", spec=replace(LLAMA, hidden=256), inputs=tuple(llama.CASES)),
        # Heads as wide as the published models', which is what kernels are chosen by.
        Carried(
            name="qwen3_embedding",
            spec=replace(TINY, hidden=256, heads=4, kv_heads=2, head_dim=128),
            inputs=tuple(embedding.CASES),
        ),
        Carried(
            name="qwen3_vl_embedding",
            spec=replace(VL_TINY, **_VL_SMALL),
            inputs=tuple(vl.CASES.values()),
        ),
        Carried(
            name="qwen3_vl_embedding_wide_heads",
            spec=replace(VL_TINY, hidden=256, vision_hidden=144, vision_heads=2, vision_intermediate=430),
            inputs=tuple(vl.CASES.values()),
        ),
        Carried(name="llama_nemotron_rerank", spec=replace(RERANK, hidden=256), inputs=tuple(rerank.CASES)),
        Carried(
            name="llama_nemotron_rerank_vl",
            spec=replace(RERANK_TINY, **_SMALL, hidden=256, head_dim=64),
            inputs=tuple(rerank_vl.CASES),
        ),
        Carried(
            name="llama_nemotron_colembed_vl",
            spec=replace(
                COLEMBED_TINY, **_SMALL, hidden=256, head_dim=128, vision_hidden=192, vision_heads=2
            ),
            inputs=tuple(colembed.CASES),
        ),
        Carried(
            name="colqwen3",
            spec=replace(COL_TINY, **_VL_SMALL, width=64),
            inputs=tuple(colqwen3.CASES),
        ),
        Carried(
            name="nemotron_3_embed",
            spec=replace(NEMOTRON_3, hidden=256, kv_heads=2, head_dim=128),
            inputs=tuple(nemotron_3.CASES[:7]),
        ),
        Carried(
            name="nemotron_3_5_embed",
            spec=replace(
                NEMOTRON_3_5, hidden=256, kv_heads=2, head_dim=128, vision_hidden=128, longest_edge=300
            ),
            inputs=tuple(nemotron_3_5.CASES),
        ),
        Carried(
            name="nemotron_colembed_vl",
            spec=replace(NEMOTRON_COLEMBED, **_VL_SMALL),
            inputs=tuple(nemotron_colembed.CASES[:7]),
        ),
        # Heads as wide as the published models', and those of so400m.
        Carried(
            name="clip",
            spec=replace(CLIP_TINY, text=_TOWER, vision=_TOWER),
            inputs=tuple(two_towers.CASES),
        ),
        Carried(
            name="siglip",
            spec=replace(SIGLIP_TINY, text=_TOWER, vision=_TOWER, width=256),
            inputs=tuple(two_towers.CASES),
        ),
        Carried(
            name="siglip_wide_heads",
            spec=replace(SIGLIP_TINY, text=_WIDE_HEADS, vision=_WIDE_HEADS, width=288),
            inputs=tuple(two_towers.CASES),
        ),
        Carried(
            name="siglip2",
            spec=replace(
                SIGLIP2_TINY, text=_TOWER, vision=_TOWER, width=256, image_size=256, most_patches=64
            ),
            inputs=tuple(two_towers.CASES),
        ),
        # Heads as wide as MiniLM's, and as those of the others.
        Carried(name="bert", spec=replace(BERT, hidden=128), inputs=tuple(encoder.CASES)),
        Carried(
            name="xlm_roberta",
            spec=replace(ROBERTA_TINY, hidden=256, intermediate=512),
            inputs=tuple(encoder.CASES),
        ),
        Carried(name="splade", spec=SPLADE_TINY, inputs=tuple(encoder.CASES)),
        Carried(
            name="bert_rerank",
            spec=replace(BERT_RERANK, hidden=256, intermediate=512),
            inputs=tuple(rerank.CASES),
        ),
        Carried(
            name="xlm_roberta_rerank",
            spec=replace(ROBERTA_RERANK_TINY, hidden=256, intermediate=512),
            inputs=tuple(rerank.CASES),
        ),
        Carried(
            name="qwen3_rerank",
            spec=replace(QWEN3_RERANK, hidden=256, heads=4, kv_heads=2, head_dim=128),
            inputs=tuple(qwen3_rerank.CASES),
        ),
        Carried(
            name="qwen3_vl_rerank",
            spec=replace(VL_RERANK_TINY, **_VL_SMALL),
            inputs=tuple(qwen3_vl_rerank.CASES),
        ),
        Carried(name="qwen3_embedding_full", spec=FULL, inputs=tuple(embedding.CASES[:6]), full_size=True),
        Carried(
            name="qwen3_vl_embedding_full",
            spec=VL_FULL,
            inputs=tuple(list(vl.CASES.values())[:10]),
            full_size=True,
        ),
    )
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ALL:
            vectors = ALL[name].compute(Path(folder))
            np.save(ALL[name].file, vectors)
            print(f"{ALL[name].file}: {vectors.shape}")


if __name__ == "__main__":
    main(sys.argv[1:])
