"""One service for every test that only asks: tests of the xdist_group ``shared-service`` start it once.

It is closed with an API key and exports its traces. A test that needs other flags of a frontend starts one
more for its workers, ``Disaggregated.frontend``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.disaggregated import Disaggregated, disaggregated
from tests.groups import group_fixture
from tests.tracing.collector import Collector, collecting


@group_fixture
def traces() -> Iterator[Collector]:
    """Where the processes of ``service`` export their traces to."""
    with collecting() as running:
        yield running


@group_fixture
def service(
    checkpoint: Path, traces: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disaggregated]:
    with disaggregated(checkpoint, tmp_path_factory.mktemp("service"), traces.environment()) as running:
        yield running
