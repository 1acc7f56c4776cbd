"""``deploy/tessera.service``: systemd takes it, and it agrees with the launcher."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.launch.settings import settings
from tests.e2e.service import ROOT

UNIT = ROOT / "deploy/tessera.service"
PATH = "/opt/tessera/bin/tessera"


@pytest.fixture
def service() -> configparser.SectionProxy:
    """Return the section of the unit about its start and its end; of a repeated key the last value."""
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return unit["Service"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    installed = Path(sys.executable).with_name("tessera")
    copy.write_text(UNIT.read_text().replace(PATH, str(installed)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_refuses_a_unit_with_a_mistake(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PATH, "/bin/true").replace("KillMode=mixed", "KillMode=some"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=180, check=False
    )
    assert "kill mode" in done.stderr


def test_it_serves_in_the_foreground_and_stops_in_order(service: configparser.SectionProxy) -> None:
    assert shlex.split(service["ExecStart"]) == [PATH, "serve", "--config", "/etc/tessera.yaml"]
    assert service["ExecReload"].split() == ["/bin/kill", "-HUP", "$MAINPID"]
    assert service["KillMode"] == "mixed"
    # Frontends, embed workers and encode workers, one after another.
    (stop,) = (field.default for field in settings() if field.name == "stop_timeout_seconds")
    assert isinstance(stop, int) and int(service["TimeoutStopSec"]) > 3 * stop
