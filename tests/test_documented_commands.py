"""Every ``tessera`` command of the pages is understood by the command that it names.

Each is given to the parser as it stands; what it would then do is stopped before it begins. Tests of their
own run many of them: ``tests/deploy/test_readme.py``, ``tests/clients``, ``tests/tessera_corpus``.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tessera.cli.__main__ import command_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]


class _Understood(Exception):
    """What was read has been taken, and nothing is left."""


def _commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:\$ |\+)?(tessera .*)", line):
                    yield page.name, shlex.split(found[1], comments=True)[1:]


COMMANDS = [(page, words) for page, words in _commands() if words[0] != "serve"]


def test_they_are_found() -> None:
    assert {words[0] for _, words in COMMANDS} >= {"embed", "search", "engine", "checkpoint", "sizing"}


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page} {' '.join(words[:3])}" for page, words in COMMANDS]
)
def test_a_command_of_a_page_is_understood(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = words
    module = import_module(command_of(name).module)
    top = True

    def stopping(method: Any) -> Any:
        def parse(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
            nonlocal top
            outermost, top = top, False
            try:
                parsed, more = method(self, *given, **named)
            finally:
                top = outermost
            if outermost and not more:
                raise _Understood
            return parsed, more

        return parse

    for method in ("parse_known_args", "parse_known_intermixed_args"):
        monkeypatch.setattr(
            argparse.ArgumentParser, method, stopping(getattr(argparse.ArgumentParser, method))
        )

    def refused(status: object = 0) -> NoReturn:
        raise AssertionError(f"{page}: {' '.join(words)}: {capsys.readouterr().err}")

    try:
        status = module.main(rest, f"tessera {name}")
    except _Understood:
        return
    except SystemExit as ended:
        refused(ended.code)
    refused(status)
