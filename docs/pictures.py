"""Makes the pictures in docs/images that show the first minute: a search's contact sheet and the page.

    .venv/bin/python docs/pictures.py

Starts ``launch/agg.sh`` with its default model, does what the README says, and needs Chromium. The figures
in the pictures are those of the machine it runs on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
QUERY = "a yellow heart on the left of an orange triangle"


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """The URL of an aggregated service on free ports."""
    ports = [_free_port() for _ in range(2)]
    environment = os.environ | {"DYN_HTTP_PORT": str(ports[0]), "DYN_SYSTEM_PORT_BASE": str(ports[1])}
    log = folder / "log"
    with log.open("wb") as output:
        script = subprocess.Popen(
            [ROOT / "launch" / "agg.sh"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        subprocess.run(
            [sys.executable, "-m", "tessera.frontend.ready", "--url", url, "--pids", str(script.pid)],
            check=True,
        )
        yield url
    except subprocess.CalledProcessError:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        script.terminate()
        script.wait()


def _free_port() -> int:
    # Dynamo takes ports below 32768 only, which the system does not hand out by itself.
    for port in range(20_000 + os.getpid() % 5000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0 and port not in _taken:
                _taken.add(port)
                return port
    raise OSError("no free port")


_taken: set[int] = set()


def search(url: str, folder: Path) -> None:
    sheet = folder / "search.png"
    index = ["--url", url, "--index", str(folder / "index.sqlite")]
    written = ["--sheet", str(sheet), "--html", str(folder / "search.html")]
    program = [sys.executable, "examples/search.py"]
    subprocess.run([*program, "index", "examples/images", *index], check=True, cwd=ROOT)
    query = [*program, "query", "examples/images", QUERY, "--top", "8", *index, *written]
    subprocess.run(query, check=True, cwd=ROOT)
    keep(sheet, IMAGES / "search.png")


def page(url: str, folder: Path) -> None:
    taken = folder / "page.png"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1040, "height": 920}, color_scheme="light")
        shown.goto(url)
        shown.locator("#suggestion-list button").first.click()
        examples = json.loads(
            (ROOT / "components/src/tessera/frontend/page/examples/examples.json").read_text()
        )
        expect(shown.locator(".score:visible")).to_have_count(len(examples["pictures"]), timeout=60_000)
        shown.screenshot(path=taken)
        browser.close()
    keep(taken, IMAGES / "page.png")


def keep(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with Image.open(source) as image:
        # In full colour, which is what these pictures are searched by.
        image.convert("RGB").save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")


def main() -> None:
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as url:
        search(url, Path(name))
        page(url, Path(name))


if __name__ == "__main__":
    main()
