"""Pieces of a batch run side by side, each on its share of torch's threads, and leave those as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch

from tessera.engine.lanes import Lanes
from tessera.launched import Launched
from tests.torch_threads import torch_threads
from tests.waiting import wait_until


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    with torch_threads(3):
        made = Lanes()
        yield made
        made.close()


def run(lanes: Lanes, work: Callable[[Any], Any], pieces: list[int], sizes: list[int]) -> list[Any]:
    return Launched.of_futures(lanes.start(work, pieces, sizes), list).result()


def test_pieces_run_at_the_same_time_on_one_thread_each(lanes: Lanes) -> None:
    # Nobody gets past it unless all three are there.
    together = threading.Barrier(3)

    def work(piece: int) -> tuple[int, int]:
        together.wait(60)
        return piece * 10, torch.get_num_threads()

    assert run(lanes, work, [1, 2, 3], [1, 1, 1]) == [(10, 1), (20, 1), (30, 1)]


def test_a_few_lanes_share_many_threads() -> None:
    together = threading.Barrier(4)

    def work(piece: int) -> int:
        together.wait(60)
        return torch.get_num_threads()

    with torch_threads(10):
        made = Lanes()
        assert made.count == 4 and sorted(run(made, work, [0] * 4, [1] * 4)) == [2, 2, 3, 3]
        made.close()
        assert torch.get_num_threads() == 10


def test_torch_keeps_its_threads_for_everybody_else(lanes: Lanes) -> None:
    assert lanes.count == 3 and torch.get_num_threads() == 3
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [3]


def test_results_are_in_order_and_the_largest_begins_first(lanes: Lanes) -> None:
    begun: list[int] = []
    first_three = threading.Barrier(3)

    def work(piece: int) -> int:
        begun.append(piece)
        if piece != 1:
            first_three.wait(60)
        return -piece

    assert run(lanes, work, [4, 1, 9, 2], [4, 1, 9, 2]) == [-4, -1, -9, -2]
    assert set(begun[:3]) == {9, 4, 2} and begun[3] == 1


def test_an_error_is_raised_once_nothing_runs_any_more(lanes: Lanes) -> None:
    failed = threading.Event()
    ended: list[int] = []

    def work(piece: int) -> None:
        if piece == 0:
            failed.set()
            raise ValueError("the first piece")
        failed.wait(60)
        ended.append(piece)

    with pytest.raises(ValueError, match="the first piece"):
        run(lanes, work, [0, 1, 2, 3, 4], [1, 1, 1, 1, 1])
    assert sorted(ended) == [1, 2, 3, 4]


def test_a_batch_begins_while_the_last_piece_of_the_one_before_runs(lanes: Lanes) -> None:
    held, begun = threading.Event(), threading.Barrier(3)

    def last(piece: int) -> int:
        held.wait(60)
        return piece

    def work(piece: int) -> int:
        # Beside the first batch's piece, on the other two lanes and the main thread.
        begun.wait(60)
        return piece

    first = Launched.of_futures(lanes.start(last, [7], [1]), list)
    told = threading.Event()
    first.when_done(told.set)
    assert lanes.busy and first.tells and not first.done()
    second = lanes.start(work, [1, 2], [1, 1])
    begun.wait(60)
    assert [future.result(60) for future in second] == [1, 2]
    assert not first.done() and not told.is_set()
    held.set()
    assert told.wait(60) and first.result() == [7]
    assert first.done()
    # A result is there a moment before its piece is counted as done.
    wait_until(lambda: not lanes.busy)


@pytest.mark.parametrize(
    ("sizes", "suit"),
    [
        ([], False),
        ([9], False),
        ([5, 5], False),  # a lane would have nothing
        ([5, 5, 5], True),
        ([5, 5, 5, 1], True),
        ([5, 5, 5, 5], False),  # two would wait for the one with two
        ([9, 1, 1, 1, 1], False),
        ([4, 4, 4, 4, 4, 4, 4, 4], True),
    ],
)
def test_whether_pieces_keep_the_lanes_busy(lanes: Lanes, sizes: list[int], suit: bool) -> None:
    assert lanes.suit(sizes) is suit


def test_behind_others_each_lane_must_have_a_piece(lanes: Lanes) -> None:
    held = threading.Event()
    running = lanes.start(lambda _: held.wait(60), [0], [1])
    assert lanes.busy
    assert lanes.suit([9, 1, 1]) and not lanes.suit([1, 1])
    held.set()
    wait(running)
    # A result is there a moment before its piece is counted as done.
    wait_until(lambda: not lanes.busy)
    assert not lanes.suit([9, 1, 1])


def test_one_thread_needs_no_lanes() -> None:
    with torch_threads(1):
        made = Lanes()
        assert not made.suit([1, 1])
        made.close()
