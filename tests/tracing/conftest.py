from __future__ import annotations

from collections.abc import Iterator

import pytest

from tessera import tracing
from tests.tracing.collector import Collector, collecting


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """This process records, and exports to a collector."""
    with collecting() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        tracing.start("test", ["otlp"])
        try:
            yield running
        finally:
            tracing.stop()
