"""All images of one request: what they weigh together, what one failure ends, and the way through a proxy."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tessera.errors import MediaFetchError, PayloadTooLarge, RequestCancelled
from tessera.frontend.media import ImageLimits, MediaLoader, MediaPolicy
from tessera.frontend.media.fetch import Fetcher
from tessera.frontend.request import ImageSource, Input
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.images import ImageReader
from tessera.models import open_model
from tessera.models.base import Role
from tessera.tasks import Deadline
from tests.frontend.media.hostile import LoopbackPolicy, response, server
from tests.waiting import until


def one(*urls: str) -> Input:
    images = tuple(ImageSource(url=url, param=f"input[{index}]") for index, url in enumerate(urls))
    return Input.of(parts=images, role=Role.PASSAGE, param="input")


class Web:
    """A server of one photograph; ``/slow`` never ends, and it counts who still waits for it."""

    def __init__(self, photo: bytes) -> None:
        self.photo = photo
        self.asked: list[str] = []
        self.waiting = 0

    async def handle(self, head: str, writer: asyncio.StreamWriter) -> None:
        line = head.split("\r\n")[0]
        self.asked.append(line)
        if "/slow" not in line:
            writer.write(response(self.photo))
            return
        self.waiting += 1
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        finally:
            self.waiting -= 1


@pytest.fixture
async def web(photos: dict[str, bytes]) -> AsyncIterator[tuple[Web, str]]:
    made = Web(photos["flower"])
    async with server(made.handle) as port:
        yield made, f"http://127.0.0.1:{port}"


def call(seconds: float) -> Call:
    return Call(request_id="r", deadline=Deadline.after(seconds))


def reader(checkpoint: Path, limits: ImageLimits | None = None, **policy: object) -> ImageReader:
    chosen = LoopbackPolicy(**policy)  # type: ignore[arg-type]
    loader = MediaLoader(chosen, limits, fetcher=Fetcher(chosen, limits))
    return ImageReader(open_model(checkpoint), loader)


async def test_images_are_bounded_together(
    checkpoint: Path, web: tuple[Web, str], photos: dict[str, bytes], tmp_path: Path
) -> None:
    served, url = web
    size = len(served.photo)
    (tmp_path / "a.jpg").write_bytes(served.photo)
    data = "data:;base64," + base64.b64encode(served.photo).decode()
    for source in (f"{url}/a", data, str(tmp_path / "a.jpg")):
        limits = ImageLimits(max_request_bytes=int(2.5 * size))
        reading = reader(checkpoint, limits, allowed_local_path=tmp_path)
        fits = await reading.read([one(source), one(source)], call(20), allow_partial=False)
        assert all(isinstance(found, tuple) for found in fits)
        found = await reading.read([one(source, source, source)], call(20), allow_partial=True)
        assert isinstance(found[0], PayloadTooLarge)
        assert found[0].param is not None and found[0].param.startswith("input[")


async def test_one_failure_ends_what_is_behind_it(checkpoint: Path, web: tuple[Web, str]) -> None:
    served, url = web
    reading = reader(checkpoint, timeout=300.0)
    bad = "data:;base64,AAAA"
    # The slow ones would go on for as long as anybody waits for them.
    found = await asyncio.wait_for(
        reading.read(
            [one(f"{url}/good"), one(f"{url}/slow/a", bad), one(f"{url}/slow/b"), one(f"{url}/slow/c")],
            call(60),
            allow_partial=False,
        ),
        60,
    )
    assert isinstance(found[0], tuple)
    assert getattr(found[1], "param", None) == "input[1]"
    assert isinstance(found[2], RequestCancelled) and isinstance(found[3], RequestCancelled)
    await until(lambda: not served.waiting)


async def test_partial_results_wait_for_everything(checkpoint: Path, web: tuple[Web, str]) -> None:
    _, url = web
    reading = reader(checkpoint, timeout=3.0)
    found = await reading.read(
        [one("data:;base64,AAAA"), one(f"{url}/slow"), one(f"{url}/good")],
        call(60),
        allow_partial=True,
    )
    assert isinstance(found[1], MediaFetchError)
    assert isinstance(found[2], tuple)


async def test_through_a_proxy_and_only_when_asked(
    checkpoint: Path, web: tuple[Web, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, url = web
    monkeypatch.setenv("HTTP_PROXY", url)
    monkeypatch.setenv("ALL_PROXY", url)
    direct = ImageReader(open_model(checkpoint), MediaLoader(MediaPolicy(timeout=1.0)))
    (refused,) = await direct.read([one("http://images.invalid/a.jpg")], call(20), allow_partial=True)
    assert isinstance(refused, MediaFetchError)
    assert served.asked == []
    policy = MediaPolicy(proxy=url.replace("http://", "http://me:secret@"), timeout=5.0)
    proxied = ImageReader(open_model(checkpoint), MediaLoader(policy))
    (found,) = await proxied.read([one("http://images.invalid/a.jpg")], call(20), allow_partial=True)
    assert isinstance(found, tuple)
    assert served.asked == ["GET http://images.invalid/a.jpg HTTP/1.1"]
    # Names are the proxy's to resolve; what is an address already is not even asked for.
    for host in ("127.0.0.1", "[::1]", "169.254.169.254", "localhost", "2130706433", "0x7f.1", "a.internal"):
        (refused,) = await proxied.read([one(f"http://{host}/a.jpg")], call(20), allow_partial=True)
        assert isinstance(refused, MediaFetchError), host
    assert len(served.asked) == 1
