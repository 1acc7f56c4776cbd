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
from typing import TYPE_CHECKING

import numpy as np

from tessera.tools.random_checkpoint.checkpoint import Spec, write_checkpoint
from tessera.tools.random_checkpoint.llama import TINY as LLAMA
from tessera.tools.random_checkpoint.qwen3 import FULL, TINY, VL_FULL, VL_TINY
from tests.models.llama_nemotron_embed import cases as llama
from tests.models.qwen3_embedding import cases as embedding
from tests.models.qwen3_vl_embedding import cases as vl

if TYPE_CHECKING:
    from tests.models.running import Given

FOLDER = Path(__file__).parent / "carried"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A checkpoint in bfloat16, inputs, and the file of their unit vectors, float32 ``[inputs, width]``."""

    name: str
    spec: Spec
    inputs: tuple[Given, ...]
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
        return np.stack([reference.answer(each) for each in self.inputs])


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
            spec=replace(
                VL_TINY,
                hidden=256,
                heads=4,
                kv_heads=2,
                head_dim=128,
                sections=(24, 20, 20),
                vision_hidden=128,
                vision_heads=2,
                positions=2304,
            ),
            inputs=tuple(vl.CASES.values()),
        ),
        Carried(
            name="qwen3_vl_embedding_wide_heads",
            spec=replace(VL_TINY, hidden=256, vision_hidden=144, vision_heads=2, vision_intermediate=430),
            inputs=tuple(vl.CASES.values()),
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
