"""``tessera``: one command with a word for each thing to do. A command's module is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from tessera import __version__
from tessera.garbage import quick_imports
from tessera.terminal import complain


@dataclass(frozen=True, slots=True)
class Command:
    """``module`` has a ``main`` of the arguments and of the command's name, which returns the status."""

    text: str
    module: str


COMMANDS: Final = {
    "serve": Command("start a service on this machine: tessera serve [MODEL]", "tessera.cli.serve"),
    "models": Command("say which models can be served here, or are served at a URL", "tessera.cli.models"),
    "embed": Command("embed a corpus: folders, JSON lines, tables, PDF files", "tessera_corpus.cli.embed"),
    "search": Command(
        "search what tessera embed has written, by text or picture", "tessera_corpus.cli.search"
    ),
    "bench": Command("load a running service and measure it", "tessera.cli.bench"),
    "engine": Command("build engines ahead of time, look into them, export stages", "tessera_engines.cli"),
    "checkpoint": Command(
        "write a checkpoint with random weights", "tessera.tools.random_checkpoint.checkpoint"
    ),
    "sizing": Command("how many workers a mix of traffic needs, and what they cost", "tessera.tools.sizing"),
}


def usage() -> str:
    lines = [f"  {name:<12}{command.text}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tessera COMMAND [ARGUMENT...]",
            "",
            "Turns text and images into vectors, behind OpenAI's API.",
            "",
            *lines,
            "",
            "  --version   say which version this is",
            "  --help      this; tessera COMMAND --help says more of one",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if first in ("-V", "--version", "version"):
        print(f"tessera {__version__}")
        return 0
    if first in COMMANDS:
        with quick_imports():
            module = import_module(COMMANDS[first].module)
        return module.main(words[1:], f"tessera {first}") or 0
    known = ", ".join(COMMANDS)
    said = f"there is no command {first!r}" if first else "say what to do"
    complain(f"tessera: {said}: {known}, or --help")
    return 2


if __name__ == "__main__":
    sys.exit(main())
