"""The streams and graphs that an engine's work goes through, with torch's own kernels in its place."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tessera.engine.placement import Placement
from tessera.engine.streams import CudaStreams
from tests.engine.handing_out import TARGETS, HandingOut
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu


@pytest.fixture
def streams() -> CudaStreams:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return CudaStreams("cuda")


def test_copies_come_before_the_run_that_reads_them(streams: CudaStreams) -> None:
    staged = streams.staging((1 << 22,), torch.float32)
    assert staged.is_pinned()
    host = streams.staging((1 << 22,), torch.float32)
    for value in range(1, 6):
        staged.fill_(value)
        with streams.copying():
            batch = staged.to("cuda", non_blocking=True)
        with streams.computing():
            assert torch.cuda.current_stream().cuda_stream == streams.handle
            host.copy_(batch * 2, non_blocking=True)
            launched = streams.launched(lambda: None, keep=(staged, batch, host))
        launched.result()
        assert launched.done() and bool((host == 2 * value).all())


def test_a_recorded_run_reads_what_lies_there_now(streams: CudaStreams) -> None:
    source, target = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(streams.handle)):
            target.copy_(source + 1)

    with streams.computing():
        replay, _ = streams.record(run)
    for value in (3.0, 7.0):
        with streams.computing():
            source.fill_(value)
            replay()
            launched = streams.launched(lambda: None, keep=())
        launched.result()
        assert bool((target == value + 1).all())
    streams.synchronize()


# A tenth of a second at 2 GHz.
CYCLES = 200_000_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", TARGETS)
def test_rows_are_handed_out_behind_the_run_that_makes_them(
    streams: CudaStreams, kind: str, dtype: str
) -> None:
    """Two batches one after the other, and the host does not wait for either."""
    batches = [HandingOut(kind, Placement(device="cuda", dtype=dtype), seed) for seed in (0, 1)]
    # What loads kernels would wait.
    first = HandingOut(kind, Placement(device="cuda", dtype=dtype), 2)
    first.start(first.rows * 1)
    torch.cuda.synchronize()
    launched = []
    for batch in batches:
        # To pageable memory the driver waits for what it copies.
        with no_waiting() if kind != "pageable" else nullcontext(), streams.computing():
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            rows = batch.rows * 1
            batch.start(rows)
            launched.append(streams.launched(lambda: None, keep=(rows, batch)))
            if kind != "pageable":
                assert not launched[-1].done()
    for one, batch in zip(launched, batches, strict=True):
        one.result()
        batch.check()
