"""``tessera embed --ray``: a cluster of its own and one that is there, killed runs and killed workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from benchmarks.corpus import Corpus, differences, make_corpus, read
from benchmarks.ports import free_ports
from benchmarks.proc import below

from tests.forks.popen import Forked
from tests.proc import open_files, title
from tests.waiting import wait_until

AT_MOST = ["--ray-readers", "2", "--ray-engines", "2"]
LOCAL = ["--ray", "local", "--ray-cpus", "4", "--ray-memory-mb", "256"]

# Three clusters start, each some fifteen processes, of which five load torch.
pytestmark = [pytest.mark.embeds, pytest.mark.xdist_group("corpus-ray"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    made = make_corpus(tmp_path_factory.mktemp("corpus"), texts=160, pictures=32, pages=32, square=True)
    (Path(made.sources[1]) / "bad.png").write_bytes(b"no picture")
    return made


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that is there: its address, what its users have in the environment, and its processes."""

    address: str
    environment: dict[str, str]
    head: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Being started: whoever joins it waits for it."""
    (port,) = free_ports(1)
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-this-test"}
    # Has everything listen on 127.0.0.1 alone, and be looked for there.
    own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    environment = os.environ | own | {"RAY_USAGE_STATS_ENABLED": "0"}
    # With Ray's 15 its actors have a thirtieth of a core while other tests run, and the run takes minutes.
    environment["RAY_worker_niceness"] = "0"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--port", str(port), "--node-ip-address", "127.0.0.1", "--temp-dir", folder),
            *("--num-cpus", "4", "--object-store-memory", str(256 << 20), "--include-dashboard", "false"),
        ]
        head = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield Cluster(f"127.0.0.1:{port}", own, head)
        finally:
            # SIGTERM would have it wait half a minute for what its workers do.
            _gone(_kill(head.pid))
            head.wait()


@contextmanager
def running(corpus: Corpus, out: Path, *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command; what is left of it is killed."""
    words = [*corpus.sources, "--out", str(out), "--progress", "none", "--part-rows", "10", *AT_MOST, *flags]
    with subprocess.Popen(
        [sys.executable, "-m", "tessera.cli", "embed", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                _kill(process.pid)


def test_runs_that_end_in_every_way_write_what_a_run_without_ray_does(
    corpus: Corpus, cluster: Cluster, tmp_path: Path
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "ray"
    # Ray starts what it runs itself; what runs without it is a fork.
    command = [sys.executable, "-m", "tessera.cli", "embed", *corpus.sources, "--out", str(plain)]
    assert Forked(command, stderr=subprocess.DEVNULL).wait(timeout=600) == 3
    # One run is killed once it has published something, and all that is below it ends.
    started: set[int] = set()
    with running(corpus, out, *LOCAL) as process:
        _until(lambda: _parts(out) or process.poll() is not None, process.pid, started)
        assert process.poll() is None, process.communicate()
        assert _addresses(started) == {"127.0.0.1"}
        process.kill()
        process.communicate(timeout=180)
    # Two of Ray's agents, which hold nothing, go only a minute later: the next run starts beside them.
    before = len(read(out)[0])
    assert 0 < before < corpus.items

    # The next one is told to stop once it has published more.
    parts, stopped = _parts(out), set[int]()
    with running(corpus, out, *LOCAL) as process:
        _until(lambda: _parts(out) > parts or process.poll() is not None, process.pid, stopped)
        process.terminate()
        _, errors = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors.endswith("stopped; what was embedded is kept, and the same command goes on\n")
    # Nor has a thread that was left with Ray's objects anything to say.
    assert "uncaught" not in errors and "SIGTERM handler" not in errors
    _gone(stopped)
    after = len(read(out)[0])
    assert before < after < corpus.items

    # The last one, on a cluster that is there, loses a reader and an engine, and goes on.
    with running(corpus, out, "--ray", cluster.address, **cluster.environment) as process:
        for name in ("Reader", "EngineActor"):
            seen = _until(
                lambda name=name: _actors(cluster.head.pid, name) or process.poll(), process.pid, started
            )
            assert isinstance(seen, list), process.communicate()
            os.kill(seen[0], signal.SIGKILL)
        # Nothing but its last line is written, so no pipe fills up.
        _until(lambda: process.poll() is not None, process.pid, started)
        said, errors = process.communicate()
    assert process.returncode == 3, errors
    assert f"{after} done before" in said and "1 failed" in said
    # That cluster stays, and has nothing of the run.
    wait_until(lambda: not any(_actors(cluster.head.pid, name) for name in ("Reader", "EngineActor")))
    assert cluster.head.poll() is None and any("raylet" in title(pid) for pid in below(cluster.head.pid))
    _gone(started)
    wrong, cosine, _ = differences(plain, out)
    assert not wrong and cosine >= 0.9999
    assert len(read(out)[0]) == corpus.items
    assert [row["id"] for row in pq.read_table(out / "errors.parquet").to_pylist()] == [
        row["id"] for row in pq.read_table(plain / "errors.parquet").to_pylist()
    ]


def _kill(pid: int) -> list[int]:
    """A process and all below it, whose numbers are the answer."""
    pids = [pid, *below(pid)]
    for one in pids:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    return pids


def _until(done: Callable[[], Any], pid: int, started: set[int]) -> Any:
    """What ``done`` gives; all processes below ``pid`` that are seen meanwhile are added to ``started``."""

    def seen() -> Any:
        with suppress(OSError):
            started.update(below(pid))
        return done()

    return wait_until(seen, 500)


def _parts(out: Path) -> set[Path]:
    return set((out / "vectors").glob("part-*"))


def _actors(pid: int, name: str) -> list[int]:
    """The actors of a stage: Ray names a process for what it does."""
    titles = {one: title(one) for one in below(pid)}
    return [one for one, said in titles.items() if said.startswith("ray::") and name in said]


def _gone(pids: Iterable[int]) -> None:
    """Wait until processes have ended; a number that something else has by now is none of Ray's."""

    def left() -> list[str]:
        return [said for said in map(title, pids) if "ray" in said or "tessera" in said]

    wait_until(lambda: not left(), 180, said=left)


def _addresses(pids: Iterable[int]) -> set[str]:
    """Where processes listen for TCP."""
    own = set()
    for pid in pids:
        own |= set(open_files(pid))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(socket.inet_ntoa(bytes.fromhex(fields[1].partition(":")[0][-8:])[::-1]))
    return found
