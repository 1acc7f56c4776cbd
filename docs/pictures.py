"""Makes the pictures in docs/images: a search's contact sheet, the page, and the main metrics under load.

    .venv/bin/python docs/pictures.py [search] [page] [metrics]

Starts the launch scripts with their default model and does what the README says. The page needs Chromium,
the metrics need Prometheus and take three minutes. The figures are those of the machine it runs on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from load import Load
from metrics_picture import Span, draw
from PIL import Image
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parents[1]
# What starts services and Prometheus for the tests does so here, too.
sys.path.insert(0, str(ROOT))

from benchmarks.ports import free_ports  # noqa: E402
from tests.e2e.monitoring import prometheus  # noqa: E402
from tests.e2e.service import launch  # noqa: E402

IMAGES = ROOT / "docs" / "images"
QUERY = "a yellow heart on the left of an orange triangle"


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """The URL of an aggregated service on free ports."""
    ports = free_ports(2)
    environment = os.environ | {"TESSERA_PORT": str(ports[0]), "TESSERA_SYSTEM_PORT_BASE": str(ports[1])}
    log = folder / "log"
    with log.open("wb") as output:
        script = subprocess.Popen(
            [ROOT / "launch" / "agg.sh"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        subprocess.run(
            [sys.executable, "-m", "tessera.launch.ready", "--url", url, "--pids", str(script.pid)],
            check=True,
        )
        yield url
    except subprocess.CalledProcessError:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        script.terminate()
        script.wait()


def search(folder: Path) -> None:
    vectors, sheet = folder / "vectors", folder / "search.png"
    program = [sys.executable, "-m", "tessera.cli"]
    subprocess.run([*program, "embed", "examples/images", "--out", str(vectors)], check=True, cwd=ROOT)
    query = [*program, "search", str(vectors), QUERY, "--top", "8", "--sheet", str(sheet)]
    subprocess.run(query, check=True, cwd=ROOT)
    keep(sheet, IMAGES / "search.png")


def page(url: str, folder: Path) -> None:
    taken = folder / "page.png"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        shown = browser.new_page(
            viewport={"width": 1040, "height": 920}, color_scheme="light", reduced_motion="reduce"
        )
        shown.goto(url)
        shown.locator("#suggestion-list button").first.click()
        examples = json.loads(
            (ROOT / "components/src/tessera/frontend/page/examples/examples.json").read_text()
        )
        expect(shown.locator(".score:visible")).to_have_count(len(examples["pictures"]), timeout=60_000)
        expect(shown.locator("#examples")).to_be_enabled()
        shown.screenshot(path=taken)
        browser.close()
    keep(taken, IMAGES / "page.png")


def keep(source: Path, target: Path, *, colours: int | None = None) -> None:
    target.parent.mkdir(exist_ok=True)
    with Image.open(source) as image:
        # In full colour where that is what the pictures are searched by.
        kept = image.convert("RGB")
        (kept if colours is None else kept.quantize(colours)).save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")


def metrics(folder: Path) -> None:
    """Four phases: texts, new images beside them, images that were seen, and everything, mistakes too."""
    checkpoint = ROOT / "components/src/tessera/checkpoints/tessera-demo"
    with (
        launch("e_p.sh", checkpoint, folder / "e_p.log", workers=2) as running,
        prometheus(running, folder) as scraper,
        Load(running.url) as load,
    ):
        start = time.time()
        for phase in ({"texts"}, {"texts", "new images"}, {"texts", "known images"}, set(Load.KINDS)):
            load.phase = phase
            time.sleep(30)
        span = Span(start, time.time(), rate_seconds=10)
        ports = dict(zip(running.worker_ports, ("encode", "embed"), strict=True))
        names = {f"127.0.0.1:{port}": name for port, name in ports.items()}
        title = (
            "launch/e_p.sh: texts; new images from 30 s, known ones from 60 s, everything at once from 90 s"
        )
        target = IMAGES / "metrics.png"
        drawn = draw(scraper.url, span, target, names=names, title=title)
    assert all(drawn.values()), drawn
    keep(target, target, colours=128)


def main() -> None:
    wanted = set(sys.argv[1:]) or {"search", "page", "metrics"}
    with tempfile.TemporaryDirectory() as name:
        if "search" in wanted:
            search(Path(name))
        if "page" in wanted:
            with service(Path(name)) as url:
                page(url, Path(name))
        if "metrics" in wanted:
            metrics(Path(name))


if __name__ == "__main__":
    main()
