"""``data:`` URLs with base64 payloads, decoded strictly and bounded before they are decoded.

The declared media type is not looked at: content decides. Accepted beside plain base64, because clients
send them: the URL-safe alphabet, missing padding, percent-encoded characters and ASCII white space.
Anything else is refused rather than skipped. Errors never repeat the payload.
"""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote

from tessera.errors import InvalidInput, PayloadTooLarge
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
        raise _too_large(param, max_bytes)
    return data


def _plain(payload: str, param: str, max_bytes: int) -> str:
    """The payload in the standard alphabet without white space, at most as long as the limit needs."""
    longest = (max_bytes + 2) // 3 * 4
    if "%" in payload:
        if len(payload) > 3 * longest:
            raise _too_large(param, max_bytes)
        payload = unquote(payload, errors="replace")
    # A line break for every 76 characters is the usual wrapping; more is no reason to go on.
    if len(payload) > longest + longest // 8 + 64:
        raise _too_large(param, max_bytes)
    if _SPACES.search(payload) is not None:
        payload = _SPACES.sub("", payload)
    if len(payload) > longest:
        raise _too_large(param, max_bytes)
    if "-" in payload or "_" in payload:
        if "+" in payload or "/" in payload:
            raise InvalidInput(f"{param}: the data URL mixes two base64 alphabets", param=param)
        payload = payload.translate(_FROM_URL_SAFE)
    return payload


def _too_large(param: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{param}: the data URL holds more than {max_bytes} bytes", param=param)
