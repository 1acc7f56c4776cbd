"""``tessera checkpoint``: whose layouts it can write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.models import families
from tessera_tools.random_checkpoint import checkpoint
from tessera_tools.random_checkpoint.spec import Sizes
from tests.cli.test_added_commands import SOURCE, write_distribution

MODULE = """
from dataclasses import replace
from tessera_tools.random_checkpoint.llama import SIZES
from tessera_tools.random_checkpoint.spec import Sizes
ACME = Sizes(tiny=replace(SIZES.tiny, layers=1), full=SIZES.full)
"""


def test_every_family_has_random_checkpoints() -> None:
    # BGE M3's is one of xlm_roberta's, with heads.
    assert checkpoint.families().keys() == {family.name for family in families()} | {
        "bert_distilled",
        "bert_rerank_distilled",
        "bge_m3",
        "splade_distilled",
    }


@pytest.mark.parametrize("name", checkpoint.families())
def test_each_has_two_sizes(name: str) -> None:
    sizes = checkpoint.families()[name].load()
    assert isinstance(sizes, Sizes) and sizes.tiny != sizes.full


def test_an_installed_package_adds_a_family(tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "model"
    write_distribution(site, "acme", "[tessera.random_checkpoints]\nacme = acme_random:ACME\n")
    (site / "acme_random.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(SOURCE)))}
    command = [sys.executable, "-m", "tessera.cli", "checkpoint", "--family", "acme", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    assert '"num_hidden_layers": 1,' in (out / "config.json").read_text()
