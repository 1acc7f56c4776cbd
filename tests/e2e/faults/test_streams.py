"""Many streams of gRPC whose calls take long: each of their messages is received all the same."""

from __future__ import annotations

import asyncio
import signal

import grpc.aio
import httpx
import pytest

from tessera_kserve import messages_pb2 as pb
from tests.e2e.faults.conftest import EMBED, Deployment
from tests.e2e.faults.test_processes import named, until, whole
from tests.e2e.service import MODEL
from tests.signals import freeze, signal_process

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("faults")]

STREAMS = 48
"""The largest messages of all of them would be three times what the process may have."""


def call(number: int) -> bytes:
    made = pb.ModelInferRequest(model_name=MODEL, id=str(number))
    text = made.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"a stream's text, number %d" % number)
    return made.SerializeToString()


async def test_streams_with_calls_under_way_leave_room_for_others(deployment: Deployment) -> None:
    await whole(deployment)
    workers = [named(deployment, worker) for worker in EMBED]
    async with grpc.aio.insecure_channel(deployment.grpc) as channel:
        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        try:
            for pid in workers:
                freeze(pid)
            streams = []
            # None of them has an answer, and each waits for its next message when the next one begins. One
            # connection is one frontend's.
            for number in range(STREAMS):
                streams.append(infer())
                await streams[-1].write(call(number))
                await until(lambda n=number: n + 1 in map(in_flight, deployment.urls))
        finally:
            for pid in workers:
                signal_process(pid, signal.SIGCONT)
        for number, stream in enumerate(streams):
            raw = await asyncio.wait_for(stream.read(), 60)
            answer = pb.ModelStreamInferResponse.FromString(raw)
            assert (answer.infer_response.id, answer.error_message) == (str(number), "")
            stream.cancel()
    await whole(deployment)


def in_flight(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("tessera_requests_in_flight"))
    return int(float(line.split()[-1]))
