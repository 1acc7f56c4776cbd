"""Images that come without a network: ``data:`` URLs, and files below the directory opened for them.

**Data URLs.** The declared media type is ignored: content decides. Beside plain base64 these are accepted,
because clients send them: the URL-safe alphabet, missing padding, percent-encoded characters and ASCII white
space. Anything else is refused, not skipped. Errors never repeat the payload.

**Files.** The path is resolved first, so that a symbolic link counts as what it points to. Then every
component is opened from the one before it without following links: a link put there after the check is not
followed.
"""

from __future__ import annotations

import binascii
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tessera.errors import InvalidInput, MediaFetchError, PayloadTooLarge
from tessera.frontend.api.request import BARE_BASE64

_HEADER_CHARACTERS = 256
_SPACES = re.compile(r"[ \t\r\n\f]+")
_FROM_URL_SAFE = str.maketrans("-_", "+/")


def payload_size(url: str) -> int:
    """An upper bound for the bytes the URL decodes to, without decoding."""
    return (len(url) * 3 + 3) // 4


def decode(url: str, *, param: str, max_bytes: int) -> bytes:
    """The bytes in a data URL.

    Raises ``InvalidInput`` when it is not base64 or holds nothing, ``PayloadTooLarge`` above ``max_bytes``.
    """
    comma = url.find(",", 0, _HEADER_CHARACTERS)
    if comma < 0 or url[:5].lower() != "data:":
        raise InvalidInput(
            f"{param}: expected a data URL with a comma in its first {_HEADER_CHARACTERS} characters",
            param=param,
        )
    if url[:comma].lower().rsplit(";", 1)[-1].strip() != "base64":
        raise InvalidInput(f"{param}: expected a data URL with ;base64 before its comma", param=param)
    payload = _plain(url[comma + 1 :], param, max_bytes)
    if not payload:
        raise InvalidInput(f"{param}: the data URL is empty", param=param)
    try:
        data = binascii.a2b_base64(payload + "=" * (-len(payload) % 4), strict_mode=True)
    except (binascii.Error, ValueError):
        # The module's own message can quote the input. A payload that came without a URL around it may be
        # a file's name, or a URL that somebody cut.
        why = "the data URL is not valid base64"
        if url.startswith(BARE_BASE64):
            why = "not valid base64; an image is base64, or a data, http, https or file URL"
        raise InvalidInput(f"{param}: {why}", param=param) from None
    if len(data) > max_bytes:
        raise _payload_too_large(param, max_bytes)
    return data


def _plain(payload: str, param: str, max_bytes: int) -> str:
    """The payload in the standard alphabet without white space, at most as long as the limit needs."""
    longest = (max_bytes + 2) // 3 * 4
    if "%" in payload:
        if len(payload) > 3 * longest:
            raise _payload_too_large(param, max_bytes)
        payload = unquote(payload, errors="replace")
    # A line break for every 76 characters is the usual wrapping; more is no reason to go on.
    if len(payload) > longest + longest // 8 + 64:
        raise _payload_too_large(param, max_bytes)
    if _SPACES.search(payload) is not None:
        payload = _SPACES.sub("", payload)
    if len(payload) > longest:
        raise _payload_too_large(param, max_bytes)
    if "-" in payload or "_" in payload:
        if "+" in payload or "/" in payload:
            raise InvalidInput(f"{param}: the data URL mixes two base64 alphabets", param=param)
        payload = payload.translate(_FROM_URL_SAFE)
    return payload


def _payload_too_large(param: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{param}: the data URL holds more than {max_bytes} bytes", param=param)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe waits for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_local(url: str, *, root: Path | None, max_bytes: int, param: str) -> bytes:
    """The content of a ``file://`` URL or absolute path; blocks.

    Raises ``MediaFetchError`` for everything that is not a regular, readable file below ``root``, with one
    message for all, so that it does not tell which files exist; ``PayloadTooLarge`` above ``max_bytes``.
    """
    if root is None:
        raise MediaFetchError(
            f"{param}: local files are not served here; send the bytes as a data URL", param=param
        )
    path = _path(url, param)
    refused = MediaFetchError(f"{param}: no readable file below the allowed directory", param=param)
    try:
        top = root.resolve(strict=True)
        parts = path.resolve(strict=True).relative_to(top).parts
        descriptor = _open(top, parts)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refused
        if status.st_size > max_bytes:
            raise _too_large(param, max_bytes)
        return _read(descriptor, max_bytes, param)
    except OSError:
        raise refused from None
    finally:
        os.close(descriptor)


def _read(descriptor: int, max_bytes: int, param: str) -> bytes:
    """Everything up to the end, which may have moved since the size was looked at."""
    data = bytearray()
    while chunk := os.read(descriptor, 1 << 20):
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(param, max_bytes)
    return bytes(data)


def _too_large(param: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{param}: the file has more than {max_bytes} bytes", param=param)


def _path(url: str, param: str) -> Path:
    if url.startswith("/"):
        return Path(url)
    try:
        parsed = urlsplit(url)
    except ValueError:
        raise InvalidInput(f"{param}: not a valid file URL", param=param) from None
    path = unquote(parsed.path)
    if parsed.scheme != "file" or parsed.netloc not in ("", "localhost") or not path.startswith("/"):
        raise InvalidInput(f"{param}: expected a file URL with an absolute path and no host", param=param)
    if parsed.query or parsed.fragment:
        raise InvalidInput(f"{param}: a file URL has no query or fragment", param=param)
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
