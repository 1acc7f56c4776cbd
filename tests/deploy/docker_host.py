"""A Docker daemon in a network namespace that reaches the package index and nothing of this machine.

The namespace keeps the daemon's bridges, firewall rules and published ports away from this machine's; its way
out is slirp4netns, a network stack in a process. Base images are made of Debian packages, since no registry
may be reachable.
"""

from __future__ import annotations

import configparser
import functools
import hashlib
import http.server
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.deploy.processes import run_script, running
from tests.e2e.service import ROOT
from tests.waiting import wait_for_line, wait_until

PROGRAMS = ("dockerd", "docker", "runc", "mmdebstrap", "slirp4netns", "ip", "nsenter", "curl")
# Docker's own: a newer client beside it may lack what builds images.
CLIENT = "/usr/bin/docker"
STARTED_SECONDS = 30
NEEDED_BYTES = 12 << 30
DISK = "disk-of-images"
DISK_BYTES = 24 << 30
GATEWAY = "198.18.80.2"
"""This machine's loopback, as the namespace sees it."""

PYTHON_IMAGE = "tessera-test/python:debian"
# The servers of compose.yaml come from a newer Debian than this may be, whose Prometheus knows its settings.
SERVERS = ("etcd-server", "etcd-client", "prometheus", "docker-compose")
COMPOSE = "usr/libexec/docker/cli-plugins/docker-compose"
SERVERS_HOOK = (
    'mkdir -p "$1/usr/local/bin" "$1/prometheus"; chown 65534:65534 "$1/prometheus"; '
    'ln -s ../../bin/etcd ../../bin/etcdctl "$1/usr/local/bin/"; rm -rf "$1"/usr/share/*'
)
# Nobody reads in it. Told to dpkg as paths to leave out it costs a Python process for each package: 59 s of
# processor time for both Debians, not 33.
UNREAD_HOOK = 'cd "$1/usr/share" && rm -rf doc/* info/* locale/* man/*'
# Debian's own pip is older than any that public images of Python have, and 8 s of processor time to compile.
PIP_HOOK = 'cp -a "$PIP" "$1/usr/lib/python3/dist-packages/pip"'

MADE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera-tests"
"""Where the files of Debians are kept, 0.5 GB; a base is as old as those that people pull."""
KEPT_SECONDS = 7 * 86_400


@dataclass(slots=True)
class DockerHost:
    """``folder`` is the daemon's; everything in it goes when it ends."""

    folder: Path
    namespace: str
    secrets: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    built: dict[str, float] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"DOCKER_HOST": f"unix://{self.folder}/socket", "DOCKER_BUILDKIT": "1"}

    def docker(self, *words: str, timeout: float = 120.0) -> str:
        """What a command of the client prints. A failure is an ``AssertionError`` with all that it said."""
        return self._run(CLIENT, *words, timeout=timeout)

    def compose(self, *words: str, variables: Mapping[str, str], timeout: float = 900.0) -> str:
        """The same of Compose, for a user whose shell has the variables."""
        return self._run(str(self.folder / COMPOSE), *words, timeout=timeout, variables=variables)

    def _run(self, *words: str, timeout: float, variables: Mapping[str, str] = MappingProxyType({})) -> str:
        ran = subprocess.run(
            words,
            cwd=ROOT,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ran.returncode == 0, f"{' '.join(words)}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
        return ran.stdout.strip()

    def image(self, target: str) -> str:
        """The image of a target of the Dockerfile, built when it is first asked for."""
        name = f"tessera-{target}:0.1.0"
        if target not in self.built:
            words = ["build", "--network", "host", "--file", "deploy/docker/Dockerfile", "--target", target]
            words += [f"--build-arg={name}={value}" for name, value in self.arguments.items()]
            words += [f"--secret={secret}" for secret in self.secrets]
            start = time.monotonic()
            self.docker(*words, "--tag", name, ".", timeout=1200)
            self.built[target] = time.monotonic() - start
        return name

    def state(self, container: str) -> dict[str, Any]:
        """``State`` of a container, as ``docker inspect`` has it."""
        state: dict[str, Any] = json.loads(self.docker("inspect", "--format", "{{json .State}}", container))
        return state

    def wait_until_healthy(self, container: str, seconds: float = 90.0) -> None:
        def settled() -> bool:
            state = self.state(container)
            return state["Health"]["Status"] == "healthy" or not state["Running"]

        wait_until(settled, seconds, said=lambda: (self.state(container), self.logs(container)))
        state = self.state(container)
        assert state["Running"], (state, self.logs(container))

    def logs(self, container: str) -> str:
        ran = subprocess.run(
            [CLIENT, "logs", "--tail", "60", container],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return ran.stdout

    def ask(self, port: int, path: str, body: object = None, seconds: float = 60.0) -> tuple[int, str]:
        """Status and body of the answer at a published port; status 0 where nothing answers."""
        words = ["nsenter", f"--net=/var/run/netns/{self.namespace}", "curl", "--silent"]
        words += [
            "--max-time",
            str(seconds),
            "--write-out",
            "\n%{http_code}",
            f"http://127.0.0.1:{port}{path}",
        ]
        if body is not None:
            words += ["--header", "Content-Type: application/json", "--data-binary", "@-"]
        text = None if body is None else json.dumps(body)
        ran = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
        answer, _, status = ran.stdout.rpartition("\n")
        return int(status), answer


@contextmanager
def docker_host(folder: Path) -> Iterator[DockerHost]:
    """Start a daemon with the base images; skips with a sentence where it cannot."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or not Path(CLIENT).exists():
        pytest.skip(f"{', '.join(missing) or CLIENT} is not installed (scripts/system-packages)")
    if os.geteuid():
        pytest.skip("a Docker daemon of its own needs root")
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        pytest.skip(f"{folder} has less than {NEEDED_BYTES >> 30} GiB left for images")
    namespace = f"tessera-docker-{os.getpid() % 100_000}"
    if (made := run_script("ip", "netns", "add", namespace)).returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    with ExitStack() as stack:
        stack.callback(run_script, "ip", "netns", "del", namespace)
        stack.callback(shutil.rmtree, folder)
        _mount_disk(stack, folder)
        host = DockerHost(folder, namespace)
        with ExitStack() as bases:
            python, servers = (bases.enter_context(_files(folder, debian)) for debian in DEBIANS)
            path = f"/var/run/netns/{namespace}"
            out = ["slirp4netns", "--netns-type=path", "--configure", "--mtu=65520", "--cidr=198.18.80.0/24"]
            stack.enter_context(running([*out, path, "tap0"], dict(os.environ), folder / "slirp.log"))
            _start(stack, host, path)
        host.docker("import", "--change", f"ENV PATH={_PATH}", str(python), PYTHON_IMAGE)
        etcd, prometheus = _server_images()
        host.docker("import", str(servers), etcd)
        container = host.docker("create", etcd, "nothing")
        words = ["--change", 'ENTRYPOINT ["/bin/prometheus"]', "--change", "USER 65534"]
        host.docker("commit", *words, container, prometheus)
        host.docker("rm", container)
        with tarfile.open(servers) as tar:
            tar.extract(f"./{COMPOSE}", folder, filter="data")
        host.arguments["PYTHON_IMAGE"] = PYTHON_IMAGE
        _use_index(stack, host)
        yield host


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Debian:
    """A suite, how much of it, packages, and shell commands for what was made (``$1``)."""

    suite: str
    variant: str
    packages: tuple[str, ...]
    hooks: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        words = ["mmdebstrap", f"--variant={self.variant}", f"--include={','.join(self.packages)}"]
        # Nobody needs it after a crash.
        words += ["--format=tar", "--dpkgopt=force-unsafe-io"]
        return [*words, *self.hooks, self.suite]


DEBIANS = (
    Debian(
        "bookworm",
        "minbase",
        ("python-is-python3", "ca-certificates"),
        (f"--customize-hook={PIP_HOOK}", f"--customize-hook={UNREAD_HOOK}"),
    ),
    # Nothing but files is wanted of it: it is not installed, which runs scripts of each package.
    Debian("trixie", "extract", ("base-files", *SERVERS), (f"--extract-hook={SERVERS_HOOK}",)),
)


@contextmanager
def _files(folder: Path, debian: Debian) -> Iterator[Path]:
    """Make a Debian's tar file while the block runs, unless one of this week is there.

    Behind the block it is there.
    """
    # It is not imported: no process that did can import setuptools any more.
    pip = importlib.util.find_spec("pip")
    assert pip is not None and pip.origin is not None
    what = repr((debian, importlib.metadata.version("pip")))
    tar = MADE / f"{debian.suite}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.tar"
    if tar.exists() and time.time() - tar.stat().st_mtime < KEPT_SECONDS:
        yield tar
        return
    log, unfinished = folder / f"{debian.suite}.log", folder / DISK / tar.name
    environment = os.environ | {"TMPDIR": str(folder / DISK), "PIP": str(Path(pip.origin).parent)}
    with log.open("wb") as output:
        words = [*debian.command, str(unfinished)]
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
    try:
        yield tar
        if process.wait(300):
            pytest.skip(f"Debian's packages cannot be had here: {log.read_text()[-500:]}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    MADE.mkdir(parents=True, exist_ok=True)
    for old in MADE.glob(f"{debian.suite}-*.tar"):
        if time.time() - old.stat().st_mtime >= KEPT_SECONDS:
            old.unlink(missing_ok=True)
    # Another run may make the same: whoever is later wins.
    own = tar.with_name(f"{tar.name}.{os.getpid()}")
    shutil.move(unfinished, own)
    own.rename(tar)


def _mount_disk(stack: ExitStack, folder: Path) -> None:
    """A file system of one file for images, where that can be mounted.

    Images are hundreds of thousands of files, which took 5 minutes to remove from a disk that discards the
    blocks of each.
    """
    disk, root = folder / "disk", folder / DISK
    root.mkdir()
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    words = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "nodiscard", str(disk)]
    if run_script(*words).returncode or run_script("mount", "-o", "loop", disk, root).returncode:
        disk.unlink()
    else:
        stack.callback(run_script, "umount", root)


def _start(stack: ExitStack, host: DockerHost, path: str) -> None:
    log = host.folder / "dockerd.log"
    words = ["nsenter", f"--net={path}", "dockerd", "--host", f"unix://{host.folder}/socket"]
    words += [f"--{name}={host.folder}/{name}" for name in ("exec-root", "pidfile")]
    words.append(f"--data-root={host.folder / DISK}/docker")
    # Passes the GPUs of a host into containers; a host without has nothing to pass.
    words.append(f"--add-runtime=nvidia={shutil.which('runc')}")
    # Its containerd is a process group of its own, which it ends itself.
    process = stack.enter_context(running(words, dict(os.environ), log))
    stack.callback(_remove_containers, host)
    try:
        wait_for_line(log, "API listen", STARTED_SECONDS, process=process)
        wait_until((host.folder / "socket").exists)
    except AssertionError:
        pytest.skip(f"a Docker daemon does not start here: {log.read_text()[-500:]}")


def _remove_containers(host: DockerHost) -> None:
    if containers := host.docker("ps", "--all", "--quiet").split():
        host.docker("rm", "--force", "--volumes", *containers)


def _server_images() -> tuple[str, str]:
    """The names that compose.yaml has for etcd and Prometheus."""
    text = (ROOT / "deploy/compose.yaml").read_text()
    etcd, prometheus = (re.findall(rf"image: (\S*{name}:\S+)", text)[0] for name in ("etcd", "prometheus"))
    return etcd, prometheus


def _use_index(stack: ExitStack, host: DockerHost) -> None:
    """Pass this machine's index and certificates on to builds; what lies on its disk is served to them."""
    said = run_script(sys.executable, "-m", "pip", "config", "list").stdout
    # Those of the environment come first, and win.
    found: dict[str, str] = {}
    for name, value in re.findall(r"^\S*?\.([\w-]+)='(.*)'$", said, re.MULTILINE):
        found.setdefault(name, value)
    served = host.folder / "served"
    served.mkdir()
    handler = functools.partial(_Quiet, directory=str(served))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)

    def passed_on(place: str) -> str:
        path = Path(place.removeprefix("file://"))
        if not path.is_absolute():
            return place
        # With the folder around it, to which an index has links.
        link = served / str(len(list(served.iterdir())))
        link.symlink_to(path.parent)
        return f"http://{GATEWAY}:{server.server_port}/{link.name}/{path.name}/"

    settings: dict[str, str] = {
        name: " ".join(map(passed_on, found[name].split("\\n" if "\\n" in found[name] else None)))
        for name in ("index-url", "extra-index-url", "find-links")
        if name in found
    }
    if "extra-index-url" in settings:
        host.arguments["TORCH_INDEX"] = settings["extra-index-url"]
    settings["trusted-host"] = GATEWAY
    authorities = Path(found.get("cert", "/etc/ssl/certs/ca-certificates.crt"))
    if authorities.is_file():
        settings["cert"] = "/run/secrets/certificates"
        host.secrets.append(f"id=certificates,src={authorities}")
    file = configparser.ConfigParser(interpolation=None)
    file["global"] = settings
    with (host.folder / "pip.conf").open("w") as output:
        file.write(output)
    host.secrets.append(f"id=pip,src={host.folder}/pip.conf")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
