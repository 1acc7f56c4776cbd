"""``python -m benchmarks.decoding``: images decoded and cut for each second, on threads and in processes.

With ``--busy`` another thread of this process never waits, as an event loop under load: whoever gives up the
interpreter's lock has to get it back from there.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import usage
from tessera.engine.process import tune_interpreter
from tessera.models import Model, open_model
from tessera.worker.decoding import Decoder, Limits, ProcessDecoder, ThreadDecoder
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tessera_tools.table import number, table

SIZES = {"tile": (512, 512), "page": (1275, 1650), "photo": (4000, 3000)}
MAX_PIXELS = 100_000_000


def picture(size: tuple[int, int]) -> bytes:
    """A JPEG with about the detail of a photograph."""
    width, height = size
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def rate(decoder: Decoder, data: bytes, *, threads: int, seconds: float) -> float:
    """Images for each second."""

    def work(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            decoder.decode(data, param="image")
            done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [time.perf_counter() + 0.3] * threads))
        started = time.perf_counter()
        done = sum(pool.map(work, [started + seconds] * threads))
        return done / (time.perf_counter() - started)


@contextmanager
def busy() -> Iterator[None]:
    """Run a thread that never waits, with the switch interval of a worker."""
    running, interval = [True], sys.getswitchinterval()

    def spin() -> None:
        while running:
            pass

    thread = threading.Thread(target=spin)
    tune_interpreter()
    thread.start()
    try:
        yield
    finally:
        running.clear()
        thread.join()
        sys.setswitchinterval(interval)


def decoders(model: Model, threads: int) -> dict[str, Decoder]:
    assert model.vision is not None
    limits = Limits(
        seconds=60.0,
        memory_bytes=2 << 30,
        max_pixels=MAX_PIXELS,
    )
    return {
        "threads": ThreadDecoder(model, max_pixels=MAX_PIXELS),
        "processes": ProcessDecoder(model.path, {}, model.vision, limits, count=threads),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = usage.parser("benchmarks.decoding", __doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of both, in turn; the best counts")
    parser.add_argument("--busy", action="store_true", help="beside a thread that never waits")
    parsed = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        make_checkpoint(["--out", str(checkpoint)])
        model = open_model(checkpoint)
        rows = []
        for threads in parsed.threads:
            made = decoders(model, threads)
            for name, size in SIZES.items():
                data = picture(size)
                best = dict.fromkeys(made, 0.0)
                for _ in range(parsed.repeats):
                    for kind, decoder in made.items():
                        with busy() if parsed.busy else nullcontext():
                            found = rate(decoder, data, threads=threads, seconds=parsed.seconds)
                        best[kind] = max(best[kind], found)
                share = 100 * best["processes"] / best["threads"]
                rows.append([name, str(threads), *(number(value) for value in best.values()), number(share)])
            for decoder in made.values():
                decoder.close()
    print(table(("image", "at a time", "threads/s", "processes/s", "share %"), rows))


if __name__ == "__main__":
    main()
