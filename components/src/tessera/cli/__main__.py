"""``tessera``: one command with a word for each thing to do. A command's module is imported when it runs.

The core's words are ``CORE``; packages beside it add others by entry points of ``tessera.commands``.
"""

from __future__ import annotations

import errno
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Final

from tessera import __version__
from tessera.command import Command
from tessera.extras import lack
from tessera.garbage import quick_imports
from tessera.siblings import COMMANDS, DISTRIBUTION, distribution_of, siblings
from tessera.terminal import complain, reason_of, say

CORE: Final = {
    "serve": Command("start a service on this machine: tessera serve [MODEL]", "tessera.cli.serve"),
    "models": Command("say which models can be served here, or are served at a URL", "tessera.cli.models"),
}

_COLUMN: Final = 14


class Unavailable(Exception):
    """A command that cannot be run here; the message is what follows its name."""


def names() -> tuple[str, ...]:
    """Return the words of all commands: the core's, Tessera's other packages', then those of others."""
    return (*CORE, *_added())


def command_of(name: str) -> Command:
    """Return the command of one of ``names``; raises ``Unavailable`` where it cannot be loaded."""
    if name in CORE:
        return CORE[name]
    entry = _added()[name]
    try:
        command = entry.load()
    except Exception as error:
        # Whatever an installed package does wrong, the other commands work.
        reason = " ".join(str(error).split())
        raise Unavailable(f"cannot be loaded from {entry.value}: {type(error).__name__}: {reason}") from error
    if not isinstance(command, Command):
        raise Unavailable(f"cannot be loaded from {entry.value}: it is no Command")
    return command


def lacks(name: str, command: Command) -> str:
    """Return what a command needs and how to install it; nothing where all of it is there."""
    if not command.missing:
        return ""
    distribution = DISTRIBUTION if name in CORE else distribution_of(_added()[name])
    return lack(*command.missing, extra=command.extra, of=distribution)


def _added() -> dict[str, EntryPoint]:
    """Return the commands that are found beside the core, none of which replaces one of the core."""

    def place(entry: EntryPoint) -> tuple[bool, str]:
        return not entry.value.startswith("tessera"), entry.value

    return {entry.name: entry for entry in sorted(siblings(COMMANDS), key=place) if entry.name not in CORE}


def usage() -> str:
    return "\n".join(
        [
            "usage: tessera COMMAND [ARGUMENT...]",
            "",
            "Turns text and images into vectors, behind OpenAI's API.",
            "",
            *(line for name in names() for line in _lines(name)),
            "",
            "  --version   say which version this is",
            "  --help      this; tessera COMMAND --help says more of one",
        ]
    )


def _lines(name: str) -> Iterator[str]:
    """Yield what the usage says of a command: a line, and a second one for what is not installed."""
    head = f"  {name}".ljust(_COLUMN - 1) + " "
    try:
        command = command_of(name)
    except Unavailable as error:
        yield f"{head}{error}"
        return
    yield head + command.text
    if needs := lacks(name, command):
        yield " " * _COLUMN + needs


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the words say; the status is that of a process which SIGPIPE ends where nobody reads on."""
    try:
        try:
            return _answer(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("tessera: stopped")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _is_unread():
            raise
        from tessera.process_exit import leave

        # Whoever read the output, head perhaps, has seen enough.
        leave(128 + signal.SIGPIPE)


def _is_unread() -> bool:
    """Whether the reader of standard output has gone."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))


def _answer(words: Sequence[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        say(usage())
        return 0
    if first in ("-V", "--version", "version"):
        print(f"tessera {__version__}")
        return 0
    if first in CORE or first in _added():
        return _run(first, words[1:])
    known = ", ".join(names())
    problem = f"there is no command {first!r}" if first else "say what to do"
    complain(f"tessera: {problem}: {known}, or --help")
    return 2


def _run(name: str, words: Sequence[str]) -> int:
    """Run a command; the status is 2, after one line, where it cannot be run here."""
    try:
        command = command_of(name)
        if needs := lacks(name, command):
            raise Unavailable(needs)
    except Unavailable as error:
        complain(f"tessera {name} {error}")
        return 2
    with quick_imports():
        module = import_module(command.module)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return module.main(words, f"tessera {name}") or 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Wherever it was to be written: TMPDIR, a home, an output.
        complain(f"tessera {name}: {reason_of(error)}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
