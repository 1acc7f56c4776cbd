"""Carries out a Dockerfile in bare folders, where no daemon can build images.

A stage becomes a folder that holds what its ``COPY`` lines bring. ``RUN`` lines are executed with every
path below ``/opt/tessera`` moved into that folder; those that change the system (users, Debian packages)
are only noted. Paths in ``ENTRYPOINT`` and ``HEALTHCHECK`` are moved likewise.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from docker.utils.build import exclude_paths
from dockerfile_parse import DockerfileParser

PREFIX = "/opt/tessera"
SYSTEM = ("apt-get", "groupadd", "useradd")


@dataclass(slots=True)
class Stage:
    """``skipped`` holds the ``RUN`` lines that were not executed."""

    name: str
    base: str
    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def move(self, text: str) -> str:
        return text.replace(PREFIX, f"{self.root}{PREFIX}")

    def command(self, setting: str) -> list[str]:
        """An ``ENTRYPOINT``, ``CMD`` or ``HEALTHCHECK`` in its JSON form."""
        value = self.settings[setting]
        words: list[str] = json.loads(value[value.index("[") :])
        return [self.move(word) for word in words]

    def process_environment(self) -> dict[str, str]:
        own = {name: self.move(value) for name, value in self.environment.items() if name != "HOME"}
        return os.environ | own | {"PATH": f"{self.root}{PREFIX}/venv/bin:{os.environ['PATH']}"}


class Build:
    """The stages of one Dockerfile, built on demand below ``scratch``."""

    def __init__(self, dockerfile: Path, context: Path, scratch: Path) -> None:
        self.context = context
        self.scratch = scratch
        parsed = DockerfileParser(fileobj=io.BytesIO(dockerfile.read_bytes())).structure
        self.lines = [
            (line["instruction"], line["value"]) for line in parsed if line["instruction"] != "COMMENT"
        ]
        self.arguments = dict(value.split("=", 1) for name, value in self._global("ARG"))
        ignore = (context / ".dockerignore").read_text().splitlines()
        patterns = [line.strip() for line in ignore if line.strip() and not line.startswith("#")]
        self.allowed = set(exclude_paths(str(context), patterns))
        self.bodies = dict(self._bodies())
        self.built: dict[str, Stage] = {}

    def _global(self, instruction: str) -> Iterator[tuple[str, str]]:
        for name, value in self.lines:
            if name == "FROM":
                return
            if name == instruction:
                yield name, value

    def _bodies(self) -> Iterator[tuple[str, tuple[str, list[tuple[str, str]]]]]:
        body: list[tuple[str, str]] = []
        for name, value in self.lines:
            if name == "FROM":
                base, _, stage = value.partition(" AS ")
                body = []
                yield stage, (base, body)
            else:
                body.append((name, value))

    def bundle_words(self, stage: str) -> list[str]:
        """The arguments with which a stage collects its wheels."""
        (line,) = [value for name, value in self.bodies[stage][1] if name == "RUN"]
        words = line.partition("&&")[0].split()
        return words[words.index(f"{PREFIX}/source/scripts/bundle") + 1 :]

    def stage(self, name: str) -> Stage:
        if name not in self.built:
            self.built[name] = self._build(name)
        return self.built[name]

    def discard(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.built.pop(name).root)

    def _build(self, name: str) -> Stage:
        base, body = self.bodies[name]
        stage = Stage(name, base, self.scratch / name)
        if base in self.bodies:
            below = self.stage(base)
            stage.environment |= below.environment
            stage.settings |= below.settings
            stage.skipped += below.skipped
            link_tree(below.root, stage.root)
        stage.root.mkdir(parents=True, exist_ok=True)
        arguments: dict[str, str] = {}
        for instruction, value in body:
            if instruction == "ARG":
                key, _, default = value.partition("=")
                arguments[key] = default or self.arguments[key]
            elif instruction == "ENV":
                for word in shlex.split(value):
                    key, _, text = word.partition("=")
                    stage.environment[key] = text
            elif instruction == "COPY":
                self._copy(stage, value)
            elif instruction == "RUN":
                self._run(stage, value, arguments)
            else:
                stage.settings[instruction] = value
        return stage

    def _copy(self, stage: Stage, value: str) -> None:
        *words, target = value.split()
        source, ignored = self.context, False
        if words[0].startswith("--from="):
            source = self.stage(words.pop(0).partition("=")[2]).root
        else:
            ignored = True
        for word in words:
            start = source / word.lstrip("/")
            into = stage.root / target.lstrip("/")
            if not start.is_dir():
                if ignored and word not in self.allowed:
                    raise FileNotFoundError(f"{word} is kept out by .dockerignore")
                into = into / start.name if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(start, into)
            elif not ignored:
                link_tree(start, into)
            else:
                files = [path for path in sorted(self.allowed) if path.startswith(f"{word}/")]
                if not files:
                    raise FileNotFoundError(f"{word} is kept out by .dockerignore")
                for path in files:
                    if (source / path).is_file():
                        place = into / Path(path).relative_to(word)
                        place.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(source / path, place)

    def _run(self, stage: Stage, value: str, arguments: dict[str, str]) -> None:
        if any(re.search(rf"\b{word}\b", value) for word in SYSTEM):
            stage.skipped.append(value)
            return
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            ["sh", "-ec", stage.move(value)],
            cwd=stage.root,
            env=os.environ | stage.environment | arguments | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"RUN {value}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")


def link_tree(source: Path, target: Path) -> None:
    """A copy that shares the files' contents, since environments are large."""
    shutil.copytree(source, target, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
