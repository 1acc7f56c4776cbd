"""Continuous mixed traffic whose every vector and score is checked against the reference."""

from __future__ import annotations

import asyncio
import io
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import numpy as np
from PIL import Image

from tests.e2e.inputs import Case, cosine, parts
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

T = TypeVar("T", bound="Traffic")

SAME = 0.9999
SAME_SCORE = 1e-3
# Of a client between two requests. It leaves room for what starts again and for the tests beside these: some
# twenty requests a second come while a process ends and another takes its place.
PAUSE = 0.25
# The share of requests that ask for scores.
SCORED = 0.3


def picture(seed: int, size: int = 64) -> bytes:
    """A small PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    buffer = io.BytesIO()
    # Noise cannot be compressed, and to try takes twice as long: 10 ms for 300 by 300 pixels, of which a soak
    # sends ten a second.
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Known:
    """An input and the vector that it has; ``role`` is what it is for."""

    value: Any
    vector: np.ndarray
    role: str


def known_inputs(reference: Reference, texts: int = 12, images: int = 20) -> list[Known]:
    """Texts of different lengths, images, images with text, and queries."""
    found = []
    for seed in range(texts):
        text = f"sentence number {seed} " * (1 + seed % 7)
        found.append(Case("", text, text, (), "none"))
    for seed in range(images):
        said = f"picture {seed}" if seed % 2 else None
        data = picture(1000 + seed)
        found.append(Case("", parts(said, data), said, (data,), "passage"))
    found += [Case("", text, text, (), "query") for text in ("what is it?", "a picture of some noise")]
    return [Known(case.value, case.expected(reference), case.role) for case in found]


@dataclass(frozen=True, slots=True)
class Answered:
    """When a request was sent (monotonic clock), the seconds it took, how often it changed frontends."""

    at: float
    seconds: float
    moved: int


@dataclass(slots=True)
class Traffic(ABC):
    """``urls`` are the frontends; a request whose connection breaks goes to the next one, as balancers do.

    Each client waits for ``pause`` seconds between two requests.
    """

    urls: Sequence[str]
    pause: float = 0.0
    answered: list[Answered] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    vectors: int = 0
    scores: int = 0
    stopping: bool = False

    @abstractmethod
    async def send(self, client: httpx.AsyncClient, chance: random.Random, first: int) -> int:
        """Send one request, to the frontend ``first`` before the others, and check its answer; how often it
        changed frontends."""

    async def run(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while not self.stopping:
            first = chance.randrange(len(self.urls))
            started = time.monotonic()
            try:
                moved = await self.send(client, chance, first)
                self.answered.append(Answered(started, time.monotonic() - started, moved))
                await asyncio.sleep(self.pause)
            except Exception as error:
                self.errors.append(f"{time.monotonic() - started:.1f} s: {error!r}")
                await asyncio.sleep(0.1)

    async def ask(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], first: int
    ) -> tuple[dict[str, Any], int]:
        """The answer, and how often the request changed frontends."""
        for moved in range(2 * len(self.urls)):
            url = self.urls[(first + moved) % len(self.urls)]
            try:
                response = await client.post(f"{url}{path}", json=body)
                break
            except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                if len(self.urls) == 1:
                    raise
        else:
            raise RuntimeError("no frontend answers")
        assert response.status_code == 200, f"{response.status_code}: {response.text[:300]}"
        answer: dict[str, Any] = response.json()
        return answer, moved

    def percentile(self, share: float, since: float, until: float) -> float:
        """Seconds, of the requests that ended between two moments."""
        found = sorted(one.seconds for one in self.answered if since <= one.at + one.seconds < until)
        return found[int(share * (len(found) - 1))] if found else float("nan")

    def figures(self, what: str, first: float) -> None:
        """Print what docs/reliability.md reports, for faults from this moment on (monotonic clock)."""
        before = self.percentile(0.99, 0.0, first)
        slowest = self.percentile(1.0, first, float("inf"))
        print(
            f"{what}: {len(self.answered)} requests, {self.vectors} vectors, {self.scores} scores, "
            f"{len(self.errors)} errors; "
            f"p99 before {before * 1e3:.0f} ms, slowest after {slowest * 1e3:.0f} ms"
        )


@dataclass(slots=True, kw_only=True)
class Mixed(Traffic):
    """Vectors of ``known`` inputs, and the scores of images for queries among them."""

    known: Sequence[Known]

    async def send(self, client: httpx.AsyncClient, chance: random.Random, first: int) -> int:
        ask = self._score if chance.random() < SCORED else self._embed
        return await ask(client, chance, first)

    async def _embed(self, client: httpx.AsyncClient, chance: random.Random, first: int) -> int:
        inputs = [known for known in self.known if known.role != "query"]
        chosen = chance.sample(inputs, chance.choice((1, 1, 2, 4)))
        body = {"model": MODEL, "input": [known.value for known in chosen]}
        answer, moved = await self.ask(client, "/v1/embeddings", body, first)
        rows = answer["data"]
        assert len(rows) == len(chosen)
        for row, known in zip(rows, chosen, strict=True):
            found = cosine(np.array(row["embedding"], np.float32), known.vector)
            assert found > SAME, f"another input's vector: cosine {found}"
            self.vectors += 1
        return moved

    async def _score(self, client: httpx.AsyncClient, chance: random.Random, first: int) -> int:
        """A query with images, in the order that they are sent."""
        query = chance.choice([known for known in self.known if known.role == "query"])
        chosen = chance.sample([known for known in self.known if known.role == "passage"], 3)
        documents = [{"content": known.value} for known in chosen]
        body = {"model": MODEL, "queries": query.value, "documents": documents}
        answer, moved = await self.ask(client, "/v1/score", body, first)
        rows = answer["data"]
        assert len(rows) == len(chosen)
        for row, known in zip(rows, chosen, strict=True):
            expected = cosine(query.vector, known.vector)
            assert abs(row["score"] - expected) < SAME_SCORE, f"another score: {row['score']}, not {expected}"
            self.scores += 1
        return moved


@asynccontextmanager
async def sending(running: T, concurrency: int = 6, timeout: float = 60.0) -> AsyncIterator[T]:
    """``timeout``, in seconds, is of a request."""
    limits = httpx.Limits(max_connections=4 * concurrency)
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        tasks = [asyncio.create_task(running.run(client, number)) for number in range(concurrency)]
        try:
            yield running
        finally:
            running.stopping = True
            await asyncio.gather(*tasks)


def traffic(
    urls: Sequence[str],
    known: Sequence[Known],
    concurrency: int = 6,
    timeout: float = 60.0,
    pause: float = 0.0,
) -> AbstractAsyncContextManager[Mixed]:
    return sending(Mixed(urls, pause, known=known), concurrency, timeout)
