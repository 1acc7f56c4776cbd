"""An engine directory that holds a compiled stage, for this machine; its weights come out of the checkpoint.

AOTInductor's programs run on machines like the one that compiled them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from threading import Lock
from zipfile import ZipFile

import torch

from tessera.engine.placement import CPU, Placement, capability
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineMismatch
from tessera.models.base import Model
from tessera_engines.aoti import kernels
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import Stage, axis_ranges
from tessera_engines.compiled.stages import load_stage

PACKAGE = "engine.pt2"
FLAGS = "cpu_flags"
# A program calls back into Python for its GEMMs if it was installed when the program was compiled.
GEMM_LIBRARY = "quack-kernels"
_VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "vaes", "vpclmulqdq", "gfni", "popcnt")
# Two loads at a time could not tell their unpacked files apart.
_loading = Lock()


class AotiPackage:
    """An engine directory that has been checked to be for this model and machine."""

    def __init__(self, model: Model, directory: Path, stage: Stage, placement: Placement) -> None:
        """Check the manifest; raises ``EngineMismatch`` naming both sides of each difference."""
        manifest = Manifest.read(directory)
        manifest.require(
            directory,
            flavour="aoti",
            stage=stage,
            dtype=placement.dtype,
            **Manifest.of_model(model),
            capability=capability(placement.device),
            versions=versions(placement.device),
        )
        if capability(placement.device) == CPU:
            require_cpu_flags(manifest.notes.get(FLAGS, ""), directory)
        manifest.verify_files(directory, PACKAGE)
        self.manifest = manifest
        self.ranges = axis_ranges(manifest.profiles)
        self._model = model
        self._directory = directory
        self._placement = placement

    def load(self) -> AotiProgram:
        """Load the program and its weights; raises ``EngineMismatch`` if the model lacks one."""
        kernels.restore(self._directory)
        device = torch.device(self._placement.device)
        index = (device.index or 0) if self._placement.is_cuda else None
        return AotiProgram(self._directory / PACKAGE, self._weights(), index)

    def _weights(self) -> dict[str, torch.Tensor]:
        module = load_stage(
            self._model,
            self.manifest.stage,
            layout=self.manifest.layout,
            dtype=self._placement.dtype,
            device=self._placement.device,
            max_sequences=self.ranges["sequences"].max,
        ).module
        # Under each of their names: a program may want a weight that two parts share by either.
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        return {name: value.detach() for name, value in named}

    def width(self, name: str) -> int:
        """How wide the rows of an input are."""
        return next(one.shape[-1] for one in self.manifest.bindings if one.name == name)

    def require_room(self, axis: str, size: int, what: str) -> None:
        """Check that the engine was built for ``size`` on ``axis``; raises ``EngineMismatch``."""
        most = self.ranges[axis].max
        if size > most:
            raise EngineMismatch(
                f"{self._directory}: the engine does not match: it was built for up to {most} {axis},"
                f" but {what} is {size}; build it with larger profiles, or lower max_batch_cost"
            )


def open_package(model: Model, settings: EngineSettings, placement: Placement, stage: Stage) -> AotiPackage:
    """Open the engine at ``settings.path``; raises ``ConfigError`` without one, or for quantization."""
    if settings.path is None:
        raise ConfigError(f"engine 'aoti' needs path: the --out of tessera engine build --stage {stage}")
    if settings.quantization not in ("auto", "none"):
        raise ConfigError(f"engine aoti has no quantization {settings.quantization}; engine torch has")
    return AotiPackage(model, settings.path, stage, placement)


class AotiProgram:
    """A compiled program in memory.

    It takes and gives tensors by position; the manifest's ``bindings`` say which.

    Runs on the current stream of the calling thread, one call at a time.

    The loader unpacks a package into a directory of its own among the temporary files, and removes it when
    it is destroyed. A process that is killed, or that ends by ``leave``, would leave one there at every
    start, so it is removed as soon as nothing reads it any more. A library stays mapped without its file; the
    code of a GPU's kernels is read when they are first launched.
    """

    def __init__(self, package: Path, weights: Mapping[str, torch.Tensor], device_index: int | None) -> None:
        """``device_index`` is the GPU's, None for the CPU; ``weights`` are used in place, not copied.

        Raises ``EngineMismatch`` naming a weight that the program wants and ``weights`` does not have.
        """
        with ZipFile(package) as archive:
            library = next(f"/{name}" for name in archive.namelist() if name.endswith(".so"))
        index = -1 if device_index is None else device_index
        with _loading:
            before = _mapped(library)
            # Run by a single thread: without the events between calls, which a CUDA graph cannot record. Not
            # by aoti_load_package: only to warn of another CPU, which the manifest refuses, that compiles
            # programs for each kind of vector instructions, seconds of a start, and brings in setuptools,
            # which dies where pip was imported before.
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, index)
            self._unpacked = [path.removesuffix(library) for path in _mapped(library) - before]
        wanted = self._loader.get_constant_fqns()
        missing = sorted(set(wanted) - weights.keys())
        if missing or device_index is None:
            self._remove_unpacked()
        if missing:
            raise EngineMismatch(f"{package}: it wants {missing[0]!r}, which the model does not have")
        # Kept for as long as the program, which has only their addresses.
        self._weights = {name: weights[name] for name in wanted}
        self._loader.load_constants(self._weights, False, True, user_managed=True)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._loader.boxed_run(list(inputs))
        self._remove_unpacked()
        return found

    def _remove_unpacked(self) -> None:
        while self._unpacked:
            shutil.rmtree(self._unpacked.pop(), ignore_errors=True)


def _mapped(name: str) -> set[str]:
    """Files in this process's memory whose paths end in ``name``."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(name)}


def versions(device: str) -> dict[str, str]:
    """Versions of the libraries that a compiled program depends on; ``GEMM_LIBRARY`` if it is installed."""
    found = {"torch": str(torch.__version__)}
    if device.startswith("cuda"):
        found["cuda"] = str(torch.version.cuda)
    with suppress(metadata.PackageNotFoundError):
        found[GEMM_LIBRARY] = metadata.version(GEMM_LIBRARY)
    return found


def cpu_flags() -> list[str]:
    """Vector instructions of this CPU by the Linux kernel's names; empty if /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))


def require_cpu_flags(built: str, directory: Path) -> None:
    """Check that this CPU has the instructions of a build; raises ``EngineMismatch`` naming what it lacks.

    The program would be killed at the first one.
    """
    missing = sorted(set(built.split()) - set(cpu_flags()))
    if missing:
        raise EngineMismatch(
            f"{directory}: the engine does not match: it was built for a CPU with {' '.join(missing)},"
            " which this one lacks. tessera engine build makes one for this machine"
        )
