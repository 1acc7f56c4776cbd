"""The service, as this example uses it: its model, and vectors of texts and pictures."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt

from image_search.errors import ServiceFailed

Vector = npt.NDArray[np.float32]

_ATTEMPTS = 6
_MAX_WAIT_SECONDS = 15.0
# Errors of single inputs that say something of the service, and nothing of the input.
_PASSING = frozenset(
    (
        *("overloaded", "unavailable", "deadline_exceeded", "engine_dead"),
        *("hand_off_failed", "lease_expired", "transport_unavailable"),
    )
)


@dataclass(frozen=True, slots=True)
class Served:
    """``fingerprint`` changes with the checkpoint's content: vectors of two models cannot be compared.

    ``checkpoint`` is ``random`` or ``demo`` for those that come with Tessera.
    """

    name: str
    fingerprint: str
    checkpoint: str | None

    @property
    def note(self) -> str | None:
        """What to know before looking at results; None for a model that is meant for use."""
        match self.checkpoint:
            case "random":
                return f"{self.name} has random weights: the order of the results means nothing"
            case "demo":
                return f"{self.name} is a demonstration model of synthetic scenes; it knows no photographs"
        return None

    @property
    def key(self) -> str:
        return f"{self.name} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Embedded:
    """A unit vector for each input or what was wrong with it; tokens of the whole request."""

    rows: list[Vector | str]
    tokens: int
    cached_tokens: int


def reason(error: dict[str, Any]) -> str:
    """What was wrong, without the input's place in a request: the name of the file says more."""
    message, param = str(error["message"]), str(error["param"] or "")
    return message.removeprefix(param).lstrip(": ") if param and message.startswith(param) else message


def picture_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def picture_part(data: bytes, media_type: str) -> dict[str, Any]:
    """A picture as a content part of an input."""
    return {"type": "image_url", "image_url": {"url": picture_url(data, media_type)}}


class Service:
    """A client of one service. Asks again when the service is full, and only for as long as it is."""

    def __init__(self, url: str, key: str | None, *, timeout: float = 120.0) -> None:
        """Raises ``ServiceFailed`` for an URL that is none."""
        self._url = url.rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            local = httpx2.URL(url).host in ("localhost", "127.0.0.1", "::1")
            # A proxy from the environment would be asked for an address on this host.
            self._http = httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=not local)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ServiceFailed(f"{url}: not an URL: {error}") from error

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def served(self) -> Served:
        """The model that is asked: the first that gives vectors, where several are served."""
        status = await self._ask("GET", "/status")
        try:
            models = status["models"]
            found = next((model for model in models if model["output"]["kind"] == "vector"), None)
            if found is None:
                said = ", ".join(
                    f"{model['model']}, which gives {model['output']['kind']}" for model in models
                )
                raise ServiceFailed(
                    f"{self._url} serves {said or 'no model yet'}; this compares one vector of each picture"
                )
            return Served(found["model"], found["fingerprint"], found["checkpoint"])
        except (KeyError, TypeError) as error:
            raise ServiceFailed(f"{self._url} does not answer as Tessera does") from error

    async def embed(self, model: Served, inputs: list[Any], **options: Any) -> Embedded:
        """One row for each input; a picture that the service refuses does not take the others with it."""
        body = {"model": model.name, "input": inputs, "encoding_format": "base64", "partial": True, **options}
        for attempt in range(1, _ATTEMPTS + 1):
            answer = await self._ask("POST", "/v1/embeddings", body)
            errors = [row["error"] for row in answer["data"] if row["embedding"] is None]
            passing = [error["message"] for error in errors if error["code"] in _PASSING]
            if not passing:
                break
            if attempt == _ATTEMPTS:
                raise ServiceFailed(f"{self._url}: {passing[0]}")
            await asyncio.sleep(1.0)
        usage = answer["usage"]
        rows: list[Vector | str] = []
        for row in answer["data"]:
            if row["embedding"] is None:
                rows.append(reason(row["error"]))
            else:
                rows.append(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"))
        return Embedded(rows, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])

    async def rank(self, model: str | None, query: Any, documents: list[Any]) -> list[tuple[int, float]]:
        """The documents by their scores, best first; without a ``model`` by the only reranker there is."""
        body = {"query": query, "documents": documents, **({"model": model} if model else {})}
        answer = await self._ask("POST", "/v1/rerank", body)
        return [(result["index"], result["relevance_score"]) for result in answer["results"]]

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = await self._http.request(method, self._url + path, json=body)
            except httpx2.HTTPError as error:
                raise ServiceFailed(
                    f"no answer from {self._url} ({error or type(error).__name__}); is it running? "
                    "tessera serve starts one, and --url names another"
                ) from error
            if answer.status_code in (429, 503) and attempt < _ATTEMPTS:
                await asyncio.sleep(_wait(answer))
            elif answer.is_success:
                return _parsed(answer, self._url)
            else:
                raise ServiceFailed(_refusal(answer, self._url))
        raise AssertionError("unreachable")


def _wait(answer: httpx2.Response) -> float:
    try:
        asked = float(answer.headers.get("retry-after", "1"))
    except ValueError:
        asked = 1.0
    return min(max(asked, 0.1), _MAX_WAIT_SECONDS)


def _parsed(answer: httpx2.Response, url: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise ServiceFailed(f"{url} does not answer as Tessera does") from error


def _refusal(answer: httpx2.Response, url: str) -> str:
    if answer.status_code == 401:
        return f"{url} asks for an API key: set TESSERA_API_KEY to one that it knows"
    if answer.status_code == 404:
        return f"{url} does not answer as Tessera does"
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = answer.reason_phrase
    return f"{url} answered {answer.status_code}: {said}"
