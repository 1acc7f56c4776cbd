"""A Slurm cluster on one machine: a controller, and network namespaces behind one bridge for nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.processes import run_script
from tests.proc import command_line
from tests.waiting import wait_until

# Addresses for tests of other networks (RFC 2544), which no real host should have.
NETWORK = "198.18.77"
COUNT = 3
STARTED_SECONDS = 60
_UNDER_WAY = ("PENDING", "RUNNING", "COMPLETING")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")

# Processor time and memory are shared out as on clusters whose steps get what they ask for.
SETTINGS = """\
ClusterName=tessera
SlurmctldHost={host}({network}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SlurmctldPort=17000
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
ReturnToService=2
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was submitted; ``log`` is its output."""

    number: str
    log: Path
    environment: dict[str, str]

    def state(self) -> str:
        """Its state, such as ``RUNNING`` or ``COMPLETED``."""
        said = self.tell("scontrol", "show", "job", self.number)
        return said.partition("JobState=")[2].split()[0]

    def tell(self, *words: str) -> str:
        ran = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def written(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for_line(self, text: str, seconds: float) -> None:
        def over() -> bool:
            # Its state first: what it wrote before it ended is there then.
            return self.state() not in _UNDER_WAY

        wait_until(lambda: over() or text in self.written(), seconds, said=self.written)
        assert text in self.written(), self.written()

    def wait_for_end(self, seconds: float) -> str:
        """The state in which it ended."""
        wait_until(lambda: self.state() not in _UNDER_WAY, seconds, said=self.written)
        return self.state()


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` are the names of the nodes, each with its address and the name of its namespace."""

    nodes: dict[str, tuple[str, str]]
    environment: dict[str, str]

    def submit(self, script: Path, log: Path, *flags: str, **variables: str) -> Job:
        """Submit a script from the repository root, as a user does."""
        environment = self.environment | variables
        ran = subprocess.run(
            ["sbatch", "--parsable", f"--output={log}", *flags, str(script)],
            env=environment,
            cwd=script.parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return Job(ran.stdout.strip(), log, environment)

    def address(self, node: str) -> str:
        return self.nodes[node][0]

    def tasks(self, module: str) -> dict[int, str]:
        """The processes that run a Python module on the nodes, with the node of each."""
        found = {}
        for node, (_, namespace) in self.nodes.items():
            for pid in run_script("ip", "netns", "pids", namespace).stdout.split():
                command = command_line(int(pid))
                if module in command and "python" in command[0]:
                    found[int(pid)] = node
        return found


def _ip(*words: str) -> None:
    ran = run_script("ip", *words)
    if ran.returncode:
        pytest.skip(f"network namespaces are not permitted here (CAP_NET_ADMIN): {ran.stderr.strip()}")


@contextmanager
def _network(mark: str) -> Iterator[dict[str, tuple[str, str]]]:
    """Namespaces with an address each, behind one bridge."""
    bridge = f"tsb{mark}"
    nodes = {
        f"n{number}": (f"{NETWORK}.{number}", f"tessera-{mark}-{number}") for number in range(1, COUNT + 1)
    }
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{NETWORK}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node, (address, name) in nodes.items():
            _ip("netns", "add", name)
            _ip("link", "add", f"tsv{mark}{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"tsv{mark}{node}", "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for _, name in nodes.values():
            run_script("ip", "netns", "del", name)
        run_script("ip", "link", "del", bridge)


@contextmanager
def _daemon(*words: str | Path, environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start munged, slurmctld and one slurmd in each of three namespaces; skips where one cannot start."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed (Debian packages slurm-wlm, munge, iproute2)")
    if os.geteuid():
        pytest.skip("slurmd starts jobs as root alone")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    with ExitStack() as stack:
        nodes = stack.enter_context(_network(f"{os.getpid() % 100_000}"))
        cores = len(os.sched_getaffinity(0))
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr={address} Port=1700{address[-1]} "
            f"CPUs={cores} RealMemory=4000"
            for node, (address, _) in nodes.items()
        ]
        settings = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        settings.write_text(
            SETTINGS.format(host=host, network=NETWORK, folder=folder, nodes="\n".join(lines))
        )
        # Where the nodes find each other by name.
        hosts = folder / "hosts"
        hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {node}\n" for node, (address, _) in nodes.items())
        )
        environment = os.environ | {"SLURM_CONF": str(settings)}
        log = folder / "log"
        own = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        munged = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={key}",
            *own,
        ]
        stack.enter_context(_daemon(*munged, environment=environment, log=log))
        stack.enter_context(_daemon("slurmctld", "-D", environment=environment, log=log))
        for node, (_, namespace) in nodes.items():
            inside = ["nsenter", f"--net=/var/run/netns/{namespace}", "unshare", "--mount", "sh", "-ec"]
            command = 'mount --bind "$1" /etc/hosts; exec slurmd -D -N "$2"'
            stack.enter_context(
                _daemon(*inside, command, "sh", hosts, node, environment=environment, log=log)
            )
        cluster = Cluster(nodes, environment)
        try:
            wait_until(lambda: _idle(environment) >= len(nodes), STARTED_SECONDS)
        except AssertionError:
            logs = "".join(path.read_text() for path in folder.glob("*.log"))
            pytest.skip(f"Slurm does not start here: {log.read_text()}{logs}"[-3000:])
        yield cluster


def _idle(environment: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--states=idle", "--responding", "--format=%n"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return len(ran.stdout.split())
