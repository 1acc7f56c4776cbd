"""``tessera engine``: build engines ahead of time, look into them, export stages, quantize checkpoints."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from tessera.atomic_directory import atomic_directory
from tessera.command import OneLineParser
from tessera.errors import ConfigError, TesseraError
from tessera.flags import convert, json_object
from tessera.logs import log_as
from tessera.models import find, open_model
from tessera.terminal import complain, say
from tessera.worker.settings import load_stages
from tessera_engines.compiled.build import build_engine, flavour
from tessera_engines.compiled.manifest import MANIFEST_FILE, Manifest
from tessera_engines.compiled.spec import BUILD_DTYPES, BuildSpec, Layout, Profile, Range, Stage

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[OneLineParser]


def _add_build(commands: Subparsers) -> None:
    parser = commands.add_parser("build", help="build an engine from a checkpoint")
    _add_model_path(parser)
    parser.add_argument("--stage", choices=[stage.value for stage in Stage], required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a directory to make")
    parser.add_argument("--config", type=Path, help="an engine config file whose build list has the stage")
    _add_model_options(parser)
    parser.add_argument("--timing-cache", type=Path, metavar="FILE", help="read and updated")
    changes = parser.add_argument_group("instead of what the config says")
    changes.add_argument("--flavour", help="aoti, tensorrt or tensorrt_rtx")
    changes.add_argument("--dtype", choices=BUILD_DTYPES)
    changes.add_argument("--layout", choices=[layout.value for layout in Layout])
    changes.add_argument("--capability", action="append", metavar="8.9", help="may be given several times")
    changes.add_argument(
        "--decomposable", action="store_true", help="build even where no fused attention kernel exists"
    )
    changes.add_argument("--calibration", type=Path, metavar="DIR", help="images and texts for float8")
    parser.set_defaults(run=_build)


def _add_model_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-path",
        required=True,
        metavar="MODEL",
        help="a checkpoint directory, or ORG/NAME[@REVISION] of a hub to download once",
    )


def _progress() -> Callable[[str], None]:
    """Show each step that begins, with the seconds since now."""
    started = time.monotonic()
    return lambda what: complain(f"{time.monotonic() - started:7.1f} s  {what}")


def _directory(model: str) -> Path:
    """Raises ``CheckpointError`` and ``ConfigError``."""
    if not Path(model).is_dir():
        # A download has something to say.
        log_as("engine")
    return find(model, bar=sys.stderr.isatty()).directory


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    def parse(text: str) -> dict[str, Any]:
        try:
            return json_object(text, "--model-options")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(
        "--model-options",
        type=parse,
        default={},
        metavar="JSON",
        help="options of the model's family: those of the processes that serve it, or the engine is refused",
    )


def _build(options: argparse.Namespace) -> None:
    spec, progress = spec_of(options), _progress()
    progress(f"opening {options.model_path}")
    configured = {} if options.config is None else load_stages(options.config, None).model_options
    model = open_model(_directory(options.model_path), configured | options.model_options)
    manifest = build_engine(model, spec, options.out, timing_cache=options.timing_cache, progress=progress)
    size = sum(entry.nbytes for entry in manifest.files.values())
    say(
        f"{options.out}: {manifest.stage} {manifest.flavour} {manifest.dtype} engine for"
        f" {', '.join(manifest.capabilities)}, {size / (1 << 20):.1f} MiB, {manifest.build_seconds:.1f} s"
    )


def builds(config: Path) -> tuple[BuildSpec, ...]:
    """Return the ``build`` list of an engine config; raises ``ConfigError`` naming the file and the key."""
    return convert(tuple[BuildSpec, ...], load_stages(config, None).build, f"{config}: build")


def spec_of(options: argparse.Namespace) -> BuildSpec:
    """The config's entry for the stage with the flags over it; raises ``ConfigError``."""
    values: dict[str, Any] = {"stage": options.stage}
    if options.config is not None:
        entries = [spec for spec in builds(options.config) if spec.stage == options.stage]
        if len(entries) > 1:
            raise ConfigError(f"{options.config}: build lists the stage {options.stage} {len(entries)} times")
        if not entries and options.flavour is None:
            raise ConfigError(f"{options.config}: build has no entry with the stage {options.stage}")
        values = msgspec.to_builtins(entries[0], enc_hook=str) if entries else values
    changes = {
        "flavour": options.flavour,
        "dtype": options.dtype,
        "layout": options.layout,
        "capabilities": options.capability,
        "decomposable": options.decomposable or None,
        "calibration": options.calibration and str(options.calibration),
    }
    values |= {key: value for key, value in changes.items() if value is not None}
    if "flavour" not in values:
        raise ConfigError("build needs --flavour, or --config with a file whose build list has the stage")
    spec = convert(BuildSpec, values, str(options.config or "build"))
    if options.calibration is not None and spec.dtype != "float8":
        raise ConfigError(f"--calibration is for --dtype float8, and this stage is built in {spec.dtype}")
    return spec


def _add_inspect(commands: Subparsers) -> None:
    parser = commands.add_parser("inspect", help="describe a built engine as JSON")
    parser.add_argument("directory", type=Path, help="what tessera engine build made")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    manifest = Manifest.read(options.directory)
    try:
        compiler = flavour(manifest.flavour)
    except ConfigError as error:
        raise ConfigError(f"{options.directory / MANIFEST_FILE}: {error}") from error
    found = {
        "manifest": msgspec.to_builtins(manifest),
        "engine": compiler.inspect(options.directory, manifest),
    }
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


def _add_export(commands: Subparsers) -> None:
    parser = commands.add_parser("export", help="write ONNX files or a Triton model repository")
    _add_model_path(parser)
    _add_model_options(parser)
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
    limits.add_argument(
        "--max-units", "--max-tiles", type=int, default=32, help="of all images, as the family counts them"
    )
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    # Here, so that the other commands need no torch.
    from tessera_engines.compiled.spec import axis_ranges
    from tessera_engines.compiled.stages import load_stage, stages_of
    from tessera_engines.triton_export.onnx_file import write_onnx
    from tessera_engines.triton_export.repository import TritonRepository

    progress = _progress()
    model = open_model(_directory(options.model_path), options.model_options)
    stages = stages_of(model)
    tokens = options.max_tokens or model.max_tokens
    if min(options.max_sequences, options.max_units, tokens) < 1:
        raise ConfigError("--max-sequences, --max-tokens and --max-units must be at least 1")
    if tokens > model.max_tokens:
        raise ConfigError(f"--max-tokens {tokens}: the model takes at most {model.max_tokens}")
    rows = 1 if model.vision is None else max(1, model.vision.rows(options.max_units))
    profile = Profile(
        units=_up_to(options.max_units),
        sequences=_up_to(options.max_sequences),
        tokens=_up_to(tokens),
        rows=_up_to(rows),
    )
    ranges = axis_ranges([profile])
    if options.stage is not None:
        if options.out.exists():
            raise ConfigError(f"{options.out} exists already; name another file or remove it")
        progress(f"loading the {options.stage} stage")
        stage = load_stage(model, options.stage, layout="padded", dtype=options.dtype, device="cpu")
        progress("exporting it")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{options.out.name}.", dir=options.out.parent) as partial:
            # The model last: it names the file with its weights.
            for written in reversed(write_onnx(stage, ranges, Path(partial) / options.out.name)):
                path = written.rename(options.out.with_name(written.name))
                say(f"{path}: {path.stat().st_size / (1 << 20):.1f} MiB")
        return
    with atomic_directory(options.out) as folder:
        repository = TritonRepository(model, folder, ranges, dtype=options.dtype)
        if options.triton == "fused":
            repository.write_fused(progress)
        else:
            repository.write_split(progress, image_token_id=stages.image_token_id)
    say(f"{options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")


def _add_quantize(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "quantize", help="write a checkpoint in FP8 with scales from real inputs, as ModelOpt lays it out"
    )
    _add_model_path(parser)
    _add_model_options(parser)
    parser.add_argument(
        "--calibration",
        type=Path,
        required=True,
        metavar="SOURCE",
        help="a directory of images and .txt files with an input a line, or one such file",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a directory to make")
    parser.add_argument(
        "--stage",
        choices=("text", "vision", "all"),
        default="text",
        help="text by default: vLLM reads no SigLIP or CLIP tower in FP8",
    )
    parser.add_argument("--most-inputs", type=int, default=128, help="texts, and images, that are taken")
    parser.add_argument(
        "--most-loss",
        type=float,
        default=0.002,
        help="mean of 1 less the cosine of an output, above which layers are left as they are",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N: where inputs are run, in float32"
    )
    parser.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> None:
    # Here, so that the other commands need no torch.
    from tessera.engine.placement import device_named
    from tessera_engines.calibration import Calibration
    from tessera_engines.quantize.command import Request, quantize

    if options.most_inputs < 1 or not options.most_loss > 0:
        raise ConfigError("--most-inputs must be at least 1, and --most-loss positive")
    progress = _progress()
    progress(f"opening {options.model_path}")
    model = open_model(_directory(options.model_path), options.model_options)
    request = Request(
        source=Calibration.read(options.calibration),
        out=options.out,
        stages=options.stage,
        most_inputs=options.most_inputs,
        most_loss=options.most_loss,
        device=device_named(options.device),
    )
    for stage, tower in quantize(model, request, progress).items():
        for layer in tower.layers:
            kept = ", left as it is" if layer.kept else ""
            say(f"{stage} layer {layer.number}: loss {layer.loss:.2g}{kept}")
        say(
            f"{stage}: {len(tower.weights)} products in FP8, loss {tower.loss:.2g};"
            f" {tower.whole:.2g} with all layers; {tower.clipped} scales below the largest input"
        )
    say(f"{options.out}: {sum(path.stat().st_size for path in options.out.iterdir()) / (1 << 20):.1f} MiB")


def _up_to(most: int) -> Range:
    return Range(1, min(8, most), most)


def main(arguments: Sequence[str] | None = None, prog: str = "tessera-engine") -> None:
    """Exits with 1 and one line on standard error when it cannot do what was asked.

    What SIGTERM or Ctrl-C interrupts leaves nothing behind that looks finished; the status is 143 or 130.
    """
    parser = OneLineParser(
        prog=prog,
        description="Build engines ahead of time, look into them, export stages, and quantize checkpoints.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_to in (_add_build, _add_export, _add_inspect, _add_quantize):
        add_to(commands)
    options = parser.parse_args(arguments)
    told: list[int] = []

    def end(number: int, _: object) -> NoReturn:
        told.append(number)
        raise SystemExit(128 + number)

    ending = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        ending.append(signal.SIGINT)
    before = {number: signal.signal(number, end) for number in ending}
    try:
        options.run(options)
    except Exception as error:
        if told:
            # Compiled code that is interrupted may raise another error in place of the handler's.
            raise SystemExit(128 + told[0]) from None
        if not isinstance(error, (TesseraError, OSError)):
            raise
        complain(f"{prog}: {error}")
        raise SystemExit(1) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
