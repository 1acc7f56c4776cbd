"""What sdist and wheel hold, and ``scripts/first-vector``, which serves a vector from the wheel alone."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.deploy.processes import run_script
from tests.e2e.service import ROOT

pytestmark = [pytest.mark.installs, pytest.mark.xdist_group("wheel"), pytest.mark.timeout(600)]
SOURCE = "components/src/"


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with both, and what was said of the way to a vector."""
    dist = tmp_path_factory.mktemp("dist")
    arguments = f"--constraint {ROOT / 'constraints.txt'}"
    # With this Python, beside which is uv.
    words = [
        sys.executable,
        ROOT / "scripts/first-vector",
        sys.executable,
        "--dist",
        dist,
        "--installer",
        "uv",
    ]
    ran = run_script(*words, TESSERA_PIP_ARGS=arguments)
    if ran.returncode and any(
        sign in ran.stderr for sign in ("Failed to fetch", "was not found in the package registry")
    ):
        pytest.skip(f"the package index cannot be reached: {ran.stderr}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    return dist, ran.stdout


def of_package() -> set[str]:
    """The files of the package that git knows, below its folder."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", SOURCE]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name.removeprefix(SOURCE) for name in listed if (ROOT / name).is_file()}


def test_a_wheel_alone_serves_a_vector(tried: tuple[Path, str]) -> None:
    _, said = tried
    assert re.search(r"^  a vector of 256 numbers: [\d.]+ s$", said, re.MULTILINE)
    assert "  one of a picture: " in said and "left in HOME: nothing" in said


def test_the_wheel_holds_the_package_and_nothing_else(tried: tuple[Path, str]) -> None:
    (wheel,) = tried[0].glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    # Compiled for every Python here, for which it was, and the tag says so.
    built = {"tessera/_resampling.abi3.so"} if shutil.which("cc") else set()
    assert names - about == of_package() | built
    assert wheel.name.endswith(f"-cp311-abi3-linux_{platform.machine()}.whl")
    packages = {path.parent.name for path in (ROOT / SOURCE).glob("*/__init__.py")}
    assert {"tessera", "tessera_engines", "tessera_tools"} <= packages
    assert {name.partition("/")[0] for name in names - about} == packages
    assert {f"{package}/py.typed" for package in packages} < names
    assert "tessera/engine_configs/default/agg.yaml" in names
    assert {"tessera/checkpoints/tessera-demo/model.safetensors", "tessera/frontend/page/page.html"} < names
    assert sorted(name.partition("/")[2] for name in about) == [
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    ]


def test_the_sdist_holds_what_the_wheel_is_built_from_and_nothing_else(tried: tuple[Path, str]) -> None:
    (sdist,) = tried[0].glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {member.name.partition("/")[2] for member in tar if member.isfile()}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    beside = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert names - made == {f"{SOURCE}{name}" for name in of_package()} | beside
