"""Packages that an extra of this one brings."""

from __future__ import annotations

from tessera.errors import ConfigError


def missing(package: str, extra: str, what: str) -> ConfigError:
    """What to raise where a package is not installed that ``what``, a singular, needs."""
    return ConfigError(f"{what} needs {package}; install it with: pip install 'tessera-embed[{extra}]'")
