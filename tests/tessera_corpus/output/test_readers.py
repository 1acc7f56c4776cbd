"""Programs that open the tables without conversion: DuckDB, pandas, ``datasets`` and LanceDB."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.environment import clients_environment
from tests.tessera_corpus.output.made import WIDTH, embedded, kind_of, opened

pytestmark = [pytest.mark.installs, pytest.mark.xdist_group("tables")]

_TEXTS = {f"id-{number}": f"text {number}" for number in range(40)}

DUCKDB = """
import duckdb
rows = duckdb.sql(f"SELECT id, vector FROM '{folder}/*.parquet' ORDER BY id").fetchall()
distance = duckdb.sql(
    f"SELECT id FROM '{folder}/*.parquet' ORDER BY list_distance(vector, {query}) LIMIT 1"
).fetchall() if kind == "vectors" else []
found = {"rows": rows, "nearest": [row[0] for row in distance]}
"""
PANDAS = """
import numpy as np, pandas
table = pandas.read_parquet(folder).sort_values("id")
rows = [[id, np.array([np.asarray(row) for row in vector]).tolist() if kind == "tokens" else vector.tolist()]
        for id, vector in zip(table["id"], table["vector"])]
found = {"rows": rows}
"""
DATASETS = """
import datasets
datasets.disable_progress_bars()
table = datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", cache_dir=cache, split="train")
found = {"rows": sorted([row["id"], row["vector"]] for row in table)}
"""
_BEFORE = "import json, sys\nfolder, cache, kind, query = sys.argv[1:]\nquery = json.loads(query)\n"
_AFTER = "print(json.dumps(found))\n"


def output(folder: Path, dtype: str, *, tokens: bool, format: str = "parquet") -> Path:
    """An output of several parts, and the folder that its table is."""
    made = opened(
        folder / "out", kind=kind_of(dtype=dtype, tokens=tokens), dtype=dtype, format=format, part_rows=15
    )
    for id, text in _TEXTS.items():
        made.put([embedded(id, text, rows=3 if tokens else 1)])
    made.close()
    return folder / "out" / ("vectors.lance" if format == "lance" else "vectors")


def wanted(dtype: str, *, tokens: bool) -> dict[str, Any]:
    found = {}
    for id, text in _TEXTS.items():
        rows = embedded(id, text, rows=3 if tokens else 1).rows.values
        if dtype == "int8":
            rows = np.rint(rows * (127.0 / np.abs(rows).max(axis=1, keepdims=True)))
        found[id] = rows.tolist() if tokens else rows[0].tolist()
    return found


@pytest.mark.parametrize("program", [DUCKDB, PANDAS, DATASETS], ids=["duckdb", "pandas", "datasets"])
@pytest.mark.parametrize("tokens", [False, True], ids=["vectors", "tokens"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_program_opens_the_parts(tmp_path: Path, program: str, dtype: str, tokens: bool) -> None:
    folder, rows = output(tmp_path, dtype, tokens=tokens), wanted(dtype, tokens=tokens)
    query = json.dumps([] if tokens else rows["id-7"])
    kind = "tokens" if tokens else "vectors"
    ran = subprocess.run(
        [
            *(clients_environment("tables") / "bin/python", "-c", _BEFORE + program + _AFTER),
            *(folder, tmp_path / "cache", kind, query),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    # Values are those of eighths: float16 holds them.
    assert dict(found["rows"]) == rows
    assert found.get("nearest", []) in ([], ["id-7"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lancedb_opens_and_searches_the_table(tmp_path: Path, dtype: str) -> None:
    folder, rows = output(tmp_path, dtype, tokens=False, format="lance"), wanted(dtype, tokens=False)
    # 4 s of processor time, in this process alone and not in each that collects the tests.
    import lancedb

    table = lancedb.connect(folder.parent).open_table("vectors")
    assert table.count_rows() == len(rows)
    (best,) = table.search(rows["id-7"]).limit(1).to_list()
    assert best["id"] == "id-7" and list(best["vector"]) == rows["id-7"] and len(best["vector"]) == WIDTH
