"""From an image source to its bytes, hash and header: ``data:`` URLs, local files, what ``fetch`` brings."""

from __future__ import annotations

import binascii
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import pybase64
from blake3 import blake3

from tessera.checkpoint.safetensors import LENGTH_BYTES, header_length
from tessera.errors import InvalidInput, MediaFetchError, PayloadTooLarge, UnsupportedMedia
from tessera.frontend.media.embeddings import (
    SUFFIX,
    UNSAFE_SUFFIXES,
    LoadedEmbeddings,
    read_embeddings,
)
from tessera.frontend.media.policy import ImageLimits, MediaPolicy
from tessera.frontend.request import BARE_BASE64, ImageSource
from tessera.imaging import Picture
from tessera.tasks import Deadline
from tessera.turns import Threads

if TYPE_CHECKING:
    from tessera.frontend.media.fetch import Fetcher

T = TypeVar("T")

_HEADER_CHARACTERS = 256
# No base64 has a dot, and every image file's name does.
_PATH = re.compile(r"[^\r\n]{0,1000}\.[A-Za-z0-9]{1,5}")
_SPACES = re.compile(r"[ \t\r\n\f]+")
_FROM_URL_SAFE = str.maketrans("-_", "+/")


def decode(url: str, *, param: str, max_bytes: int) -> bytes:
    """The bytes in a data URL.

    The declared media type is ignored: content decides. Beside plain base64 these are accepted, because
    clients send them: the URL-safe alphabet, missing padding, percent-encoded characters and ASCII white
    space. Anything else is refused, not skipped. Errors never repeat the payload.

    Raises ``InvalidInput`` when it is not base64 or holds nothing, ``PayloadTooLarge`` above ``max_bytes``.
    """
    comma = url.find(",", 0, _HEADER_CHARACTERS)
    if comma < 0 or url[:5].lower() != "data:":
        raise _unlike(param, f"a comma in its first {_HEADER_CHARACTERS} characters")
    if url[:comma].lower().rsplit(";", 1)[-1].strip() != "base64":
        raise _unlike(param, ";base64 before its comma")
    payload = url[comma + 1 :]
    data = _strict(payload) if len(payload) <= _longest(max_bytes) else None
    if not data:
        # Only then: to look for what clients may write otherwise takes 0.6 ms for 45 kB, and to decode 5 µs.
        bare = url.startswith(BARE_BASE64)
        if bare:
            refuse_path(payload, param)
        data = _lenient(_plain(payload, param, max_bytes), param, bare=bare)
    if len(data) > max_bytes:
        raise _payload_too_large(param, max_bytes)
    return data


def refuse_path(text: str, param: str) -> None:
    """Raise ``InvalidInput`` where an image is named by a path of the client's."""
    if _PATH.fullmatch(text):
        raise InvalidInput.at(
            param, "that is a path; send the file as a data URL, data:image/jpeg;base64,..."
        )


def _unlike(param: str, missing: str) -> InvalidInput:
    return InvalidInput.at(param, f"expected a data URL with {missing}")


def _lenient(payload: str, param: str, *, bare: bool) -> bytes:
    """Return the bytes of base64 that may lack its padding; ``bare`` says that it came without a URL."""
    if not payload:
        raise InvalidInput.at(param, "the data URL is empty")
    data = _strict(payload + "=" * (-len(payload) % 4))
    if data is None:
        # The module's own message can quote the input. A payload that came without a URL around it may be
        # a file's name, or a URL that somebody cut.
        why = "the data URL is not valid base64"
        if bare:
            why = "not valid base64; an image is base64, or a data, http, https or file URL"
        raise InvalidInput.at(param, f"{why}")
    return data


def _strict(payload: str) -> bytes | None:
    """The bytes of plain base64; None where it is written otherwise, or is none."""
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return None


# 5 million spaces among as many letters kept the interpreter for 0.6 s.
_PIECE_CHARACTERS = 1 << 18


def _in_pieces(work: Callable[[str], str], payload: str) -> str:
    """Return what ``work`` makes of a payload; no piece ends within an escape."""
    parts: list[str] = []
    at = 0
    while at < len(payload):
        end = at + _PIECE_CHARACTERS
        escape = payload.rfind("%", end - 2, end)
        end = escape if escape > at else end
        parts.append(work(payload[at:end]))
        at = end
    return "".join(parts)


def _longest(max_bytes: int) -> int:
    """Characters of plain base64."""
    return (max_bytes + 2) // 3 * 4


def _plain(payload: str, param: str, max_bytes: int) -> str:
    """The payload in the standard alphabet without white space, at most as long as the limit needs."""
    longest = _longest(max_bytes)
    if "%" in payload:
        if len(payload) > 3 * longest:
            raise _payload_too_large(param, max_bytes)
        payload = _in_pieces(partial(unquote, errors="replace"), payload)
    # A line break for every 76 characters is the usual wrapping; more is no reason to go on.
    if len(payload) > longest + longest // 8 + 64:
        raise _payload_too_large(param, max_bytes)
    if _SPACES.search(payload) is not None:
        payload = _in_pieces(partial(_SPACES.sub, ""), payload)
    if len(payload) > longest:
        raise _payload_too_large(param, max_bytes)
    if "-" in payload or "_" in payload:
        if "+" in payload or "/" in payload:
            raise InvalidInput.at(param, "the data URL mixes two base64 alphabets")
        payload = payload.translate(_FROM_URL_SAFE)
    return payload


def _payload_too_large(param: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge.at(param, f"the data URL holds more than {max_bytes} bytes")


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe waits for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_local(url: str, *, root: Path | None, max_bytes: int, param: str) -> bytes:
    """Return the content of a ``file://`` URL or absolute path; blocks.

    Raises as ``_opened``.
    """
    with _opened(url, root, max_bytes, param) as (file, nbytes):
        # In one piece, of its length; one more, for the end may have moved since that was looked at.
        data = file.read(nbytes + 1) or b""
        while len(data) <= max_bytes and (more := file.read(max_bytes + 1 - len(data))):
            data += more
    if len(data) > max_bytes:
        raise _too_large(param, max_bytes)
    return data


def local_size(url: str, *, root: Path | None, max_bytes: int, param: str) -> int:
    """Return the bytes that ``read_local`` would; blocks, and raises as it does."""
    with _opened(url, root, max_bytes, param) as (_, nbytes):
        return nbytes


@contextmanager
def _opened(url: str, root: Path | None, max_bytes: int, param: str) -> Iterator[tuple[FileIO, int]]:
    """Open a ``file://`` URL or absolute path, and give the file and its bytes.

    The path is resolved first, so that a symbolic link counts as what it points to. Then every component is
    opened from the one before it without following links: a link put there after the check is not followed.

    Raises ``MediaFetchError`` for everything that is not a regular, readable file below ``root``, with one
    message for all, so that it does not tell which files exist; ``PayloadTooLarge`` above ``max_bytes``.
    """
    if root is None:
        raise MediaFetchError.at(param, "local files are not served here; send the bytes as a data URL")
    path = _path(url, param)
    refused = MediaFetchError.at(param, "no readable file below the allowed directory")
    try:
        top = root.resolve(strict=True)
        parts = path.resolve(strict=True).relative_to(top).parts
        descriptor = _open(top, parts)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            # A file object of a directory would not be made, and would not close it.
            os.close(descriptor)
            raise refused
        with open(descriptor, "rb", buffering=0) as file:
            if status.st_size > max_bytes:
                raise _too_large(param, max_bytes)
            yield file, status.st_size
    except OSError:
        raise refused from None


def _too_large(param: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge.at(param, f"the file has more than {max_bytes} bytes")


def _path(url: str, param: str) -> Path:
    if url.startswith("/"):
        return Path(url)
    try:
        parsed = urlsplit(url)
    except ValueError:
        raise InvalidInput.at(param, "not a valid file URL") from None
    path = unquote(parsed.path)
    if parsed.scheme != "file" or parsed.netloc not in ("", "localhost") or not path.startswith("/"):
        raise InvalidInput.at(param, "expected a file URL with an absolute path and no host")
    if parsed.query or parsed.fragment:
        raise InvalidInput.at(param, "a file URL has no query or fragment")
    return Path(path)


def _open(top: Path, parts: tuple[str, ...]) -> int:
    """Open a file by walking down from ``top``; no component may be a link."""
    if not parts:
        raise IsADirectoryError(top)
    directory = os.open(top, _DIRECTORY)
    try:
        for part in parts[:-1]:
            deeper = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = deeper
        return os.open(parts[-1], _FILE, dir_fd=directory)
    finally:
        os.close(directory)


_THREAD_BYTES = 256 * 1024
"""From this size on, work goes to a thread: below it, the hop costs more than the work."""
# Of a request's images that are looked at on the event loop: 256 together, of 55 MB, took it 113 ms.
_LOOP_BYTES = 4 << 20

_THREADS = 8

_WEB = ("http://", "https://")
_LOCAL = ("file://", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """An encoded image that passed the policy; ``digest`` is the 32-byte blake3 hash of ``data``.

    ``size`` is its width and height in pixels as it is meant to be seen.
    """

    data: bytes
    digest: bytes
    size: tuple[int, int]


Hold = Callable[[int, float], Awaitable[None]]
"""(bytes, seconds) → room for them; raises ``Overloaded`` where there is none within so many seconds."""


async def unbounded(nbytes: int, seconds: float) -> None:
    """Take bytes that nobody counts."""


@dataclass(slots=True)
class MediaBudget:
    """Counts bytes while they arrive, so that many images cannot fill the memory side by side.

    ``client`` is whose share of fetches, look-ups and threads the images take. ``hold`` waits for what
    all requests together may hold of images that they only name.
    """

    limit: int
    client: str = ""
    hold: Hold = unbounded
    taken: int = 0

    def take(self, nbytes: int, *, param: str) -> None:
        """Raises ``PayloadTooLarge`` naming ``param`` when the request's images are too many bytes."""
        self.taken += nbytes
        if self.taken > self.limit:
            raise PayloadTooLarge.at(
                param, f"the images of this request are larger than {self.limit} bytes together"
            )

    async def bring(self, nbytes: int, seconds: float, *, param: str) -> None:
        """Take bytes that did not come with the request, once there is room for them.

        Raises ``Overloaded``, too, where that is not within so many ``seconds``.
        """
        self.take(nbytes, param=param)
        await self.hold(nbytes, seconds)


class MediaLoader:
    """Loads images under one policy, within limits; owned by one event loop. ``close`` ends it.

    ``threads`` look at large images and read files.
    """

    def __init__(
        self,
        policy: MediaPolicy,
        limits: ImageLimits | None = None,
        *,
        fetcher: Fetcher | None = None,
        threads: Threads | None = None,
    ) -> None:
        self.threads = threads or Threads(_THREADS, "media")
        self._root = policy.allowed_local_path
        self._limits = limits or ImageLimits()
        self._wait_seconds = policy.timeout
        if fetcher is None:
            # Its libraries are a quarter of a second of every process that only decodes what is there.
            from tessera.frontend.media.fetch import Fetcher

            fetcher = Fetcher(policy, self._limits)
        self._fetcher = fetcher

    async def load(
        self, source: ImageSource, *, row_width: int, deadline: Deadline, budget: MediaBudget | None = None
    ) -> LoadedImage | LoadedEmbeddings:
        """Obtain, check and hash one image, or one tensor of rows ``row_width`` wide.

        ``budget`` is what the images of the request share; without one, this image is the only one.
        Raises ``RequestError`` subclasses naming ``source.param``, or ``DeadlineExceeded``.
        """
        deadline.left()
        url, param, budget = source.url, source.param, budget or self.budget()
        if url[:5].lower() == "data:":
            # An upper bound, before the payload is there a second time.
            size = (len(url) * 3 + 3) // 4
            budget.take(size, param=param)
            obtain: Callable[[], bytes] = partial(decode, url, param=param, max_bytes=self._limits.max_bytes)
            # Nothing but the client's own word names what it holds.
            tensor = source.embeddings
        else:
            tensor = _claims_tensor(source)
            data = await self.read_named(source, deadline, budget)
            size, obtain = len(data), lambda: data

        def examine() -> LoadedImage | LoadedEmbeddings:
            data = obtain()
            digest = blake3(data).digest()
            carried = not url[:8].lower().startswith(_WEB)
            if tensor or (carried and _looks_like_safetensors(data)):
                return read_embeddings(
                    data, row_width=row_width, digest=digest, grid=source.grid, param=param
                )
            picture = Picture(data, param=param, max_pixels=self._limits.max_pixels)
            return LoadedImage(data=data, digest=digest, size=picture.size)

        if size < _THREAD_BYTES and budget.taken <= _LOOP_BYTES:
            return examine()
        return await self._aside(examine, deadline, budget.client)

    async def _aside(self, work: Callable[[], T], deadline: Deadline, client: str) -> T:
        async with deadline.bound():
            return await self.threads.run(work, client)

    def budget(self, client: str = "", hold: Hold = unbounded) -> MediaBudget:
        """For the images of one request of this client."""
        return MediaBudget(self._limits.max_request_bytes, client, hold)

    async def read_named(self, source: ImageSource, deadline: Deadline, budget: MediaBudget) -> bytes:
        """Return the bytes that the URL or the path of a source leads to."""
        url, param, limit = source.url, source.param, self._limits.max_bytes
        scheme = url[:8].lower()
        if scheme.startswith(_WEB):
            return await self._fetcher.get(url, param=param, deadline=deadline, budget=budget)
        if scheme.startswith(_LOCAL):
            look = partial(local_size, url, root=self._root, max_bytes=limit, param=param)
            size = await self._aside(look, deadline, budget.client)
            async with deadline.bound():
                await budget.bring(size, self._wait_seconds, param=param)
            # One that has grown meanwhile is longer than what is held.
            read = partial(read_local, url, root=self._root, max_bytes=size, param=param)
            return await self._aside(read, deadline, budget.client)
        refuse_path(source.url, param)
        raise InvalidInput.at(param, "expected a data, http, https or file URL")

    async def close(self) -> None:
        await self._fetcher.close()


def _claims_tensor(source: ImageSource) -> bool:
    """Whether the source is said to hold embeddings; refuses what could only hold them unsafely.

    Looking at a local name costs nothing and gives a better answer than the bytes would: a pickle is not
    opened at all.
    """
    url = source.url
    scheme = url[:8].lower()
    if scheme.startswith(_LOCAL) and url.lower().endswith(UNSAFE_SUFFIXES):
        raise UnsupportedMedia.at(source.param, f"files that can hold pickles are not read; use {SUFFIX}")
    named = scheme.startswith((*_LOCAL, *_WEB)) and url.lower().endswith(SUFFIX)
    if (source.embeddings or named) and scheme.startswith(_WEB):
        raise UnsupportedMedia.at(
            source.param, "embeddings are taken from an allowed local path or inline, not from a URL"
        )
    return source.embeddings or named


def _looks_like_safetensors(data: bytes) -> bool:
    """Whether the bytes begin as the format does, which no image format's do."""
    after = len(data) - LENGTH_BYTES
    return (
        after > 0
        and data[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
        and header_length(data) <= min(after, 1 << 32)
    )
