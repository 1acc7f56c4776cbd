"""What ``import tessera`` and ``from tessera import Embedder`` import; ``python -m tessera``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tessera

_NEW = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def run(*words: str) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


def test_the_package_imports_nothing_else() -> None:
    assert run("-c", _NEW.format("import tessera")).split() == ["tessera"]


def test_the_embedder_imports_no_engine_no_server_and_no_dynamo() -> None:
    modules = run("-c", _NEW.format("from tessera import Embedder")).split()
    assert "tessera.embedder" in modules and "numpy" in modules
    unwanted = {"torch", "dynamo", "fastapi", "starlette", "httptools", "httpcore2", "multiprocessing"}
    assert unwanted.isdisjoint(modules)


def test_what_there_is_has_names() -> None:
    assert {"Embedder", "Ranked", "__version__"} <= {*dir(tessera)} and tessera.__all__
    with pytest.raises(AttributeError, match="no attribute 'Embeder'"):
        tessera.Embeder  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_runs_the_command() -> None:
    assert run("-m", "tessera", "--version") == f"tessera {tessera.__version__}\n"
