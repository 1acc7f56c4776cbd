"""What each version of a family gave: other vectors need another version, as it is part of the fingerprint.

Corpora and caches go by the fingerprint. Without a new version they would go on with other vectors. Vectors
are pinned as a few sums over their rows and columns, for small checkpoints, as they are and varied.

    python -m tests.models.pinned   # pin what is new, or of a new version; refuses what is neither
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.models import open_model
from tessera.models.base import Model
from tessera_tools.random_checkpoint import colbert, llama_nemotron_vl
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.colbert.cases import CASES as COLBERT
from tests.models.llama_nemotron_colembed_vl.cases import CASES as PAGES
from tests.models.running import Given, Pair, found_by
from tests.models.variations import CASES, Case, inputs_of, varied
from tests.references.carry import ALL

FILE = Path(__file__).with_name("pinned.json")

_SUMS: Final = 4
# What kernels of other processors change is below 1e-4; a vector turned by a hundredth changes some sum more.
_TOLERANCE: Final = 2e-3

OTHERS: Final[Mapping[str, tuple[Spec, tuple[Given, ...]]]] = {
    "bert_colbert": (colbert.TINY, tuple(COLBERT)),
    "xlm_roberta_colbert": (colbert.ROBERTA_TINY, tuple(COLBERT)),
    "llama_nemotron_vl": (llama_nemotron_vl.TINY, tuple(PAGES)),
}
"""Families of which no vectors are carried to other machines."""

Pins = dict[str, dict[str, Any]]
"""By family: its ``version``, and by case the ``sums``."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a model gave, float32 ``[rows, width]``."""

    model: Model
    case: str
    values: np.ndarray


def variation(family: str, varying: Case) -> str:
    """Return the name of a varied checkpoint's case."""
    return f"{family}: {varying.name}"


def sums(values: np.ndarray) -> list[float]:
    """Return the count of rows, and 16 sums of all values with weights by row and column."""
    rows, columns = (
        np.cos(np.outer(np.arange(_SUMS) + 0.5, np.arange(count) + 1.0)) for count in values.shape
    )
    found = rows @ values.astype(np.float64) @ columns.T
    return [len(values), *(round(float(one), 4) for one in found.flat)]


def are_same(one: list[float], other: list[float]) -> bool:
    allowed = _TOLERANCE * np.maximum(1, np.abs(other))
    return len(one) == len(other) and bool((np.abs(np.subtract(one, other)) <= allowed).all())


def assert_pinned(model: Model, case: str, values: np.ndarray) -> None:
    """Fail for vectors that are not those of the family's version."""
    pins = json.loads(FILE.read_text())
    family = Found(model=model, case=case, values=values)
    pinned = pins.get(model.family, {})
    assert pinned.get("version") == version_of(model) and case in pinned["cases"], (
        f"nothing is pinned of {model.family}, version {version_of(model)}, for {case!r}:"
        " run python -m tests.models.pinned"
    )
    merged(pins, [family])


def merged(pins: Pins, found: list[Found]) -> Pins:
    """Return pins with what was found; raises ``ValueError`` for other vectors of the same version."""
    new: Pins = {}
    for each in found:
        family, version, now = each.model.family, version_of(each.model), sums(each.values)
        before = pins.get(family, {"version": 0, "cases": {}})
        if version < before["version"]:
            raise ValueError(f"{family} has version {version}, after {before['version']}")
        pinned = before["cases"].get(each.case) if version == before["version"] else None
        if pinned is not None and not are_same(now, pinned):
            raise ValueError(
                f"{family} gives other vectors for {each.case!r}, and its version is still {version}: raise"
                f" it, so that its fingerprint is another one, then run python -m tests.models.pinned\n"
                f"pinned {pinned}\nfound  {now}"
            )
        of_family = new.setdefault(family, {"version": version, "cases": {}})
        # What is within the rounding stays as it was.
        of_family["cases"][each.case] = now if pinned is None else pinned
    return new


def version_of(model: Any) -> int:
    return int(model.version)


def every_case(folder: Path) -> Iterator[tuple[str, Path, tuple[Given | Pair, ...]]]:
    """Yield each case with its checkpoint, written below ``folder``, and its inputs."""
    for name, carried in ALL.items():
        if not carried.full_size:
            yield name, carried.checkpoint(folder), carried.inputs
    for name, (spec, inputs) in OTHERS.items():
        yield name, _written(folder / name, spec), inputs
    for family, (spec, cases) in CASES.items():
        for number, each in enumerate(cases):
            if not each.refused:
                source, target = folder / f"{family}-source", folder / f"{family}-{number}"
                path = varied(_written(source, spec), target, each.changes)
                yield variation(family, each), path, tuple(inputs_of(family))


def _written(path: Path, spec: Spec) -> Path:
    if not path.exists():
        write_checkpoint(path, spec, seed=0, dtype="float32")
    return path


def main() -> None:
    """Write the file; what is within the rounding of what is there stays as it is."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case, path, inputs in every_case(Path(folder)):
            model = open_model(path)
            found.append(Found(model=model, case=case, values=found_by(model, inputs)))
            print(f"{model.family}, version {version_of(model)}: {case}")
    pins = merged(json.loads(FILE.read_text()) if FILE.exists() else {}, found)
    lines = []
    for family, pinned in sorted(pins.items()):
        cases = ",\n".join(
            f"  {json.dumps(case)}: {json.dumps(each)}" for case, each in pinned["cases"].items()
        )
        lines.append(f'{json.dumps(family)}: {{"version": {pinned["version"]}, "cases": {{\n{cases}}}}}')
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
