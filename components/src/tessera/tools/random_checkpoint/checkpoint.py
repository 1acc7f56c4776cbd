"""Writes checkpoints with random weights in the real file layout: the default model, and test models.

The console script is ``tessera-checkpoint``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.atomic_directory import atomic_directory
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.dtypes import FLOATS
from tessera.errors import TesseraError
from tessera.models.llama_nemotron_vl.config_reader import CONFIG_FILE, PROCESSOR_FILE, read_config
from tessera.tools.random_checkpoint.spec import (
    FULL,
    TINY,
    CheckpointSpec,
    config_json,
    processor_json,
    sentence_transformers_json,
)
from tessera.tools.random_checkpoint.tokenizer import tokenizer_config_json, tokenizer_json
from tessera.tools.random_checkpoint.weights import write_weights

SENTENCE_TRANSFORMERS_FILE = "config_sentence_transformers.json"

_SIZES = {"tiny": TINY, "full": FULL}


def write_checkpoint(path: Path, spec: CheckpointSpec, *, seed: int = 0, dtype: str = "float32") -> None:
    """Write a checkpoint directory at ``path``; equal arguments give equal bytes.

    The directory appears under its name only when it is complete. Raises ``ConfigError`` when something
    is there already; if another process completes the same path first, its directory stays.
    """
    with atomic_directory(path, first_wins=True) as partial:
        # The mark is for the try-it page, which must not pass off noise as search results.
        _write_json(partial / CONFIG_FILE, {**config_json(spec, dtype), "tessera_checkpoint": "random"})
        _write_json(partial / PROCESSOR_FILE, processor_json(spec))
        _write_json(partial / TOKENIZER_FILE, tokenizer_json(spec, seed))
        _write_json(partial / TOKENIZER_CONFIG_FILE, tokenizer_config_json(spec))
        _write_json(partial / SENTENCE_TRANSFORMERS_FILE, sentence_transformers_json())
        write_weights(partial, spec, read_config(partial), seed, dtype)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """``tessera-checkpoint``: exits with 1 and one line on standard error when it cannot write."""
    parser = argparse.ArgumentParser(
        prog="tessera-checkpoint", description="Write a llama_nemotron_vl checkpoint with random weights."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a directory to make")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal files (default: 0)")
    parser.add_argument(
        "--size",
        choices=sorted(_SIZES),
        default="tiny",
        help="tiny: runs anywhere; full: the published model's shapes, 3.1 GiB in bfloat16",
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
        write_checkpoint(options.out, _SIZES[options.size], seed=options.seed, dtype=dtype)
    except (TesseraError, OSError) as error:
        print(f"tessera-checkpoint: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    print(f"{options.out}: {options.size} {dtype} checkpoint, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
