"""Writes checkpoints with random weights in the real file layout: the default model, and test models.

The command is ``tessera checkpoint``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

from tessera.atomic_directory import atomic_directory
from tessera.checkpoint.section import CONFIG_FILE
from tessera.command import OneLineParser
from tessera.dtypes import FLOATS
from tessera.errors import TesseraError
from tessera.siblings import load, siblings
from tessera_tools.random_checkpoint.spec import Sizes, Spec, WithHeads, WithModules
from tessera_tools.random_checkpoint.vocabulary import with_published
from tessera_tools.random_checkpoint.weights import write_weights

_GROUP: Final = "tessera.random_checkpoints"


def families() -> dict[str, EntryPoint]:
    """Return where the ``Sizes`` of each family are, by its name: those of all installed packages."""
    return {entry.name: entry for entry in siblings(_GROUP)}


AUTO: Final = "auto"
"""As ``vocabulary``: the published one where it is found, else one that is made up."""


def write_checkpoint(
    path: Path, spec: Spec, *, seed: int = 0, dtype: str = "float32", vocabulary: str | None = None
) -> str:
    """Write a checkpoint directory at ``path``; equal arguments give equal bytes.

    ``vocabulary`` is where packages with the published ones are, ``AUTO``, or None for one that is made up.
    Returns the name of the published one, which is empty for one that is made up. The directory appears under
    its name only when it is complete. Raises ``ConfigError`` when something is there already, or where there
    is no vocabulary; if another process completes the same path first, its directory stays.
    """
    files, named = spec.files(dtype, seed), ""
    if vocabulary is not None:
        files, named = with_published(files, None if vocabulary == AUTO else Path(vocabulary))
    with atomic_directory(path, first_wins=True) as partial:
        for name, content in files.items():
            # The mark is for the try-it page, which must not pass off noise as search results.
            marked: Any = {**content, "tessera_checkpoint": "random"} if name == CONFIG_FILE else content
            _write_json(partial / name, marked)
        write_weights(partial, spec.tensors(partial), shards=spec.shards, seed=seed, dtype=dtype)
        if isinstance(spec, WithModules):
            for folder, tensors in spec.modules().items():
                write_weights(partial / folder, tensors, shards=1, seed=seed + 1, dtype=dtype)
        if isinstance(spec, WithHeads):
            _write_heads(partial, spec, seed=seed, dtype=dtype)
    return named


def _write_heads(directory: Path, spec: WithHeads, *, seed: int, dtype: str) -> None:
    import torch  # These files are torch's own.

    for name, tensors in spec.pickled(seed).items():
        state = {key: torch.from_numpy(values).to(getattr(torch, dtype)) for key, values in tensors.items()}
        torch.save(state, directory / name)


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None, prog: str = "tessera-checkpoint") -> None:
    """Exits with 1 and one line on standard error when it cannot write."""
    parser = OneLineParser(prog=prog, description="Write a checkpoint with random weights.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a directory to make")
    known = families()
    parser.add_argument("--family", choices=tuple(known), default="llama_nemotron_vl", help="whose layout")
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
    parser.add_argument(
        "--vocabulary",
        metavar="DIR|auto",
        help="the published one in place of one that is made up, for --size full: an environment with the "
        "package that carries it, or auto: this one, if it has it",
    )
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("bfloat16" if options.size == "full" else "float32")
    started = time.monotonic()
    try:
        sizes: Sizes = load(known[options.family])
        spec = sizes.full if options.size == "full" else sizes.tiny
        named = write_checkpoint(
            options.out, spec, seed=options.seed, dtype=dtype, vocabulary=options.vocabulary
        )
    except (TesseraError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    words = f", {named}'s vocabulary" if named else ", made-up vocabulary"
    print(f"{options.out}: {options.size} {dtype} checkpoint{words}, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
