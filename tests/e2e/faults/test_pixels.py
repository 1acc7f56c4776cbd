"""Workers are killed while they have pixels that clients normalised, and no gRPC client sees an error."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio
from tritonclient.grpc import InferInput

from tests.e2e.faults.conftest import EMBED, ENCODE, Deployment
from tests.e2e.faults.test_processes import named, replaced, until, whole, whole_again
from tests.e2e.faults.traffic import PAUSE, Traffic, picture, sending
from tests.e2e.service import Service
from tests.e2e.test_pixels import Row, batch, row
from tests.references.llama_nemotron_vl import Reference
from tests.signals import signal_process

pytestmark = [
    pytest.mark.xdist_group("faults"),
    pytest.mark.service,
    pytest.mark.kserve,
    pytest.mark.timeout(600),
]

KINDS = (np.float32, np.float16)
ROWS = 4
"""Of a call."""
SAME = 1e-5
# A worker is stopped for so long before it is killed: it is sent more, and ends nothing.
STOPPED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """Rows, and what each kind of pixels gives when nothing else is asked: ``[kinds, rows, width]``."""

    rows: Sequence[Row]
    vectors: np.ndarray


@dataclass(slots=True, kw_only=True)
class Pixels(Traffic):
    """Calls with some rows of ``known``, each sent once: ``door`` is where to."""

    door: tritonclient.grpc.aio.InferenceServerClient
    known: Known

    async def send(self, client: httpx.AsyncClient, chance: random.Random, first: int) -> int:
        kind = chance.randrange(len(KINDS))
        chosen = chance.sample(range(len(self.known.rows)), ROWS)
        found = await pooled(self.door, [self.known.rows[index] for index in chosen], KINDS[kind])
        np.testing.assert_allclose(found, self.known.vectors[kind, chosen], atol=SAME)
        self.vectors += ROWS
        return 0


async def pooled(
    door: tritonclient.grpc.aio.InferenceServerClient, rows: Sequence[Row], kind: type
) -> np.ndarray:
    tensors = []
    for name, values in batch(list(rows), kind).items():
        datatype = {"int64": "INT64", "float32": "FP32", "float16": "FP16"}[values.dtype.name]
        tensors.append(InferInput(name, list(values.shape), datatype))
        tensors[-1].set_data_from_numpy(values)
    answer = await door.infer("router", tensors)
    found: np.ndarray = answer.as_numpy("pooled")
    return found


@pytest.fixture(scope="module")
def rows(reference: Reference) -> list[Row]:
    """More tiles than a worker's cache holds, with noise that no byte has."""
    chance = np.random.default_rng(5)
    made = [row(reference, picture(7000 + seed), f"word {seed}") for seed in range(16)]
    return [(ids, (tiles + chance.normal(0, 0.1, tiles.shape)).astype(np.float32)) for ids, tiles in made]


async def test_workers_that_are_killed_with_pixels_under_way_are_not_noticed(
    deployment: Deployment, rows: list[Row]
) -> None:
    service = deployment.service
    await whole(deployment)
    async with tritonclient.grpc.aio.InferenceServerClient(deployment.grpc) as door:
        alone = [[(await pooled(door, [one], kind))[0] for one in rows] for kind in KINDS]
        vectors = np.array(alone)
        # Another row's vector would be seen.
        assert min(np.abs(vectors[0, 0] - other).max() for other in vectors[0, 1:]) > 100 * SAME
        traffic = Pixels(deployment.urls, PAUSE, door=door, known=Known(rows, vectors))
        async with sending(traffic) as running:
            await until(lambda: len(running.answered) > 6)
            first = time.monotonic()
            for worker, retries in ((ENCODE[0], encode_retries), (EMBED[0], embed_retries)):
                retried = retries(service)
                # On a machine that is busy with other things perhaps nothing was sent to it.
                for _ in range(20):
                    pid = named(deployment, worker)
                    signal_process(pid, signal.SIGSTOP)
                    await asyncio.sleep(STOPPED_SECONDS)
                    signal_process(pid, signal.SIGKILL)
                    await until(lambda p=pid, w=worker: replaced(deployment, w, p))
                    await whole_again(deployment)
                    if retries(service) > retried:
                        break
                assert retries(service) > retried
                # The new one takes its part.
                await until(lambda w=worker: service.worker_metric(w, "tessera_items_total") > 0)
    assert running.errors == [] and running.vectors > 0
    running.figures("workers killed with pixels under way", first)
    await whole(deployment)
    # The slabs of writers that are gone are let go of.
    for worker in EMBED:
        await until(lambda w=worker: service.worker_metric(w, "tessera_slab_peers") <= len(ENCODE))


def encode_retries(service: Service) -> float:
    """Images that were sent to another encode worker."""
    return sum(service.worker_metric(worker, "tessera_encode_retries_total") for worker in EMBED)


def embed_retries(service: Service) -> float:
    """Inputs that were sent to another embed worker."""
    return service.frontend_metric("tessera_retries_total")
