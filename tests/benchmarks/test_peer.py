from __future__ import annotations

import csv
import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from benchmarks.in_process import sustained

from benchmarks import peer
from tessera_tools.load.bodies import WORKLOADS, Bodies
from tessera_tools.load.words import CheckpointWords
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.towers import SIGLIP_TINY
from tests.e2e.disaggregated import Disaggregated
from tests.e2e.service import MODEL
from tests.figure import figure

pytestmark = pytest.mark.starts

# In the place of a server: hands every connection on to the port in its last argument.
FORWARD = """
import asyncio, sys

async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

async def connected(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(pump(reader, back), pump(there, writer))

async def main():
    server = await asyncio.start_server(connected, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()

asyncio.run(main())
"""


def arguments(checkpoint: Path, out: Path, *more: str) -> list[str]:
    given = ["--model-path", str(checkpoint), "--clients", "1", "--warm", "0.2", "--threads", "1"]
    return [*given, "--tokens", "1024", "--units", "2", "--out", str(out), *more]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.service
@pytest.mark.measures
@pytest.mark.xdist_group("shared-service")
def test_a_server_that_takes_conversations_is_driven_as_vllm_is(
    service: Disaggregated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "forward.py"
    script.write_text(FORWARD)
    with service.frontend("--max-in-flight", "100000") as url:
        command = f"{sys.executable} {script} {{port}} {url.rpartition(':')[2]}"
        more = ["--vllm", str(tmp_path), "--vllm-command", command, "--parts", "vllm", "--seconds", "1"]
        more += ["--workloads", "text-32x64@1", "tile@1", "rerank-128x100@1"]
        more += ["--model-name", MODEL, "--encoding", "float"]
        assert peer.main(arguments(service.checkpoint, tmp_path, *more)) == 0
    found = rows(tmp_path / "peer.csv")
    assert [(row["server"], row["workload"], row["errors"]) for row in found] == [
        ("vllm", "text-32x64", ""),
        ("vllm", "tile", ""),
        ("vllm", "rerank-128x100", ""),
    ]
    assert all(figure(row["inputs/s"]) > 0 for row in found)
    with np.load(tmp_path / "vectors-vllm.npz") as vectors:
        shapes = {name: vectors[name].shape for name in vectors.files}
    width = shapes["tile"][1]
    assert shapes == {"text-32x64": (16, width), "tile": (2, width), "rerank-128x100": (16,)}
    assert "vllm p50 ms" in capsys.readouterr().out
    assert (tmp_path / "vllm-model" / "chat.jinja").exists()


def test_a_part_that_dies_says_why_and_the_next_one_begins(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} -c \"raise SystemExit('no card here')\""
    more = ["--vllm", str(tmp_path), "--vllm-command", command, "--parts", "vllm", "engine"]
    more += ["--seconds", "0.1", "--workloads", "text-32@1"]
    assert peer.main(arguments(checkpoint, tmp_path, *more)) == 1
    said = capsys.readouterr().out
    assert "no card here" in said and "vllm failed: it ended with 1 while it started" in said
    (row,) = rows(tmp_path / "peer.csv")
    assert row["server"] == "engine" and figure(row["p50 ms"]) > 0


def test_time_that_is_left_bounds_the_parts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--vllm", str(tmp_path), "--parts", "engine", "--limit", "5", "--seconds", "60"]
    assert peer.main(arguments(checkpoint, tmp_path, *more, "--workloads", "text-32@1")) == 1
    assert "too few for the engines" in capsys.readouterr().out


@pytest.mark.usefixtures("forks")
def test_two_towers_embed_images_without_a_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SIGLIP_TINY)
    (body, *_) = islice(Bodies(WORKLOADS["image"], CheckpointWords(tmp_path / "model"), "m", seed=0), 1)
    (message,) = json.loads(body.data)["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    asked = [("image", 1), ("image", 8), ("image-again", 8), ("text-32", 1)]
    rows = [(WORKLOADS[name], loop) for name, loop in asked]
    found = sustained(tmp_path / "model", {}, rows, warm=0.1, seconds=0.1)
    # Images that come again are no work for an engine.
    assert set(found) == {("image", 1), ("image", 8), ("text-32", 1)}
    assert all(each.rate > 0 for each in found.values())
