"""The event loop of a frontend stands for 0.1 s at most, whatever comes by gRPC within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import grpc
import grpc.aio
import pytest
from benchmarks.ports import free_ports

from tessera_kserve import messages_pb2 as pb
from tests.frontend.alone import Alone, frontend_process

pytestmark = [pytest.mark.service, pytest.mark.kserve]

MIB = 1 << 20
MESSAGE = 32 * MIB - 100
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Alone, int]]:
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("turns")
    with frontend_process(checkpoint, folder, "--grpc-port", str(port), watched=True) as alone:
        yield alone, port


def outputs(size: int) -> bytes:
    """A message that is full of outputs without a name, which are looked at one by one."""
    return b"\x32\x00" * (size // 2)


def integers(size: int) -> bytes:
    """A tensor of typed contents."""
    message = pb.ModelInferRequest(model_name="router")
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[1])
    tensor.contents.int64_contents.extend([1] * (size - 40))
    return message.SerializeToString()


def raw_contents(size: int) -> bytes:
    message = pb.ModelInferRequest(model_name="router", raw_input_contents=[bytes(size - 40)])
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("make", "size", "times"),
    [
        (raw_contents, MESSAGE, 8),
        (lambda size: b"\x2a\x00" * (size // 2), MESSAGE, 4),
        (outputs, MESSAGE, 4),
        (integers, 4 * MIB, 4),
        # What is read on the loop itself.
        (outputs, 1 << 18, 64),
        (integers, 1 << 18, 64),
    ],
    ids=["raw", "empty tensors", "outputs", "integers", "small outputs", "small integers"],
)
@pytest.mark.parametrize("method", [INFER, STREAM])
async def test_messages_of_grpc(
    running: tuple[Alone, int], method: str, make: Callable[[int], bytes], size: int, times: int
) -> None:
    alone, port = running
    raw = make(size)

    async def ask() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call = channel.stream_stream(method)(iter([raw] * (2 if method == STREAM else 1)))
            with pytest.raises(grpc.aio.AioRpcError) if method == INFER else nullcontext():
                assert len([answer async for answer in call]) == 2

    # What many streams take of messages that are not whole would end them, where a message takes seconds.
    for _ in alone.tries():
        await asyncio.gather(*(ask() for _ in range(times if method == INFER else min(times, 4))))


async def test_methods_of_grpc_that_take_a_name(running: tuple[Alone, int]) -> None:
    alone, port = running
    unknown = b"\x7a\x00" * (MESSAGE // 2)
    for _ in alone.tries():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name in ("RepositoryIndex", "ModelStatistics", "SystemSharedMemoryStatus"):
                with pytest.raises(grpc.aio.AioRpcError, match="larger than the 65536 bytes"):
                    await channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(unknown)
