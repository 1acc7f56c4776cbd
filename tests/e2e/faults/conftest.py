"""One service with two processes of everything for all tests that do not need another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import TINY
from tests.e2e.faults.traffic import Known, known_inputs
from tests.e2e.service import Service, free_ports, launch
from tests.groups import group_fixture
from tests.references.llama_nemotron_vl import Reference

FRONTENDS, ENCODE, EMBED = (0, 1), (0, 1), (2, 3)
"""Positions among the frontends, and among the workers."""

# A checksum proves each hand-off; leases are short so that what is lost shows soon. The queues hold
# what the tests send on a slow machine, too.
ENGINE = """transport: {kind: %s, checksum: true, lease_seconds: 3}
vision: {max_queue_seconds: 600}
text: {max_queue_seconds: 600}
"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two frontends, two encode and two embed workers; ``urls`` are of each frontend alone.

    ``grpc`` is the address, without a scheme, at which both answer KServe calls.
    """

    service: Service
    urls: tuple[str, str]
    grpc: str


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The others' with a quarter of the pixels and rows of an image: half of a soak was the encoder."""
    path = tmp_path_factory.mktemp("models") / "faults"
    write_checkpoint(path, replace(TINY, image_size=256), seed=0)
    return path


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="package")
def known(reference: Reference) -> list[Known]:
    return known_inputs(reference)


@group_fixture
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(checkpoint, tmp_path_factory.mktemp("faults"), ENGINE % "auto") as running:
        yield running


@contextmanager
def deployed(checkpoint: Path, folder: Path, engine: str) -> Iterator[Deployment]:
    """A deployment of its own, with this engine configuration for every worker."""
    config = folder / "engine.yaml"
    config.write_text(engine)
    (port,) = free_ports(1)
    environment = {
        "TESSERA_FRONTEND_ARGS": f"--grpc-port {port}",
        "TESSERA_ENCODE_WORKERS": "2",
        "TESSERA_EMBED_WORKERS": "2",
        "TESSERA_ENCODE_ENGINE_ARGS": str(config),
        "TESSERA_EMBED_ENGINE_ARGS": str(config),
    }
    # A cache of a few images, so that the encode workers stay busy.
    small = ("--multimodal-embedding-cache-capacity-gb", "0.00008")
    log = folder / "log"
    with launch(
        "e_p.sh", checkpoint, log, workers=4, frontends=2, arguments=small, environment=environment
    ) as service:
        first, second = service.frontend_urls
        yield Deployment(service, (first, second), f"127.0.0.1:{port}")
