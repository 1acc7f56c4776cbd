"""What AIPerf is given to send are the inputs that the other clients send."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from benchmarks.aiperf import Asked, write_inputs

from tessera_tools.load.bodies import EMBEDDING, IMAGE_TEXT, Bodies
from tessera_tools.load.words import CheckpointWords

pytestmark = pytest.mark.measures


@pytest.mark.parametrize("name", ["text-32", "text-32x64", "tile"])
def test_its_lines_are_inputs_of_the_workload(checkpoint: Path, tmp_path: Path, name: str) -> None:
    words, workload = CheckpointWords(checkpoint), EMBEDDING[name]
    asked = Asked(workload=workload, at_once=1, entries=5, warm=0, seconds=0)
    write_inputs(asked, words, tmp_path / "inputs.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "inputs.jsonl").read_text().splitlines()]
    assert len(lines) == 5
    bodies = [
        json.loads(body.data) for body in islice(iter(Bodies(workload, words, "", seed=1 << 20)), len(lines))
    ]
    for line, body in zip(lines, bodies, strict=True):
        if workload.size is None:
            given = body["input"]
            assert line == {"texts": [given] if isinstance(given, str) else given}
        else:
            image = body["messages"][0]["content"][0]["image_url"]["url"]
            assert line == {"images": [image], "texts": [IMAGE_TEXT]}
    assert len({json.dumps(line) for line in lines}) == 5
