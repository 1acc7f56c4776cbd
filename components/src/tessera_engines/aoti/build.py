"""PyTorch's AOTInductor: a stage compiled for this machine, its weights left in the checkpoint.

A package holds code alone. With 256 MiB of weights compiled into it the package was as large again, took
three times as long to build, and the process that loaded it peaked 275 MiB higher; it was ready no sooner.
"""

from __future__ import annotations

import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch.export import ExportedProgram

from tessera.engine.placement import CPU, capability
from tessera.errors import ConfigError, EngineBuildFailed
from tessera.models.base import Model
from tessera.models.stages import StageModule, StageTensor
from tessera.nn.kernels import exported_products
from tessera_engines.aoti import kernels
from tessera_engines.aoti.package import FLAGS, GEMM_LIBRARY, PACKAGE, cpu_flags, versions
from tessera_engines.compiled.build import Built, Progress
from tessera_engines.compiled.export import example_inputs, export_stage
from tessera_engines.compiled.manifest import Binding, Manifest
from tessera_engines.compiled.spec import AxisRanges, BuildSpec, Range, Stage, axis_ranges
from tessera_engines.compiled.stages import load_stage

_STANDARD_LIBRARY = "libstdc++.so.6"
_OPTIONS = {
    # By its own name: where only libstdc++.a lies beside g++, the program would get a copy of its own, whose
    # locales are not the process's, and would die in std::regex when it is loaded.
    "aot_inductor.custom_op_libs": [f":{_STANDARD_LIBRARY}"],
    "aot_inductor.package_constants_in_so": False,
    # Twelve CPU seconds, for headers that the compiler then reads no faster.
    "aot_inductor.precompile_headers": False,
    # As many threads as the process that runs it is given, not as many as the one that built it had.
    "cpp.dynamic_threads": True,
}


class AotiFlavour:
    """Implements ``Flavour``; builds for the machine that it runs on, and for no other."""

    def build(
        self, model: Model, spec: BuildSpec, directory: Path, *, timing_cache: Path | None, progress: Progress
    ) -> Built:
        device = _device(spec)
        if spec.dtype == "float8":
            raise ConfigError("flavour aoti has no float8; it takes float32, bfloat16 or float16")
        if timing_cache is not None:
            raise ConfigError("flavour aoti keeps no timing cache; leave --timing-cache out")
        _require_compiler(device)
        ranges = axis_ranges(spec.profiles)
        if spec.stage is Stage.TEXT:
            _require_room(model, ranges)
        progress(f"loading the {spec.stage} stage on {device}")
        stage = load_stage(
            model,
            spec.stage,
            layout=spec.layout,
            dtype=spec.dtype,
            device=device,
            max_sequences=ranges["sequences"].max,
        )
        if not stage.fused_attention and not spec.decomposable:
            raise EngineBuildFailed(
                f"there is no fused attention for layout {spec.layout} in {spec.dtype} on {device}:"
                " use --layout padded, or allow attention to be taken apart with --decomposable"
            )
        progress("tracing it with torch.export")
        program = export_stage(stage, ranges, device=device)
        progress(f"compiling {len(program.graph.nodes)} nodes with AOTInductor")
        _compile(program, directory / PACKAGE)
        require_shared_library(directory / PACKAGE)
        libraries = versions(device)
        if calls_gemms(program):
            progress("compiling the products that it calls")
            kernels.collect()
            _compile_gemms(stage, ranges, device)
            kernels.store(directory)
        else:
            libraries.pop(GEMM_LIBRARY, None)
        return Built(
            bindings=tuple(_binding(one, output=False) for one in stage.inputs)
            + tuple(_binding(one, output=True) for one in stage.outputs),
            capabilities=(capability(device),),
            versions=libraries,
            notes={FLAGS: " ".join(cpu_flags())} if device == CPU else {},
        )

    def inspect(self, directory: Path, manifest: Manifest) -> dict[str, Any]:
        """The files inside the package, and the operators that it calls instead of compiled code."""
        manifest.verify_files(directory, PACKAGE)
        with ZipFile(directory / PACKAGE) as archive:
            files = {entry.filename: entry.file_size for entry in archive.infolist()}
            source = "".join(
                archive.read(name).decode(errors="replace")
                for name in files
                if name.endswith(".cpp") and "kernel" not in name
            )
        calls: dict[str, int] = {}
        for part in source.split("aoti_torch_")[1:]:
            name = part.partition("(")[0]
            if name.startswith(("cpu_", "cuda_")) and name.isidentifier():
                calls[name] = calls.get(name, 0) + 1
        return {"files": files, "operators": dict(sorted(calls.items()))}


AOTI = AotiFlavour()


def _require_room(model: Model, ranges: AxisRanges) -> None:
    """Check that a worker would load the engine, before minutes of compiling."""
    for axis in ("tokens", "rows"):
        if ranges[axis].max < model.max_tokens:
            raise ConfigError(
                f"profiles: up to {ranges[axis].max} {axis}, but the longest input is {model.max_tokens};"
                " no worker loads an engine without room for it: build it with a larger profile"
            )


def _device(spec: BuildSpec) -> str:
    has_cuda = torch.cuda.is_available()
    here = capability("cuda") if has_cuda else CPU
    wanted = spec.capabilities or (here,)
    if wanted == (CPU,):
        return CPU
    if wanted != (here,):
        raise ConfigError(
            f"flavour aoti compiles for the machine it runs on, which has {here}; it was asked for"
            f" {', '.join(wanted)}"
        )
    return "cuda"


def _require_compiler(device: str) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as error:
        raise EngineBuildFailed(
            f"AOTInductor needs a C++ compiler: install g++, or set CXX ({error})"
        ) from error
    if shutil.which(compiler) is None:
        raise EngineBuildFailed(f"AOTInductor needs a C++ compiler, and {compiler} is not there: install g++")
    if device != CPU:
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            raise EngineBuildFailed(
                "AOTInductor needs the CUDA toolkit's headers: install it, or set CUDA_HOME"
            )


def _compile(program: ExportedProgram, path: Path) -> None:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=dict(_OPTIONS)
            )
    except Exception as error:
        raise EngineBuildFailed(f"AOTInductor: {type(error).__name__}: {error}") from error


def require_shared_library(package: Path) -> None:
    """Check that the program has no copy of the C++ library; raises ``EngineBuildFailed``."""
    with ZipFile(package) as archive:
        programs = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    # As the dynamic section names it.
    wanted = f"\0{_STANDARD_LIBRARY}\0".encode()
    if not programs or not all(wanted in program for program in programs):
        raise EngineBuildFailed(
            "the C++ compiler put its standard library into the program, which would die when it is loaded:"
            f" install one that links {_STANDARD_LIBRARY}, or name it with CXX"
        )


def calls_gemms(program: ExportedProgram) -> bool:
    """Whether the program calls the GEMM operators of ``exported_products``."""
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    return not called.isdisjoint(f"tessera.{name}.default" for name in exported_products.OPERATORS)


def _compile_gemms(stage: StageModule, ranges: AxisRanges, device: str) -> None:
    """Call the GEMMs at several sizes, so that their library compiles what the first start would wait for."""
    few = {axis: Range(1, 1, sizes.max) for axis, sizes in ranges.items()}
    most = {axis: Range(1, sizes.max, sizes.max) for axis, sizes in ranges.items()}
    with torch.inference_mode():
        for sizes in (few, ranges):
            stage.module(*example_inputs(stage, sizes, device=device))
        # A batch that does not fit on this device is not served on it either.
        with suppress(torch.OutOfMemoryError):
            stage.module(*example_inputs(stage, most, device=device))
    torch.cuda.synchronize()


def _binding(tensor: StageTensor, *, output: bool) -> Binding:
    shape = tuple(axis if isinstance(axis, int) else -1 for axis in tensor.axes)
    return Binding(name=tensor.name, output=output, dtype=tensor.dtype, shape=shape)
