"""Decoders that crash, hang and swell, in real processes."""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.proc import children
from PIL import Image

from tessera.errors import (
    DecodeFailed,
    EngineFailed,
    InvalidInput,
    PayloadTooLarge,
    RequestError,
    Unavailable,
    UnsupportedMedia,
)
from tessera.image_plan import ImagePlan
from tessera.imaging import FORMATS
from tessera.models import open_model
from tessera.models.base import Pixels, VisionSpec
from tessera.sandbox.memory import mapped, shared
from tessera.worker.decoding import (
    Decoded,
    Limits,
    ProcessDecoder,
    ThreadDecoder,
    decode_answer,
    empty_in,
    encode,
    fits,
    memory_bytes,
    read,
    write,
)
from tessera_tools.random_checkpoint.checkpoint import families
from tests.families.dual_encoder import SIZE, DualEncoder, install, make_checkpoint, pixels_of
from tests.imaging.kinds import of_samples, ramp
from tests.waiting import wait_until

pytestmark = pytest.mark.starts

MAX_PIXELS = 1_000_000

# Those that take images: the others' decoders have nothing to do.
FAMILIES = [name for name in families() if "vl" in name or name.startswith("col")]


class Decoding:
    """A process decoder, why it lost processes, and its children."""

    def __init__(
        self, path: Path, *, count: int = 2, seconds: float = 5.0, vision: VisionSpec = DualEncoder.vision
    ) -> None:
        self.lost: Counter[str] = Counter()
        limits = Limits(seconds=seconds, memory_bytes=1 << 29, max_pixels=MAX_PIXELS)
        before = set(children(os.getpid()))
        self.decoder = ProcessDecoder(
            path, {}, vision, limits, count=count, lost=lambda why: self.lost.update([why])
        )
        (self.server,) = set(children(os.getpid())) - before

    def pixels(self, data: bytes) -> np.ndarray:
        return self.decoder.decode(data, param="input[0]").values


def alive(pids: Iterable[int]) -> set[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    return {pid for pid in pids if state(pid) not in "ZX"}


Make = Callable[..., Decoding]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Decoders of the second family; afterwards no process and no descriptor is left."""
    monkeypatch.setenv("PYTHONPATH", install(tmp_path / "site"))
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1)
    # What earlier tests left is not to be closed in between.
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    made: list[Decoding] = []

    def make(**options: float) -> Decoding:
        made.append(Decoding(checkpoint, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for decoding in made:
        family = {decoding.server, *children(decoding.server)}
        decoding.decoder.close()
        wait_until(lambda: not alive(family), said=lambda: alive(family))  # noqa: B023
    # Other tests' threads may have closed one of theirs meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_pixels_are_those_of_a_thread(checkpoint: Path, photos: dict[str, bytes]) -> None:
    model = open_model(checkpoint)
    assert model.vision is not None
    limits = Limits(seconds=60, memory_bytes=1 << 30, max_pixels=MAX_PIXELS)
    processes = ProcessDecoder(checkpoint, {}, model.vision, limits, count=2)
    threads = ThreadDecoder(model, max_pixels=MAX_PIXELS)
    try:
        with ThreadPoolExecutor(2) as pool:
            for data in photos.values():
                found = list(pool.map(lambda _, data=data: processes.decode(data, param="x"), range(3)))
                expected = threads.decode(data, param="x")
                assert expected.plan.units == len(expected.values) > 1
                for pixels in found:
                    assert pixels.plan == expected.plan
                    assert pixels.values.dtype == np.uint8
                    np.testing.assert_array_equal(pixels.values, expected.values)
                    assert pixels.values.flags.writeable and pixels.values.flags.owndata
        for decoder in (processes, threads):
            with pytest.raises(UnsupportedMedia, match=r"input\[3\]") as raised:
                decoder.decode(b"no image", param="input[3]")
            assert raised.value.param == "input[3]"
            with pytest.raises(InvalidInput):
                decoder.decode(photos["china"][:30_000], param="x")
    finally:
        processes.close()


@functools.cache
def in_every_format() -> dict[str, bytes]:
    """Pictures that take different ways through Pillow, some large enough for threads, tables or tiles."""
    random = np.random.default_rng(1)
    coarse = random.integers(0, 256, (40, 50, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((530, 200))
    turned = Image.Exif()
    turned[0x0112] = 6
    found: dict[str, bytes] = {}

    def add(name: str, kind: str, image: Image.Image = picture, **options: object) -> None:
        file = io.BytesIO()
        image.save(file, kind, **options)
        found[f"{name} {kind}"] = file.getvalue()

    for kind in FORMATS:
        add("plain", kind)
        add("grey", kind, picture.convert("L"))
        if kind not in ("JPEG", "WEBP"):
            add("palette", kind, picture.quantize())
        add("small", kind, picture.resize((5, 3)))
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        add("turned", kind, exif=turned)
    for kind in ("PNG", "WEBP", "TIFF"):
        add("transparent", kind, picture.convert("RGBA"))
    for kind in ("JPEG", "TIFF"):
        add("CMYK", kind, picture.convert("CMYK"))
    for kind in ("GIF", "WEBP", "PNG", "MPO"):
        add("several", kind, save_all=True, append_images=[picture.rotate(90)])
    add("progressive", "JPEG", progressive=True)
    add("lossless", "WEBP", lossless=True)
    add("16 bits", "PNG", Image.fromarray(random.integers(0, 1 << 16, (60, 50), dtype=np.uint16)))
    for compression in ("tiff_lzw", "jpeg", "tiff_adobe_deflate", "packbits"):
        add(compression, "TIFF", compression=compression)
    add("fax", "TIFF", picture.convert("1"), compression="group4")
    add("LAB", "TIFF", Image.merge("LAB", picture.split()))
    found["planes TIFF"] = of_samples(ramp(3, 16), 16, 2, planes=True)
    found["deflated planes TIFF"] = of_samples(ramp(3, 16), 16, 2, planes=True, deflate=True)
    return found


def outcome(decoder: ThreadDecoder | ProcessDecoder, data: bytes) -> Pixels | RequestError:
    # Warnings are errors in tests, and not in decoding processes.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return decoder.decode(data, param="picture")
        except RequestError as error:
            return error


@pytest.mark.confines
@pytest.mark.parametrize("family", FAMILIES)
def test_a_confined_decoder_decodes_every_format(family: str, tmp_path: Path) -> None:
    """A decoder can open no file any more, so what decoding imports or opens late would show here."""
    for name, content in families()[family].load().tiny.files("float32", 0).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    model = open_model(tmp_path)
    assert model.vision is not None
    limits = Limits(seconds=60, memory_bytes=1 << 30, max_pixels=MAX_PIXELS)
    processes = ProcessDecoder(tmp_path, {}, model.vision, limits, count=1)
    threads = ThreadDecoder(model, max_pixels=MAX_PIXELS)
    try:
        for name, data in in_every_format().items():
            for file in (data, data[: len(data) * 2 // 3]):
                expected, found = outcome(threads, file), outcome(processes, file)
                assert type(found) is type(expected), (name, expected, found)
                if isinstance(found, Pixels) and isinstance(expected, Pixels):
                    assert found.plan == expected.plan
                    np.testing.assert_array_equal(found.values, expected.values, err_msg=name)
                else:
                    assert str(found) == str(expected) and file is not data, name
    finally:
        processes.close()


@pytest.mark.parametrize("ending", [b"CRASH", b"SPIN", b"SLEEP"])
def test_one_image_fails_and_the_next_is_decoded(make: Make, photos: dict[str, bytes], ending: bytes) -> None:
    decoding = make(count=1, seconds=0.3)
    good = photos["flower"]
    for losses in (1, 2):
        with pytest.raises(DecodeFailed, match=r"input\[0\]") as raised:
            decoding.pixels(good + ending)
        assert raised.value.param == "input[0]"
        np.testing.assert_array_equal(decoding.pixels(good), pixels_of(good))
        assert sum(decoding.lost.values()) == losses
    assert set(decoding.lost) == {"crash" if ending == b"CRASH" else "timeout"}
    wait_until(lambda: len(alive(children(decoding.server))) == 1)


def test_a_file_is_decoded_whether_the_shared_memory_has_room_for_it_or_not(
    make: Make, photos: dict[str, bytes]
) -> None:
    decoding, room = make(count=1), memory_bytes(DualEncoder.vision)
    file = io.BytesIO()
    Image.open(io.BytesIO(photos["china"])).resize((24, 24)).save(file, "JPEG")
    # Nothing behind the end of a JPEG belongs to the picture.
    fitting, larger = [decoding.pixels(file.getvalue().ljust(size, b"\0")) for size in (room, room + 1)]
    np.testing.assert_array_equal(fitting, larger)
    assert not decoding.lost


def test_the_others_go_on(make: Make, photos: dict[str, bytes]) -> None:
    decoding = make(count=2, seconds=0.3)
    good, expected = photos["flower"], pixels_of(photos["flower"])
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(decoding.pixels, good + b"SLEEP")
        for _ in range(20):
            np.testing.assert_array_equal(pool.submit(decoding.pixels, good).result(), expected)
        with pytest.raises(DecodeFailed, match=r"0\.3 seconds of processor time"):
            hanging.result()
    assert decoding.lost == {"timeout": 1}


def test_memory_is_bounded_and_nothing_is_lost_over_it(make: Make, photos: dict[str, bytes]) -> None:
    decoding = make(count=1)
    with pytest.raises(PayloadTooLarge, match="512 MiB"):
        decoding.pixels(photos["flower"] + b"SWELL")
    assert not decoding.lost


def test_a_bug_of_the_family_is_told(make: Make, photos: dict[str, bytes]) -> None:
    decoding = make(count=1)
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        decoding.pixels(photos["flower"] + b"RAISE")
    assert not decoding.lost


def test_pixels_of_a_shape_that_the_family_has_not_are_not_believed(
    make: Make, photos: dict[str, bytes]
) -> None:
    other = replace(DualEncoder.vision, unit_shape=(3, SIZE, SIZE + 1))
    decoding = make(count=1, vision=other)
    with pytest.raises(DecodeFailed, match="crashed"):
        decoding.pixels(photos["flower"])
    assert decoding.lost == {"crash": 1}


def test_more_pixels_than_there_is_memory_for_are_told(make: Make, photos: dict[str, bytes]) -> None:
    decoding = make(count=1, vision=replace(DualEncoder.vision, unit_shape=(3, 2, 2)))
    with pytest.raises(EngineFailed):
        decoding.pixels(photos["flower"])
    assert not decoding.lost


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((2, 3, 4), ImagePlan(units=2, rows=8)),
        ((3, 3, 4), ImagePlan(units=3, rows=8)),
        ((0, 3, 4), ImagePlan(units=0, rows=8)),
        ((-1, 3, 4), ImagePlan(units=-1, rows=8)),
        ((1, 4, 3), ImagePlan(units=1, rows=4)),
        ((1, 12), ImagePlan(units=1, rows=4)),
        ((1, 3, 4, 1), ImagePlan(units=1, rows=4)),
        ((), ImagePlan(units=1, rows=4)),
        ((1, 3, 4), ImagePlan(units=2, rows=4)),
        ((1, 3, 4), ImagePlan(units=1, rows=0)),
        ((1, 3, 4), ImagePlan(units=1, rows=9)),
    ],
)
def test_only_what_an_image_can_have_become_fits(shape: tuple[int, ...], plan: ImagePlan) -> None:
    vision = VisionSpec(row_width=5, unit_shape=(3, 4), largest=ImagePlan(units=2, rows=8))
    right = Decoded(shape=(2, 3, 4), dtype="float32", plan=ImagePlan(units=2, rows=8))
    assert fits(right, vision)
    assert fits(Decoded(shape=shape, dtype="uint8", plan=plan), vision) == (shape == right.shape)


def test_float_pixels_come_as_they_are() -> None:
    """With the plan's grid, through the message and the memory."""
    vision = VisionSpec(row_width=5, unit_shape=(3, 4), largest=ImagePlan(units=6, rows=8))
    memory = mapped(shared(memory_bytes(vision)))
    values = np.random.default_rng(1).standard_normal((6, 3, 4)).astype(np.float32)
    made = Pixels(values=values, plan=ImagePlan(units=6, rows=8, grid=(1, 2, 3)))
    told = decode_answer.decode(encode(write(memory, made)))
    assert isinstance(told, Decoded) and fits(told, vision)
    found = read(memory, told)
    assert found.plan == made.plan and found.values.dtype == np.float32
    np.testing.assert_array_equal(found.values, values)
    memory[:] = 0
    np.testing.assert_array_equal(found.values, values)


def test_pixels_are_told_in_their_own_order_wherever_they_were_made() -> None:
    vision = VisionSpec(row_width=5, unit_shape=(3, 4), largest=ImagePlan(units=2, rows=8))
    memory = mapped(shared(memory_bytes(vision)))
    made = empty_in(memory)((2, 3, 4), np.uint8)
    made[...] = np.arange(24, dtype=np.uint8).reshape(made.shape)
    plan = ImagePlan(units=2, rows=8)
    for values in (made, made.reshape(2, 4, 3).transpose(0, 2, 1)):
        expected = values.copy()
        told = write(memory, Pixels(values=values, plan=plan))
        np.testing.assert_array_equal(read(memory, told).values, expected)
    with pytest.raises(ValueError, match="reshape"):
        empty_in(memory)((1000, 3, 4), np.uint8)


def test_limits_are_in_force(make: Make, photos: dict[str, bytes]) -> None:
    decoding = make(count=1)
    decoding.pixels(photos["flower"])
    (child,) = children(decoding.server)
    rows = Path(f"/proc/{child}/limits").read_text().splitlines()[1:]
    limits = {row[:26].strip(): row[26:46].strip() for row in rows}
    assert limits["Max file size"] == "0"
    assert limits["Max core file size"] == "0"
    assert limits["Max open files"] == "64"
    assert 1 << 29 < int(limits["Max address space"]) < 1 << 33
    status = Path(f"/proc/{child}/status").read_text()
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status


def test_a_decoder_sees_no_keys_and_no_descriptor_but_its_own(
    make: Make, photos: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_API_KEYS", "sk-secret somebody")
    with open(__file__) as ours:
        os.set_inheritable(ours.fileno(), True)
        decoding = make(count=2)
        for _ in range(2):
            # One image in each, after which it has closed what it does not need.
            decoding.pixels(photos["flower"])
        for pid in (decoding.server, *children(decoding.server)):
            assert b"sk-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        for pid in children(decoding.server):
            opened = {
                int(name): os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")
            }
            assert opened[0] == os.devnull
            channel, memory = (opened[number] for number in sorted(opened) if number > 2)
            assert channel.startswith("socket:") and memory.startswith("/memfd:tessera-results")


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(
    make: Make, photos: dict[str, bytes]
) -> None:
    decoding = make(count=1, seconds=0.3)
    good = photos["flower"]
    control = decoding.decoder._pool._server._control
    assert control is not None
    patience = control.gettimeout()
    control.settimeout(0.5)
    os.kill(decoding.server, signal.SIGSTOP)
    try:
        with pytest.raises(DecodeFailed):
            decoding.pixels(good + b"CRASH")
        with pytest.raises(Unavailable):
            decoding.pixels(good)
    finally:
        os.kill(decoding.server, signal.SIGCONT)
        control.settimeout(patience)
    with pytest.raises(DecodeFailed):
        decoding.pixels(good + b"SLEEP")
    # What was killed is what slept.
    np.testing.assert_array_equal(decoding.pixels(good), pixels_of(good))
    wait_until(lambda: len(alive(children(decoding.server))) == 1)


def test_a_killed_fork_server_is_started_again(make: Make, photos: dict[str, bytes]) -> None:
    decoding = make(count=1)
    others = set(children(os.getpid()))
    family = {decoding.server, *children(decoding.server)}
    os.kill(decoding.server, signal.SIGKILL)
    # Decoders do not outlive their fork server.
    wait_until(lambda: not alive(family))
    good = photos["flower"]
    np.testing.assert_array_equal(decoding.pixels(good), pixels_of(good))
    (decoding.server,) = set(children(os.getpid())) - others
