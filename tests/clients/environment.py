"""Environments of clients that cannot live in that of the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.service import ROOT

INSTALL_SECONDS = float(os.environ.get("TESSERA_CLIENTS_SECONDS", "240"))


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
