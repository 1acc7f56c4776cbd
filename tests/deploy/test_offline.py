"""Installing without a network: the bundle, its parts, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.deploy.conftest import PART_MB, run_script
from tests.e2e.service import ROOT

pytestmark = pytest.mark.e2e
INSTALL = ROOT / "scripts" / "install-offline"


def unpacked(bundle: Path, folder: Path) -> Path:
    joined = b"".join(part.read_bytes() for part in sorted(bundle.glob("bundle.tar.*")))
    with tarfile.open(fileobj=io.BytesIO(joined)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def test_no_part_is_larger_than_was_asked_for(bundle: Path) -> None:
    sizes = [part.stat().st_size for part in sorted(bundle.glob("bundle.tar.*"))]
    assert len(sizes) > 1
    assert set(sizes[:-1]) == {PART_MB << 20} and sizes[-1] <= PART_MB << 20


def test_the_parts_hold_one_wheel_for_each_pinned_requirement(bundle: Path, tmp_path: Path) -> None:
    folder = unpacked(bundle, tmp_path)
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").split()
    listed = (folder / "requirements.txt").read_text().split()
    assert len(listed) == len(list(folder.glob("*.whl"))) > 20
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line for line in listed if line not in pins] == [f"{project['name']}=={project['version']}"]
    for name in ("torch", "nixl", "safetensors", "triton"):
        assert not any(line.startswith(f"{name}==") for line in listed)


def test_the_environment_has_a_frontend_and_no_torch(bare_frontend: Path) -> None:
    code = "import importlib.util as u, tessera.frontend.__main__; print(u.find_spec('torch'))"
    ran = subprocess.run([bare_frontend, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "None"), ran.stderr


def test_a_damaged_part_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    part = copy / "bundle.tar.001"
    part.write_bytes(part.read_bytes()[:-1] + b"\x5a")
    ran = run_script(INSTALL, copy, tmp_path / "venv")
    assert ran.returncode == 1
    assert "bundle.tar.001" in ran.stdout + ran.stderr
    assert not (tmp_path / "venv").exists()


def test_a_bundle_for_another_python_is_refused(bundle: Path, bare_frontend: Path, tmp_path: Path) -> None:
    folder = unpacked(bundle, tmp_path)
    about = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(about | {"python": "3.99"}))
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    ran = run_script(INSTALL, folder, bare_frontend.parents[1])
    assert ran.returncode == 1
    assert "python 3.99" in ran.stderr


def test_a_missing_requirement_is_named(bundle: Path, tmp_path: Path) -> None:
    """pip is told not to resolve, so what is missing has to be found afterwards."""
    folder = unpacked(bundle, tmp_path / "bundle")
    for path in folder.iterdir():
        if not path.name.startswith(("click-", "uvicorn-", "bundle.json")):
            path.unlink()
    kept = [path.name for path in folder.glob("*.whl")]
    (folder / "requirements.txt").write_text("".join("==".join(name.split("-")[:2]) + "\n" for name in kept))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in folder.iterdir()]
    (folder / "SHA256SUMS").write_text("".join(lines))
    ran = run_script(INSTALL, folder, tmp_path / "venv")
    assert ran.returncode == 1
    assert "uvicorn" in ran.stderr and "requires h11, which is not installed" in ran.stderr
