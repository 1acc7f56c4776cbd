"""A compiled program in memory, and the end of the files that it was loaded from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from zipfile import ZipFile

import torch

from tessera.errors import EngineMismatch

# Two that load at once could not tell whose files are whose.
_loading = Lock()


class AotiProgram:
    """Positional tensors in, tensors out; what they are stands in the manifest's ``bindings``.

    Runs on the current stream of the calling thread, one call at a time.

    The loader unpacks a package into a directory of its own among the temporary files, and removes it when
    it is destroyed: a process that is killed, or that ends by ``leave``, would leave it there at every start.
    So it goes as soon as nothing reads it any more. A library stays mapped without its file; the code of a
    GPU's kernels is read when they are first launched.
    """

    def __init__(self, package: Path, weights: Mapping[str, torch.Tensor], device_index: int | None) -> None:
        """``device_index`` is the GPU's; ``weights`` are used where they lie.

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
