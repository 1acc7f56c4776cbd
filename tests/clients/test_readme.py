"""What ``README.md`` shows of a client runs as it stands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.cli.__main__ import names
from tessera.cli.serve import read
from tessera.models import families
from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PICTURE = ROOT / "examples" / "images" / "pair-02.jpg"


def block(section: str, kind: str = "") -> str:
    """The first block of a kind in a section."""
    text = README.partition(f"## {section}\n")[2].partition("\n## ")[0]
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(autouse=True)
def in_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_python(service: ClosedService, reference: Reference) -> None:
    code = (
        block("Ask", "python")
        .replace("http://127.0.0.1:8000", service.url)
        .replace('"none"', f'"{service.key}"')
    )
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    names["client"].close()
    picture = PICTURE.read_bytes()
    wanted = [
        reference.vector("plain text", [], "none"),
        reference.vector(None, [picture], "passage"),
        reference.vector("a yellow heart", [picture], "passage"),
    ]
    found = [np.array(row.embedding, np.float32) for row in names["answer"].data]
    assert len(found) == len(wanted)
    assert min(map(cosine, found, wanted)) >= 0.9999


def test_shell(service: ClosedService, reference: Reference) -> None:
    text = README.partition("From a shell")[2]
    command = re.search(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    key = f"-H 'Authorization: Bearer {service.key}'"
    line = command[1].replace("http://127.0.0.1:8000/v1/embeddings", f"{service.url}/v1/embeddings {key}")
    answer = json.loads(subprocess.check_output(["bash", "-c", line]))
    wanted = reference.vector("a yellow heart", [PICTURE.read_bytes()], "passage")
    assert cosine(np.array(answer["data"][0]["embedding"], np.float32), wanted) >= 0.9999


def test_commands_can_be_typed() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("tessera ")]
    serving = [line for line in lines if line.startswith("tessera serve")]
    assert len(serving) > 1
    # Files that a page has its readers write.
    written = {
        name for page in pages for name in re.findall(r"^cat > (\S+) <<", page.read_text(), re.MULTILINE)
    }
    for line in serving:
        words = shlex.split(line, comments=True)[2:]
        if not written.intersection(words):
            read(words)
    assert {line.split()[1] for line in lines} <= set(names())


def test_it_is_short_and_begins_with_what_to_type() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert "tessera serve" in lines[:20]


def test_every_family_is_listed() -> None:
    listed = re.findall(r"\[(\w+)\]\(docs/models\.md#\w+\): `", README)
    assert sorted(listed) == sorted(family.name for family in families())


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:")):
                continue
            found = (page.parent / path) if path else page
            assert found.exists(), (page, target)
            if anchor and found.suffix == ".md":
                heads = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                known = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in known, (page, target)
