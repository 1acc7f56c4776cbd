"""A compiled program in memory, and the end of the files that it was loaded from."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Lock
from zipfile import ZipFile

import torch

# Two that load at once could not tell whose files are whose.
_loading = Lock()


class AotiProgram:
    """A package of AOTInductor's, run by a single thread, one call at a time.

    The loader unpacks a package into a directory of its own among the temporary files, and removes it when
    it is destroyed: a process that is killed, or that ends by ``leave``, would leave it there at every start.
    So it goes as soon as nothing reads it any more, which is after the first call: a library stays mapped
    without its file, and the code of a GPU's kernels is read when they are first launched.
    """

    def __init__(self, package: Path, device_index: int) -> None:
        """``package`` is one with a manifest; ``device_index`` is the GPU's, or -1 for the CPU."""
        with ZipFile(package) as archive:
            library = next(f"/{name}" for name in archive.namelist() if name.endswith(".so"))
        with _loading:
            before = _mapped(library)
            # Run by a single thread: without the events between calls, which a CUDA graph cannot record. Not
            # by aoti_load_package: only to warn of another CPU, which the manifest refuses, that compiles
            # programs for each kind of vector instructions, seconds of a start, and brings in setuptools,
            # which dies where pip was imported before.
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, device_index)
            self._unpacked = [path.removesuffix(library) for path in _mapped(library) - before]

    def constants(self) -> list[str]:
        """The names of the weights that it wants."""
        names: list[str] = self._loader.get_constant_fqns()
        return names

    def use(self, weights: dict[str, torch.Tensor]) -> None:
        """Take exactly ``constants()`` where they lie; the caller keeps them for as long as it calls this."""
        self._loader.load_constants(weights, False, True, user_managed=True)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._loader.boxed_run(list(inputs))
        while self._unpacked:
            shutil.rmtree(self._unpacked.pop(), ignore_errors=True)
        return found


def _mapped(name: str) -> set[str]:
    """Files in this process's memory whose paths end in ``name``."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(name)}
