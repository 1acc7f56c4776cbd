"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder; what it signs is for localhost and 127.0.0.1."""

    folder: Path

    def __post_init__(self) -> None:
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-subj", "/CN=ca", "-out", "ca.pem")

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    def sign(self, name: str, *validity: str) -> tuple[Path, Path]:
        """A certificate with the authority's behind it, and its key; ``validity`` are openssl's words."""
        (self.folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        key, request = f"{name}.key", f"{name}.csr"
        self._openssl("req", *_NEW_KEY, "-keyout", key, "-subj", f"/CN={name}", "-out", request)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        words = validity or ("-days", "2")
        self._openssl("x509", "-req", "-in", request, *signing, *words, "-out", f"{name}.leaf")
        chain = self.folder / f"{name}.pem"
        chain.write_text((self.folder / f"{name}.leaf").read_text() + (self.folder / "ca.pem").read_text())
        return chain, self.folder / key

    def encrypt(self, key: Path, password: str) -> Path:
        encrypted = key.with_suffix(".encrypted")
        words = ("-aes256", "-passout", f"pass:{password}")
        self._openssl("ec", "-in", str(key), *words, "-out", str(encrypted))
        return encrypted

    @property
    def client(self) -> ssl.SSLContext:
        """Trusts this authority alone."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
