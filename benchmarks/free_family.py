"""A model family whose engines cost nothing, so that what is left is the service around them.

Everything but the engines is that of a published family at full size. Of ``llama_nemotron_vl``: its prompts,
a tokenizer of 128,256 tokens, tiles decoded from the image file, 256 rows of 2,048 numbers for a tile. The
engines do no arithmetic: rows and vectors are whatever the memory holds, after a copy of the right size.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.imaging import Picture
from tessera.models import Model, open_model
from tessera.models.base import Empty, Feature, OutputKind, Pixels

MODEL_TYPE: Final = "benchmark_free"
_ROOT = Path(__file__).parent.parent
DESCRIBED: Final = "described"
USUAL: Final = "llama_nemotron_vl"
# Of this tree, also in a service of another commit.
_WITHIN: Final = ("thread_names", "child_ends", "bytecodes")
_ROWS: Final = 64 * 256
_SEQUENCES: Final = 8192


class FreeModel:
    """Implements ``tessera.models.base.Model``, by the model of the folder ``described``."""

    family = MODEL_TYPE
    fingerprint = MODEL_TYPE
    features: frozenset[Feature] = frozenset()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._described: Model = open_model(path / DESCRIBED)

    def __getattr__(self, name: str) -> Any:
        # What the protocol asks for besides the engines, in this commit or in one that it is compared with.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._described, name)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        return self._described.preprocess(picture, empty)

    def load_vision(self, *, dtype: str, device: str) -> Any:
        import torch

        vision = self._described.vision
        assert vision is not None
        rows = torch.ones(_ROWS, vision.row_width, dtype=getattr(torch, dtype), device=device)
        return lambda pixels, positions, bounds, units: rows[: vision.rows(len(pixels))]

    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        # One vector for everybody, of numbers as long in JSON as those of a real one.
        pooled = torch.randn(self._described.output.width, device=device).repeat(_SEQUENCES, 1)
        if self._described.output.kind is OutputKind.TOKENS:
            return lambda batch: pooled[: len(batch.input_ids)]
        return lambda batch: pooled[: len(batch.lengths)]

    def vision_nbytes(self, dtype: str) -> int:
        return 1

    text_nbytes = vision_nbytes

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return 1

    text_activation_nbytes = vision_activation_nbytes


class FreeFamily:
    """Implements ``tessera.models.base.Family``."""

    name = MODEL_TYPE
    model_types = (MODEL_TYPE,)

    def open_model(self, path: Path, options: Mapping[str, object]) -> FreeModel:
        return FreeModel(path)


FAMILY = FreeFamily()


@contextmanager
def installed(vocabulary: str | None = None, family: str = USUAL) -> Iterator[Path]:
    """A checkpoint of the family, which is installed for this process and those it starts.

    ``family`` is whose prompts and images it has; ``vocabulary`` is that of ``benchmarks.checkpoint``, None:
    one that is made up.
    Their threads have the names that Python gives them, cut to 15 bytes, as the system's names too.
    """
    # Not of a worker, whose package may be that of an older commit.
    from benchmarks.checkpoint import MADE_UP
    from tessera_tools.random_checkpoint.checkpoint import AUTO, families
    from tessera_tools.random_checkpoint.spec import Sizes
    from tessera_tools.random_checkpoint.vocabulary import with_published

    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        metadata = site / "tessera_benchmark_free-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: tessera-benchmark-free\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(
            f"[tessera.models]\n{MODEL_TYPE} = benchmarks.free_family:FAMILY\n"
        )
        (site / "sitecustomize.py").write_text(
            "from runpy import run_path\n\n"
            f"for name in {_WITHIN}:\n    run_path(f'{_ROOT}/benchmarks/within/{{name}}.py')['begin']()\n"
        )
        checkpoint = Path(folder) / "checkpoint"
        described = checkpoint / DESCRIBED
        described.mkdir(parents=True)
        (checkpoint / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE}))
        sizes: Sizes = families()[family].load()
        files: Mapping[str, Any] = sizes.full.files("bfloat16", 0)
        if vocabulary is not None and vocabulary != MADE_UP:
            files, _ = with_published(files, None if vocabulary == AUTO else Path(vocabulary))
        for name, values in files.items():
            (described / name).write_text(json.dumps(values))
        added = [str(site), str(_ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(added + ([before] if before else []))
        sys.path[:0] = added
        try:
            yield checkpoint
        finally:
            del sys.path[: len(added)]
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before
