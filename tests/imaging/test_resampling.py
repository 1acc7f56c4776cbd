"""Images resized by the compiled function have the pixels that Pillow gives them."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tessera import resampling
from tessera.imaging import Picture
from tessera.resampling import REACHES, compiled

SIDE = st.integers(1, 200)
COMPILER = shutil.which((os.environ.get("CC") or "cc").split()[0])


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = compiled()
    assert found is not None or COMPILER is None, "scripts/setup dev builds it, once more where it is gone"
    return found or pytest.skip("there is no C compiler")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Black and white beside levels in between: sums that leave 0 to 255 on both sides."""
    random = np.random.default_rng(seed)
    levels = random.integers(-200, 456, (height, width, 3)).clip(0, 255)
    return Image.fromarray(levels.astype(np.uint8))


def written(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    planes = np.empty((3, size[1], size[0]), np.uint8)
    Picture.of(image, param="x").write(planes, size, resample=resample)
    return planes.transpose(1, 2, 0)


@given(width=SIDE, height=SIDE, wide=SIDE, high=SIDE, resample=st.sampled_from([*REACHES]), seed=SIDE)
def test_every_size(
    library: ctypes.CDLL, width: int, height: int, wide: int, high: int, resample: Image.Resampling, seed: int
) -> None:
    image, size = noise(width, height, seed), (wide, high)
    np.testing.assert_array_equal(written(image, size, resample), np.asarray(image.resize(size, resample)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(((1240, 1754), size) for size in ((224, 224), (896, 1152), (1280, 1800))),
        *(((1, 4000), (1, 7)), ((4000, 1), (7, 1)), ((1, 1), (300, 200)), ((7, 4000), (1, 3999))),
        *(((65_535, 1), (224, 1)), ((65_535, 256), (224, 100)), ((3, 2), (65_535, 256))),
        *(((1, 65_535), (1, 224)), ((256, 65_535), (256, 65_534)), ((60, 90), (60, 9))),
    ],
    ids=str,
)
def test_pages_and_lines(library: ctypes.CDLL, before: tuple[int, int], after: tuple[int, int]) -> None:
    assert library.resizes(*before, *after)
    image = noise(*before)
    for resample in REACHES:
        np.testing.assert_array_equal(
            written(image, after, resample), np.asarray(image.resize(after, resample))
        )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(((0, 5), (5, 5)), ((5, 0), (5, 5)), ((5, 5), (0, 5)), ((5, 5), (5, 0)), ((5, 5), (-1, 5))),
        *(((65_536, 1), (5, 1)), ((5, 1), (65_536, 1)), ((1, 5), (1, 65_536)), ((1, 65_536), (1, 5))),
        *(((4097, 4096), (5, 5)), ((5, 5), (4097, 4096)), ((1, 2**24), (2**24, 1)), ((9, 9), (8, 6))),
        *(((2**32 + 5, 5), (5, 5)), ((5, 5), (2**32 + 5, 5)), ((2**31, 2**31), (2**31, 2**31))),
        ((100, 100), (101, 99)),
    ],
    ids=str,
)
def test_what_it_refuses(library: ctypes.CDLL, before: tuple[int, int], after: tuple[int, int]) -> None:
    """Without a look at memory, of which there is none here for such sizes."""
    assert not library.resizes(*before, *after)
    nothing = np.zeros((1, 1), np.uint32)
    assert not library.resize(nothing, *before, nothing, *after, 2)


def test_memory_of_another_kind_is_not_taken(library: ctypes.CDLL) -> None:
    levels = np.zeros((4, 4), np.uint32)
    for other in (levels.T[::2], levels.astype(np.uint64), levels[0], None, 0):
        with pytest.raises((ctypes.ArgumentError, TypeError)):
            library.resize(other, 2, 2, levels, 2, 2, 1)
    for reach in (-1, 0, 3):
        assert not library.resize(levels, 4, 4, levels.copy(), 4, 4, reach)


def test_what_it_refuses_pillow_resizes() -> None:
    for size in ((101, 99), (40, 97)):
        image = noise(100, 100)
        expected = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(written(image, size), expected)
    image = noise(30, 20)
    expected = np.asarray(image.resize((9, 8), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(written(image, (9, 8), Image.Resampling.LANCZOS), expected)
    with pytest.raises(ValueError, match="must be > 0"):
        written(image, (0, 8))


def test_without_memory_it_says_so(library: ctypes.CDLL) -> None:
    """In a process of its own, which may have few MiB more than it has, and then more."""
    program = (
        "import numpy as np, resource\n"
        "from PIL import Image\n"
        "from tessera.imaging import Picture, load_codecs\n"
        "load_codecs()\n"
        "picture = Picture.of(Image.new('RGB', (4096, 4096)), param='x')\n"
        "planes = np.ones((3, 2048, 2048), 'u1')\n"
        "picture.levels\n"
        "for more in range(1, 180, 6):\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (more << 20), -1))\n"
        "    try:\n"
        "        picture.write(planes, (2048, 2048))\n"
        "        print('done')\n"
        "        break\n"
        "    except MemoryError as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    said = ran.stdout.splitlines()
    assert ran.returncode == 0 and said[-1] == "done", ran.stdout + ran.stderr
    assert "no memory for resizing an image" in said


def part(image: Image.Image) -> bytes:
    """The planes of the middle of what an image is resized to."""
    planes = np.empty((3, 32, 32), np.uint8)
    Picture.of(image, param="x").write(planes, (64, 48), part=(16, 8, 48, 40))
    return planes.tobytes()


def test_without_it_pillow_resizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = [noise(90, 70), noise(20, 120)]
    before = [part(image) for image in images]
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resampling, "_LIBRARY", tmp_path / "gone.so")
    for found in (None, b"", b"no library"):
        if found is not None:
            (tmp_path / "gone.so").write_bytes(found)
        compiled.cache_clear()
        try:
            assert compiled() is None
            assert [part(image) for image in images] == before
        finally:
            compiled.cache_clear()
        (line,) = caplog.messages
        assert re.match(r"images are resized by Pillow, at three times the time: .*gone\.so", line)
        caplog.clear()


def test_another_pillow_resizes_itself(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose filters reach further than those of ``resampling.c``."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resampling, "REACHES", {Image.Resampling.LANCZOS: 2})
    compiled.cache_clear()
    try:
        assert compiled() is None and "it differs from _resampling.abi3.so" in caplog.text
    finally:
        compiled.cache_clear()
