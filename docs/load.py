"""Mixed traffic for the picture of the metrics: texts, new and known images, several routes, mistakes."""

from __future__ import annotations

import base64
import io
import itertools
import random
import threading
from pathlib import Path
from typing import Any, Final

import httpx2
from PIL import Image

PICTURES = Path(__file__).parents[1] / "examples" / "images"


class Load:
    """One thread for each kind of traffic that ``phase`` names; a context manager."""

    KINDS: Final = ("texts", "new images", "known images", "other routes", "mistakes")

    def __init__(self, url: str) -> None:
        self.phase: set[str] = set()
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in self.KINDS]
        self._pictures = sorted(PICTURES.glob("*.jpg"))
        self._sent: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: str) -> None:
        dice = random.Random(kind)
        with httpx2.Client(base_url=self._url, timeout=60) as client:
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                if kind in self.phase:
                    route, body = self._request(kind, turn, dice)
                    client.post(route, json=body)
                self._stop.wait(dice.expovariate(20.0))

    def _request(self, kind: str, turn: int, dice: random.Random) -> tuple[str, dict[str, Any]]:
        words = [" ".join(f"word {dice.randrange(1000)}" for _ in range(dice.randrange(2, 40)))]
        match kind:
            case "texts":
                return "/v1/embeddings", {"input": words * dice.randrange(1, 9)}
            case "new images":
                self._sent.append(self._picture(len(self._sent)))
                return "/v1/embeddings", {"input": [f"what is this? {self._sent[-1]}"]}
            case "known images":
                return "/v1/embeddings", {"input": [dice.choice(self._sent)]}
            case "other routes" if turn % 2:
                return "/embed", {"inputs": words}
            case "other routes":
                return "/v2/embed", {"texts": words, "input_type": "search_query", "model": "tessera-random"}
            case _:
                return "/v1/embeddings", {"input": ""}

    def _picture(self, number: int) -> str:
        """One of the example pictures, cut a little differently each time."""
        with Image.open(self._pictures[number % len(self._pictures)]) as image:
            cut = number // len(self._pictures) + 1
            buffer = io.BytesIO()
            image.crop((cut, cut, *image.size)).save(buffer, "JPEG")
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
