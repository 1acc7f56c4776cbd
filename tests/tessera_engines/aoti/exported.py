"""A stand-in for AOTInductor's compiler, which takes half a minute of a processor for each stage.

The program that it would compile is kept as it was exported, and runs as that. All around it is the real
thing: the trace, the directory with its manifest, what is checked when it is opened, and the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tessera_engines.aoti import build, package


class ExportedProgram:
    """Offers what ``AotiProgram`` does."""

    def __init__(self, path: Path, weights: Mapping[str, torch.Tensor], device_index: int | None) -> None:
        assert device_index is None, "compiled for the CPU"
        program = torch.export.load(path)
        wanted = program.state_dict.keys()
        assert wanted <= weights.keys(), "by the names that a compiled program asks for"
        self._module = program.module()
        self._module.load_state_dict({name: weights[name] for name in wanted})

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(self._module(*inputs))


def leave_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines built and opened without a compiler."""
    monkeypatch.setattr(build, "_require_compiler", lambda device: None)
    monkeypatch.setattr(build, "_compile", torch.export.save)
    monkeypatch.setattr(build, "require_shared_library", lambda path: None)
    monkeypatch.setattr(package, "AotiProgram", ExportedProgram)
