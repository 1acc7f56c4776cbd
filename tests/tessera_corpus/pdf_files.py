"""PDF files, written by hand."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

_PADDING = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")


def line(text: str, *, x: int = 20, y: int = 100, size: int = 12) -> str:
    """Content that shows a line of text."""
    return f"BT /F {size} Tf {x} {y} Td ({text}) Tj ET\n"


def pdf(
    contents: Sequence[str],
    *,
    box: str = "0 0 200 150",
    page: str = "",
    catalog: str = "",
    resources: str = "",
    objects: Sequence[bytes] = (),
    trailer: str = "",
    password: bytes | None = None,
    font: str = "3 0 R",
) -> bytes:
    """A file with a page for each of ``contents``.

    ``page``, ``catalog``, ``resources`` and ``trailer`` are more entries of these dictionaries. ``objects``
    are numbered from 10 on; pages follow. ``font`` is the one called F. ``password`` encrypts the file by
    RC4 (an empty one: for who knows no password).
    """
    first = 10 + len(objects)
    kids = " ".join(f"{first + 2 * index} 0 R" for index in range(len(contents)))
    bodies: dict[int, bytes] = {
        1: f"<</Type/Catalog/Pages 2 0 R {catalog}>>".encode(),
        2: f"<</Type/Pages/Kids[{kids}]/Count {len(contents)}>>".encode(),
        3: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    }
    bodies |= {10 + index: body for index, body in enumerate(objects)}
    key = b""
    if password is not None:
        key, encrypt = _encryption(password)
        bodies[4] = encrypt
        trailer += f"/Encrypt 4 0 R/ID[<{_ID.hex()}><{_ID.hex()}>]"
    for index, content in enumerate(contents):
        number = first + 2 * index
        bodies[number] = (
            f"<</Type/Page/Parent 2 0 R/MediaBox[{box}]/Contents {number + 1} 0 R"
            f"/Resources<</Font<</F {font}>>{resources}>>{page}>>"
        ).encode()
        data = content.encode("latin-1")
        if key:
            salted = hashlib.md5(key + (number + 1).to_bytes(3, "little") + b"\0\0").digest()[: len(key) + 5]
            data = _rc4(salted, data)
        bodies[number + 1] = stream(data)
    out = bytearray(b"%PDF-1.7\n")
    places = {}
    for number, body in sorted(bodies.items()):
        places[number] = len(out)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 1\n0000000000 65535 f \n"
    for number, place in places.items():
        out += b"%d 1\n%010d 00000 n \n" % (number, place)
    size = max(places) + 1
    out += f"trailer\n<</Size {size}/Root 1 0 R{trailer}>>\nstartxref\n{table}\n%%EOF\n".encode()
    return bytes(out)


def unembedded(letters: str, subtype: str = "TrueType", name: str = "ArialMT", beside: str = "") -> bytes:
    """A page with one letter for each glyph name, of a font that is not in the file, after what is beside."""
    names = letters.split()
    descriptor = (
        f"/FontDescriptor<</Type/FontDescriptor/FontName/{name}/Flags 32/FontBBox[0 -200 1000 900]"
        "/ItalicAngle 0/Ascent 800/Descent -200/CapHeight 700/StemV 80>>"
    )
    font = (
        f"<</Type/Font/Subtype/{subtype}/BaseFont/{name}/FirstChar 1/LastChar {len(names)}"
        f"/Widths[{'600 ' * len(names)}]{descriptor}"
        f"/Encoding<</Type/Encoding/Differences[1/{'/'.join(names)}]>>>>"
    )
    shown = "".join(f"\\{number:03o}" for number in range(1, len(names) + 1))
    shown = f"BT /F 24 Tf 20 50 Td ({shown}) Tj ET"
    return pdf([beside + shown], objects=[font.encode()], font="10 0 R")


def stream(data: bytes, entries: str = "") -> bytes:
    return f"<</Length {len(data)}{entries}>>\nstream\n".encode() + data + b"\nendstream"


def image(width: int, height: int, samples: bytes) -> bytes:
    """An image object of 8-bit RGB."""
    data = zlib.compress(samples)
    return stream(
        data,
        f"/Type/XObject/Subtype/Image/Width {width}/Height {height}/ColorSpace/DeviceRGB"
        "/BitsPerComponent 8/Filter/FlateDecode",
    )


def endless() -> bytes:
    """A page that takes longer to draw than anybody waits: each of 12 forms draws the next 30 times."""
    form = "/Type/XObject/Subtype/Form/BBox[0 0 200 150]"
    objects = [
        stream(b"/X Do " * 30, f"{form}/Resources<</XObject<</X {11 + number} 0 R>>>>")
        for number in range(12)
    ]
    objects.append(stream(b"0 0 9 9 re f", form))
    return pdf(["/X Do"], resources="/XObject<</X 10 0 R>>", objects=objects)


_ID = bytes(range(16))


def _encryption(password: bytes) -> tuple[bytes, bytes]:
    """The key, and the dictionary, of the standard security handler's revision 2 (40 bits)."""
    padded = (password + _PADDING)[:32]
    owner = _rc4(hashlib.md5((b"owner" + _PADDING)[:32]).digest()[:5], padded)
    permissions = -4
    key = hashlib.md5(padded + owner + permissions.to_bytes(4, "little", signed=True) + _ID).digest()[:5]
    user = _rc4(key, _PADDING)
    entries = f"/Filter/Standard/V 1/R 2/O<{owner.hex()}>/U<{user.hex()}>/P {permissions}"
    return key, f"<<{entries}>>".encode()


def _rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out = bytearray()
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)
