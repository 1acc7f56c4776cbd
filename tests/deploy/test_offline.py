"""Installing without a network: the bundle, its parts, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import runpy
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.deploy.processes import run_script
from tests.e2e.service import ROOT, launch

pytestmark = [pytest.mark.xdist_group("images"), pytest.mark.images, pytest.mark.timeout(600)]
INSTALL = ROOT / "scripts" / "install-offline"
SETUP = ROOT / "scripts" / "setup"
PART_MB = 40
BUNDLE = runpy.run_path(str(ROOT / "scripts" / "bundle"), run_name="bundle")


@pytest.fixture(scope="module")
def parts(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle in parts, as --part-mb leaves it."""
    folder = tmp_path_factory.mktemp("parts")
    BUNDLE["split"](bundle, folder, PART_MB << 20)
    return folder


def sign(folder: Path) -> None:
    """Checksums for a bundle that was changed on purpose."""
    paths = [path for path in folder.iterdir() if path.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_there_is_one_wheel_for_each_pinned_requirement(bundle: Path) -> None:
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").split()
    listed = (bundle / "requirements.txt").read_text().split()
    assert len(listed) == len(list(bundle.glob("*.whl"))) > 20
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line for line in listed if line not in pins] == [f"{project['name']}=={project['version']}"]
    for name in ("torch", "nixl", "safetensors", "triton"):
        assert not any(line.startswith(f"{name}==") for line in listed)


def test_the_environment_has_a_frontend_and_no_torch(bare_frontend: Path) -> None:
    code = "import importlib.util as u, tessera.frontend.__main__; print(u.find_spec('torch'))"
    ran = subprocess.run([bare_frontend, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "None"), ran.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_environment_resizes_images_by_what_was_compiled(bare_frontend: Path) -> None:
    code = "from tessera.resampling import compiled; print(compiled())"
    ran = subprocess.run([bare_frontend, "-c", code], capture_output=True, text=True, check=False)
    assert "site-packages/tessera/_resampling.abi3.so" in ran.stdout, ran.stderr


def test_a_wheel_for_another_processor_is_built_without_a_compiler(bundle: Path, tmp_path: Path) -> None:
    other = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
    wheel = BUNDLE["build"](tmp_path, other)
    assert wheel.name.endswith(f"-cp311-abi3-linux_{other}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "tessera/resampling.py" in names and not [name for name in names if name.endswith(".so")]


def test_no_part_is_larger_than_was_asked_for(parts: Path) -> None:
    sizes = [part.stat().st_size for part in sorted(parts.glob("bundle.tar.*"))]
    assert len(sizes) > 1
    assert set(sizes[:-1]) == {PART_MB << 20} and sizes[-1] <= PART_MB << 20


def test_parts_install_like_the_folder(parts: Path, bare_frontend: Path, tmp_path: Path) -> None:
    venv = bare_frontend.parents[1]
    ran = run_script(INSTALL, parts, venv, TMPDIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_is_refused(parts: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(parts, tmp_path / "bundle")
    part = copy / "bundle.tar.001"
    part.write_bytes(part.read_bytes()[:-1] + b"\x5a")
    ran = run_script(INSTALL, copy, tmp_path / "venv")
    assert ran.returncode == 1
    assert "bundle.tar.001" in ran.stdout + ran.stderr
    assert not (tmp_path / "venv").exists()


def test_a_bundle_for_another_python_is_refused(bundle: Path, bare_frontend: Path, tmp_path: Path) -> None:
    about = json.loads((bundle / "bundle.json").read_text())
    (tmp_path / "bundle.json").write_text(json.dumps(about | {"python": "3.99"}))
    sign(tmp_path)
    ran = run_script(INSTALL, tmp_path, bare_frontend.parents[1])
    assert ran.returncode == 1
    assert "python 3.99" in ran.stderr


def part_of(bundle: Path, folder: Path, *names: str, **about: object) -> Path:
    """A bundle of a few of its packages; ``about`` goes over what is said of it."""
    folder.mkdir()
    kept = [next(bundle.glob(f"{name}-*.whl")) for name in names]
    for path in kept:
        shutil.copy(path, folder)
    pins = ["==".join(path.name.split("-")[:2]) + "\n" for path in kept]
    (folder / "requirements.txt").write_text("".join(pins))
    said = json.loads((bundle / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(said | about))
    sign(folder)
    return folder


def test_a_missing_requirement_is_named(bundle: Path, tmp_path: Path) -> None:
    """pip is told not to resolve, so what is missing has to be found afterwards."""
    # Without a pip of its own, 5 s of processor time: that of PYTHON installs.
    venv.create(tmp_path / "venv", symlinks=True)
    part = part_of(bundle, tmp_path / "bundle", "click", "uvicorn")
    ran = run_script(INSTALL, part, tmp_path / "venv", PYTHON=sys.executable)
    assert ran.returncode == 1
    assert "uvicorn" in ran.stderr and "requires h11, which is not installed" in ran.stderr


def test_it_sees_what_another_virtual_environment_has(bundle: Path, tmp_path: Path) -> None:
    """As for a torch in an environment of its own; with Debian's Python, which comes without ensurepip."""
    others, own, hidden = (tmp_path / name for name in ("others", "own", "hidden"))
    venv.create(others, symlinks=True)
    (site,) = others.glob("lib/python*/site-packages")
    # The pip that is here, since one of its own takes 5 s of processor time. It is not imported: no process
    # that did can import setuptools any more.
    here = importlib.util.find_spec("pip")
    assert here is not None and here.origin is not None
    (site / "pip").symlink_to(Path(here.origin).parent)
    (site / "torch.py").touch()
    (site / "torch-2.11.0.dist-info").mkdir()
    (site / "torch-2.11.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0"
    )
    hidden.mkdir()
    (hidden / "ensurepip.py").write_text("raise ImportError")
    about = {"left_out": ["torch", "missing"], "extras": ["worker"], "source": "older"}
    ran = run_script(
        *(INSTALL, part_of(bundle, tmp_path / "bundle", "click", "h11", **about), own),
        PYTHON=str(others / "bin/python"),
        SYSTEM_SITE_PACKAGES="1",
        PYTHONPATH=str(hidden),
    )
    assert ran.returncode == 0, ran.stderr
    assert "made without missing, which" in ran.stderr
    code = "import click, torch; print(click.__file__, torch.__file__)"
    mine, theirs = run_script(own / "bin/python", "-c", code).stdout.split()
    assert Path(mine).is_relative_to(own) and Path(theirs).is_relative_to(others)
    ran = run_script(SETUP, "worker", VENV=str(own))
    assert ran.returncode == 0 and "another version" in ran.stderr


def test_launch_starts_it_and_leaves_it_as_it_is(
    bare_frontend: Path, checkpoint: Path, tmp_path: Path
) -> None:
    environment = {
        "VENV": str(bare_frontend.parents[1]),
        "PYTHON": "/nowhere/python",
        "PIP_NO_INDEX": "1",
        "TESSERA_ENCODE_WORKERS": "0",
        "TESSERA_EMBED_WORKERS": "0",
    }
    log = tmp_path / "log"
    with launch("e_p.sh", checkpoint, log, workers=0, environment=environment) as service:
        assert service.health()["workers"] == {"embed": 0, "encode": 0}
    assert "installing" not in log.read_text() and "bundle" not in log.read_text()


def test_setup_says_what_the_bundle_lacked(bare_frontend: Path) -> None:
    environment = str(bare_frontend.parents[1])
    ran = run_script(SETUP, "worker", VENV=environment)
    assert ran.returncode == 1
    assert environment in ran.stderr and "--extra worker" in ran.stderr
