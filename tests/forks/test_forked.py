"""A fork finds what a program finds that was executed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import tessera.worker
from tessera.kernel_caches import keep_kernels
from tessera.rpc import set_environment_defaults
from tessera.sandbox import pool
from tests.distribution import install
from tests.forks.popen import ROOT, Forked
from tests.forks.program import differs, imported_with
from tests.signals import default_signals

pytestmark = pytest.mark.starts


def begun(popen: type[subprocess.Popen[bytes]], child: Path, **environment: str) -> list[dict[str, Any]]:
    """What a probe finds, and what its child does."""
    inherited = os.memfd_create("inherited")
    process = popen(
        [sys.executable, "-m", "tests.forks.probe", str(child)],
        env={**imported_with, "TESSERA_PROBE": "é \n", **environment},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[inherited],
        start_new_session=True,
        preexec_fn=default_signals,
    )
    os.close(inherited)
    said, _ = process.communicate(b"some input")
    assert process.returncode == 3
    found: list[dict[str, Any]] = [json.loads(said), json.loads(child.read_text())]
    assert found[0].pop("parent") == os.getpid()
    assert found[1].pop("parent") == process.pid
    return found


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_fork_finds_what_an_executed_program_finds(tmp_path: Path, elsewhere: bool) -> None:
    child = tmp_path / "child"
    # Of a package that is installed elsewhere, and a service that looks for modules where it was started.
    path = install(tmp_path / "site", "tessera.models", "tests.families.token_rows:FAMILY")
    environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"} if elsewhere else {}
    before = Forked.forks
    forked = begun(Forked, child, **environment)
    assert Forked.forks == before + 1
    assert ("token_rows" in forked[0]["families"]) == elsewhere
    for found, wanted in zip(forked, begun(subprocess.Popen, child, **environment), strict=True):
        differences = {name: (value, wanted[name]) for name, value in found.items() if value != wanted[name]}
        assert not differences


@pytest.mark.parametrize("module", ["tessera.launch", "tessera.frontend", "tessera.local.engine_process"])
def test_a_fork_says_what_an_executed_program_says(module: str) -> None:
    said = []
    for popen in (Forked, subprocess.Popen):
        command = [sys.executable, "-m", module, "--help"]
        process = popen(command, env=imported_with, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate()
        # A traceback of a fork is another one, but for its end.
        said.append((process.returncode, output, errors.split()[-3:]))
        assert b"RuntimeWarning" not in errors
    assert said[0] == said[1]


def test_what_the_package_sets_in_this_process_keeps_nothing_from_a_fork(tmp_path: Path) -> None:
    """Otherwise no test forks any more after one that has used workers here."""
    with patch.dict(os.environ, {"TESSERA_CACHE_DIR": str(tmp_path)}):
        importlib.reload(tessera.worker)
        keep_kernels()
        set_environment_defaults()
        # As scikit-learn does, which another test may import.
        os.environ |= {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
        assert differs(dict(os.environ)) is None
        assert differs({**os.environ, "OMP_WAIT_POLICY": "active"}) == "OMP_WAIT_POLICY"
        # Confined processes, whose memory is allocated otherwise for its speed.
        assert differs({**os.environ, **pool._ENVIRONMENT}) is None
        for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
            assert differs({**os.environ, **pool._ENVIRONMENT, name: "1"}) == name


def test_what_a_fork_would_not_heed_is_executed(tmp_path: Path) -> None:
    before = Forked.forks
    for name in ("sitecustomize", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").touch()
    # The settings of a frontend are those of its doors.
    door = install(tmp_path / "site", "tessera.doors", "tests.doors.knock:DOOR")
    paths = str(tmp_path / "sitecustomize"), str(tmp_path / "torch"), door
    others = [{"PYTHONPATH": path} for path in paths]
    for other in ({"MALLOC_ARENA_MAX": "1"}, {"PYTHONWARNINGS": "once"}, *others):
        assert differs({**imported_with, **other}) == next(iter(other))
        Forked(
            [sys.executable, "-m", "tests.forks.probe"],
            env={**imported_with, **other},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ).wait()
    Forked(["true"]).wait()
    assert Forked.forks == before
