"""Files of operators: only regular ones are read, within bounds, and no key of YAML is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.cli.serve import read
from tessera.errors import ConfigError
from tessera.flags import json_object
from tessera.frontend.model_settings import read_models
from tessera.launch.settings import SettingError
from tessera.small_files import MOST_YAML_BYTES, read_json, read_regular, read_yaml
from tessera.worker.settings import load_stages
from tests.special_files import endless, fifo, folder, large

pytestmark = pytest.mark.timeout(60)

DEEP = 100_000
"""Levels of JSON; of YAML each takes calls of Python, and the time of its square."""
DEEP_YAML = 101


SPECIAL = [
    (fifo, "is no regular file"),
    (endless, "is no regular file"),
    (folder, "Is a directory"),
    (large, r"has more than the \d+ MiB that are read"),
]


@pytest.mark.parametrize("reader", [read_regular, read_json, read_yaml])
@pytest.mark.parametrize(("make", "says"), SPECIAL)
def test_what_is_no_file_of_an_operator_is_not_read(
    tmp_path: Path, reader: Callable[[Path], Any], make: Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(OSError, match=says):
        reader(path)


def test_a_link_to_a_file_and_a_file_of_proc_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {}
    # Such a file has no size.
    assert read_regular(Path("/proc/self/stat")).startswith(str(os.getpid()).encode())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("[" * DEEP_YAML, "nested too deeply", id="deep"),
        pytest.param("a: " + "9" * 5000, "a value cannot be read: Exceeds the limit", id="digits"),
        ("a: 2001-13-41", "a value cannot be read: month must be in 1..12"),
        ("a: !!int ''", "a value cannot be read"),
        ("a: 1\nb: 2\na: 3", r"^the key 'a' stands on line 1 and again on line 3$"),
        ("'a': 1\nb: 2\na: 3", "the key 'a' stands on line 1 and again on line 3"),
        ("x:\n  - {y: 1,\n     y: 1}", "the key 'y' stands on line 2 and again on line 3"),
        ("x: [{y: 1, y: 2}]", "the key 'y' stands twice on line 1"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("a: [", "expected the node content"),
    ],
)
def test_what_is_no_yaml_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)


def test_a_mapping_may_override_what_it_takes_from_another(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        "base: &b {x: 1, y: 2}\nfirst: &f {<<: *b, x: 3}\nsecond: {<<: *f, y: 4}\nthird: *b\n1: a\n'1': b\n"
    )
    assert read_yaml(path) == {
        "base": {"x": 1, "y": 2},
        "first": {"x": 3, "y": 2},
        "second": {"x": 3, "y": 4},
        "third": {"x": 1, "y": 2},
        1: "a",
        "1": "b",
    }


def serve(path: Path) -> None:
    read(["--config", str(path)])


def models(path: Path) -> None:
    read_models(path, "space")


@pytest.mark.parametrize("reader", [serve, models, load_stages])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (fifo, "is no regular file"),
        (endless, "is no regular file"),
        pytest.param("[" * DEEP_YAML, "not valid YAML: it is nested too deeply", id="deep"),
        pytest.param("port: " + "9" * 5000, "not valid YAML: a value cannot be read", id="digits"),
        ("models: []\nmodels: []", "not valid YAML: the key 'models' stands on line 1 and again on line 2"),
        pytest.param(" " * (MOST_YAML_BYTES + 1), "has more than the 4 MiB", id="large"),
    ],
)
def test_each_file_of_settings_is_read_so(
    tmp_path: Path, reader: Callable[[Path], Any], content: str | Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "file.yaml"
    if isinstance(content, str):
        path.write_text(content)
    else:
        content(path)
    with pytest.raises((SettingError, ConfigError), match=says):
        reader(path)


def test_a_setting_may_not_come_in_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max_in_flight: 8\nmodel-path: x\nmax-in-flight: 9\n")
    with pytest.raises(SettingError, match="max_in_flight and max-in-flight are the same setting"):
        serve(path)


def test_json_of_a_flag_may_not_be_as_deep_as_anything() -> None:
    with pytest.raises(ConfigError, match=r"^--x: not valid JSON: it is nested too deeply$"):
        json_object("[" * DEEP, "--x")
