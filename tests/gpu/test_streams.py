"""The streams and graphs that an engine's work goes through, with torch's own kernels in its place."""

from __future__ import annotations

import pytest
import torch

from tessera.engine.streams import CudaStreams

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
