"""Messages between processes: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera import wire
from tessera.errors import ProtocolError
from tessera.image_plan import ImagePlan

IMAGE = wire.Image(digest=b"d" * 32, data=b"\x89PNG", units=3, rows=768, param="input[0]")
GRID = wire.Image(digest=b"e" * 32, data=b"\xff\xd8", units=24, rows=6, grid=(1, 4, 6), param="input[1]")
ITEM = wire.Item(tokens=b"\1\0\0\0", images=(IMAGE, GRID), param="input[0]")
HANDLE = wire.Handle(
    kind="shm", producer="1f", slab="ab", offset=4096, shape=(256, 64), dtype="float32", lease=7
)
INFO = wire.WorkerInfo(
    role="embed",
    model="m",
    fingerprint="f",
    dtype="float32",
    width=64,
    row_width=256,
    images=True,
    slabs=(wire.SlabInfo(kind="shm", producer="1f", slab="ab", nbytes=1, address=b"a"),),
)
REQUESTS: list[wire.Request] = [
    wire.EmbedRequest(request_id="r", items=(ITEM, ITEM), timeout_ms=1000),
    wire.EncodeRequest(
        request_id="r", image=IMAGE, timeout_ms=5, reader=wire.ReaderInfo(host="h", kinds=("shm", "inline"))
    ),
    wire.Describe(),
    wire.Inspect(),
]
REPLIES: list[wire.Reply] = [
    wire.EmbedReply(
        outputs=(wire.OutputRows(rows=memoryview(b"\0" * 24), norms=b"\0" * 12, width=2),),
        counts=(3, 0),
        failures={1: wire.Failure(code="overloaded", message="full", retry_after=2.0)},
        cached_tokens=(0, 256),
        timings=wire.Timings(queue_ms=1.5),
    ),
    wire.EncodeReply(handle=HANDLE, timings=wire.Timings(encode_ms=3.0)),
    INFO,
    wire.WorkerState(
        queued={"text": 12.0, "vision": 0.0},
        cache=wire.CacheState(hits=3, misses=1, entries=1, nbytes=512, capacity_bytes=1024),
        slab=wire.SlabState(used_bytes=0, capacity_bytes=4096, leases=0),
    ),
    wire.Failure(code="invalid_input", message="no", param="input[1]"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_come_back_equal(message: wire.Request) -> None:
    calls = wire.Calls(caller=1, first=7, requests=(message, wire.Describe()), cancelled=(3,))
    assert wire.decode_calls(wire.encode(calls)) == calls


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_come_back_equal(message: wire.Reply) -> None:
    replies = wire.Replies(replies={3: message, 0: wire.Forgotten()})
    assert wire.decode_replies(wire.encode(replies)) == replies


def test_a_failure_may_stand_for_all_replies() -> None:
    failure = wire.Failure(code="protocol_error", message="no")
    assert wire.decode_replies(wire.encode(failure)) == failure


def test_another_version_is_refused_naming_both() -> None:
    payload = bytes((wire.VERSION + 1,)) + wire.encode(wire.Describe())[1:]
    with pytest.raises(
        ProtocolError, match=rf"version {wire.VERSION}, its peer sent version {wire.VERSION + 1}"
    ):
        wire.decode_calls(payload)


def test_an_image_says_its_plan() -> None:
    assert GRID.plan == ImagePlan(units=24, rows=6, grid=(1, 4, 6))
    rows = wire.Embeddings(digest=b"d" * 32, handle=HANDLE, grid=(1, 32, 32), param="input[0]")
    assert rows.plan == ImagePlan(units=0, rows=256, grid=(1, 32, 32))
    assert ITEM.token_count == 1


@pytest.mark.parametrize("payload", [b"", "text", None, 5, {"type": "Describe"}], ids=repr)
def test_what_is_no_message_is_refused(payload: object) -> None:
    for decode in (wire.decode_calls, wire.decode_replies):
        with pytest.raises(ProtocolError):
            decode(payload)


def test_unknown_fields_and_wrong_types_are_refused() -> None:
    for body, match in (
        ({"type": "Describe", "extra": 1}, "extra"),
        ({"type": "Nonsense"}, "Nonsense"),
        ({"type": "EmbedRequest", "request_id": "r", "items": [], "timeout_ms": "5"}, "timeout_ms"),
        ({"type": "EmbedRequest", "request_id": "r", "items": []}, "timeout_ms"),
    ):
        calls = {"type": "Calls", "caller": 1, "first": 0, "requests": [body]}
        with pytest.raises(ProtocolError, match=match):
            wire.decode_calls(bytes((wire.VERSION,)) + msgspec.msgpack.encode(calls))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(ProtocolError):
        wire.decode_calls(wire.encode(INFO))
    with pytest.raises(ProtocolError):
        wire.decode_calls(wire.encode(wire.Replies(replies={0: INFO})))


@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=200))
@example(junk=b"\x81\xa4type\xa2\xff\xfe")
@example(junk=b"\x91" * 190)
def test_bytes_from_anywhere_raise_nothing_but_protocol_errors(junk: bytes) -> None:
    payload = bytes((wire.VERSION,)) + junk
    for decode in (wire.decode_calls, wire.decode_replies):
        with suppress(ProtocolError):
            decode(payload)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_messages_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    requests = tuple(data.draw(st.lists(st.sampled_from(REQUESTS), max_size=3)))
    payload = bytearray(wire.encode(wire.Calls(caller=1, first=0, requests=requests)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(1, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        wire.decode_calls(bytes(payload))


def test_timings_merge_to_the_largest_of_each_stage() -> None:
    one = wire.Timings(queue_ms=5, encode_ms=1)
    other = wire.Timings(queue_ms=2, encode_ms=7, transfer_ms=3)
    assert one.merge(other) == wire.Timings(queue_ms=5, encode_ms=7, transfer_ms=3) == other.merge(one)
