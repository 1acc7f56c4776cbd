"""``python -m tessera.launch``: what it needs, and what it says to a command that it does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORTED = """
import sys
before = set(sys.modules)
import tessera.launch.__main__, tessera.launch.{}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new - sys.stdlib_module_names), *sorted(n for n in sys.modules if n.startswith("tessera.")))
"""


@pytest.mark.parametrize("module", ["scripts", "role"])
def test_it_needs_nothing_but_the_standard_library(module: str) -> None:
    program = _IMPORTED.format(module)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    first, *others = said.split()
    assert first == "tessera"
    # What it reads of the machine, and chooses from it, is for workers as well, and lines are for people. It
    # declares its settings as every process does.
    ours = (
        "tessera.launch",
        "tessera.settings",
        "tessera.errors",
        "tessera.machine",
        "tessera.defaults",
        "tessera.etcd",
        "tessera.listening",
        "tessera.model_names",
        "tessera.terminal",
    )
    assert all(name.startswith(ours) for name in others), others


@pytest.mark.parametrize("words", [[], ["serve"], ["--colour", "agg"]])
def test_an_unknown_command_is_answered_with_the_usage(words: list[str]) -> None:
    command = [sys.executable, "-m", "tessera.launch", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: python -m tessera.launch")
