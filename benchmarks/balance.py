"""``python -m benchmarks.balance``: how evenly the frontend's routing rules load many workers, simulated.

Requests arrive at random and each worker serves its queue at a fixed rate of tokens. An image that a
worker has not seen costs it an encode. The router is the service's own; workers and time are not real.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from benchmarks import usage
from tessera.frontend.serving.dispatch import Router
from tessera_tools.table import number, table

HEADER = (
    "traffic", "rule", "max/mean served", "p99 max/mean in flight", "hits %", "p50 ms", "p99 ms"
)  # fmt: skip
_TEXT_TOKENS = (32, 128, 512, 1024)
_IMAGE_TOKENS = (264, 1800, 1800, 1800)
# Seconds that an image of so many tokens costs beyond its text stage when it has to be encoded.
_ENCODE_SHARE = 1.5

Pick = Callable[["Request", Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Request:
    tokens: int
    digest: bytes | None


@dataclass(slots=True)
class Worker:
    """``free_at`` is when it will have served what it has; its cache never forgets."""

    free_at: float = 0.0
    served: int = 0
    seen: set[bytes] = field(default_factory=set)


def simulate(
    name: str, rule: str, requests: Sequence[Request], *, workers: int, load: float, rate: float, seed: int
) -> tuple[str, ...]:
    """One row: ``load`` is the offered share of what the workers can serve, ``rate`` tokens a second each."""
    chance = random.Random(seed)
    router = Router()
    instances = list(range(1, workers + 1))
    fleet = {instance: Worker() for instance in instances}
    pick = _rule(rule, router, chance)
    mean_tokens = statistics.fmean(request.tokens for request in requests)
    interval = mean_tokens / (rate * workers * load)
    now, hits, images = 0.0, 0, 0
    leaving: list[tuple[float, int, int]] = []
    latencies, skews = [], []
    for number_, request in enumerate(requests):
        now += chance.expovariate(1 / interval)
        while leaving and leaving[0][0] <= now:
            _, instance, tokens = heapq.heappop(leaving)
            router.finished(instance, tokens)
        instance = pick(request, instances)
        worker = fleet[instance]
        work = request.tokens / rate
        if request.digest is not None:
            images += 1
            if request.digest in worker.seen:
                hits += 1
            else:
                worker.seen.add(request.digest)
                work *= 1 + _ENCODE_SHARE
        router.started(instance, request.tokens)
        worker.free_at = max(worker.free_at, now) + work
        worker.served += request.tokens
        heapq.heappush(leaving, (worker.free_at, instance, request.tokens))
        latencies.append(worker.free_at - now)
        if number_ % 50 == 0:
            loads = [router.in_flight(each) for each in instances]
            skews.append(max(loads) * workers / max(1, sum(loads)))
    served = [worker.served for worker in fleet.values()]
    latencies.sort()
    skews.sort()
    return (
        name,
        rule,
        f"{max(served) / statistics.fmean(served):.2f}",
        f"{skews[int(len(skews) * 0.99)]:.2f}",
        number(100 * hits / images) if images else "-",
        number(latencies[len(latencies) // 2] * 1e3),
        number(latencies[int(len(latencies) * 0.99)] * 1e3),
    )


def _rule(name: str, router: Router, chance: random.Random) -> Pick:
    hashing = Router(slack=1 << 60)
    rules: dict[str, Pick] = {
        "random": lambda request, instances: chance.choice(instances),
        "least tokens": lambda request, instances: router.loads.least(instances),
        "hashing alone": lambda request, instances: hashing.pick_image(request.digest or b"", instances),
        "bounded hashing": lambda request, instances: router.pick_image(request.digest or b"", instances),
        "both, as served": lambda request, instances: (
            router.loads.least(instances)
            if request.digest is None
            else router.pick_image(request.digest, instances)
        ),
    }
    return rules[name]


def _texts(chance: random.Random, count: int) -> list[Request]:
    return [Request(chance.choice(_TEXT_TOKENS), None) for _ in range(count)]


def _images(chance: random.Random, count: int, distinct: int) -> list[Request]:
    """Popularity follows a power law, as it does in use."""
    kinds = [
        Request(chance.choice(_IMAGE_TOKENS), blake2b(str(rank).encode(), digest_size=16).digest())
        for rank in range(distinct)
    ]
    return chance.choices(kinds, [1 / (rank + 1) for rank in range(distinct)], k=count)


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.balance", __doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--images", type=int, default=5_000, help="distinct ones")
    parser.add_argument("--load", type=float, default=0.6, help="offered share of the workers' rate")
    parser.add_argument("--rate", type=float, default=280_000.0, help="tokens a second of one worker")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    chance = random.Random(options.seed)
    texts = _texts(chance, options.requests)
    images = _images(chance, options.requests, options.images)
    mixed = [chance.choice((text, image)) for text, image in zip(texts, images, strict=True)]
    rows = [
        simulate(
            name,
            rule,
            requests,
            workers=options.workers,
            load=options.load,
            rate=options.rate,
            seed=options.seed,
        )
        for name, requests, rules in (
            ("text", texts, ("random", "least tokens")),
            ("images", images, ("random", "hashing alone", "bounded hashing")),
            ("half and half", mixed, ("random", "both, as served")),
        )
        for rule in rules
    ]
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
