"""Services for all clients: one closed by API keys, with a directory open for media, and a reranker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tests.e2e.disaggregated import OTHER_NAME
from tests.e2e.service import MODEL, Service, launch
from tests.groups import group_fixture

KEY = "sk-clients-0123456789"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give what asks these services their marker, and one process, which starts each of them once.

    A module with a service of its own under the same name is not meant.
    """
    if isinstance(item, pytest.Function):
        asked = {"service", "reranker"}.intersection(item.fixturenames)
        if any(not hasattr(item.module, name) for name in asked):
            item.add_marker(pytest.mark.service)
            item.add_marker(pytest.mark.xdist_group("clients"))


@dataclass(frozen=True, slots=True)
class ClosedService:
    """A running service, a key that opens it, and the directory whose files it reads."""

    running: Service
    media: Path
    key: str = KEY

    @property
    def url(self) -> str:
        return self.running.url

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=60)


@group_fixture
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedService]:
    folder = tmp_path_factory.mktemp("clients")
    media = folder / "media"
    media.mkdir()
    environment = {
        "TESSERA_SERVED_MODEL_NAME": f"{MODEL}, {OTHER_NAME}",
        "TESSERA_DIMENSIONS_ALLOWED": "96,100-104",
        "TESSERA_API_KEYS": f"{KEY} clients, sk-other-0123456789 other",
        "TESSERA_ALLOWED_LOCAL_MEDIA_PATH": str(media),
        "TESSERA_MAX_FILE_SIZE_MB": "8",
        "TESSERA_FRONTEND_PAGE": "off",
        "TESSERA_FRONTEND_ARGS": "--open-metrics",
        # The allocator gives large blocks back at once, so that resident memory is what is in use.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    # A cache that is soon full, so that what grows after that is a leak.
    arguments = ("--multimodal-embedding-cache-capacity-gb", "0.02")
    with launch(
        "agg.sh", checkpoint, folder / "log", workers=1, arguments=arguments, environment=environment
    ) as running:
        yield ClosedService(running, media)


@group_fixture
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedService]:
    """A service of a reranker of texts and images; the last of its names is one that NVIDIA would change."""
    folder = tmp_path_factory.mktemp("reranker")
    write_checkpoint(folder / MODEL, RERANK_TINY, seed=0)
    environment = {
        "TESSERA_SERVED_MODEL_NAME": f"{MODEL}, {OTHER_NAME}, org/some_model",
        "TESSERA_API_KEYS": f"{KEY} clients",
        "TESSERA_FRONTEND_PAGE": "off",
        # What is too long is cut to this: a pair of the model's own 10,240 tokens takes a second.
        "TESSERA_FRONTEND_ARGS": "--max-tokens 4096",
    }
    with launch("agg.sh", folder / MODEL, folder / "log", workers=1, environment=environment) as running:
        yield ClosedService(running, folder)


@pytest.fixture
def http(service: ClosedService) -> Iterator[httpx.Client]:
    with service.http() as client:
        yield client
