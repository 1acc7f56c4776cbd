"""Calls as either transport reads them, without a service; ``tests/e2e/test_kserve`` asks one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.errors import InvalidInput, UnsupportedOperation
from tessera.tasks import Deadline
from tessera_kserve import http, messages
from tessera_kserve import messages_pb2 as pb
from tessera_kserve.call import Call
from tessera_kserve.shared_memory.regions import Regions, is_loopback
from tessera_kserve.shared_memory.system import SystemMemory

IDS = np.array([[1, 5, 6]])
OFF = Regions("")


def message(**fields: Any) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="router", **fields)
    made.inputs.add(name="input_ids", datatype="INT64", shape=[1, 3])
    return made


def body(*, binary: bytes = b"", **input_: Any) -> tuple[bytes, bytes]:
    """A body, and the length of its JSON."""
    one = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", **input_}
    head = json.dumps({"inputs": [one]}).encode()
    return head + binary, str(len(head)).encode()


def test_raw_and_typed_contents_are_the_same() -> None:
    raw = message(raw_input_contents=[IDS.tobytes()])
    typed = message()
    typed.inputs[0].contents.int64_contents.extend(IDS.ravel().tolist())
    for one in (raw, typed):
        call = messages.read_call(one, "127.0.0.1")
        assert np.array_equal(call.inputs["input_ids"].values, IDS)
        assert call.nbytes == IDS.nbytes


def test_contents_beside_raw_ones_are_refused_in_tritons_words() -> None:
    both = message(raw_input_contents=[IDS.tobytes()])
    both.inputs[0].contents.int64_contents.append(1)
    with pytest.raises(InvalidInput, match="contents field must not be specified when using raw_input"):
        messages.read_call(both, "")
    few = message(raw_input_contents=[IDS.tobytes()])
    few.inputs.add(name="attention_mask", datatype="INT64", shape=[1, 3])
    with pytest.raises(InvalidInput, match="unable to find data for input tensor 'attention_mask'"):
        messages.read_call(few, "")
    with pytest.raises(InvalidInput, match="more entries than there are inputs"):
        messages.read_call(message(raw_input_contents=[IDS.tobytes()] * 2), "")


def test_json_and_binary_data_are_the_same() -> None:
    plain, _ = body(data=IDS.tolist())
    packed, length = body(binary=IDS.tobytes(), parameters={"binary_data_size": IDS.nbytes})
    for raw, head in ((plain, None), (packed, length)):
        call, binary = http.read_call(raw, head, "router", "", "")
        assert np.array_equal(call.inputs["input_ids"].values, IDS)
        assert not binary


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (body(binary=b"x" * 24), "inputs\\[0\\].data"),
        (body(binary=b"x" * 24, parameters={"binary_data_size": 23}), "takes 24 bytes, found 23"),
        (body(binary=b"x" * 25, parameters={"binary_data_size": 24}), "1 bytes behind the JSON"),
        (body(binary=b"x", parameters={"binary_data_size": 24}), "expected 0 to 1"),
        (body(parameters={"binary_data_size": True}), "binary_data_size"),
        ((body()[0], b"0"), "Inference-Header-Content-Length"),
        ((body()[0], b"-1"), "Inference-Header-Content-Length"),
        ((body()[0], b"99999"), "Inference-Header-Content-Length"),
        (body(colour=1), "unknown key"),
    ],
)
def test_wrong_bodies_are_refused(given: tuple[bytes, bytes], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        http.read_call(*given, "router", "", "")


@pytest.fixture
def region(tmp_path: Path) -> Iterator[tuple[Regions, Path]]:
    """A region of 24 bytes, 8 bytes into its file."""
    path = Path("/dev/shm", f"tessera-calls-{tmp_path.name}-{id(tmp_path)}")
    path.write_bytes(bytes(8) + IDS.tobytes())
    regions = Regions("tessera-calls-")
    try:
        regions.register_system("", "ids", f"/{path.name}", 8, 24)
        yield regions, path
    finally:
        regions.unregister("", SystemMemory, "")
        path.unlink()


PLACE = {"shared_memory_region": "ids", "shared_memory_byte_size": 24}


async def loaded(regions: Regions, call: Call) -> Call:
    held: list[int] = []

    async def hold(nbytes: int) -> None:
        held.append(nbytes)

    before = call.nbytes
    loaded = await regions.load("", call, Deadline.after(60), hold)
    # Of what is read there, and of nothing else.
    assert sum(held) == loaded.nbytes - before
    return loaded


async def test_inputs_and_outputs_in_shared_memory(region: tuple[Regions, Path]) -> None:
    regions, path = region
    made = message()
    made.inputs[0].parameters["shared_memory_region"].string_param = "ids"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 24
    call = await loaded(regions, messages.read_call(made, "127.0.0.1"))
    assert np.array_equal(call.inputs["input_ids"].values, IDS)
    assert call.nbytes == IDS.nbytes
    regions.write("", {**PLACE, "shared_memory_byte_size": 8, "shared_memory_offset": 8}, "pooled", b"x" * 8)
    assert path.read_bytes()[16:24] == b"x" * 8
    for peer in ("10.0.0.1", "", "::2"):
        with pytest.raises(UnsupportedOperation, match="loopback"):
            await loaded(regions, messages.read_call(made, peer))
    with pytest.raises(UnsupportedOperation, match="off"):
        await loaded(OFF, messages.read_call(made, "127.0.0.1"))
    small = Regions("tessera-calls-", 23)
    small.register_system("", "ids", f"/{path.name}", 8, 24)
    with pytest.raises(InvalidInput, match="input_ids: a call has 23 bytes at most"):
        await loaded(small, messages.read_call(made, "127.0.0.1"))


async def test_regions_are_for_peers_of_this_host_by_http_too(region: tuple[Regions, Path]) -> None:
    regions, _ = region
    raw, _ = body(parameters=PLACE)
    call, _ = http.read_call(raw, None, "router", "", "::1")
    assert np.array_equal((await loaded(regions, call)).inputs["input_ids"].values, IDS)
    # However a client writes the name.
    for written in (raw, raw.replace(b"shared_memory_region", b"shared_memory_\\u0072egion")):
        call, _ = http.read_call(written, None, "router", "", "10.0.0.1")
        with pytest.raises(UnsupportedOperation, match="loopback"):
            await loaded(regions, call)
        call, _ = http.read_call(written, None, "router", "", "::1")
        with pytest.raises(UnsupportedOperation, match="off"):
            await loaded(OFF, call)


async def test_an_output_outside_a_region_is_refused_before_anything_is_computed(
    region: tuple[Regions, Path],
) -> None:
    made = message(raw_input_contents=[IDS.tobytes()])
    wanted = made.outputs.add(name="pooled")
    wanted.parameters["shared_memory_region"].string_param = "ids"
    wanted.parameters["shared_memory_byte_size"].int64_param = 25
    with pytest.raises(InvalidInput, match=r"pooled: .* within the 24 bytes of the region 'ids'"):
        await loaded(region[0], messages.read_call(made, "127.0.0.1"))


def test_memory_outlives_its_region_until_it_is_copied(region: tuple[Regions, Path]) -> None:
    """A descriptor that was closed in the middle of a copy would be another file's by then."""
    regions, path = region
    (held,) = regions.regions("", SystemMemory, "ids")
    regions.unregister("", SystemMemory, "ids")
    with pytest.raises(InvalidInput, match="not registered"):
        regions.read("", PLACE, "input_ids")
    assert held.memory.read(0, 24) == IDS.tobytes()
    memory = f"/dev/shm/{path.name}"
    assert memory in {os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")}
    del held
    assert memory not in {os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")}


@pytest.mark.parametrize(
    "change",
    [
        {"shared_memory_region": "other"},
        {"shared_memory_byte_size": 25},
        {"shared_memory_byte_size": 0},
        {"shared_memory_byte_size": "24"},
        {"shared_memory_offset": 1},
        {"shared_memory_offset": -1},
    ],
)
def test_places_outside_a_region_are_refused(
    region: tuple[Regions, Path], change: dict[str, int | str]
) -> None:
    with pytest.raises(InvalidInput):
        region[0].read("", {**PLACE, **change}, "input_ids")


def test_a_file_that_was_shortened_is_refused(region: tuple[Regions, Path]) -> None:
    regions, path = region
    path.write_bytes(b"")
    with pytest.raises(InvalidInput, match="shortened"):
        regions.read("", PLACE, "input_ids")
    with pytest.raises(InvalidInput, match="shortened"):
        regions.write("", PLACE, "pooled", b"x" * 24)
    assert path.read_bytes() == b""


def test_a_key_has_a_share_of_regions_and_of_bytes(region: tuple[Regions, Path]) -> None:
    """Who registers as much as there is leaves room for those who come later, and gets all of it back."""
    regions, path = region
    other = path.with_name(f"{path.name}-other")
    other.write_bytes(b"")
    room = os.statvfs("/dev/shm")
    os.truncate(other, room.f_blocks * room.f_frsize)
    try:

        def fill(client: str, key: str, size: int) -> int:
            """Register until it is refused, and return how often it was not."""
            for number in range(1025):
                try:
                    regions.register_system(client, f"r{number}", key, 0, size)
                except InvalidInput as refusal:
                    assert "this API key" in str(refusal)
                    return number
            raise AssertionError("there was no end")

        regions.unregister("", SystemMemory, "")
        assert fill("alice", path.name, 1) == 819
        assert fill("bob", other.name, 1) > 100
        for client in ("alice", "bob"):
            regions.unregister(client, SystemMemory, "")
        # A file may be as large as anything, and has no bytes: also a first region is within the share.
        assert fill("alice", other.name, room.f_blocks * room.f_frsize) == 0
        assert fill("alice", other.name, room.f_blocks * room.f_frsize // 10) == 8
        with pytest.raises(InvalidInput, match="another API key"):
            regions.register_system("bob", "x", other.name, 0, 1)
        regions.register_system("bob", "x", path.name, 0, 8)
        regions.unregister("alice", SystemMemory, "")
        assert [entry.name for entry in regions.regions("bob", SystemMemory, "")] == ["x"]
        regions.unregister("bob", SystemMemory, "")
        # Without keys there is nobody to share with.
        for number in range(1024):
            regions.register_system("", f"r{number}", other.name, 0, room.f_blocks * room.f_frsize)
        with pytest.raises(InvalidInput, match="1024 regions are registered already"):
            regions.register_system("", "x", other.name, 0, 1)
    finally:
        regions.unregister("", SystemMemory, "")
        other.unlink()


@pytest.mark.parametrize(
    ("key", "offset", "size"),
    [
        ("other", 0, 8),
        ("/../tessera-calls-x", 0, 8),
        ("tessera-calls-/x", 0, 8),
        ("tessera-calls-\0", 0, 8),
        ("tessera-calls-nowhere", 0, 8),
    ],
)
def test_other_files_are_no_regions(key: str, offset: int, size: int) -> None:
    with pytest.raises(InvalidInput):
        Regions("tessera-calls-").register_system("", "x", key, offset, size)


def test_a_region_ends_within_its_file_and_has_its_name_alone(region: tuple[Regions, Path]) -> None:
    regions, path = region
    with pytest.raises(InvalidInput, match="behind the file's"):
        regions.register_system("", "x", path.name, 8, 25)
    with pytest.raises(InvalidInput, match="registered already"):
        regions.register_system("", "ids", path.name, 0, 8)
    link = path.with_name(path.name + "-link")
    link.symlink_to("/etc/hostname")
    try:
        with pytest.raises(InvalidInput):
            regions.register_system("", "x", link.name, 0, 1)
    finally:
        link.unlink()


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("::1", True), ("127.8.9.1", True), ("10.0.0.1", False), ("", False), ("x", False)],
)
def test_loopback_addresses(host: str, own: bool) -> None:
    assert is_loopback(host) is own


@pytest.mark.parametrize("what", ["inputs", "outputs", "parameters"])
def test_more_of_anything_than_a_call_has_is_refused_by_its_count(what: str) -> None:
    by_grpc = pb.ModelInferRequest(model_name="router")
    by_http: dict[str, Any] = {"inputs": []}
    for number in range(65):
        if what == "parameters":
            by_grpc.parameters[str(number)].bool_param = True
            by_http.setdefault(what, {})[str(number)] = True
        else:
            getattr(by_grpc, what).add(name=str(number))
            by_http.setdefault(what, []).append({"name": str(number)})
    for read in (
        lambda: messages.read_call(by_grpc, ""),
        lambda: http.read_call(json.dumps(by_http).encode(), None, "router", "", ""),
    ):
        with pytest.raises(InvalidInput, match=f"^{what}: expected at most 64, found 65$") as refused:
            read()
        assert refused.value.param == what
