"""Makes image files of every mode, depth and oddity, and says what each of them shows.

Nothing of Pillow writes what it may read wrongly: samples are laid out here by the formats' own rules.
"""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

WIDTH, HEIGHT = 23, 14

Pixels = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Kind:
    """A file and the upright RGB that it shows on white; None where it is to be refused.

    ``apart`` is by how much a value may differ. ``elsewhere`` is false where ImageMagick 6 shows something
    else: the negative of WhiteIsZero with 2, 4 and 12 bits, samples that mean nothing as alpha, planes of
    grey and alpha mixed, and the fourth byte of a BMP as alpha, which no browser takes for it.
    """

    name: str
    data: bytes
    shows: Pixels | None
    apart: int = 1
    elsewhere: bool = True


def ramp(samples: int, bits: int) -> Samples:
    """Values of ``bits``, ``[HEIGHT, WIDTH, samples]``, from the least to the most."""
    at = np.arange(HEIGHT * WIDTH * samples).reshape(HEIGHT, WIDTH, samples)
    most = (1 << bits) - 1
    values = (at * 2654435761 >> 7) & most
    values[0, 0], values[0, 1] = 0, most
    return values.astype(np.uint16)


def eight(values: npt.NDArray[np.integer], bits: int) -> Pixels:
    """Samples of ``bits`` as 8 bits."""
    if bits >= 8:
        return (values >> (bits - 8)).astype(np.uint8)
    return (values.astype(np.uint32) * 255 // ((1 << bits) - 1)).astype(np.uint8)


def rgb(values: Pixels) -> Pixels:
    """Grey, ``[..., 1]``, or colours as RGB."""
    return np.repeat(values, 3, axis=2) if values.shape[2] == 1 else values


def on_white(colours: Pixels, alpha: Pixels) -> Pixels:
    """RGB with 8 bits of alpha beside it, ``[..., 1]``."""
    share = alpha.astype(np.float64) / 255
    return np.round(colours * share + 255 * (1 - share)).astype(np.uint8)


def packed(values: Samples, bits: int, big: bool = True) -> bytes:
    """Rows of samples, each row from a byte's beginning on, the first in the highest bits."""
    rows = values.reshape(values.shape[0], -1)
    if bits == 16:
        return rows.astype(">u2" if big else "<u2").tobytes()
    if bits == 8:
        return rows.astype(np.uint8).tobytes()
    spread = (rows[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(spread.reshape(len(rows), -1).astype(np.uint8), axis=1).tobytes()


def tiff(
    *pages: dict[int, tuple[int, Sequence[int]] | bytes],
    strips: Sequence[Sequence[bytes]],
    big: bool = False,
) -> bytes:
    """A TIFF of directories, ``{tag: (type, values)}``, each with its strips or, with tag 322, tiles."""
    order = ">" if big else "<"
    sizes = {1: "B", 3: "H", 4: "I", 5: "I", 7: "B", 8: "h"}
    out = bytearray((b"MM\0*" if big else b"II*\0") + bytes(4))
    link = 4
    for page, parts in zip(pages, strips, strict=True):
        places = []
        for part in parts:
            places.append(len(out))
            out += part + bytes(len(part) % 2)
        tiled = 322 in page
        entries = dict(page)
        entries[324 if tiled else 273] = (4, places)
        entries[325 if tiled else 279] = (4, [len(part) for part in parts])
        written = []
        for tag, entry in sorted(entries.items()):
            kind, values = (7, list(entry)) if isinstance(entry, bytes) else entry
            body = struct.pack(f"{order}{len(values)}{sizes[kind]}", *values)
            count = len(values) // 2 if kind == 5 else len(values)
            if len(body) > 4:
                place = len(out)
                out += body + bytes(len(body) % 2)
                body = struct.pack(f"{order}I", place)
            written.append(struct.pack(f"{order}HHI", tag, kind, count) + body.ljust(4, b"\0"))
        struct.pack_into(f"{order}I", out, link, len(out))
        out += struct.pack(f"{order}H", len(written)) + b"".join(written)
        link = len(out)
        out += bytes(4)
    return bytes(out)


def of_samples(
    values: Samples,
    bits: int,
    photometric: int,
    *,
    big: bool = False,
    planes: bool = False,
    deflate: bool = False,
    predictor: bool = False,
    reversed_bits: bool = False,
    tiled: bool = False,
    more: dict[int, tuple[int, Sequence[int]] | bytes] | None = None,
) -> bytes:
    """A TIFF of one page."""
    height, width, samples = values.shape
    tags: dict[int, tuple[int, Sequence[int]] | bytes] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [bits] * samples),
        259: (3, [8 if deflate else 1]),
        262: (3, [photometric]),
        277: (3, [samples]),
        284: (3, [2 if planes else 1]),
        **(more or {}),
    }
    layers = [values[..., at : at + 1] for at in range(samples)] if planes else [values]
    parts = []
    if tiled:
        tags |= {322: (4, [16]), 323: (4, [16])}
        for layer in layers:
            wide = np.zeros((-height % 16 + height, -width % 16 + width, layer.shape[2]), np.uint16)
            wide[:height, :width] = layer
            for top, left in itertools.product(range(0, len(wide), 16), range(0, wide.shape[1], 16)):
                parts.append(packed(wide[top : top + 16, left : left + 16], bits, big))
    else:
        tags[278] = (4, [5])
        for layer in layers:
            if predictor:
                layer = np.diff(layer.astype(np.int64), axis=1, prepend=0) & ((1 << bits) - 1)
                layer = layer.astype(np.uint16)
            parts += [packed(layer[top : top + 5], bits, big) for top in range(0, height, 5)]
    if predictor:
        tags[317] = (3, [2])
    if deflate:
        parts = [zlib.compress(part) for part in parts]
    if reversed_bits:
        tags[266] = (3, [2])
        turned = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
        parts = [part.translate(turned) for part in parts]
    return tiff(tags, strips=[parts], big=big)


def tiffs() -> Iterator[Kind]:
    for bits, white, big, deflate, turned in itertools.product(
        (1, 2, 4, 8, 12, 16), (False, True), (False, True), (False, True), (False, True)
    ):
        values = ramp(1, bits)
        shows = rgb(eight((1 << bits) - 1 - values if white else values, bits))
        data = of_samples(values, bits, 0 if white else 1, big=big, deflate=deflate, reversed_bits=turned)
        if turned and bits > 8:
            # Of samples that are no bytes, the order of bits is everybody's own.
            continue
        name = f"grey {bits} {'white' if white else 'black'} {'MM' if big else 'II'}"
        name += (" deflate" if deflate else "") + (" reversed" if turned else "")
        yield Kind(name, data, shows, elsewhere=not (turned or (white and bits in (2, 4, 12))))
    for bits in (1, 2, 4, 8):
        values = ramp(1, bits)
        table = (np.arange(3 << bits).reshape(3, -1) * 7919 + 40) & 0xFF
        map_ = {320: (3, [int(value) * 257 for value in table.ravel()])}
        shows = table.T[values[..., 0]].astype(np.uint8)
        for big, deflate in itertools.product((False, True), repeat=2):
            data = of_samples(values, bits, 3, big=big, deflate=deflate, more=map_)
            yield Kind(f"palette {bits} {'MM' if big else 'II'}{' deflate' if deflate else ''}", data, shows)
    for bits, big, planes, deflate, tiled in itertools.product((8, 16), *[(False, True)] * 4):
        words = f"{bits} {'MM' if big else 'II'}{' planes' if planes else ''}"
        words += (" deflate" if deflate else "") + (" tiles" if tiled else "")
        layout = {"big": big, "planes": planes, "deflate": deflate, "tiled": tiled}
        values = ramp(3, bits)
        yield Kind(f"RGB {words}", of_samples(values, bits, 2, **layout), eight(values, bits))
        values = ramp(4, bits)
        colours, alpha = eight(values[..., :3], bits), eight(values[..., 3:], bits)
        for extra, shows in ((2, on_white(colours, alpha)), (0, colours)):
            data = of_samples(values, bits, 2, more={338: (3, [extra])}, **layout)
            yield Kind(f"RGB and {extra} {words}", data, shows, elsewhere=extra > 0)
        times = values.astype(np.uint32)
        times[..., :3] = times[..., :3] * times[..., 3:] // ((1 << bits) - 1)
        over = eight(times[..., :3], bits).astype(int) + 255 - alpha
        data = of_samples(times.astype(np.uint16), bits, 2, more={338: (3, [1])}, **layout)
        yield Kind(f"RGB and 1 {words}", data, over.clip(0, 255).astype(np.uint8), apart=3)
        inks = eight(values, bits).astype(int)
        shows = ((255 - inks[..., :3]) * (255 - inks[..., 3:]) / 255).round().astype(np.uint8)
        yield Kind(f"CMYK {words}", of_samples(values, bits, 5, **layout), shows, apart=2)
        values = ramp(2, bits)
        grey, alpha = rgb(eight(values[..., :1], bits)), eight(values[..., 1:], bits)
        for extra, shows in ((2, on_white(grey, alpha)), (0, grey)):
            data = of_samples(values, bits, 1, more={338: (3, [extra])}, **layout)
            yield Kind(f"grey and {extra} {words}", data, shows, elsewhere=extra > 0 and not planes)
        times = values.astype(np.uint32)
        times[..., :1] = times[..., :1] * times[..., 1:] // ((1 << bits) - 1)
        over = rgb(eight(times[..., :1], bits)).astype(int) + 255 - alpha
        data = of_samples(times.astype(np.uint16), bits, 1, more={338: (3, [1])}, **layout)
        shows = over.clip(0, 255).astype(np.uint8)
        yield Kind(f"grey and 1 {words}", data, shows, apart=3, elsewhere=not planes)
    for bits, big in itertools.product((8, 16), (False, True)):
        words, layout = f"{bits} {'MM' if big else 'II'} predictor", {"deflate": True, "predictor": True}
        values = ramp(3, bits)
        for planes in (False, True):
            data = of_samples(values, bits, 2, big=big, planes=planes, **layout)
            yield Kind(f"RGB {words}{' planes' if planes else ''}", data, eight(values, bits))
        values = ramp(2, bits)
        shows = on_white(rgb(eight(values[..., :1], bits)), eight(values[..., 1:], bits))
        yield Kind(f"grey and 2 {words}", of_samples(values, bits, 1, big=big, **layout), shows)
    for turn in range(1, 9):
        values = ramp(3, 8)
        data = of_samples(values, 8, 2, more={274: (3, [turn])})
        yield Kind(f"turned {turn}", data, upright(values.astype(np.uint8), turn))
    grey = np.repeat(np.arange(HEIGHT)[:, None] * 18, WIDTH, axis=1).astype(np.uint16)[..., None]
    neutral = np.concatenate([grey, np.zeros_like(grey), np.zeros_like(grey)], axis=2)
    yield Kind("Lab, neutral", of_samples(neutral, 8, 8), rgb(_of_lightness(grey)), apart=3)
    for samples, bits, photometric in ((1, 16, 1), (1, 8, 1), (3, 16, 2), (3, 8, 2)):
        data = of_samples(ramp(samples, bits), bits, photometric, more={339: (3, [2] * samples)})
        yield Kind(f"signed {samples} x {bits}", data, None, elsewhere=False)
    for bits in (2, 4, 10, 12, 14):
        values = ramp(3, bits)
        yield Kind(f"RGB {bits}", of_samples(values, bits, 2), eight(values, bits))
    for bits in (2, 4):
        values = ramp(4, bits)
        shows = on_white(eight(values[..., :3], bits), eight(values[..., 3:], bits))
        yield Kind(f"RGB and 2 {bits}", of_samples(values, bits, 2, more={338: (3, [2])}), shows)
    for bits in (8, 16):
        inks = ramp(5, bits)
        found = eight(inks[..., :4], bits).astype(int)
        shows = ((255 - found[..., :3]) * (255 - found[..., 3:]) / 255).round().astype(np.uint8)
        shows = on_white(shows, eight(inks[..., 4:], bits))
        data = of_samples(inks, bits, 5, more={338: (3, [2])})
        yield Kind(f"CMYK and 2 {bits}", data, shows, apart=2, elsewhere=False)
    for bits in (4, 8):
        # As some scanners write it: numbers of 8 bits where they should have 16.
        values = ramp(1, bits)
        table = (np.arange(3 << bits).reshape(3, -1) * 7919 + 40) & 0xFF
        data = of_samples(values, bits, 3, more={320: (3, [int(value) for value in table.ravel()])})
        yield Kind(f"palette {bits} narrow", data, table.T[values[..., 0]].astype(np.uint8))
    values = ramp(1, 16)
    table = (np.arange(3 << 16).reshape(3, -1) * 7919 + 40) & 0xFFFF
    data = of_samples(values, 16, 3, more={320: (3, [int(value) for value in table.ravel()])})
    yield Kind("palette 16", data, (table.T[values[..., 0]] >> 8).astype(np.uint8), elsewhere=False)
    small = of_samples(ramp(1, 8), 8, 1)
    yield Kind("BigTIFF", b"II+\0\x08\0\0\0" + bytes(64) + small, None, elsewhere=False)


def _of_lightness(lightness: npt.NDArray[np.integer]) -> Pixels:
    """sRGB of L* in 8 bits without a colour."""
    level = lightness * 100 / 255
    linear = np.where(level > 8, ((level + 16) / 116) ** 3, level / 903.3)
    encoded = np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)
    return np.round(encoded * 255).astype(np.uint8)


def upright(values: Pixels, turn: int) -> Pixels:
    """Turned as EXIF orientation 1 to 8 asks for."""
    steps = {
        1: values,
        2: values[:, ::-1],
        3: values[::-1, ::-1],
        4: values[::-1],
        5: values.transpose(1, 0, 2),
        6: np.rot90(values, -1),
        7: values.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(values, 1),
    }
    return np.ascontiguousarray(steps[turn])


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(values: Samples, bits: int, colour: int, *chunks: bytes, adam7: bool = False) -> bytes:
    """Of colour type 0, 2, 3, 4 or 6."""
    height, width = values.shape[:2]
    passes = [(0, 0, 1, 1)]
    if adam7:
        passes = [
            (0, 0, 8, 8),
            (0, 4, 8, 8),
            (4, 0, 8, 4),
            (0, 2, 4, 4),
            (2, 0, 4, 2),
            (0, 1, 2, 2),
            (1, 0, 2, 1),
        ]
    rows = b""
    for top, left, down, across in passes:
        part = values[top::down, left::across]
        if part.size:
            rows += b"".join(b"\0" + packed(row[None], bits) for row in part)
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, int(adam7))
    body = b"".join((chunk(b"IHDR", head), *chunks, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + body


def pngs() -> Iterator[Kind]:
    for colour, samples, depths in (
        (0, 1, (1, 2, 4, 8, 16)),
        (2, 3, (8, 16)),
        (4, 2, (8, 16)),
        (6, 4, (8, 16)),
    ):
        for bits, adam7 in itertools.product(depths, (False, True)):
            values = ramp(samples, bits)
            shown = eight(values, bits)
            words = f"{colour} {bits}{' Adam7' if adam7 else ''}"
            if colour in (4, 6):
                shows = on_white(rgb(shown[..., :-1]), shown[..., -1:])
                yield Kind(f"PNG {words}", png(values, bits, colour, adam7=adam7), shows)
                continue
            yield Kind(f"PNG {words}", png(values, bits, colour, adam7=adam7), rgb(shown))
            # Of 16 bits one that differs in its low byte alone is another colour.
            values = values.copy()
            values[1, 1] = values[1, 2] = (1 << bits) - 1 if bits == 1 else (1 << bits) - 2
            if bits == 16 and samples == 1:
                values[1, 3] = values[1, 2] ^ 1
            clear = values[1, 2]
            shows = rgb(eight(values, bits)).copy()
            shows[(values == clear).all(axis=2)] = 255
            transparent = chunk(b"tRNS", b"".join(struct.pack(">H", int(value)) for value in clear))
            yield Kind(f"PNG {words} tRNS", png(values, bits, colour, transparent, adam7=adam7), shows)
    for bits, adam7 in itertools.product((1, 2, 4, 8), (False, True)):
        values = ramp(1, bits)
        table = ((np.arange(3 << bits).reshape(-1, 3) * 7919 + 40) & 0xFF).astype(np.uint8)
        alpha = ((np.arange(1 << bits) * 97 + 30) & 0xFF).astype(np.uint8)
        plte, trns = chunk(b"PLTE", table.tobytes()), chunk(b"tRNS", alpha.tobytes())
        shows = table[values[..., 0]]
        words = f"PNG 3 {bits}{' Adam7' if adam7 else ''}"
        yield Kind(words, png(values, bits, 3, plte, adam7=adam7), shows)
        clear = on_white(shows, alpha[values[..., 0]][..., None])
        yield Kind(f"{words} tRNS", png(values, bits, 3, plte, trns, adam7=adam7), clear)
        short = on_white(shows, np.where(values < 1, alpha[0], 255))
        yield Kind(
            f"{words} short tRNS", png(values, bits, 3, plte, chunk(b"tRNS", alpha[:1].tobytes())), short
        )
    values = ramp(3, 8)
    xmp = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>'
    yield Kind("PNG turned in XMP alone", png(values, 8, 2, chunk(b"iTXt", xmp)), values.astype(np.uint8))
    for turn in range(1, 9):
        exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">HHI", turn, 0, 0)
        shows = upright(values.astype(np.uint8), turn)
        yield Kind(f"PNG turned {turn}", png(values, 8, 2, chunk(b"eXIf", exif)), shows, elsewhere=False)


def gif(
    frame: tuple[int, int, int, int], clear: int | None, *, local: bool = False, interlaced: bool = False
) -> tuple[bytes, Pixels]:
    """One frame (left, top, width, height) on a screen, and what it shows."""
    left, top, width, height = frame
    table = ((np.arange(12).reshape(4, 3) * 67 + 20) & 0xFF).astype(np.uint8)
    values = (np.arange(width * height) * 7 % 4).reshape(height, width)
    shows = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    shown = table[values]
    if clear is not None:
        shown = np.where((values == clear)[..., None], np.uint8(255), shown)
    shows[top : top + height, left : left + width] = shown
    out = b"GIF89a" + struct.pack("<HHBBB", WIDTH, HEIGHT, 0 if local else 0x81, 1, 0)
    out += b"" if local else table.tobytes()
    if clear is not None:
        out += b"\x21\xf9\x04\x01\0\0" + bytes([clear, 0])
    out += b"\x2c" + struct.pack("<HHHHB", left, top, width, height, (0x81 if local else 0) | 64 * interlaced)
    out += table.tobytes() if local else b""
    if interlaced:
        order = [*range(0, height, 8), *range(4, height, 8), *range(2, height, 4), *range(1, height, 2)]
        values = values[order]
    # Codes of three bits, and a clear code often enough that they never become longer.
    codes: list[int] = []
    for at, value in enumerate(values.ravel()):
        codes += [4] * (at % 2 == 0) + [int(value)]
    bits = 0
    for at, code in enumerate([*codes, 5]):
        bits |= code << 3 * at
    body = bits.to_bytes(3 * (len(codes) + 1) // 8 + 1, "little")
    out += b"\x02" + b"".join(
        bytes([len(body[at : at + 255])]) + body[at : at + 255] for at in range(0, len(body), 255)
    )
    return out + b"\0\x3b", shows


def gifs() -> Iterator[Kind]:
    whole, part = (0, 0, WIDTH, HEIGHT), (3, 2, 9, 8)
    for frame, clear, local, interlaced in itertools.product(
        (whole, part), (None, 0, 2), (False, True), (False, True)
    ):
        data, shows = gif(frame, clear, local=local, interlaced=interlaced)
        words = "part" if frame is part else "whole"
        yield Kind(f"GIF {words} clear {clear} {'local' if local else ''}{interlaced}", data, shows, apart=0)


def webps() -> Iterator[Kind]:
    picture = Image.fromarray(ramp(3, 8).astype(np.uint8))
    small = Image.new("RGB", (8, 6), (200, 30, 60))

    def saved(image: Image.Image) -> bytes:
        file = io.BytesIO()
        image.save(file, "WEBP", lossless=True, exact=True)
        return file.getvalue()

    def riff(*parts: bytes) -> bytes:
        body = b"WEBP" + b"".join(parts)
        return b"RIFF" + struct.pack("<I", len(body)) + body

    def part(name: bytes, body: bytes) -> bytes:
        return name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)

    yield Kind("WebP", saved(picture), np.asarray(picture))
    values = ramp(4, 8).astype(np.uint8)
    yield Kind("WebP alpha", saved(Image.fromarray(values)), on_white(values[..., :3], values[..., 3:]))
    size = (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")
    place = (2).to_bytes(3, "little") + (2).to_bytes(3, "little")
    shape = (7).to_bytes(3, "little") + (5).to_bytes(3, "little")
    frame = part(b"ANMF", place + shape + (100).to_bytes(3, "little") + b"\x02" + saved(small)[12:])
    shows = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    shows[4:10, 4:12] = (200, 30, 60)
    for flags, words in ((0x02, "opaque"), (0x12, "alpha")):
        head = part(b"VP8X", bytes([flags, 0, 0, 0]) + size)
        data = riff(head, part(b"ANIM", b"\0\0\0\0\0\0"), frame, frame)
        yield Kind(f"WebP part {words}", data, shows, elsewhere=False)


def bmps() -> Iterator[Kind]:
    def file(info: bytes, table: bytes, body: bytes) -> bytes:
        place = 14 + len(info) + len(table)
        return b"BM" + struct.pack("<IHHI", place + len(body), 0, 0, place) + info + table + body

    def info(bits: int, how: int, *, down: bool = False, colours: int = 0, more: bytes = b"") -> bytes:
        head = struct.pack(
            "<iiHHIIiiII", WIDTH, -HEIGHT if down else HEIGHT, 1, bits, how, 0, 0, 0, colours, 0
        )
        return struct.pack("<I", 4 + len(head) + len(more)) + head + more

    def rows(lines: Sequence[bytes], down: bool = False) -> bytes:
        lines = [line + bytes(-len(line) % 4) for line in lines]
        return b"".join(lines if down else lines[::-1])

    for bits, down in itertools.product((1, 4, 8), (False, True)):
        values = ramp(1, bits)
        table = ((np.arange(3 << bits).reshape(-1, 3) * 7919 + 40) & 0xFF).astype(np.uint8)
        quads = b"".join(bytes([*colour[::-1], 0]) for colour in table)
        lines = [packed(row[None], bits) for row in values]
        data = file(info(bits, 0, down=down, colours=1 << bits), quads, rows(lines, down))
        yield Kind(f"BMP {bits}{' down' if down else ''}", data, table[values[..., 0]])
    values = ramp(3, 8)
    for down in (False, True):
        body = rows([row[:, ::-1].astype(np.uint8).tobytes() for row in values], down)
        yield Kind(
            f"BMP 24{' down' if down else ''}",
            file(info(24, 0, down=down), b"", body),
            values.astype(np.uint8),
        )
    four = np.concatenate([values[..., ::-1], ramp(1, 8)], axis=2).astype(np.uint8)
    body = rows([row.tobytes() for row in four])
    yield Kind("BMP 32", file(info(32, 0), b"", body), values.astype(np.uint8), elsewhere=False)
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    fourth = info(32, 3, more=masks + b"BGRs" + bytes(48))
    shows = on_white(values.astype(np.uint8), four[..., 3:])
    yield Kind("BMP 32 alpha", file(fourth, b"", rows([row.tobytes() for row in four])), shows)
    for name, how, masks_, shifts, widths in (
        ("555", 0, b"", (10, 5, 0), (5, 5, 5)),
        ("565", 3, struct.pack("<III", 0xF800, 0x7E0, 0x1F), (11, 5, 0), (5, 6, 5)),
    ):
        fine = ramp(3, 8)
        parts = [fine[..., at] >> (8 - wide) for at, wide in enumerate(widths)]
        words = sum(part.astype(np.uint16) << shift for part, shift in zip(parts, shifts, strict=True))
        shows = np.stack([eight(part, wide) for part, wide in zip(parts, widths, strict=True)], axis=2)
        body = rows([row.astype("<u2").tobytes() for row in words])
        yield Kind(f"BMP {name}", file(info(16, how), masks_, body), shows, apart=7)
    for bits, widths in ((16, (5, 5, 5, 1)), (16, (4, 4, 4, 4)), (16, (4, 4, 4, 0)), (32, (10, 10, 10, 2))):
        fine = ramp(4, 16)
        parts = [fine[..., at].astype(np.uint32) >> (16 - wide) for at, wide in enumerate(widths)]
        shifts = [sum(widths[at + 1 : 3]) for at in range(3)] + [sum(widths[:3])]
        words = sum(part << shift for part, shift in zip(parts, shifts, strict=True))
        own = [((1 << wide) - 1) << shift for wide, shift in zip(widths, shifts, strict=True)]
        shows = np.stack([eight(parts[at], widths[at]) for at in range(3)], axis=2)
        if widths[3]:
            shows = on_white(shows, eight(parts[3], widths[3])[..., None])
        for down in (False, True):
            body = rows([row.astype(f"<u{bits // 8}").tobytes() for row in words], down)
            head = info(bits, 3, down=down, more=struct.pack("<IIII", *own) + b"BGRs" + bytes(48))
            name = f"BMP {' '.join(map(str, widths))}{' down' if down else ''}"
            yield Kind(name, file(head, b"", body), shows, apart=2, elsewhere=False)
    table = ((np.arange(3 << 8).reshape(-1, 3) * 7919 + 40) & 0xFF).astype(np.uint8)
    quads = b"".join(bytes([*colour[::-1], 0]) for colour in table)
    columns = np.arange(HEIGHT) * 5 + 1
    body = b"".join(bytes([WIDTH, int(value), 0, 0]) for value in columns) + b"\0\1"
    shows = np.repeat(table[columns][::-1, None], WIDTH, axis=1)
    yield Kind("BMP RLE8", file(info(8, 1, colours=256), quads, body), shows)
    few = table[:16]
    columns = np.arange(HEIGHT)
    body = b"".join(bytes([WIDTH, int(value) * 17, 0, 0]) for value in columns) + b"\0\1"
    shows = np.repeat(few[columns][::-1, None], WIDTH, axis=1)
    yield Kind("BMP RLE4", file(info(4, 2, colours=16), quads[:64], body), shows)


def jpegs() -> Iterator[Kind]:
    smooth = Image.fromarray(ramp(3, 8).astype(np.uint8)[:3, :4]).resize((WIDTH, HEIGHT))

    def saved(image: Image.Image, **options: object) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=100, subsampling=0, **options)
        return file.getvalue()

    pixels = np.asarray(smooth)
    yield Kind("JPEG", saved(smooth), pixels, apart=4)
    yield Kind("JPEG RGB", saved(smooth, keep_rgb=True), pixels, apart=4)
    grey = smooth.convert("L")
    yield Kind("JPEG grey", saved(grey), rgb(np.asarray(grey)[..., None]), apart=4)
    inks = [Image.fromarray(255 - pixels[..., at]) for at in range(3)]
    cmyk = Image.merge("CMYK", [*inks, Image.new("L", smooth.size, 0)])
    yield Kind("JPEG CMYK", saved(cmyk), pixels, apart=6)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield Kind(f"JPEG turned {turn}", saved(smooth, exif=exif), upright(pixels, turn), apart=4)
    plain = saved(smooth)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    marked = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(xmp) + 2) + xmp + plain[2:]
    yield Kind("JPEG turned in XMP alone", marked, pixels, apart=4)


def kinds() -> list[Kind]:
    return [*tiffs(), *pngs(), *gifs(), *webps(), *bmps(), *jpegs()]
