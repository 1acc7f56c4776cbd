"""What the packages import is declared in pyproject.toml, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "components" / "src"
OWN = {folder.name for folder in SOURCE.glob("tessera*") if (folder / "__init__.py").exists()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Not in every environment, or under another name than the one that is imported.
KNOWN = {
    "triton": "torch",
    # Several distributions have something in it.
    "google": "protobuf",
    "pillow_heif": "pillow-heif",
    "quack": "quack-kernels",
    "flash_attn": "flash-attn-4",
    "tensorrt": "tensorrt",
    "tensorrt_rtx": "tensorrt-rtx",
}
# Import names that Triton's server and TensorRT-LLM's image bring, which no index has whole.
ELSEWHERE = {"triton_python_backend_utils", "tensorrt", "tensorrt_llm"}
# What a developer has, and random checkpoints read published vocabularies with.
OF_DEVELOPERS = {"transformers"}
# Used without an import: what exports traces, Triton's compiler for the kernels, and an exporter's part.
UNSEEN = {"nvidia-cutlass-dsl", "onnx", "onnxscript", "tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=!;\[ ]", line, maxsplit=1)[0]) for line in requirements}


def imported(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (name.name.partition(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield (
                    node.module if node.module.startswith("opentelemetry.") else node.module.partition(".")[0]
                )


def distributions() -> set[str]:
    """The distributions of all that the packages import."""
    found: set[str] = set()
    provided = packages_distributions()
    for name in set(imported(SOURCE)) - set(sys.stdlib_module_names) - ELSEWHERE - OF_DEVELOPERS - OWN:
        if name.startswith("opentelemetry."):
            part = name.split(".")[1]
            found.add({"sdk": "opentelemetry-sdk"}.get(part, "opentelemetry-api"))
        elif name in KNOWN:
            found.add(KNOWN[name])
        else:
            found.add(canonical(provided[name][0]))
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    extras = {name: set(lines) for name, lines in PROJECT["optional-dependencies"].items()}
    needed = ("worker", "nixl", "heic", "kserve", "tensorrt-rtx", "traces", "cuda", "export")
    service = names(PROJECT["dependencies"]) | set().union(*(names(list(extras[extra])) for extra in needed))
    exporters = {name for name in service if name.startswith("opentelemetry-exporter-")}
    corpus = set().union(*(names(list(extras[extra])) for extra in ("corpus", "fonts", "lance", "ray")))
    assert distributions() - service - corpus == set()
    assert service - exporters - UNSEEN - distributions() == set()
