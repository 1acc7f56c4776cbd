"""``tessera-engine export``: a stage as an ONNX file, or a checkpoint as a Triton model repository."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.atomic_directory import partial_directory
from tessera.engine.compiled.spec import Profile, Range, Stage
from tessera.errors import ConfigError
from tessera.models import open_model

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser("export", help="write ONNX files or a Triton model repository")
    parser.add_argument("--model-path", type=Path, required=True, help="a checkpoint directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--stage", choices=[stage.value for stage in Stage], help="one stage as an ONNX file")
    what.add_argument(
        "--triton",
        choices=("split", "fused"),
        help="a repository: vit, embed, lm, post and router, or model_1 that is all of them",
    )
    parser.add_argument("--out", type=Path, required=True, help="the file or the directory to make")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    limits = parser.add_argument_group("the largest batch")
    limits.add_argument("--max-sequences", type=int, default=32)
    limits.add_argument("--max-tokens", type=int, help="of one sequence; the model's own by default")
    limits.add_argument("--max-tiles", type=int, default=32)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # Here, so that the other commands need no torch.
    from tessera.engine.aoti.build import stages_of
    from tessera.engine.compiled.envelope import envelope_of
    from tessera.tools.triton_export.onnx_file import write_onnx
    from tessera.tools.triton_export.repository import TritonRepository

    started = time.monotonic()

    def progress(what: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {what}", file=sys.stderr, flush=True)

    model = open_model(options.model_path)
    stages = stages_of(model)
    tokens = options.max_tokens or model.max_tokens
    if min(options.max_sequences, options.max_tiles, tokens) < 1:
        raise ConfigError("--max-sequences, --max-tokens and --max-tiles must be at least 1")
    if tokens > model.max_tokens:
        raise ConfigError(f"--max-tokens {tokens}: the model takes at most {model.max_tokens}")
    rows = options.max_tiles * model.tokens_per_tile
    profile = Profile(
        tiles=_up_to(options.max_tiles),
        sequences=_up_to(options.max_sequences),
        tokens=_up_to(tokens),
        rows=_up_to(rows),
    )
    envelope = envelope_of([profile])
    if options.stage is not None:
        if options.out.exists():
            raise ConfigError(f"{options.out} exists already; name another file or remove it")
        progress(f"loading the {options.stage} stage")
        stage = stages.load_stage(options.stage, layout="padded", dtype=options.dtype, device="cpu")
        progress("exporting it")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{options.out.name}.", dir=options.out.parent) as partial:
            # The model last: it names the file with its weights.
            for written in reversed(write_onnx(stage, envelope, Path(partial) / options.out.name)):
                path = written.rename(options.out.with_name(written.name))
                print(f"{path}: {path.stat().st_size / (1 << 20):.1f} MiB")
        return
    with partial_directory(options.out) as folder:
        repository = TritonRepository(model, stages, folder, envelope, dtype=options.dtype)
        if options.triton == "fused":
            repository.write_fused(progress)
        else:
            repository.write_split(progress, image_token_id=stages.image_token_id)
    print(f"{options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")


def _up_to(most: int) -> Range:
    return Range(1, min(8, most), most)
