"""Settings written once: flags, checks and units come from the fields' annotations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from docs.tables import PAGES, ROOT, rows_of, written

from tessera.errors import ConfigError
from tessera.flags import parse_flags
from tessera.settings import MIB, NOT_NEGATIVE, POSITIVE, Setting, fields_of


class Part(msgspec.Struct, frozen=True, kw_only=True):
    nbytes: Annotated[int, Setting(flag="--size-mb", unit=MIB, check=POSITIVE, help="of one")] = 2 << 20
    total: Annotated[int, Setting(flag="--total-mb", unit=MIB, check=POSITIVE, help="of one")] = 8 << 20
    inner: int = 7


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    path: Annotated[Path, Setting(flag="--path", help="where")]
    part: Annotated[Part, Setting(group="sizes")] = Part()
    kind: Annotated[Literal["a", "b"], Setting(flag="--kind", help="which")] = "a"
    names: Annotated[frozenset[str], Setting(flag="--names", help="who", metavar="NAME")] = frozenset()
    seconds: Annotated[float, Setting(flag="--seconds", check=NOT_NEGATIVE, help="how long")] = 1.5
    loud: Annotated[bool, Setting(flag="--loud", help="or not", more="Not at night")] = False
    quiet: Annotated[bool, Setting(flag="--quiet", help="or not")] = True
    derived: tuple[str, ...] = ()


def parsed(*flags: str) -> Whole:
    return parse_flags(Whole, ["--path", "here", *flags], prog="whole", description="A test.")


def test_without_flags_there_are_the_defaults() -> None:
    assert parsed() == Whole(path=Path("here"))


def test_a_flag_is_in_its_own_unit_and_the_field_in_its_own() -> None:
    assert parsed("--size-mb", "0.5").part == Part(nbytes=1 << 19)


def test_values_have_the_fields_types() -> None:
    made = parsed("--names", "x", "y", "--kind", "b", "--loud", "--no-quiet", "--seconds", "0")
    assert made.names == frozenset({"x", "y"})
    assert (made.kind, made.loud, made.quiet, made.seconds) == ("b", True, False, 0.0)


def test_a_variable_is_under_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "PATH": "there",
        "NAMES": "x,y z",
        "LOUD": "on",
        "QUIET": "off",
        "SIZE_MB": "4",
        "KIND": "",
    }
    for name, text in environment.items():
        monkeypatch.setenv(f"TESSERA_{name}", text)
    made = parse_flags(Whole, ["--size-mb", "0.5"], prog="whole", description="A test.")
    assert (made.path, made.names, made.part.nbytes) == (Path("there"), frozenset("xyz"), 1 << 19)
    assert (made.loud, made.quiet, made.kind) == (True, False, "a")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("SIZE_MB", "lots", "invalid float value: 'lots'"),
        ("SIZE_MB", "0", "must be positive, not 0"),
        ("KIND", "c", "invalid choice: 'c'"),
        ("LOUD", "very", "expected on or off"),
    ],
)
def test_what_a_variable_may_not_say_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    monkeypatch.setenv(f"TESSERA_{name}", text)
    with pytest.raises(ConfigError, match=f"^TESSERA_{name}={text}: {said}"):
        parsed()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_what_is_not_positive_is_refused_by_its_flag(value: str) -> None:
    with pytest.raises(ConfigError, match=f"^--size-mb must be positive, not {value}$"):
        parsed("--size-mb", value)


def test_help_has_the_groups_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    assert "sizes:\n" in text and "of one (default: 2.0)" in text and "--names [NAME ...]" in text


def test_rows_for_tables_share_a_meaning() -> None:
    sizes, quiet = rows_of(Whole, "--size-mb", "--total-mb", "--quiet")
    assert (sizes.names, sizes.defaults) == (("--size-mb", "--total-mb"), ("2", "8"))
    assert quiet.defaults == ("on",)
    assert rows_of(Whole, "--loud")[0].text == "or not. Not at night"
    with pytest.raises(ConfigError, match="--lod"):
        rows_of(Whole, "--lod")


def test_the_frontend_knows_no_engine() -> None:
    program = """
import sys
import tessera.frontend.__main__
found = [name for name in sys.modules if name.split(".")[0] == "torch" or name.startswith("tessera.engine")]
assert not found, found
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr


def test_flags_are_written_once() -> None:
    from tessera.frontend.settings import FrontendSettings
    from tessera.worker.settings import WorkerSettings

    def flags(settings: type[msgspec.Struct]) -> list[str]:
        return [
            flag
            for field in fields_of(settings)
            for flag in ([field.setting.flag] if field.part is None else flags(field.part))
            if flag
        ]

    for settings in (FrontendSettings, WorkerSettings):
        found = flags(settings)
        assert len(found) == len(set(found)) > 15


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_what_the_settings_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- end -->" in text
    assert written(text) == text, "run python -m docs.tables"
