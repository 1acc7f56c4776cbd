"""The log's settings are known before the rest of the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tessera.logs import LogFormat, LogSettings, log_settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], LogSettings()),
        (["--log-format", "json"], LogSettings(format=LogFormat.JSON)),
        (
            ["--other", "x", "--log-level=debug", "--log-format=json"],
            LogSettings(format=LogFormat.JSON, level="debug"),
        ),
        (["--log-format", "xml"], LogSettings()),
        (["--log-level"], LogSettings()),
    ],
)
def test_they_are_found_among_other_flags(arguments: list[str], expected: LogSettings) -> None:
    assert log_settings(arguments) == expected


def test_uncaught_exceptions_and_warnings_are_lines_too() -> None:
    program = """
import json, sys, threading, warnings
from tessera.logs import LogFormat, LogSettings, log_as
log_as("embed", LogSettings(format=LogFormat.JSON))
warnings.warn("careful")
for end in (sys.exit, lambda: 1 / 0):
    thread = threading.Thread(target=end); thread.start(); thread.join()
raise RuntimeError("the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(lines) == 3 and "careful" in lines[0]["message"]
    assert "ZeroDivisionError" in lines[1]["exception"]
    assert "the end" in lines[2]["exception"]


@pytest.mark.usefixtures("forks")
def test_a_wrong_setting_is_logged_in_the_form_that_was_asked_for() -> None:
    command = [sys.executable, "-m", "tessera.frontend", "--model-path", "/nowhere", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["level"] == "ERROR"
    assert "/nowhere" in json.loads(line)["message"]
