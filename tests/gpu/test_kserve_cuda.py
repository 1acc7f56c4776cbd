"""Tensors in a card's memory, through both doors of KServe, with the card's own driver.

The frontend is a process of its own and has no torch; workers compute on the host, so that pixels in the
message and pixels on the card have one answer.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tessera.errors import HandOffError
from tessera.transport.slab.device_memory import DeviceMemory
from tests.e2e.disaggregated import Disaggregated, disaggregated
from tests.e2e.kserve import Door, KserveClient, kserve_frontend, refused

pytestmark = [pytest.mark.gpu, pytest.mark.service, pytest.mark.kserve, pytest.mark.timeout(600)]

BYTES = 8 << 20
"""Four times what the driver rounds sizes to."""


class Region(Protocol):
    """``BYTES`` of a client's memory on card 0."""

    @property
    def raw_handle(self) -> Any:
        """In base64, as Triton's clients take it."""
        ...

    def write(self, values: np.ndarray) -> None: ...

    def read(self, like: np.ndarray) -> np.ndarray: ...


class DriverRegion:
    """Allocated and exported by the driver, as any client may."""

    def __init__(self, nbytes: int = BYTES) -> None:
        self._memory = DeviceMemory.allocate(nbytes, 0)
        self._nbytes = nbytes

    @property
    def raw_handle(self) -> Any:
        return base64.b64encode(self._memory.handle()).decode()

    def _bytes(self, count: int) -> torch.Tensor:
        return self._memory.tensor((1, self._nbytes), torch.uint8)[0, :count]

    def write(self, values: np.ndarray) -> None:
        self._bytes(values.nbytes).copy_(torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy()))
        torch.cuda.synchronize()

    def read(self, like: np.ndarray) -> np.ndarray:
        data = self._bytes(like.nbytes).cpu().numpy().tobytes()
        return np.frombuffer(data, like.dtype).reshape(like.shape)


class TritonRegion:
    """Made by NVIDIA's own helpers."""

    def __init__(self, helpers: Any, name: str) -> None:
        self._helpers = helpers
        self._handle = helpers.create_shared_memory_region(name, BYTES, 0)

    @property
    def raw_handle(self) -> Any:
        return self._helpers.get_raw_handle(self._handle)

    def write(self, values: np.ndarray) -> None:
        self._helpers.set_shared_memory_region(self._handle, [values])

    def read(self, like: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._helpers.get_contents_as_numpy(self._handle, like.dtype, list(like.shape))
        return found.copy()

    def close(self) -> None:
        self._helpers.destroy_shared_memory_region(self._handle)


@pytest.fixture(scope="module")
def workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disaggregated]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("kserve-cuda")
    config = folder / "host.yaml"
    config.write_text("vision: {device: cpu}\ntext: {device: cpu}\n")
    settings = {"TESSERA_ENCODE_ENGINE_ARGS": str(config), "TESSERA_EMBED_ENGINE_ARGS": str(config)}
    with disaggregated(checkpoint, folder, settings) as running:
        yield running


@pytest.fixture(scope="module")
def door(workers: Disaggregated) -> Iterator[Door]:
    with kserve_frontend(workers, "--kserve-shared-memory", "tessera-gpu-") as door:
        yield door


@pytest.fixture(params=["grpc", "http"])
def kserve(request: pytest.FixtureRequest, door: Door) -> Iterator[KserveClient]:
    client = door.client(request.param)
    yield client
    client.client.unregister_cuda_shared_memory()
    client.close()


@pytest.fixture(params=["driver", "tritonclient"])
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Region, Region]]:
    """One for what is given, one for what is wanted; asked for before ``kserve``, which lets go of them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # The runtime's calls and torch's share the primary context.
    torch.cuda.init()
    if request.param == "driver":
        yield DriverRegion(), DriverRegion()
        return
    try:
        from tritonclient.utils import cuda_shared_memory

        made = TritonRegion(cuda_shared_memory, "given"), TritonRegion(cuda_shared_memory, "wanted")
        # Those of older versions know no handle of CUDA 13.
        assert made[0].raw_handle
    except (ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"NVIDIA's helpers do not work here: {error}")
    yield made
    for one in made:
        one.close()


def given(kserve: KserveClient, name: str, like: np.ndarray, region: str, size: int = 0) -> Any:
    kind = {"int64": "INT64", "float32": "FP32"}[str(like.dtype)]
    tensor = kserve.module.InferInput(name, list(like.shape), kind)
    tensor.set_shared_memory(region, size or like.nbytes)
    return tensor


def wanted(kserve: KserveClient, name: str, region: str, size: int) -> Any:
    output = kserve.module.InferRequestedOutput(name)
    output.set_shared_memory(region, size)
    return output


def names(kserve: KserveClient) -> set[str]:
    found = kserve.client.get_cuda_shared_memory_status()
    return set(found.regions) if hasattr(found, "regions") else {row["name"] for row in found}


def pixels(door: Door) -> np.ndarray:
    """Two tiles of noise, of the size that the model says."""
    client = door.client("grpc")
    try:
        (one,) = client.client.get_model_metadata("vit").inputs
    finally:
        client.close()
    size = int(one.shape[-1])
    return np.random.default_rng(7).uniform(-1, 1, (2, 3, size, size)).astype(np.float32)


def test_pixels_are_read_and_vectors_written_on_the_card(
    door: Door, two: tuple[Region, Region], kserve: KserveClient
) -> None:
    source, target = two
    tiles = pixels(door)
    assert tiles.nbytes <= BYTES
    exact = kserve.infer("vit", {"pixel_values": tiles}).as_numpy("image_features")
    assert exact.any() and exact.nbytes <= BYTES
    source.write(tiles)
    target.write(np.full_like(exact, 7))
    # Names as perf_analyzer chooses them, which begin with nothing of the service's.
    kserve.client.register_cuda_shared_memory("given", source.raw_handle, 0, BYTES)
    kserve.client.register_cuda_shared_memory("wanted", target.raw_handle, 0, BYTES)
    assert names(kserve) == {"given", "wanted"}
    kserve.client.infer(
        "vit",
        [given(kserve, "pixel_values", tiles, "given")],
        outputs=[wanted(kserve, "image_features", "wanted", exact.nbytes)],
    )
    np.testing.assert_allclose(target.read(exact), exact, atol=1e-4)
    # What lies there now counts, not what lay there before.
    source.write(tiles[::-1].copy())
    found = kserve.client.infer("vit", [given(kserve, "pixel_values", tiles, "given")])
    np.testing.assert_allclose(found.as_numpy("image_features"), exact[::-1], atol=1e-4)
    # Token ids as well, and the vectors of a text.
    ids = np.array([[1, 5, 6], [1, 7, 0]])
    vectors = kserve.infer("router", {"input_ids": ids}).as_numpy("pooled")
    source.write(ids)
    kserve.client.infer(
        "router",
        [given(kserve, "input_ids", ids, "given")],
        outputs=[wanted(kserve, "pooled", "wanted", vectors.nbytes)],
    )
    np.testing.assert_allclose(target.read(vectors), vectors, atol=1e-5)


def test_what_is_outside_the_memory_is_refused(two: tuple[Region, Region], kserve: KserveClient) -> None:
    source, _ = two
    ids = np.array([[1, 5, 6], [1, 7, 0]])
    source.write(ids)
    register, unregister = (
        kserve.client.register_cuda_shared_memory,
        kserve.client.unregister_cuda_shared_memory,
    )
    cards = torch.cuda.device_count()
    for handle, device, size, says in (
        (source.raw_handle, 0, 1 << 40, "its memory has"),
        (source.raw_handle, 0, 8 * BYTES, "its memory has"),
        (source.raw_handle, cards, ids.nbytes, f"none of the {cards} cards"),
        (base64.b64encode(bytes(64)).decode(), 0, ids.nbytes, "cannot be opened on GPU 0"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            register("x", handle, device, size)
        status, message = refused(caught.value)
        assert (status, says in message) == (400, True), message
        assert names(kserve) == set()
    register("x", source.raw_handle, 0, ids.nbytes)
    for inputs, outputs in (
        ([given(kserve, "input_ids", ids, "x", ids.nbytes + 1)], None),
        ([given(kserve, "input_ids", ids, "x", ids.nbytes - 1)], None),
        ([kserve.tensor("input_ids", ids)], [wanted(kserve, "pooled", "x", ids.nbytes + 1)]),
        ([kserve.tensor("input_ids", ids)], [wanted(kserve, "pooled", "x", ids.nbytes)]),
    ):
        with pytest.raises(InferenceServerException) as caught:
            kserve.client.infer("router", inputs, outputs=outputs)
        assert refused(caught.value)[0] == 400
    assert (source.read(ids) == ids).all(), "an output that did not fit was written"
    unregister("x")
    with pytest.raises(InferenceServerException) as caught:
        kserve.client.infer("router", [given(kserve, "input_ids", ids, "x")])
    assert refused(caught.value)[0] == 400


def test_unregistered_and_refused_memory_goes_back(kserve: KserveClient) -> None:
    """Memory that the frontend kept open would stay taken, and the card hold half of what is asked here."""
    nbytes = torch.cuda.get_device_properties(0).total_memory // 16 >> 21 << 21
    for _ in range(32):
        try:
            region = DriverRegion(nbytes)
        except HandOffError as error:
            pytest.fail(f"the card is full: {error}")
        kserve.client.register_cuda_shared_memory("first", region.raw_handle, 0, nbytes)
        kserve.client.register_cuda_shared_memory("second", region.raw_handle, 0, 8)
        with pytest.raises(InferenceServerException, match="its memory has"):
            kserve.client.register_cuda_shared_memory("third", region.raw_handle, 0, 2 * nbytes)
        assert names(kserve) == {"first", "second"}
        kserve.client.unregister_cuda_shared_memory("first")
        kserve.client.unregister_cuda_shared_memory()
        assert names(kserve) == set()
        del region
