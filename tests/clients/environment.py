"""Environments of clients that cannot live in that of the tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from tests.e2e.service import ROOT

INSTALL_SECONDS = float(os.environ.get("TESSERA_CLIENTS_SECONDS", "240"))


class Answering(Protocol):
    """A running service, and a key that opens it."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...


def clients_environment(name: str) -> Path:
    """The directory that ``scripts/clients NAME`` makes. Where it cannot, the test is skipped and says why.

    ``TESSERA_CLIENTS_SECONDS`` bounds how long the installation may take.
    """
    try:
        ran = subprocess.run(
            [str(ROOT / "scripts" / "clients"), name],
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(
            f"{name} was not installed within {INSTALL_SECONDS:.0f} s; scripts/clients goes on from there"
        )
    if ran.returncode != 0:
        pytest.skip(f"{name} cannot be installed here: {ran.stderr[-300:]}")
    return Path(ran.stdout.strip())


def answers_of(
    environment: str, script: ModuleType, service: Answering, model: str, query: str, texts: list[str]
) -> dict[str, Any]:
    """What each of the ``CLIENTS`` of ``script`` answers in an environment, or the text of its error."""
    python = clients_environment(environment) / "bin" / "python"
    ran = subprocess.run(
        [python, "-m", script.__name__, service.url, service.key, model, query, json.dumps(texts)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert answers.keys() == script.CLIENTS.keys()
    return answers
