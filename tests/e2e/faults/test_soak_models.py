"""Two models, asked all the time while processes are killed and frozen, others hang up, and a third model
comes and goes by SIGHUP.

Ten seconds by default, and as long as each change takes; ``TESSERA_SOAK_SECONDS`` makes it longer (the
promise is for twenty minutes).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.proc import children

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY, TINY
from tests.e2e.faults.hang_ups import Target, hang_ups, held, routes
from tests.e2e.faults.size import Size
from tests.e2e.faults.traffic import PAUSE, picture
from tests.e2e.inputs import parts
from tests.e2e.service import free_ports
from tests.e2e.serving import Serve
from tests.proc import command_line, environment
from tests.signals import signal_process
from tests.waiting import until

SECONDS = float(os.environ.get("TESSERA_SOAK_SECONDS", "10"))
# Of one client. Without it the short run took both processors, and each change waited for them.
BETWEEN = 0.02 if SECONDS >= 600 else PAUSE
EMBEDDER, RERANKER, THIRD = "pictures", "reranker", "third"
# Clients that hang up, and what each of them waits between two: some 40 hang-ups a second in the long run.
LEAVING, BEFORE_NEXT = (4, 0.05) if SECONDS >= 600 else (2, PAUSE)
PARTS = 4 if SECONDS >= 600 else 2
# As test_soak has it: allocators take minutes until they have all that they will ever hold.
MOST_GROWTH = 1.1 if SECONDS >= 600 else 1.35

pytestmark = [
    pytest.mark.soak,
    pytest.mark.service,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.xdist_group("several"),
]


@dataclass
class Asked:
    """What clients of one model sent, and what they should get for it: the first answer to the same."""

    path: str
    bodies: Sequence[dict[str, Any]]
    first: dict[int, list[float]] = field(default_factory=dict)
    answers: int = 0
    errors: list[str] = field(default_factory=list)

    async def run(self, url: str, number: int, done: asyncio.Event) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while not done.is_set():
                index = chance.randrange(len(self.bodies))
                try:
                    answer = await self._post(client, self.bodies[index])
                except httpx.TransportError as error:
                    self.errors.append(repr(error))
                    continue
                self.answers += 1
                if answer.status_code != 200:
                    self.errors.append(f"{answer.status_code}: {answer.text}")
                    continue
                values = _values(answer.json())
                if values != pytest.approx(self.first.setdefault(index, values), abs=1e-4):
                    self.errors.append(f"another answer to {index}")
                await asyncio.sleep(BETWEEN)

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """A connection of a frontend that is killed breaks; whoever takes the next one answers."""
        for _ in range(5):
            try:
                return await client.post(self.path, json=body)
            except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                await asyncio.sleep(0.05)
        return await client.post(self.path, json=body)


def _values(answer: dict[str, Any]) -> list[float]:
    if "results" not in answer:
        return [value for row in answer["data"] for value in row["embedding"]]
    by_index = sorted(answer["results"], key=lambda result: int(result["index"]))
    return [result["relevance_score"] for result in by_index]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    for seed, (name, spec) in enumerate(((EMBEDDER, TINY), (RERANKER, RERANK_TINY), (THIRD, TINY))):
        # Each picture is one tile; of 512 pixels it took 25 ms of the encoder, not 3.
        write_checkpoint(tmp_path / name, replace(spec, image_size=256), seed=seed)
    own, _, grpc_port = free_ports(3)
    made = Serve(
        tmp_path,
        *listed(tmp_path),
        frontends=2,
        agg_workers=2,
        frontend_port_base=own,
        grpc_port=grpc_port,
    )
    with made.running():
        yield made


def listed(folder: Path, *others: str) -> list[dict[str, Any]]:
    """Each with a cache of a few images: a larger one would fill for as long as the test runs."""
    cache = {"multimodal_embedding_cache_capacity_gb": 0.00008}
    return [{"model": str(folder / name), **cache} for name in (EMBEDDER, RERANKER, *others)]


def asked() -> list[Asked]:
    texts = [f"sentence number {number} " * (1 + number % 5) for number in range(8)]
    images = [parts(None, picture(number)) for number in range(8)]
    embedder = [{"model": EMBEDDER, "input": [value]} for value in (*texts, *images)]
    reranker = [{"model": RERANKER, "query": text, "documents": texts[:3]} for text in texts]
    return [Asked("/v1/embeddings", embedder), Asked("/v1/rerank", reranker)]


def processes(serve: Serve) -> dict[str, list[int]]:
    """Frontends, and the workers of each model, in the order in which they were started."""
    found: dict[str, list[int]] = {"frontend": []}
    for pid in children(serve.process.pid):
        words = command_line(pid)
        if "tessera.frontend" in words:
            found["frontend"].append(pid)
        elif "tessera.worker" in words:
            name = words[words.index("--served-model-name") + 1]
            found.setdefault(name, []).append(pid)
    return found


def is_whole(serve: Serve, *names: str) -> bool:
    try:
        health = httpx.get(f"{serve.url}/health").json()
    except httpx.TransportError:
        return False
    models = health["models"]
    return (
        health["frontends"] == 2
        and set(models) == set(names)
        and all(models[name]["workers"]["embed"] == 2 for name in names)
    )


async def whole(serve: Serve, *names: str) -> None:
    await until(
        lambda: asyncio.to_thread(is_whole, serve, *names),
        process=serve.process,
        said=lambda: serve.log.read_text()[-4000:],
    )


def pages(serve: Serve) -> list[str]:
    """The pages of metrics of all processes."""
    ports = [serve.common["frontend_port_base"] + index for index in range(2)]
    for name, pids in processes(serve).items():
        for pid in pids if name != "frontend" else ():
            # One of the model that was taken away may be about to end.
            if (port := environment(pid).get("DYN_SYSTEM_PORT")) is not None:
                ports.append(int(port))
    return [httpx.get(f"http://127.0.0.1:{port}/metrics").text for port in ports]


@dataclass
class Churn:
    """What was done to the service."""

    kills: int = 0
    freezes: int = 0
    changes: int = 0


async def freeze_for(pid: int, seconds: float) -> None:
    """Stop a process for so long."""
    signal_process(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        signal_process(pid, signal.SIGCONT)


async def churn(
    serve: Serve, seconds: float, chance: random.Random, live: set[int], *, changes: int
) -> Churn:
    """Kill what may not live on and freeze any process, one after another, and add or take away the third
    model in between, ``changes`` times at least."""
    until, seen, names = time.monotonic() + seconds, Churn(), [EMBEDDER, RERANKER]
    while time.monotonic() < until or seen.changes < changes or len(names) > 2:
        step = (seen.kills + seen.freezes + seen.changes) % 4
        if step == 3:
            names = [EMBEDDER, RERANKER] if len(names) > 2 else [EMBEDDER, RERANKER, THIRD]
            serve.write(*listed(serve.folder, *names[2:]))
            serve.process.send_signal(signal.SIGHUP)
            seen.changes += 1
        elif step == 1:
            running = await asyncio.to_thread(processes, serve)
            kind = chance.choice(["frontend", EMBEDDER, RERANKER])
            await freeze_for(chance.choice(running[kind]), chance.uniform(0.1, 6.0))
            seen.freezes += 1
        else:
            running = await asyncio.to_thread(processes, serve)
            kind = chance.choice(["frontend", EMBEDDER, RERANKER])
            victims = [pid for pid in running[kind] if pid not in live]
            signal_process(chance.choice(victims), chance.choice([signal.SIGKILL, signal.SIGTERM]))
            seen.kills += 1
            # Discovery takes a moment to say so.
            await asyncio.sleep(1.0)
        await whole(serve, *names)
        await asyncio.sleep(chance.uniform(0.2, 1.0))
    return seen


async def stir(serve: Serve, seconds: float, chance: random.Random, live: set[int], *, changes: int) -> str:
    """Traffic and churn for so long; no client of the two models may notice."""
    clients, done = asked(), asyncio.Event()
    tasks = [
        asyncio.create_task(model.run(serve.url, number, done)) for model in clients for number in range(3)
    ]
    # Of one frontend's own port and of the shared one.
    targets = [
        Target(serve.url, f"127.0.0.1:{serve.common['grpc_port']}"),
        Target(f"http://127.0.0.1:{serve.common['frontend_port_base']}"),
    ]
    asked_for = routes(EMBEDDER, reranker=RERANKER)
    leaving = asyncio.create_task(
        hang_ups(
            targets,
            asked_for,
            count=1_000_000,
            seconds=2 * SECONDS + 600,
            model=EMBEDDER,
            clients=LEAVING,
            pause=BEFORE_NEXT,
            stopping=done,
        )
    )
    try:
        seen = await churn(serve, seconds, chance, live, changes=changes)
    finally:
        done.set()
        await asyncio.gather(*tasks, leaving)
    assert [model.errors for model in clients] == [[], []], serve.log.read_text()[-4000:]
    left = leaving.result().total()
    return f"{[model.answers for model in clients]} answers, {seen}, {left} hang-ups"


async def idle(serve: Serve) -> None:
    """Wait until no process holds anything."""

    async def free() -> bool:
        return not any(map(held, await asyncio.to_thread(pages, serve)))

    await until(free, despite=httpx.TransportError, said=lambda: list(map(held, pages(serve))))


async def test_two_models_answer_while_a_third_comes_and_goes(serve: Serve) -> None:
    chance = random.Random(11)
    await whole(serve, EMBEDDER, RERANKER)
    running = await asyncio.to_thread(processes, serve)
    # One of each kind lives on, and must not grow; nor may the launcher.
    live = {name: pids[0] for name, pids in running.items()} | {"launcher": serve.process.pid}
    reports, sizes = [], []
    for number in range(PARTS):
        # The third model has come and gone in the first, and with it what is allocated for it once.
        changes = 0 if number else 2
        reports.append(await stir(serve, SECONDS / PARTS, chance, set(live.values()), changes=changes))
        await idle(serve)
        sizes.append({name: Size.of(pid) for name, pid in live.items()})

    def grown() -> dict[str, tuple[Size, Size]]:
        return {
            name: (sizes[0][name], now)
            for name, pid in live.items()
            if (now := Size.of(pid)).private_mb > MOST_GROWTH * sizes[0][name].private_mb
            or now.files > sizes[0][name].files + 4
        }

    # Connections to processes that are gone take their time to close.
    await until(lambda: not grown(), said=grown)
    print(f"{SECONDS:.0f} s, no errors:", *reports, sep="\n")
    for name, pid in live.items():
        print(f"{name}: {', '.join(str(size[name]) for size in sizes)}, now {Size.of(pid)}")
