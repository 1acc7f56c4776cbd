"""Local files, only below the directory that the operator has opened for them.

The path is resolved first, so that a symbolic link counts as what it points to. Then every component is
opened from the one before it without following links: a link put there after the check is not followed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tessera.errors import InvalidInput, MediaFetchError, PayloadTooLarge

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
