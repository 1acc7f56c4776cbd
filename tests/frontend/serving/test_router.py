"""Which worker gets what: caches that together hold each image once, and no worker far above the rest."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from blake3 import blake3

from tessera.frontend.serving.dispatch import LOAD_FACTOR, Router


def digests(count: int) -> list[bytes]:
    return [blake3(index.to_bytes(4, "little")).digest() for index in range(count)]


def workers(count: int) -> list[int]:
    chance = random.Random(count)
    return [chance.randrange(1, 2**63) for _ in range(count)]


def test_an_image_goes_to_the_same_worker_whatever_the_order() -> None:
    instances = workers(8)
    router = Router()
    for digest in digests(50):
        assert len({router.pick_image(digest, order) for order in (instances, instances[::-1])}) == 1


def test_frontends_agree_without_talking() -> None:
    instances = workers(8)
    one, other = Router(), Router()
    assert all(one.pick_image(d, instances) == other.pick_image(d, instances) for d in digests(200))


def test_a_worker_that_leaves_moves_its_own_images_alone() -> None:
    instances, images = workers(8), digests(4000)
    router = Router()
    before = {digest: router.pick_image(digest, instances) for digest in images}
    gone = instances[3]
    rest = [instance for instance in instances if instance != gone]
    after = {digest: router.pick_image(digest, rest) for digest in images}
    moved = [digest for digest in images if before[digest] != after[digest]]
    assert moved == [digest for digest in images if before[digest] == gone]
    assert len(moved) == pytest.approx(4000 / 8, rel=0.25)
    # Its images go to all of the others, not to one neighbour.
    assert {after[digest] for digest in moved} == set(rest)


def test_a_worker_that_joins_takes_only_its_share() -> None:
    instances, images = workers(9), digests(4000)
    router = Router()
    before = {digest: router.pick_image(digest, instances[:8]) for digest in images}
    after = {digest: router.pick_image(digest, instances) for digest in images}
    moved = [digest for digest in images if before[digest] != after[digest]]
    assert all(after[digest] == instances[8] for digest in moved)
    assert len(moved) == pytest.approx(4000 / 9, rel=0.25)


def test_images_are_spread_evenly() -> None:
    instances, router = workers(8), Router()
    counts = Counter(router.pick_image(digest, instances) for digest in digests(8000))
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * 1000


def test_an_overloaded_worker_is_left_and_returned_to() -> None:
    instances, router = workers(4), Router(slack=1000)
    (digest,) = digests(1)
    home = router.pick_image(digest, instances)
    router.loads.add(home, 1500)
    # 1500 is more than 1.25 times the mean of 375 plus the slack.
    away = router.pick_image(digest, instances)
    assert away != home
    # The second in its ranking, every time: that cache warms up too.
    assert router.pick_image(digest, instances) == away
    router.loads.add(home, -1500)
    assert router.pick_image(digest, instances) == home


def test_little_load_never_moves_an_image() -> None:
    instances, router = workers(4), Router()
    (digest,) = digests(1)
    home = router.pick_image(digest, instances)
    router.loads.add(home, 16_000)
    assert router.pick_image(digest, instances) == home


def test_text_goes_to_the_fewest_tokens() -> None:
    router = Router()
    router.loads.add(1, 100)
    router.loads.add(2, 50)
    router.loads.add(3, 70)
    assert router.loads.least([1, 2, 3]) == 2
    router.loads.add(2, 30)
    assert router.loads.least([1, 2, 3]) == 3
    assert router.loads.least([1, 2]) == 2


def test_counts_return_to_nothing() -> None:
    router = Router()
    for _ in range(100):
        router.loads.add(1, 7)
    for _ in range(100):
        router.loads.add(1, -7)
    assert router.loads[1] == 0
    assert not router.loads._loads


def test_load_over_64_workers_stays_within_the_bound() -> None:
    """Popular images follow a power law, as they do in use: hashing alone would drown one worker."""
    chance = random.Random(7)
    instances, router = workers(64), Router(slack=2000)
    images = digests(5000)
    weights = [1 / (rank + 1) for rank in range(len(images))]
    running: list[tuple[int, int]] = []
    alone: Counter[int] = Counter()
    served: Counter[int] = Counter()
    worst = 0.0
    hashed = Router(slack=10**12)
    for digest in chance.choices(images, weights, k=10_000):
        tokens = chance.choice((256, 1792, 1792, 3328))
        instance = router.pick_image(digest, instances)
        mean = sum(router.loads[each] for each in instances) / len(instances)
        assert router.loads[instance] <= LOAD_FACTOR * mean + 2000
        alone[hashed.pick_image(digest, instances)] += tokens
        router.loads.add(instance, tokens)
        served[instance] += tokens
        running.append((instance, tokens))
        if len(running) > 1000:
            done, held = running.pop(chance.randrange(len(running)))
            router.loads.add(done, -held)
        if len(running) == 1000:
            loads = [router.loads[each] for each in instances]
            worst = max(worst, max(loads) * len(loads) / sum(loads))
    mean = sum(served.values()) / len(instances)
    print(
        f"64 workers: max/mean {max(served.values()) / mean:.2f} of all tokens, {worst:.2f} in flight; "
        f"hashing alone {max(alone.values()) / mean:.2f}"
    )
    assert max(served.values()) / mean < 1.5
    assert max(served.values()) < max(alone.values())
    for instance, tokens in running:
        router.loads.add(instance, -tokens)
    assert not router.loads._loads
