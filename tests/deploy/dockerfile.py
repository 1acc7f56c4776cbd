"""What the Dockerfile says: its stages, and what each of them is made of."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from string import Template

from dockerfile_parse import DockerfileParser

PREFIX = "/opt/tessera"


class Dockerfile:
    """``arguments`` are those before the first stage. ``bodies`` has each stage's base and instructions."""

    def __init__(self, path: Path) -> None:
        parsed = DockerfileParser(fileobj=io.BytesIO(path.read_bytes())).structure
        self._lines = [
            (line["instruction"], line["value"]) for line in parsed if line["instruction"] != "COMMENT"
        ]
        self.arguments = dict(value.split("=", 1) for name, value in self._global() if name == "ARG")
        self.bodies = dict(self._bodies())

    def _global(self) -> Iterator[tuple[str, str]]:
        for name, value in self._lines:
            if name == "FROM":
                return
            yield name, value

    def _bodies(self) -> Iterator[tuple[str, tuple[str, list[tuple[str, str]]]]]:
        body: list[tuple[str, str]] = []
        for name, value in self._lines:
            if name == "FROM":
                base, _, stage = value.partition(" AS ")
                body = []
                yield stage, (self._filled(base), body)
            else:
                body.append((name, value))

    def _filled(self, base: str) -> str:
        """A stage whose name has an argument in it; an image stays as it is written."""
        return base if base.startswith("$") else Template(base).substitute(self.arguments)

    def settings(self, target: str) -> dict[str, str]:
        """The last instruction of each kind that a target has, of its own or from what it is built on."""
        base, body = self.bodies[target]
        return (self.settings(base) if base in self.bodies else {}) | dict(body)

    def bundle_words(self, stage: str) -> list[str]:
        """The arguments with which a stage collects its wheels."""
        (line,) = [value for name, value in self.bodies[stage][1] if name == "RUN"]
        words = line.partition("&&")[0].split()
        words = words[words.index(f"{PREFIX}/source/scripts/bundle") + 1 :]
        out = words.index("--out")
        return words[:out] + words[out + 2 :]
