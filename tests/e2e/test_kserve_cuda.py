"""Tensors in memory of a card, through both doors of KServe, with a stand-in for the driver.

``tests/gpu/test_kserve_cuda.py`` asks a card's own driver the same.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.kserve import Door, KserveClient, kserve_frontend, refused
from tests.shared_memory import FOLDER, mapped

pytestmark = [pytest.mark.service, pytest.mark.kserve, pytest.mark.xdist_group("shared-service")]

PREFIX = "tessera-card-"
IDS = np.array([[1, 5, 6], [1, 7, 0]])
VECTORS = np.zeros((2, 128), np.float32)
HANDLE = base64.b64encode(bytes(64)).decode()
FLAGS = ("--kserve-shared-memory", PREFIX)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a client allocated on a card of the stand-in."""

    path: Path

    @property
    def handle(self) -> str:
        return base64.b64encode(self.path.name.encode().ljust(64, b"\0")).decode()

    def write(self, values: np.ndarray, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(values.tobytes())

    def read(self, like: np.ndarray, offset: int = 0) -> np.ndarray:
        data = self.path.read_bytes()[offset : offset + like.nbytes]
        return np.frombuffer(data, like.dtype).reshape(like.shape)

    @property
    def is_open(self) -> bool:
        """Whether a process has it open; the client itself maps nothing."""
        return self.path in mapped(int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process that finds two cards."""
    if shutil.which("cc") is None:
        pytest.skip("needs cc (Debian package gcc)")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("cuda_standin.c")
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source]
    subprocess.run(command, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def door(service: Disaggregated, driver: dict[str, str]) -> Iterator[Door]:
    with kserve_frontend(service, *FLAGS, settings=driver) as door:
        yield door


@pytest.fixture(scope="module")
def keyed(
    service: Disaggregated, driver: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    """A frontend with the keys of alice and bob."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(f"sk-{name}-0123456789 {name}\n" for name in ("alice", "bob")))
    with kserve_frontend(service, *FLAGS, "--api-keys-file", str(file), settings=driver) as door:
        yield door


@pytest.fixture(params=["grpc", "http"])
def kserve(request: pytest.FixtureRequest, door: Door) -> Iterator[KserveClient]:
    client = door.client(request.param)
    yield client
    client.client.unregister_cuda_shared_memory()
    client.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    """A page of a card."""
    path = Path(f"{FOLDER}{PREFIX}{os.getpid()}-{threading.get_ident()}")
    path.write_bytes(bytes(4096))
    yield Memory(path)
    path.unlink()


def given(kserve: KserveClient, region: str, size: int = IDS.nbytes, offset: int = 0) -> Any:
    tensor = kserve.module.InferInput("input_ids", list(IDS.shape), "INT64")
    tensor.set_shared_memory(region, size, offset)
    return tensor


def wanted(kserve: KserveClient, region: str, size: int = VECTORS.nbytes, offset: int = 0) -> Any:
    output = kserve.module.InferRequestedOutput("pooled")
    output.set_shared_memory(region, size, offset)
    return output


def names(kserve: KserveClient, region: str = "") -> dict[str, tuple[int, int]]:
    """Device and size of each region, as the service says them."""
    as_json = {"as_json": True} if kserve.module is tritonclient.grpc else {}
    found = kserve.client.get_cuda_shared_memory_status(region, **as_json)
    rows = found.get("regions", {}).values() if isinstance(found, dict) else found
    return {row["name"]: (int(row.get("device_id", 0)), int(row["byte_size"])) for row in rows}


def test_inputs_are_read_and_outputs_written_there(kserve: KserveClient, memory: Memory) -> None:
    exact = kserve.infer("router", {"input_ids": IDS}).as_numpy("pooled")
    memory.write(IDS, 64)
    register, unregister = (
        kserve.client.register_cuda_shared_memory,
        kserve.client.unregister_cuda_shared_memory,
    )
    register(f"{PREFIX}in", memory.handle, 1, 64 + IDS.nbytes)
    register(f"{PREFIX}out", memory.handle, 0, 4096)
    assert names(kserve) == {f"{PREFIX}in": (1, 64 + IDS.nbytes), f"{PREFIX}out": (0, 4096)}
    assert names(kserve, f"{PREFIX}in") == {f"{PREFIX}in": (1, 64 + IDS.nbytes)}
    inputs, outputs = [given(kserve, f"{PREFIX}in", offset=64)], [wanted(kserve, f"{PREFIX}out", offset=128)]
    answer = kserve.client.infer("router", inputs, outputs=outputs)
    if kserve.module is tritonclient.grpc:
        assert not answer.get_response().raw_output_contents
    else:
        assert "data" not in answer.get_output("pooled")
    np.testing.assert_allclose(memory.read(VECTORS, 128), exact, atol=1e-6)
    # One of them is in the message, whichever it is.
    raw = [kserve.tensor("input_ids", IDS)]
    memory.write(VECTORS, 128)
    kserve.client.infer("router", raw, outputs=outputs)
    np.testing.assert_allclose(memory.read(VECTORS, 128), exact, atol=1e-6)
    np.testing.assert_allclose(kserve.client.infer("router", inputs).as_numpy("pooled"), exact, atol=1e-6)
    # The other kind knows nothing of these, and takes none of their names.
    assert not kserve.client.get_system_shared_memory_status(
        **({"as_json": True} if kserve.module is tritonclient.grpc else {})
    )
    kserve.client.unregister_system_shared_memory()
    assert memory.is_open
    unregister(f"{PREFIX}in")
    assert names(kserve) == {f"{PREFIX}out": (0, 4096)} and memory.is_open
    unregister()
    assert names(kserve) == {} and not memory.is_open
    # One that is not there is no error, as in Triton.
    unregister(f"{PREFIX}in")
    register(f"{PREFIX}in", memory.handle, 0, 4096)


def test_the_server_says_that_it_has_it(kserve: KserveClient) -> None:
    as_json = {"as_json": True} if kserve.module is tritonclient.grpc else {}
    found = kserve.client.get_server_metadata(**as_json)["extensions"]
    assert {"system_shared_memory", "cuda_shared_memory"} <= set(found)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("", {}, "name: expected 1 to 200 characters"),
        (f"{PREFIX}{'x' * 200}", {}, "name: expected 1 to 200 characters"),
        ("taken", {}, "'tessera-card-taken' is registered already"),
        (
            "new",
            {"raw_handle": HANDLE[:-4]},
            "raw_handle: that of the region 'tessera-card-new' has 63 bytes",
        ),
        ("new", {"raw_handle": HANDLE}, "'tessera-card-new' cannot be opened on GPU 0"),
        ("new", {"device_id": 2}, "device_id: the region 'tessera-card-new' is on none of the 2 GPUs"),
        ("new", {"device_id": -1}, "device_id: the region 'tessera-card-new' is on none of the 2 GPUs"),
        ("new", {"byte_size": 0}, "byte_size: expected more than 0"),
        ("new", {"byte_size": 4097}, "'tessera-card-new' is to have 4097 bytes, and its memory has 4096"),
        ("new", {"byte_size": (1 << 63) - 1}, "'tessera-card-new' is to have 9223372036854775807 bytes"),
    ],
)
def test_what_is_no_region_is_refused(
    kserve: KserveClient, memory: Memory, name: str, change: dict[str, Any], says: str
) -> None:
    kserve.client.register_cuda_shared_memory(f"{PREFIX}taken", memory.handle, 0, 8)
    asked = {"raw_handle": memory.handle, "device_id": 0, "byte_size": 8, **change}
    if name in ("taken", "new"):
        name = PREFIX + name
    elif not name and kserve.module is not tritonclient.grpc:
        pytest.skip("a path names a region")
    with pytest.raises(InferenceServerException) as caught:
        kserve.client.register_cuda_shared_memory(name, **asked)
    status, message = refused(caught.value)
    assert (status, says in message) == (400, True), message
    assert names(kserve) == {f"{PREFIX}taken": (0, 8)}
    kserve.client.unregister_cuda_shared_memory()
    assert not memory.is_open, "a region that was refused stayed open"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"raw_handle": {"b64": HANDLE[:-3] + "*=="}}, "raw_handle.b64: expected base64"),
        ({"raw_handle": {"b64": 7}}, "raw_handle"),
        ({"raw_handle": HANDLE}, "raw_handle"),
        ({"raw_handle": None}, "raw_handle"),
        ({"device_id": "0"}, "device_id"),
        ({"device_id": True}, "device_id"),
        ({"byte_size": 8.5}, "byte_size"),
        ({"byte_size": None}, "byte_size"),
        ({"key": "x"}, "key"),
    ],
)
def test_a_body_that_registers_nothing_is_refused(door: Door, body: dict[str, Any], says: str) -> None:
    made = {"raw_handle": {"b64": HANDLE}, "device_id": 0, "byte_size": 8, **body}
    answer = httpx.post(f"http://{door.http}/v2/cudasharedmemory/region/{PREFIX}x/register", json=made)
    assert (answer.status_code, says in answer.json()["error"]) == (400, True), answer.text


def test_places_outside_a_region_are_refused(kserve: KserveClient, memory: Memory) -> None:
    kserve.client.register_cuda_shared_memory(f"{PREFIX}x", memory.handle, 0, 1024)
    raw = [kserve.tensor("input_ids", IDS)]
    for inputs, outputs in (
        ([given(kserve, f"{PREFIX}x", 1025)], None),
        ([given(kserve, f"{PREFIX}x", offset=1024 - IDS.nbytes + 1)], None),
        ([given(kserve, f"{PREFIX}x", IDS.nbytes - 1)], None),
        ([given(kserve, f"{PREFIX}y")], None),
        (raw, [wanted(kserve, f"{PREFIX}x", 1025)]),
        (raw, [wanted(kserve, f"{PREFIX}x", 1024, 1)]),
        (raw, [wanted(kserve, f"{PREFIX}x", VECTORS.nbytes - 1)]),
        (raw, [wanted(kserve, f"{PREFIX}y")]),
    ):
        with pytest.raises(InferenceServerException) as caught:
            kserve.client.infer("router", inputs, outputs=outputs)
        status, message = refused(caught.value)
        tensor = "input_ids" if outputs is None else "pooled"
        assert status == 400 and message.removeprefix("[400] ").startswith(tensor), message
    with pytest.raises(InferenceServerException) as caught:
        names(kserve, f"{PREFIX}y")
    assert refused(caught.value)[0] == 400


def test_a_card_that_hangs_holds_up_its_own_calls_alone(
    door: Door, kserve: KserveClient, memory: Memory
) -> None:
    exact = kserve.infer("router", {"input_ids": IDS}).as_numpy("pooled")
    memory.write(IDS)
    kserve.client.register_cuda_shared_memory(f"{PREFIX}x", memory.handle, 0, 4096)
    held = memory.path.with_name(memory.path.name + ".held")
    held.touch()

    def ask(_: int) -> np.ndarray:
        client = door.client("grpc")
        try:
            inputs = [given(client, f"{PREFIX}x")]
            found: np.ndarray = client.client.infer("router", inputs).as_numpy("pooled")
            return found
        finally:
            client.close()

    try:
        with ThreadPoolExecutor(8) as threads:
            waiting = threads.map(ask, range(8))
            # More than threads copy: those that wait for one have a deadline as well.
            with pytest.raises(InferenceServerException) as caught:
                kserve.client.infer("router", [given(kserve, f"{PREFIX}x")], timeout=500_000)
            assert refused(caught.value)[0] == 504
            np.testing.assert_allclose(
                kserve.infer("router", {"input_ids": IDS}).as_numpy("pooled"), exact, atol=1e-6
            )
            assert kserve.client.is_server_live()
            held.unlink()
            for found in waiting:
                np.testing.assert_allclose(found, exact, atol=1e-6)
    finally:
        held.unlink(missing_ok=True)


def test_regions_come_and_go_while_calls_read_them(door: Door, kserve: KserveClient, memory: Memory) -> None:
    """A call has the right answer or an error that names its region, and no memory of another."""
    exact = kserve.infer("router", {"input_ids": IDS}).as_numpy("pooled")
    memory.write(IDS)
    steady, passing = f"{PREFIX}steady", f"{PREFIX}passing"
    kserve.client.register_cuda_shared_memory(steady, memory.handle, 0, 4096)
    done = threading.Event()

    def ask(region: str) -> int:
        client = door.client("grpc")
        answered = 0
        try:
            while not done.is_set() or not answered:
                try:
                    found = client.client.infer("router", [given(client, region)]).as_numpy("pooled")
                except InferenceServerException as error:
                    assert region == passing and "is not registered" in str(error)
                    if done.is_set():
                        return answered
                else:
                    np.testing.assert_allclose(found, exact, atol=1e-6)
                    answered += 1
            return answered
        finally:
            client.close()

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, region) for region in (steady, passing) for _ in range(2)]
        try:
            for _ in range(60):
                kserve.client.register_cuda_shared_memory(passing, memory.handle, 1, 4096)
                kserve.client.unregister_cuda_shared_memory(passing)
        finally:
            done.set()
        assert all(one.result() for one in asked[:2])
        for one in asked[2:]:
            one.result()
    kserve.client.unregister_cuda_shared_memory(steady)
    assert not memory.is_open


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_without_a_driver_registering_says_so(service: Disaggregated, tmp_path: Path, transport: str) -> None:
    # That of the machine, if it has one, is hidden.
    (tmp_path / "libcuda.so.1").touch()
    with kserve_frontend(service, *FLAGS, settings={"LD_LIBRARY_PATH": str(tmp_path)}) as door:
        client = door.client(transport)
        try:
            with pytest.raises(InferenceServerException) as caught:
                client.client.register_cuda_shared_memory(f"{PREFIX}x", HANDLE, 0, 8)
            status, message = refused(caught.value)
            assert status == 400 and f"'{PREFIX}x'" in message and "no CUDA driver" in message
            assert names(client) == {}
            client.client.unregister_cuda_shared_memory()
            as_json = {"as_json": True} if transport == "grpc" else {}
            found = client.client.get_server_metadata(**as_json)["extensions"]
            assert "cuda_shared_memory" not in found and "system_shared_memory" in found
        finally:
            client.close()


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_without_the_flag_there_is_none(service: Disaggregated, transport: str) -> None:
    with kserve_frontend(service) as door:
        client = door.client(transport)
        try:
            for operation in (
                lambda: client.client.register_cuda_shared_memory(f"{PREFIX}x", HANDLE, 0, 8),
                client.client.get_cuda_shared_memory_status,
                client.client.unregister_cuda_shared_memory,
                lambda: client.client.infer("router", [given(client, f"{PREFIX}x")]),
            ):
                with pytest.raises(InferenceServerException) as caught:
                    operation()
                status, message = refused(caught.value)
                assert status == 501 and "--kserve-shared-memory" in message
        finally:
            client.close()


@dataclass(frozen=True, slots=True)
class Owner:
    """The regions of one key, of one kind."""

    door: KserveClient
    kind: str
    name: str

    @property
    def headers(self) -> dict[str, str]:
        # Triton's client for gRPC adds to what it is given.
        return {"authorization": f"Bearer sk-{self.name}-0123456789"}

    def register(self, region: str, memory: Memory, size: int = 4096) -> None:
        ask = getattr(self.door.client, f"register_{self.kind}_shared_memory")
        where = (memory.path.name, size) if self.kind == "system" else (memory.handle, 0, size)
        ask(region, *where, headers=self.headers)

    def unregister(self, region: str = "") -> None:
        getattr(self.door.client, f"unregister_{self.kind}_shared_memory")(region, headers=self.headers)

    def names(self, region: str = "") -> set[str]:
        as_json = {"as_json": True} if self.door.module is tritonclient.grpc else {}
        ask = getattr(self.door.client, f"get_{self.kind}_shared_memory_status")
        status = ask(region, headers=self.headers, **as_json)
        return {row["name"] for row in (status.get("regions", {}).values() if as_json else status)}

    def infer(self, inputs: Any, outputs: Any = None) -> Any:
        return self.door.client.infer("router", inputs, outputs=outputs, headers=self.headers)


@pytest.fixture(params=["grpc", "http"])
def owners(
    request: pytest.FixtureRequest, keyed: Door, kind: str
) -> Iterator[tuple[Owner, Owner, KserveClient]]:
    """Alice's and bob's regions of a kind."""
    client = keyed.client(request.param)
    alice, bob = Owner(client, kind, "alice"), Owner(client, kind, "bob")
    yield alice, bob, client
    for owner in (alice, bob):
        owner.unregister()
    client.close()


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_a_region_is_a_keys_own(owners: tuple[Owner, Owner, KserveClient], memory: Memory, kind: str) -> None:
    alice, bob, kserve = owners
    raw = [kserve.tensor("input_ids", IDS)]
    exact = alice.infer(raw).as_numpy("pooled")
    memory.write(IDS)
    alice.register("a", memory)
    assert (alice.names(), bob.names()) == ({"a"}, set())
    # Not seen, not read, not written, and not by another name for the same memory.
    for attack, says in (
        (lambda: bob.names("a"), "'a' is not registered"),
        (lambda: bob.infer([given(kserve, "a")]), "'a' is not registered"),
        (lambda: bob.infer(raw, [wanted(kserve, "a")]), "'a' is not registered"),
        (lambda: bob.register("mine", memory), "'mine' is memory that another API key has registered"),
        (lambda: bob.register("a", memory), "'a' is memory that another API key has registered"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            attack()
        status, message = refused(caught.value)
        assert (status, says in message) == (400, True), message
    # Not removed.
    bob.unregister("a")
    bob.unregister()
    assert alice.names() == {"a"}
    np.testing.assert_array_equal(memory.read(IDS), IDS)
    np.testing.assert_allclose(alice.infer([given(kserve, "a")]).as_numpy("pooled"), exact, atol=1e-6)
    # Names are each key's own; what is given back is anybody's.
    alice.unregister("a")
    assert not memory.is_open
    bob.register("a", memory)
    np.testing.assert_allclose(bob.infer([given(kserve, "a")]).as_numpy("pooled"), exact, atol=1e-6)
    assert (alice.names(), bob.names()) == (set(), {"a"})


@pytest.mark.parametrize("kind", ["cuda"])
def test_a_key_has_a_share_of_a_cards_bytes(
    owners: tuple[Owner, Owner, KserveClient], memory: Memory, kind: str
) -> None:
    alice, bob, _ = owners
    other = Memory(memory.path.with_name(f"{memory.path.name}-other"))
    other.path.write_bytes(bytes(4096))
    try:
        for number in range(8):
            alice.register(f"a{number}", memory)
        with pytest.raises(InferenceServerException) as caught:
            alice.register("a8", memory)
        assert "regions of this API key may have 32768 bytes of GPU 0 in all, and have 32768" in str(
            refused(caught.value)
        )
        bob.register("b", other)
        assert (len(alice.names()), bob.names()) == (8, {"b"})
    finally:
        other.path.unlink()
