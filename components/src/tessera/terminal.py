"""Lines for people at a terminal, in which nothing that others wrote moves the cursor or changes a colour."""

from __future__ import annotations

import sys
from collections.abc import Collection


def printable(text: str, keep: str = "") -> str:
    """Put U+FFFD in place of each character that a terminal would obey and not show, but for ``keep``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else "\ufffd" for one in text)


def say(text: str) -> None:
    """Print lines on standard output."""
    print(printable(text, keep="\n"))


def complain(text: str) -> None:
    """Print lines on standard error."""
    sys.stderr.write(printable(f"{text}\n", keep="\n"))


def reason_of(error: OSError) -> str:
    """Return what the system refused and of which file, without the number."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def place_of(host: str, port: object) -> str:
    """Return ``HOST:PORT`` as a URL has it: an address of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def no_answer(url: str, error: Exception) -> str:
    """Return the sentence that a service cannot be asked, and what helps where TLS is the reason."""
    reason = getattr(error, "reason", None) or error
    hint = ""
    if "CERTIFICATE_VERIFY_FAILED" in str(reason):
        hint = ": SSL_CERT_FILE names a PEM file with the certificate, or with the one that signed it"
    if "WRONG_VERSION_NUMBER" in str(reason):
        hint = f": its port does not speak TLS, ask {url.replace('https://', 'http://', 1)}"
    return f"no answer from {url}: {reason}{hint}"


def near(flag: str, known: Collection[str]) -> str:
    """Return ``", did you mean --other?"``, or nothing where no known flag is like it."""
    # For a mistake alone.
    from difflib import get_close_matches

    close = get_close_matches(flag, known, n=1)
    return f", did you mean {close[0]}?" if close else ""
