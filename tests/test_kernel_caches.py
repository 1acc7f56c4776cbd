"""Where compilers are told to keep their kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.kernel_caches import CACHE_VARIABLE, cache_directory, keep_kernels

COMPILERS = {
    "TRITON_CACHE_DIR": "triton",
    "QUACK_CACHE_DIR": "quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COMPILERS, SWITCH, CACHE_VARIABLE, "XDG_CACHE_HOME"):
        # Set first, so that what is set below is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_all_are_below_one_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))
    keep_kernels()
    assert {name: os.environ[name] for name in COMPILERS} == {
        name: str(tmp_path / "caches" / folder) for name, folder in COMPILERS.items()
    }
    assert os.environ[SWITCH] == "1" and (tmp_path / "caches").is_dir()


def test_what_an_operator_says_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv(SWITCH, "0")
    keep_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere" and os.environ[SWITCH] == "0"


def test_the_users_caches_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "tessera"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "tessera"


def test_a_place_that_cannot_be_made_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "caches"))
    keep_kernels()
    assert "compiled kernels are not kept" in caplog.text
    assert not [name for name in (*COMPILERS, SWITCH) if name in os.environ]
