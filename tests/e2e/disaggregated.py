"""A disaggregated service with an API key, and more frontends for the same workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.e2e.service import MODEL, Service, free_ports, launch
from tests.forks.popen import Forked
from tests.waiting import wait_until

KEY = "sk-shared-0123456789"
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """One frontend, one encode worker and one embed worker; ``store`` is where they find each other."""

    running: Service
    checkpoint: Path
    store: Path
    key: str = KEY

    @property
    def url(self) -> str:
        return self.running.url

    def embed(self, *inputs: Any, **options: Any) -> list[list[float]]:
        """The vectors that ``/v1/embeddings`` gives."""
        answer = httpx.post(
            f"{self.url}/v1/embeddings",
            json={"model": MODEL, "input": inputs, **options},
            headers={"authorization": f"Bearer {self.key}"},
            timeout=60,
        )
        answer.raise_for_status()
        return [row["embedding"] for row in answer.json()["data"]]

    @contextmanager
    def frontend(
        self, *flags: str, settings: Mapping[str, str] = NOTHING, before: Sequence[str] = ()
    ) -> Iterator[str]:
        """The URL of one more frontend for these workers, without keys.

        ``settings`` are added to its environment, and its command to ``before``, which becomes it.
        """
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [*before, sys.executable, "-m", "tessera.frontend", "--model-path", str(self.checkpoint)]
        command += ["--served-model-name", MODEL, "--port", str(port), "--discovery-backend", "file", *flags]
        environment = {**os.environ, "DYN_FILE_KV": str(self.store), **settings}
        log = self.store.with_name(f"frontend-{port}.log")
        with log.open("wb") as errors:
            process = Forked(command, env=environment, stderr=errors)
        try:
            _wait_ready(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=60)
        assert status == 0


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    wait_until(
        lambda: httpx.get(f"{url}/health").json()["images"],
        despite=httpx.TransportError,
        process=process,
        said=lambda: log.read_text()[-4000:],
    )


OTHER_NAME = "other-name"
"""That the model has beside ``MODEL``."""


@contextmanager
def disaggregated(checkpoint: Path, folder: Path, settings: Mapping[str, str]) -> Iterator[Disaggregated]:
    """``settings`` are added to the environment of all its processes."""
    store = folder / "discovery"
    environment = {
        "TESSERA_API_KEYS": f"{KEY} shared",
        "DYN_FILE_KV": str(store),
        "TESSERA_LOG_FORMAT": "json",
        "TESSERA_SERVED_MODEL_NAME": f"{MODEL}, {OTHER_NAME}",
        **settings,
    }
    # Behind a stock frontend as well, for the tests of that.
    arguments = ("--dynamo-model",)
    with launch(
        "e_p.sh", checkpoint, folder / "log", workers=2, arguments=arguments, environment=environment
    ) as running:
        yield Disaggregated(running, checkpoint, store)
