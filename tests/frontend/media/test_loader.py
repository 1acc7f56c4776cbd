"""Data URLs, local files, and the loader that chooses between all sources."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tessera.errors import (
    DeadlineExceeded,
    InvalidInput,
    MediaFetchError,
    PayloadTooLarge,
    RequestError,
    UnsupportedMedia,
)
from tessera.frontend.media import ImageLimits, LoadedImage, MediaLoader, MediaPolicy, loader
from tessera.frontend.media.fetch import Fetcher
from tessera.frontend.media.loader import decode, read_local
from tessera.frontend.request import BARE_BASE64, ImageSource
from tessera.tasks import Deadline
from tests.frontend.media.hostile import LoopbackPolicy, response, server


def png(width: int = 9, height: int = 5) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 60)).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def plain(url: str, max_bytes: int = 1000) -> bytes:
    return decode(url, param="input[2]", max_bytes=max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,+/+/AA==",
        "data:;base64,+/+/AA==",
        "DATA:text/html;charset=utf-8;BASE64,+/+/AA==",
        "data:image/png;base64,-_-_AA==",
        "data:image/png;base64,-_-_AA",
        "data:image/png;base64,%2B%2F%2b%2FAA%3D%3D",
        "data:image/png;base64,+/+/\r\nAA==\n",
        "data:image/png;base64,  +/+ /AA",
    ],
)
def test_data_urls(url: str) -> None:
    assert plain(url) == base64.b64decode("+/+/AA==")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64", "comma"),
        ("data:" + "x" * 300 + ";base64,AAAA", "comma"),
        ("data:image/png,SECRET", ";base64"),
        ("data:base64,SECRET", ";base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,  ", "empty"),
        ("data:image/png;base64,SECRET!!", "not valid base64"),
        ("data:image/png;base64,SECRE", "not valid base64"),
        ("data:image/png;base64,AA==SECRET==", "not valid base64"),
        ("data:image/png;base64,====", "not valid base64"),
        ("data:image/png;base64,SECRET\N{SNOWMAN}x", "not valid base64"),
        ("data:image/png;base64,SECRET%FFx", "not valid base64"),
        ("data:image/png;base64,-SECRET+", "two base64 alphabets"),
        (BARE_BASE64 + "SECRET jpg", "is base64, or a data, http, https or file URL"),
        (BARE_BASE64 + "SECRET.jpg", "that is a path; send the file as a data URL"),
        (BARE_BASE64 + "SECRET/photo-01_b.jpeg", "that is a path; send the file as a data URL"),
        (BARE_BASE64 + "C:\\SECRET\\my photo.PNG", "that is a path; send the file as a data URL"),
    ],
)
def test_data_urls_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        plain(url)
    assert caught.value.param == "input[2]"
    assert "SECRE" not in caught.value.message


def test_data_urls_are_bounded_before_they_are_decoded() -> None:
    assert len(plain(data_url(bytes(1000)))) == 1000
    for size in (1001, 5000, 10_000_000):
        with pytest.raises(PayloadTooLarge, match="1000"):
            plain(data_url(bytes(size)))
    with pytest.raises(PayloadTooLarge):
        plain("data:;base64," + "%41" * 2000)
    with pytest.raises(PayloadTooLarge):
        plain("data:;base64," + " " * 10_000_000)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.binary(max_size=40))
def test_any_data_url_is_decoded_or_refused(text: str, data: bytes) -> None:
    for url in (text, "data:" + text, "data:;base64," + text):
        try:
            plain(url)
        except RequestError as error:
            assert error.param == "input[2]"
    if data:
        assert plain(data_url(data)) == data


def local(url: str, root: Path | None, max_bytes: int = 10_000) -> bytes:
    return read_local(url, root=root, max_bytes=max_bytes, param="input[1]")


@pytest.fixture
def media(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "a cat.png").write_bytes(b"cat")
    (tmp_path / "secret.txt").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x").write_bytes(b"secret")
    return root


def test_local_files(media: Path) -> None:
    assert local(str(media / "deep" / "a cat.png"), media) == b"cat"
    assert local(f"file://{media}/deep/a%20cat.png", media) == b"cat"
    assert local(f"file://localhost{media}/deep/../deep/a%20cat.png", media) == b"cat"
    (media / "inside").symlink_to(media / "deep" / "a cat.png")
    assert local(str(media / "inside"), media) == b"cat"
    (media.parent / "alias").symlink_to(media)
    assert local(str(media / "inside"), media.parent / "alias") == b"cat"


def test_local_files_that_are_refused(media: Path) -> None:
    (media / "link").symlink_to(media.parent / "secret.txt")
    (media / "out").symlink_to(media.parent)
    (media / "loop").symlink_to(media / "loop")
    os.mkfifo(media / "pipe")
    messages = set()
    for path in (
        *(f"{media}/../secret.txt", f"{media}/%2e%2e/secret.txt", f"{media}2/x", "/etc/passwd", "/dev/zero"),
        *(f"{media}/link", f"{media}/out/secret.txt", f"{media}/loop", f"{media}/pipe", f"{media}/missing"),
        *(
            f"{media}",
            f"{media}/deep",
            f"{media}/deep/a cat.png/x",
            f"{media}/a\0b",
            f"/proc/self/root{media}",
        ),
    ):
        for url in {path, f"file://{path}"}:
            if url == f"/proc/self/root{media}":
                continue
            with pytest.raises(MediaFetchError) as caught:
                local(url, media)
            assert caught.value.param == "input[1]"
            messages.add(caught.value.message)
    assert len(messages) == 1, "the message must not tell which files exist"
    with pytest.raises(MediaFetchError, match="not served"):
        local(f"{media}/deep/a cat.png", None)
    for url in ("file://host/etc/passwd", "file:relative", "file:///a?b", "file:///a#b", "file://[x"):
        with pytest.raises(InvalidInput):
            local(url, media)


def test_a_link_that_appears_after_the_check_is_not_followed(
    media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is swapped for a link between resolving the path and opening it."""
    target = media / "deep" / "x"
    target.write_bytes(b"harmless")
    original = os.open

    def swapped(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if (media / "deep").is_symlink() is False:
            (media / "deep").rename(media / "moved")
            (media / "deep").symlink_to(media.parent / "media2")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(MediaFetchError):
        local(str(target), media)


def test_a_directory_that_is_refused_stays_open_nowhere(media: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(MediaFetchError):
            local(f"{media}/deep", media)
    assert len(os.listdir("/proc/self/fd")) == before


def test_local_files_are_capped(media: Path) -> None:
    (media / "big").write_bytes(bytes(101))
    assert len(local(str(media / "big"), media, 101)) == 101
    with pytest.raises(PayloadTooLarge, match="100"):
        local(str(media / "big"), media, 100)


async def load(
    url: str, policy: MediaPolicy | None = None, limits: ImageLimits | None = None, seconds: float = 20
) -> LoadedImage:
    policy = policy or LoopbackPolicy()
    loader = MediaLoader(policy, limits, fetcher=Fetcher(policy, limits))
    try:
        return await loader.load(
            ImageSource(url=url, param="input[4]"), row_width=64, deadline=Deadline.after(seconds)
        )
    finally:
        await loader.close()


async def test_every_source_gives_the_same_image(media: Path) -> None:
    data = png()
    (media / "cat.png").write_bytes(data)

    async def handler(head: str, writer: object) -> None:
        writer.write(response(data, "content-type: text/html"))

    policy = LoopbackPolicy(allowed_local_path=media)
    async with server(handler) as port:
        urls = [
            *(data_url(data), data_url(data, "text/html"), f"file://{media}/cat.png", f"{media}/cat.png"),
            f"HTTP://127.0.0.1:{port}/cat.html",
        ]
        found = [await load(url, policy) for url in urls]
    assert all(image == found[0] for image in found)
    assert found[0].data == data
    assert found[0].digest == blake3(data).digest()
    assert found[0].size == (9, 5)


async def test_large_data_urls_go_through_a_thread() -> None:
    data = png() + bytes(2_000_000)
    found = await load(data_url(data))
    assert found.data == data
    assert found.digest == blake3(data).digest()


async def test_what_is_no_image_or_too_large_is_refused() -> None:
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\x09IDAT" + bytes(9)
    cases: list[tuple[type[RequestError], str, ImageLimits | None]] = [
        (UnsupportedMedia, data_url(b"<svg/>"), None),
        (PayloadTooLarge, data_url(bomb), None),
        (PayloadTooLarge, data_url(png()), ImageLimits(max_pixels=44)),
        (PayloadTooLarge, data_url(png()), ImageLimits(max_bytes=20)),
        (MediaFetchError, "/etc/passwd", None),
        (InvalidInput, "javascript:alert(1)", None),
        (InvalidInput, "", None),
    ]
    for kind, url, limits in cases:
        with pytest.raises(kind) as caught:
            await load(url, limits=limits)
        assert caught.value.param == "input[4]"


async def test_no_work_after_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        await load(data_url(png()), seconds=-1)


@given(
    st.binary(min_size=1, max_size=40), st.lists(st.sampled_from(["as it is", "escaped", "behind a line"]))
)
def test_base64_that_is_escaped_or_wrapped_is_the_same_wherever_it_is_cut(
    data: bytes, written: list[str]
) -> None:
    forms = {"escaped": lambda one: f"%{ord(one):02X}", "behind a line": lambda one: f"%0A{one}"}
    letters = base64.b64encode(data).decode()
    payload = "".join(
        forms.get(written[place % len(written)] if written else "", str)(letter)
        for place, letter in enumerate(letters)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_PIECE_CHARACTERS", 5)
        assert decode(f"data:image/png;base64,{payload}", param="x", max_bytes=1000) == data
