"""Commands that packages beside the core add: those of this distribution, and those of others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.cli.__main__ import CORE, names
from tessera.extras import lack
from tests.distribution import write_distribution

SOURCE = Path(__file__).parents[2] / "components" / "src"

Tessera = Callable[..., subprocess.CompletedProcess[str]]

PACKAGE = """
from tessera.command import Command

HELLO = Command("say hello", "acme_embeddings.hello")
MORE = Command("do more", "acme_embeddings.hello", extra="more", needs=("acme_more", "acme_most"))
BARE = Command("do what no extra brings", "acme_embeddings.hello", needs=("acme_most",))
SERVE = Command("take the place of another", "acme_embeddings.hello")
NEITHER = "a text"
"""
HELLO = """
def main(words, prog):
    print(prog, *words)
    return len(words)
"""
ENTRY_POINTS = """
[tessera.commands]
hello = acme_embeddings.commands:HELLO
more = acme_embeddings.commands:MORE
bare = acme_embeddings.commands:BARE
serve = acme_embeddings.commands:SERVE
neither = acme_embeddings.commands:NEITHER
broken = acme_embeddings.broken:BROKEN
"""
MORE = lack("acme_more", "acme_most", extra="more", of="acme-embeddings")


def running(site: Path, *flags: str) -> Tessera:
    """Return what runs ``tessera`` where ``site`` is on the path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(SOURCE)))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *flags, "-m", "tessera.cli", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=180
        )

    return run


@pytest.fixture(scope="module")
def tessera(tmp_path_factory: pytest.TempPathFactory) -> Tessera:
    """The command where a package that knows nothing of this repository adds some words."""
    site = tmp_path_factory.mktemp("site")
    write_distribution(site, "acme-embeddings", ENTRY_POINTS)
    package = site / "acme_embeddings"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "commands": PACKAGE,
        "hello": HELLO,
        "broken": "import acme_nowhere",
    }.items():
        (package / f"{name}.py").write_text(text)
    return running(site)


def test_an_installed_package_adds_a_command(tessera: Tessera) -> None:
    done = tessera("hello", "big", "world")
    assert (done.returncode, done.stdout, done.stderr) == (2, "tessera hello big world\n", "")
    assert tessera("hello").returncode == 0


def test_help_lists_what_is_there_and_says_what_is_not(tessera: Tessera) -> None:
    done = tessera("--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2].isalpha()]
    assert listed == [*names(), "broken", "bare", "hello", "more", "neither"]
    assert "  hello       say hello" in lines
    more = lines.index("  more        do more")
    assert lines[more + 1] == f"{'':14}{MORE}"
    (broken,) = (line for line in lines if "broken" in line)
    assert broken.endswith(
        "acme_embeddings.broken:BROKEN: ModuleNotFoundError: No module named 'acme_nowhere'"
    )
    assert "take the place" not in done.stdout


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "more",
            MORE,
        ),
        ("bare", "needs acme_most"),
        ("neither", "cannot be loaded from acme_embeddings.commands:NEITHER: it is no Command"),
        (
            "broken",
            "cannot be loaded from acme_embeddings.broken:BROKEN: "
            "ModuleNotFoundError: No module named 'acme_nowhere'",
        ),
    ],
)
def test_what_cannot_be_run_says_why_in_a_line(tessera: Tessera, name: str, problem: str) -> None:
    done = tessera(name, "--help")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"tessera {name} {problem}\n")


def test_an_unknown_word_is_told_of_every_command(tessera: Tessera) -> None:
    done = tessera("hullo")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert ", ".join(names()) in line and "hello" in line and "broken" in line


def test_no_package_takes_a_word_of_the_core(tessera: Tessera) -> None:
    done = tessera("serve", "--help")
    assert done.stdout.startswith("usage: tessera serve") and "take the place" not in done.stdout


def test_where_nothing_is_installed_the_checkout_has_its_commands(tmp_path: Path) -> None:
    bare = running(tmp_path, "-S")
    lines = bare("--help").stdout.splitlines()
    needs = f"{'':14}{lack('pyarrow', extra='corpus')}"
    assert lines[[line.split()[:1] for line in lines].index(["search"]) + 1] == needs
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in names())
    done = bare("search", "DIR", "a text")
    assert (done.returncode, done.stderr) == (2, f"tessera search {needs.strip()}\n")


def test_what_was_installed_of_the_checkout_before_counts_for_nothing(tmp_path: Path) -> None:
    write_distribution(
        tmp_path,
        "tessera-embed",
        "[tessera.commands]\ngone = tessera.gone:GONE\nbench = tessera.gone:BENCH\n",
    )
    done = running(tmp_path, "-S")("--help")
    assert "gone" not in done.stdout and "load a running service" in done.stdout


def test_names_of_commands() -> None:
    core = tuple(CORE)
    assert names()[: len(core)] == core
    assert {"embed", "search", "engine", "bench", "checkpoint", "sizing"} <= set(names())
