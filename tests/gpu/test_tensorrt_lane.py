"""The streams and graphs that TensorRT's work goes through, with torch's own kernels in its place."""

from __future__ import annotations

import pytest
import torch

from tessera.engine.tensorrt.lane import CudaLane

pytestmark = pytest.mark.gpu


@pytest.fixture
def lane() -> CudaLane:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return CudaLane("cuda")


def test_copies_come_before_the_run_that_reads_them(lane: CudaLane) -> None:
    staged = lane.staging((1 << 22,), torch.float32)
    assert staged.is_pinned()
    host = lane.staging((1 << 22,), torch.float32)
    for value in range(1, 6):
        staged.fill_(value)
        with lane.copying():
            batch = staged.to("cuda", non_blocking=True)
        with lane.computing():
            assert torch.cuda.current_stream().cuda_stream == lane.handle
            host.copy_(batch * 2, non_blocking=True)
            launched = lane.launched(lambda: None, keep=(staged, batch, host))
        launched.result()
        assert launched.done() and bool((host == 2 * value).all())


def test_a_recorded_run_reads_what_lies_there_now(lane: CudaLane) -> None:
    source, target = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(lane.handle)):
            target.copy_(source + 1)

    with lane.computing():
        replay = lane.record(run)
    assert replay is not None
    for value in (3.0, 7.0):
        with lane.computing():
            source.fill_(value)
            replay()
            launched = lane.launched(lambda: None, keep=())
        launched.result()
        assert bool((target == value + 1).all())
    lane.settle()
