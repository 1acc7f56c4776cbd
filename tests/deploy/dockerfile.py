"""What the Dockerfile says: its stages, and what each of them is made of."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from string import Template

from dockerfile_parse import DockerfileParser

INSTALL = "/opt/installer/install "


class Dockerfile:
    """``arguments`` are those before the first stage. ``bodies`` has each stage's base and instructions."""

    def __init__(self, path: Path) -> None:
        parsed = DockerfileParser(fileobj=io.BytesIO(path.read_bytes())).structure
        self._lines = [
            (line["instruction"], line["value"]) for line in parsed if line["instruction"] != "COMMENT"
        ]
        self.arguments = dict(value.split("=", 1) for name, value in self._global() if name == "ARG")
        self.bodies = dict(self._bodies())

    @property
    def python(self) -> str:
        """The version of the base image's Python, such as ``3.12``."""
        return self.arguments["PYTHON_IMAGE"].split(":")[1].rsplit(".", 1)[0]

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

    def extras(self, target: str) -> list[str]:
        """The extras whose packages a target has, in the order of its layers."""
        if target not in self.bodies:
            return []
        base, body = self.bodies[target]
        lines = [value.partition(INSTALL)[2].split() for name, value in body if name == "RUN"]
        own = [word for words in lines for word in words if not word.endswith(".whl")]
        return self.extras(base) + own
