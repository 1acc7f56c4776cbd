"""Every command of ``README.md``, in its order and as it stands, from a fresh clone with an empty HOME."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tessera.models import families
from tests.e2e.service import ROOT
from tests.waiting import wait_for_line

pytestmark = [
    pytest.mark.installs,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="needs a network namespace, for its port 8000"
    ),
]

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
START, MODELS, ASK, FOLDERS, SPLIT = (text for kind, text in BLOCKS if not kind and "──" not in text)
CLIENT, PROGRAM = (text for kind, text in BLOCKS if kind == "python")
READY_SECONDS = 120


@dataclass(frozen=True)
class Clone:
    """A user's shell: ``run`` has the index, ``inside`` a network of its own with nothing but loopback."""

    folder: Path
    environment: dict[str, str]
    network: list[str]

    def run(self, commands: str, *, network: bool = False, activate: bool = True) -> str:
        words = [
            *(self.network if network else []),
            "bash",
            "-euo",
            "pipefail",
            "-c",
            self._in(commands, activate),
        ]
        cwd = self.folder if activate else self.folder.parent
        done = subprocess.run(
            words, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    @contextmanager
    def served(self, command: str) -> Iterator[None]:
        """The service that a command starts, until it is ended as by Ctrl-C."""
        log = self.folder.parent / "serve.log"
        words = [*self.network, "bash", "-c", self._in(f"exec {command}", True)]
        with log.open("w") as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_for_line(log, "ready at http://127.0.0.1:8000", READY_SECONDS, process=process)
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        assert "Traceback" not in log.read_text()

    @staticmethod
    def _in(commands: str, activate: bool) -> str:
        return f". venv/bin/activate\n{commands}" if activate else commands


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """What the first block makes, but for its last line, which serves."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "home").mkdir()
    kept = {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") or "cert" in name.lower()
    }
    environment = kept | {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "PIP_NO_COMPILE": "1",
    }
    environment |= {"TESSERA": ROOT.as_uri(), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep 1200"]) as holder:
        try:
            made = Clone(folder / "tessera", environment, ["nsenter", "--target", str(holder.pid), "--net"])
            commands, _, last = START.strip().rpartition("\n")
            assert last == "tessera serve"
            made.run(commands, activate=False)
            yield made
        finally:
            holder.kill()
    shutil.rmtree(folder)


def of_hub(clone: Clone, name: str) -> None:
    """Put a small checkpoint of that model's family into the hub's cache, as its download leaves it."""
    (family,) = (family.name for family in families() if name in getattr(family, "hub_models", ()))
    folder = clone.folder.parent / "home/.cache/huggingface/hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    if folder.exists():
        return
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    clone.run(f"tessera checkpoint --family {family} --out {folder / 'snapshots' / commit}")


def test_the_first_command_serves_and_is_asked(clone: Clone) -> None:
    clone.run("pip install openai")
    (clone.folder.parent / "ask.py").write_text(CLIENT)
    with clone.served("tessera serve"):
        assert clone.run("python ../ask.py", network=True).startswith("3 256 Usage(")
        answer = json.loads(clone.run(ASK, network=True))
        assert len(answer["data"][0]["embedding"]) == 256
        assert "<title>" in clone.run("curl -s http://127.0.0.1:8000/", network=True)


@pytest.mark.parametrize("line", MODELS.strip().splitlines())
def test_the_models_are_served_by_their_names(clone: Clone, line: str) -> None:
    name = line.split()[2]
    of_hub(clone, name)
    with clone.served(line):
        assert name in clone.run("tessera models --url http://127.0.0.1:8000", network=True)


def test_a_program_embeds_without_a_service(clone: Clone) -> None:
    of_hub(clone, re.findall(r'Embedder\("([^"]+)"\)', PROGRAM)[0])
    (clone.folder.parent / "program.py").write_text(PROGRAM + "print(vectors.dtype, len(vectors))\n")
    assert clone.run("python ../program.py", network=True) == "float32 1\n"


def test_a_folder_is_embedded_and_searched(clone: Clone) -> None:
    said = clone.run(FOLDERS, network=True)
    assert "1. " in said and (clone.folder / "search.html").read_text().startswith("<!")
    status = clone.run("git status --porcelain")
    assert status == "", f"what the commands make is not in .gitignore: {status}"


def test_workers_are_separate(clone: Clone) -> None:
    with clone.served(SPLIT.strip()):
        assert len(json.loads(clone.run(ASK, network=True))["data"]) == 1
        roles = json.loads(clone.run("curl -s http://127.0.0.1:8000/status", network=True))
        assert "encode" in json.dumps(roles)


def test_the_command_that_passes_the_tests_is_the_one_that_is_run(clone: Clone) -> None:
    assert "`./scripts/test all` passes every test" in README
    assert (clone.folder / ".ci/run").read_text().rstrip().endswith('"$scripts/test" all')
