"""API keys: where they come from and whether a request carries one. Only digests are kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from hmac import compare_digest
from pathlib import Path
from typing import Final

import msgspec

from tessera.errors import ConfigError
from tessera.small_files import MOST_KEYS_BYTES, read_regular

API_KEYS_VARIABLE: Final = "TESSERA_API_KEYS"

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_MIN_CHARACTERS = 8


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """``digest`` is the SHA-256 of a key, which itself is not kept; ``name`` stands for it in metrics."""

    name: str
    digest: bytes


def read_keys(file: Path | None, variable: str | None) -> tuple[ApiKey, ...]:
    """The keys in a file, one for each line, and in the environment's value, separated by commas.

    A key may be followed by white space and a name, which metrics and logs then use; ``#`` begins a
    comment line in the file. Raises ``ConfigError`` for a source that is given and holds no key: a service
    that was to be closed must not start open. No message repeats a key.
    """
    keys: list[ApiKey] = []
    if file is not None:
        try:
            lines = read_regular(file, MOST_KEYS_BYTES).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            # Not the error itself: of bytes that are no text it quotes what may be a key.
            why = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
            raise ConfigError(f"--api-keys-file {file}: {why}") from None
        keys += _parse([line for line in lines if not line.lstrip().startswith("#")], f"{file}", len(keys))
    if variable is not None:
        keys += _parse(variable.split(","), API_KEYS_VARIABLE, len(keys))
    if len({key.digest for key in keys}) != len(keys) or len({key.name for key in keys}) != len(keys):
        raise ConfigError("two API keys, or the names of two API keys, are the same")
    return tuple(keys)


def _parse(entries: Sequence[str], source: str, before: int) -> list[ApiKey]:
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        words = entry.split()
        if not words:
            continue
        if len(words) > 2 or not _VISIBLE.fullmatch(words[0]) or len(words[0]) < _MIN_CHARACTERS:
            raise ConfigError(
                f"{source}: entry {number} is not a key of at least {_MIN_CHARACTERS} ASCII characters"
                " and perhaps a name"
            )
        name = words[1] if len(words) == 2 else f"key-{before + len(keys) + 1}"
        keys.append(ApiKey(name=name, digest=_digest(words[0].encode("ascii"))))
    if not keys:
        raise ConfigError(f"{source}: holds no API key")
    return keys


ANONYMOUS: Final = "anonymous"
"""The name of the caller where a service has no keys; everybody is the same one."""


class Authenticator:
    """Decides who is asking; a service without keys has none."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def name_of(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the name of the key in ``Authorization: Bearer`` or ``X-API-Key``; None for no known one.

        ``headers`` has names in lower case. Digests are compared, and always all of them, so that the time
        taken says nothing about a key.
        """
        offered = _digest(_offered(headers))
        known = None
        for key in self._keys:
            if compare_digest(key.digest, offered):
                known = key.name
        return known


def _offered(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    return headers.get(b"x-api-key", b"").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
