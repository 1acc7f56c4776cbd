"""Says what is not installed and the command that installs it, from where this installation came from.

Standard library alone, and without site-packages, as ``siblings``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tessera.errors import ConfigError
from tessera.siblings import DISTRIBUTION, checkout


def absent(*modules: str) -> tuple[str, ...]:
    """Return which of these modules are not installed."""
    return tuple(name for name in modules if not _is_installed(name))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that it would be in.
        return False


def lack(*packages: str, extra: str, of: str = DISTRIBUTION) -> str:
    """Return the end of a sentence: what is needed, and how to install it where an ``extra`` brings it."""
    needs = f"needs {' and '.join(packages)}"
    if not extra:
        return needs
    return f"{needs}; install {'them' if packages[1:] else 'it'} with: {install(extra, of)}"


def missing(what: str, *packages: str, extra: str) -> ConfigError:
    """Return the error of ``what``, a singular, which needs ``packages`` of an extra of Tessera's."""
    return ConfigError(f"{what} {lack(*packages, extra=extra)}")


def install(extra: str, of: str = DISTRIBUTION) -> str:
    """Return the command that adds ``extra`` to this environment."""
    pip = shutil.which("pip")
    own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return shlex.join([*(["pip"] if own else [sys.executable, "-m", "pip"]), "install", *_source(extra, of)])


def _source(extra: str, of: str) -> list[str]:
    root = checkout() if of == DISTRIBUTION else None
    if root is not None:
        return [*_constraints(root), "-e", f"{root}[{extra}]"]
    try:
        # https://packaging.python.org/en/latest/specifications/direct-url/
        origin = json.loads(distribution(of).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = urlsplit(origin.get("url", ""))
    path = Path(unquote(url.path))
    if url.scheme == "file" and path.exists():
        editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return [*_constraints(path), *editable, f"{path}[{extra}]"]
    return [f"{of}[{extra}]"]


def _constraints(folder: Path) -> list[str]:
    """Return the versions that the tests ran with, where the folder has them."""
    file = folder / "constraints.txt"
    return ["-c", str(file)] if file.is_file() else []
