"""The command that a message names installs what is missing, from where this installation came from."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution import ROOT

pytestmark = pytest.mark.starts

SAY = """
import sys
sys.path[:0] = {paths!r}
from tessera.extras import lack
print(lack(*{packages!r}, extra={extra!r}, of={distribution!r}))
"""


def said(*packages: str, extra: str, distribution: str, site: Path | None = None) -> str:
    paths = [str(ROOT / "components" / "src"), *([str(site)] if site else [])]
    code = SAY.format(paths=paths, packages=packages, extra=extra, distribution=distribution)
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.strip()


def command(sentence: str) -> list[str]:
    return shlex.split(sentence.partition(" with: ")[2])


def installed(tmp_path: Path, *flags: str) -> tuple[Path, Path]:
    """The folder that a package was installed from by pip, and the one into which."""
    source, site = tmp_path / "a source", tmp_path / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'acme-rows'\nversion = '1'\n[tool.setuptools]\npy-modules = []\n"
    )
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), *flags, str(source)], check=True)
    return source, site


def test_in_a_checkout_its_extra_is_installed_with_the_tested_versions() -> None:
    sentence = said("pyarrow", "tqdm", extra="corpus", distribution="tessera-embed")
    assert sentence.startswith("needs pyarrow and tqdm; install them with: ")
    pip = [sys.executable, "-m", "pip", "install"]
    assert command(sentence) == [*pip, "-c", f"{ROOT}/constraints.txt", "-e", f"{ROOT}[corpus]"]


def test_a_package_installed_from_a_folder_names_it(tmp_path: Path) -> None:
    source, site = installed(tmp_path)
    sentence = said("one", extra="more", distribution="acme-rows", site=site)
    assert sentence.startswith("needs one; install it with: ")
    assert command(sentence)[-1] == f"{source}[more]"
    (source / "constraints.txt").touch()
    again = command(said("one", extra="more", distribution="acme-rows", site=site))
    assert again[-3:] == ["-c", str(source / "constraints.txt"), f"{source}[more]"]
    assert json.loads(next(site.glob("*/direct_url.json")).read_text())["url"].endswith("a%20source")


def test_one_whose_source_is_gone_or_unknown_is_named_itself(tmp_path: Path) -> None:
    source, site = installed(tmp_path)
    shutil.rmtree(source)
    assert command(said("one", extra="more", distribution="acme-rows", site=site))[-1] == "acme-rows[more]"
    assert command(said("one", extra="more", distribution="acme-none"))[-1] == "acme-none[more]"


def test_what_no_extra_brings_is_only_named() -> None:
    assert said("torch", extra="", distribution="acme-none") == "needs torch"


@pytest.mark.parametrize("folder", ["components/src", "docs", "deploy", "scripts"])
def test_no_line_names_an_index_that_does_not_have_us(folder: str) -> None:
    files = (path for path in (ROOT / folder).rglob("*") if path.suffix in {"", ".py", ".md", ".yaml"})
    own = [path for path in files if path.is_file() and "egg-info" not in path.parent.name]
    texts = {path: path.read_text(errors="replace") for path in own}
    assert not [path for path, text in texts.items() if re.search(r"install ['\"]tessera-embed", text)]
