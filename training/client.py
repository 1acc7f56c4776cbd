"""A client of the service: inputs in, unit vectors out, a few requests at a time."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

Vectors = npt.NDArray[np.float32]

_INPUTS = 8
REQUESTS = 2
"""At a time, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    text: str | None = None
    image: bytes | None = None

    @property
    def content(self) -> Any:
        """What stands for it in a request: a string, or content parts with the image first."""
        if self.image is None:
            return self.text
        media = "png" if self.image.startswith(b"\x89PNG") else "jpeg"
        url = f"data:image/{media};base64,{base64.b64encode(self.image).decode()}"
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}]
        return parts + ([{"type": "text", "text": self.text}] if self.text else [])


class Client:
    """Waits when the service says that it is busy; raises ``httpx2.HTTPStatusError`` for other refusals."""

    def __init__(
        self, http: httpx2.AsyncClient, url: str, model: str, *, progress: bool, requests: int = REQUESTS
    ) -> None:
        self._http, self._url, self._model, self._progress = http, url, model, progress
        self._free = asyncio.Semaphore(requests)

    async def embed(self, name: str, inputs: Sequence[Input], role: str | None = None) -> Vectors:
        """Vectors ``[inputs, hidden]``; ``name`` stands beside the progress bar."""
        with tqdm(total=len(inputs), desc=name, disable=not self._progress) as bar:

            async def part(start: int) -> list[list[float]]:
                some = inputs[start : start + _INPUTS]
                body = {"model": self._model, "input": [one.content for one in some]}
                async with self._free:
                    answer = await self._post(body | ({"input_type": role} if role else {}))
                answer.raise_for_status()
                bar.update(len(some))
                return [item["embedding"] for item in answer.json()["data"]]

            parts = await asyncio.gather(*(part(start) for start in range(0, len(inputs), _INPUTS)))
        return np.array([vector for vectors in parts for vector in vectors], dtype=np.float32)

    async def _post(self, body: dict[str, Any]) -> httpx2.Response:
        while True:
            answer = await self._http.post(f"{self._url}/v1/embeddings", json=body)
            if answer.status_code not in (429, 503):
                return answer
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
