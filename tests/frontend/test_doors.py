"""A door that is only installed: its flags, routes, port and drain come without a change to the core."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.distribution import install
from tests.e2e.service import ROOT, free_ports
from tests.frontend.alone import Alone, frontend_process
from tests.waiting import wait_for_line, wait_until

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("forks")]

KEY = {"authorization": "Bearer sk-knock-0123456789"}


@pytest.fixture
def site(tmp_path: Path) -> str:
    return install(tmp_path / "site", "tessera.doors", "tests.doors.knock:DOOR")


@contextmanager
def knocking(checkpoint: Path, folder: Path, site: str, *flags: str) -> Iterator[tuple[Alone, int]]:
    """A frontend with the door, and the door's own port."""
    (port,) = free_ports(1)
    words = ("--knock-port", str(port), "--knock-word", "who is there", *flags)
    with frontend_process(checkpoint, folder, *words, environment={"PYTHONPATH": site}) as alone:
        yield alone, port


def ended(site: str, *words: str, without_site: bool = False, **environment: str) -> tuple[int, str]:
    """The status of a program of ours, and what it said."""
    command = [sys.executable, *(["-S"] if without_site else []), *words]
    path = os.pathsep.join((str(ROOT / "components" / "src"), site))
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_a_door_listens_before_http_and_is_drained_and_closed_with_the_service(
    checkpoint: Path, tmp_path: Path, site: str
) -> None:
    with knocking(checkpoint, tmp_path, site) as (alone, port):
        assert alone.http.get("/knock").json() == {"word": "who is there", "models": 1}
        with socket.create_connection(("127.0.0.1", port), timeout=60) as late:
            answers = late.makefile("rb")
            assert answers.readline() == b"who is there\n"
            alone.process.send_signal(signal.SIGTERM)
            # Who has knocked already is answered, and nobody else.
            wait_for_line(alone.log, "nobody else may knock")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=30)
            late.sendall(b"me\n")
            assert answers.readline() == b"me\n"
        assert alone.process.wait(timeout=60) == 0
        said = ["knock on", "listening on http", "nobody else may knock", "nobody is knocking"]
        log = alone.log.read_text()
        places = [log.index(words) for words in said]
        assert places == sorted(places)


def test_a_door_says_which_paths_wait_and_which_need_no_key(
    checkpoint: Path, tmp_path: Path, site: str
) -> None:
    (tmp_path / "keys").write_text("sk-knock-0123456789 mine\n")
    flags = ("--api-keys-file", str(tmp_path / "keys"), "--max-in-flight", "1", "--open-metrics")
    with knocking(checkpoint, tmp_path, site, *flags) as (alone, _):
        http = alone.http
        assert http.get("/knock").status_code == 200
        # In its own shape, and below its prefix also where no route is.
        for path in ("/knock/hold", "/knock/wait/a", "/knock/wait/no/route"):
            refused = http.post(path)
            assert (refused.status_code, refused.json()) == (401, {"knock": "invalid_api_key"}), path
        assert set(http.post("/knock").json()) == {"knock"}
        assert http.post("/knock/wait/a", headers=KEY).json() == {"has_a_place": True}
        # A place is given back behind the answer, and the metric takes none.
        wait_until(lambda: alone.in_flight == 0)
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(httpx.post, f"{http.base_url}/knock/hold", headers=KEY)
            wait_until(lambda: held.done() or alone.in_flight == 1)
            assert http.post("/v1/embeddings", headers=KEY, json={}).status_code == 429
            assert http.post("/knock/hold", headers=KEY).json() == {"knock": "overloaded"}
            assert http.post("/knock/wait/a", headers=KEY).json() == {"has_a_place": False}
            http.get("/knock/release", headers=KEY)
            assert held.result(60).status_code == 200


def test_a_doors_flags_are_listed_and_checked(checkpoint: Path, tmp_path: Path, site: str) -> None:
    status, said = ended(site, "-m", "tessera.frontend", "--help")
    assert status == 0 and "\nknocking:\n  --knock-port KNOCK_PORT" in said
    # In the order of the doors' names.
    places = [said.index(f"\n{heading}:\n") for heading in ("access", "knocking", "KServe", "Dynamo")]
    assert places == sorted(places)
    common = ("-m", "tessera.frontend", "--model-path", str(checkpoint))
    status, said = ended(site, *common, "--knock-port", "65536")
    assert status == 1 and said.endswith("--knock-port must be 0 to 65535, not 65536\n")
    status, said = ended(site, *common, "--knock-port", "81", "--port", "81")
    assert status == 1 and said.endswith("--knock-port 81: HTTP has that port\n")
    status, said = ended(site, "-m", "tessera.cli", "serve", "--help-all")
    assert status == 0 and "--knock-word" in said


@pytest.mark.parametrize("flag", ["--knock-port", "--grpc-port"])
@pytest.mark.parametrize("script", [False, True], ids=["serve", "without site-packages"])
def test_the_launcher_looks_whether_a_doors_port_is_free(
    checkpoint: Path, tmp_path: Path, site: str, flag: str, script: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, http_port = taken.getsockname()[1], free_ports(1)[0]
        if script:
            status, said = ended(
                site,
                *("-m", "tessera.launch", "agg"),
                without_site=True,
                TESSERA_MODEL_PATH=str(checkpoint),
                TESSERA_PORT=str(http_port),
                TESSERA_FRONTEND_ARGS=f"{flag}={port}",
            )
        else:
            words = ("serve", str(checkpoint), flag, str(port), "--port", str(http_port))
            status, said = ended(site, "-m", "tessera.cli", *words)
    assert status == 1 and f"tessera: {flag} {port}: something listens on" in said
