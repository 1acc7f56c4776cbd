"""Writes checkpoints with random weights in the real file layout: the default model, and test models.

The command is ``tessera checkpoint``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from tessera.atomic_directory import atomic_directory
from tessera.dtypes import FLOATS
from tessera.errors import TesseraError
from tessera_tools.random_checkpoint import llama, llama_nemotron_vl, llama_rerank, qwen3
from tessera_tools.random_checkpoint.weights import RandomTensor, write_weights

_CONFIG: Final = "config.json"


class Spec(Protocol):
    """What to write: the shapes of one family's checkpoint."""

    @property
    def shards(self) -> int: ...

    def files(self, dtype: str, seed: int) -> Mapping[str, dict[str, Any]]:
        """The JSON files by name."""
        ...

    def tensors(self, directory: Path) -> Iterable[RandomTensor]:
        """The tensors in the files' order; the JSON files are in ``directory`` already."""
        ...


_SPECS: Final[Mapping[str, Mapping[str, Spec]]] = {
    "colqwen3": {"tiny": qwen3.COL_TINY, "full": qwen3.COL_FULL},
    "llama_nemotron_colembed_vl": {
        "tiny": llama_nemotron_vl.COLEMBED_TINY,
        "full": llama_nemotron_vl.COLEMBED_FULL,
    },
    "llama_nemotron_embed": {"tiny": llama.TINY, "full": llama.FULL},
    "llama_nemotron_rerank": {"tiny": llama_rerank.TINY, "full": llama_rerank.FULL},
    "llama_nemotron_rerank_vl": {
        "tiny": llama_nemotron_vl.RERANK_TINY,
        "full": llama_nemotron_vl.RERANK_FULL,
    },
    "llama_nemotron_vl": {"tiny": llama_nemotron_vl.TINY, "full": llama_nemotron_vl.FULL},
    "qwen3_embedding": {"tiny": qwen3.TINY, "full": qwen3.FULL},
    "qwen3_vl_embedding": {"tiny": qwen3.VL_TINY, "full": qwen3.VL_FULL},
}


def write_checkpoint(path: Path, spec: Spec, *, seed: int = 0, dtype: str = "float32") -> None:
    """Write a checkpoint directory at ``path``; equal arguments give equal bytes.

    The directory appears under its name only when it is complete. Raises ``ConfigError`` when something
    is there already; if another process completes the same path first, its directory stays.
    """
    with atomic_directory(path, first_wins=True) as partial:
        for name, content in spec.files(dtype, seed).items():
            # The mark is for the try-it page, which must not pass off noise as search results.
            marked = {**content, "tessera_checkpoint": "random"} if name == _CONFIG else content
            _write_json(partial / name, marked)
        write_weights(partial, spec.tensors(partial), shards=spec.shards, seed=seed, dtype=dtype)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None, prog: str = "tessera-checkpoint") -> None:
    """Exits with 1 and one line on standard error when it cannot write."""
    parser = argparse.ArgumentParser(prog=prog, description="Write a checkpoint with random weights.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a directory to make")
    parser.add_argument("--family", choices=tuple(_SPECS), default="llama_nemotron_vl", help="whose layout")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal files (default: 0)")
    parser.add_argument(
        "--size",
        choices=("full", "tiny"),
        default="tiny",
        help="tiny: runs anywhere; full: the published model's shapes, 1.1 to 8.3 GiB in bfloat16",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(FLOATS),
        help="default: float32 for tiny, bfloat16 for full",
    )
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("bfloat16" if options.size == "full" else "float32")
    started = time.monotonic()
    try:
        spec = _SPECS[options.family][options.size]
        write_checkpoint(options.out, spec, seed=options.seed, dtype=dtype)
    except (TesseraError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    print(f"{options.out}: {options.size} {dtype} checkpoint, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
