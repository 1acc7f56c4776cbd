"""What is taken of machines of many sizes."""

from __future__ import annotations

from itertools import product

import pytest

from tessera import defaults
from tessera.defaults import GIB, MIB, Share

TILE = 3 * 512 * 512
PATCH = 3 * 16 * 16
CORES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 192)
MEMORY = (1, 2, 8, 23, 128, 2048)


@pytest.mark.parametrize(
    ("cores", "gib", "cards", "expected"),
    [
        # Without a card two cores are as they always were.
        *((cores, 23, 0, 1) for cores in (1, 2, 4, 8)),
        (64, 256, 0, 8),
        # As was measured on one card, and on two.
        (16, 128, 1, 6),
        (32, 256, 2, 12),
        *((2, 16, 1, 1), (4, 16, 1, 1), (8, 64, 1, 3)),
        # A card feeds eight at most, and memory bounds them as well.
        *((192, 2048, 1, 8), (192, 2048, 8, 64), (128, 560, 8, 48), (64, 8, 4, 2), (64, 1, 4, 1)),
    ],
)
def test_frontends(cores: int, gib: int, cards: int, expected: int) -> None:
    workers = defaults.workers(cards)
    assert workers == (cards or 1)
    found = defaults.frontends(cores=cores, nbytes=gib * GIB, cards=cards, workers=workers)
    assert found == expected


@pytest.mark.parametrize(
    ("cores", "billions", "gib", "expected"),
    [
        # The tower of SigLIP's so400m, one of twice as many, a small encoder, a larger model.
        *((16, 0.43, 80, 2), (16, 0.88, 80, 1), (16, 0.03, 80, 2), (16, 1.7, 80, 1)),
        *((2, 0.43, 80, 1), (8, 0.43, 80, 1), (15, 0.43, 80, 1), (24, 0.43, 80, 3)),
        *((32, 0.43, 80, 4), (192, 0.03, 80, 4)),
        # Each has room for its batches.
        *((64, 0.43, 0, 1), (64, 0.43, 4, 1), (64, 0.03, 8, 1), (64, 0.43, 16, 2), (64, 0.43, 24, 4)),
    ],
)
def test_workers_share_a_card_where_interpreters_are_the_bound(
    cores: int, billions: float, gib: int, expected: int
) -> None:
    found = defaults.workers_on_a_card(cores=cores, nbytes=gib * GIB, parameters=int(billions * 1e9))
    assert found == expected


def test_a_host_of_frontends_alone_gives_them_half_its_cores() -> None:
    found = [defaults.frontends(cores=cores, nbytes=64 * GIB, cards=0, workers=0) for cores in (1, 2, 8, 64)]
    assert found == [1, 1, 4, 16]


def test_two_cores_without_a_card_are_as_they_always_were() -> None:
    share = Share(cores=2, nbytes=16 * GIB)
    assert (share.decoders(), share.threads(2), share.cache_bytes()) == (2, 2, GIB)
    # What torch was told by OMP_NUM_THREADS is not raised.
    assert share.threads(1) == 1
    for beside in (2, 4):
        crowded = Share(cores=2, nbytes=16 * GIB, beside=beside)
        assert (crowded.decoders(), crowded.threads(2), crowded.cache_bytes()) == (2, 2, GIB)


def test_a_worker_beside_a_card_of_16_cores() -> None:
    share = Share(cores=16, nbytes=128 * GIB, on_card=True)
    assert (share.decoders(), share.threads(16), share.cache_bytes()) == (6, 1, 8 * GIB)
    # Ten for a small model, by one worker or by two.
    assert share.decoders(small=True) == 10
    assert Share(cores=16, nbytes=128 * GIB, beside=2, on_card=True).decoders(small=True) == 5
    twice = Share(cores=32, nbytes=256 * GIB, beside=2, on_card=True)
    assert (twice.decoders(), twice.threads(32), twice.cache_bytes()) == (6, 1, 8 * GIB)


def test_vision_batches_are_of_the_same_work_in_every_family() -> None:
    on_card = Share(cores=16, nbytes=128 * GIB, on_card=True)
    assert on_card.vision_units(largest=7, values=TILE) == 28
    assert on_card.vision_units(largest=7200, values=PATCH) == 28_800
    # Thirteen tiles, and a picture that is one unit.
    assert on_card.vision_units(largest=13, values=TILE) == 26
    assert on_card.vision_units(largest=1, values=3 * 224 * 224) == 147
    assert on_card.vision_units(largest=64, values=TILE) == 64
    on_cpu = Share(cores=2, nbytes=16 * GIB)
    assert on_cpu.vision_units(largest=7, values=TILE) == 28
    assert on_cpu.vision_units(largest=1, values=3 * 224 * 224) == 4


def test_what_waits_is_bounded_by_memory() -> None:
    roomy = Share(cores=16, nbytes=128 * GIB, on_card=True)
    assert roomy.vision_queue(batch=28, values=TILE) == 1792
    assert roomy.vision_queue(batch=28_800, values=PATCH) == 1_843_200
    tight = Share(cores=16, nbytes=8 * GIB, on_card=True)
    assert tight.vision_queue(batch=28, values=TILE) == 28 * 24
    assert Share(cores=1, nbytes=GIB, beside=8).vision_queue(batch=28, values=TILE) == 4 * 28
    assert roomy.text_queue(16_384) == 524_288
    assert roomy.text_queue(1 << 20) == 1 << 20


def test_slabs_lend_four_batches() -> None:
    share = Share(cores=16, nbytes=128 * GIB, on_card=True)
    assert share.slab_bytes(28 * MIB) == 256 * MIB
    # Rows of 8,192 in bfloat16.
    assert share.slab_bytes(7200 * 8192 * 2) == 512 * MIB


@pytest.mark.parametrize("cores", CORES)
def test_everything_is_at_least_something_and_grows_with_the_machine(cores: int) -> None:
    for gib, on_card in product(MEMORY, (False, True)):
        share = Share(cores=cores, nbytes=gib * GIB, on_card=on_card)
        larger = Share(cores=2 * cores, nbytes=2 * gib * GIB, on_card=on_card)
        for beside in (1, 2, 8):
            crowded = Share(cores=cores, nbytes=gib * GIB, beside=beside, on_card=on_card)
            assert crowded.decoders() <= crowded.decoders(small=True) <= 16
            assert 2 <= crowded.decoders() <= share.decoders() <= larger.decoders() <= 8
            assert 1 <= crowded.threads(cores) <= share.threads(cores) <= cores
            assert GIB <= crowded.cache_bytes() <= share.cache_bytes() <= larger.cache_bytes()
            queues = [each.vision_queue(batch=28, values=TILE) for each in (crowded, share, larger)]
            assert 4 * 28 <= queues[0] <= queues[1] <= queues[2]
        for cards in (0, 1, 8):
            of = {"cards": cards, "workers": defaults.workers(cards)}
            few = defaults.frontends(cores=cores, nbytes=gib * GIB, **of)
            more = defaults.frontends(cores=2 * cores, nbytes=2 * gib * GIB, **of)
            assert 1 <= few <= more <= cores


def test_caches_have_an_end() -> None:
    assert Share(cores=192, nbytes=2048 * GIB, on_card=True).cache_bytes() == 16 * GIB
