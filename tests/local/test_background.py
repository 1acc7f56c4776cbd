"""Several engines on a loop of their own share the calls of a program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.local.background import BackgroundEngines
from tessera.local.content import Content
from tessera.local.options import VectorOptions
from tessera.local.plan import plan_engines
from tessera.local.wanted import DEFAULT

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("local"), pytest.mark.usefixtures("forks")]

LOG = ["--log-level", "warning"]


def test_engines_share_calls(checkpoint: Path) -> None:
    # Without a card, names of cards say only how many engines there are.
    plan = replace(plan_engines(str(checkpoint), "", VectorOptions(), log=LOG), cards=("0", "1"))
    engines = BackgroundEngines(plan)
    try:
        groups = [[Content(parts=(f"text {group} {index}",)) for index in range(4)] for group in range(8)]
        futures = [engines.submit(group, DEFAULT, (64, 100)) for group in groups]
        for group, future in zip(groups, futures, strict=True):
            vectors = engines.wait(future)
            again = engines.wait(engines.submit(group[3:], DEFAULT, (64, 100)))
            assert (vectors.rows.values[3:] * again.rows.values).sum() >= 0.9999 and len(vectors) == 4
        assert engines._engines is not None
        each = engines._engines._engines
        assert all(engines.wait(engines._begin(engine.usage())).engine_seconds for engine in each)
    finally:
        engines.close()
