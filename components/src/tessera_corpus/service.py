"""A running service, asked politely: behind everybody else, when it says, and no more at a time than set."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Annotated, Any, Final, Self

import httpx2
import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from tessera.errors import ConfigError, ProtocolError, Unavailable
from tessera.local.model_info import ModelInfo, OutputInfo
from tessera.local.usage import Usage
from tessera.models.base import OutputKind, Role
from tessera.rows import Rows
from tessera.settings import POSITIVE, Setting
from tessera.terminal import complain, no_answer
from tessera_corpus.embedder import VectorSettings
from tessera_corpus.item import Embedded, Failure, Item

KEY_VARIABLE: Final = "TESSERA_API_KEY"

# Larger is less urgent; what people ask for has 0.
_PRIORITY: Final = 100
_ANSWER_SECONDS: Final = 900.0
_MAX_WAIT_SECONDS: Final = 60.0
_LEAST_WAIT_SECONDS: Final = 0.1
# Errors of single inputs that say something of the service, and nothing of the input.
_PASSING: Final = frozenset(
    (
        *("overloaded", "rate_limited", "unavailable", "deadline_exceeded", "engine_dead"),
        *("hand_off_failed", "lease_expired", "transport_unavailable"),
    )
)
_AGAIN: Final = (408, 429, 502, 503, 504)
# Nothing that was asked for is at fault.
_REFUSED: Final = (401, 403, 404, 405)


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The service that embeds in place of engines here; ``url`` is empty for none."""

    url: Annotated[
        str,
        Setting(
            flag="--url",
            help="the address of a running service, which embeds instead of engines of this command",
        ),
    ] = ""
    concurrency: Annotated[
        int, Setting(flag="--concurrency", check=POSITIVE, help="requests in progress at the service")
    ] = 8
    patience_seconds: Annotated[
        float,
        Setting(
            flag="--patience-seconds",
            check=POSITIVE,
            help="how long to try again when the service is full or cannot be reached",
        ),
    ] = 600.0


# As OpenSSL says it; to ask again does not help.
_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"


def _trusted() -> ssl.SSLContext | bool:
    """What certificates are trusted: those of SSL_CERT_FILE, as elsewhere, or those that httpx brings."""
    named = any(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return ssl.create_default_context() if named else True


class Service:
    """A client of one service; asks again while it is full or away, for as long as its settings say."""

    def __init__(self, settings: ServiceSettings, key: str | None) -> None:
        """Raises ``ConfigError`` for an URL that is none."""
        self.url = settings.url.rstrip("/")
        self._patience = settings.patience_seconds
        # Whether people were told, of requests that fail at the same time once.
        self._waits = False
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            local = httpx2.URL(self.url).host in ("localhost", "127.0.0.1", "::1")
            # A proxy from the environment would be asked for an address on this host.
            self._http = httpx2.AsyncClient(
                headers=headers, timeout=_ANSWER_SECONDS, trust_env=not local, verify=_trusted()
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise ConfigError(f"--url {settings.url}: not an URL: {error}") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def served(self, name: str = "") -> ModelInfo:
        """The model of that name, or the first that gives vectors; ``ConfigError`` where there is none."""
        status = (await self.ask("GET", "/status")).json()
        try:
            models = status["models"]
            found = [model for model in models if model["output"]["kind"] != OutputKind.SCORE]
            if name:
                found = [model for model in found if name in (model["model"], *model.get("names", ()))]
            if not found:
                said = ", ".join(f"{each['model']} ({each['output']['kind']})" for each in models)
                raise ConfigError(f"{self.url} has no model {name or 'that gives vectors'}: {said}")
            model = found[0]
            return ModelInfo(
                name=model["model"],
                fingerprint=model["fingerprint"],
                outputs=tuple([msgspec.convert(output, OutputInfo) for output in model["outputs"]]),
                images=model["images"],
                checkpoint=model["checkpoint"] or "",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self.url} does not answer as Tessera does") from error

    async def ask(self, method: str, path: str, body: object = None) -> httpx2.Response:
        """A good answer, or one that says what was wrong with what was asked.

        Raises ``ConfigError`` for what asking again cannot help, and ``Unavailable`` at the end of patience.
        """
        content = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"} if content else {}
        until = time.monotonic() + self._patience
        while True:
            try:
                answer = await self._http.request(method, self.url + path, content=content, headers=headers)
            except httpx2.HTTPError as error:
                if _UNTRUSTED in str(error):
                    raise ConfigError(no_answer(self.url, error)) from error
                said, wait = f"no answer: {error or type(error).__name__}", 1.0
                if not self._waits and time.monotonic() + wait <= until:
                    self._waits = True
                    complain(f"{self.url}: {said}; asked again for {self._patience:g} s (--patience-seconds)")
            else:
                if answer.is_success:
                    self._waits = False
                    return answer
                said = f"{answer.status_code}: {said_of(answer)}"
                if answer.status_code == 401:
                    raise ConfigError(
                        f"{self.url} asks for an API key: set {KEY_VARIABLE} to one that it knows"
                    )
                if answer.status_code in _REFUSED:
                    raise ConfigError(f"{self.url}{path} answered {said}")
                if answer.status_code not in _AGAIN:
                    return answer
                wait = _wait(answer)
            if time.monotonic() + wait > until:
                raise Unavailable(f"{self.url}: {said}")
            await asyncio.sleep(wait)


class ServiceEmbedder:
    """Implements ``Embedder`` by requests to a service, of which a few are under way."""

    engines = 1

    def __init__(
        self, service: Service, served: ModelInfo, vectors: VectorSettings, settings: ServiceSettings
    ) -> None:
        self.served = served
        self._service = service
        self._vectors = vectors
        self._outputs = vectors.names(served)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._patience = settings.patience_seconds
        self._images = self._cached = 0

    @classmethod
    async def start(
        cls, settings: ServiceSettings, vectors: VectorSettings, model: str, key: str | None
    ) -> Self:
        """Raises ``TesseraError`` where no such model is served."""
        service = Service(settings, key)
        try:
            served = await service.served(model)
            if vectors.dimensions:
                served = served.of_width(vectors.dimensions)
            return cls(service, served, vectors, settings)
        except BaseException:
            await service.close()
            raise

    async def ready(self) -> None:
        """A service is."""

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        found: list[Embedded | Failure] = []
        # What inputs are for is said once in a request.
        for prompt, group in groupby(items, self._prompt):
            found += await self._embed(list(group), dict(prompt))
        return found

    async def usage(self) -> Usage:
        return Usage(images=self._images, cached_images=self._cached)

    async def close(self) -> None:
        await self._service.close()

    def _prompt(self, item: Item) -> tuple[tuple[str, str], ...]:
        """The fields of a request that decide an item's prompt."""
        role = self._vectors.content_of(item).role
        said = () if role is Role.NONE else (("input_type", role.value),)
        return said if item.instruction is None else (*said, ("instruction", item.instruction))

    async def _embed(self, items: Sequence[Item], prompt: dict[str, str]) -> list[Embedded | Failure]:
        made: dict[int, Embedded | Failure] = {}
        left = list(range(len(items)))
        until = time.monotonic() + self._patience
        while left:
            asked = [items[index] for index in left]
            async with self._places:
                answer = await self._service.ask("POST", "/v1/embeddings", self._body(asked, prompt))
            if not answer.is_success:
                if len(items) > 1:
                    half = len(items) // 2
                    return await self._embed(items[:half], prompt) + await self._embed(items[half:], prompt)
                return [items[0].failed(said_of(answer))]
            rows, errors = self._read(answer, len(asked))
            again: list[int] = []
            for place, index in enumerate(left):
                item, code = items[index], errors.get(place)
                if code is None:
                    made[index] = _embedded(item, rows.of(place))
                elif code in _PASSING:
                    again.append(index)
                else:
                    # Alone and not partial, an input is answered with what was wrong, not with a code.
                    made[index] = await self._alone(item, prompt)
            if again and time.monotonic() > until:
                raise Unavailable(f"{self._service.url}: {errors[left.index(again[0])]}")
            if again:
                await asyncio.sleep(1.0)
            left = again
        return [made[index] for index in range(len(items))]

    async def _alone(self, item: Item, prompt: dict[str, str]) -> Embedded | Failure:
        async with self._places:
            body = self._body([item], prompt) | {"partial": False}
            answer = await self._service.ask("POST", "/v1/embeddings", body)
        if not answer.is_success:
            return item.failed(said_of(answer))
        return _embedded(item, self._read(answer, 1)[0].of(0))

    def _body(self, items: Sequence[Item], prompt: dict[str, str]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.served.name,
            "input": [[_part(part) for part in item.parts if part] for item in items],
            **prompt,
            "encoding_format": "base64" if self._outputs else "bytes",
            "truncate": self._vectors.truncate.truncate.value,
            "partial": True,
            "priority": _PRIORITY,
        }
        if self._vectors.dimensions:
            body["dimensions"] = self._vectors.dimensions
        if self._vectors.max_tokens:
            body["truncate_prompt_tokens"] = self._vectors.max_tokens
        if self._outputs:
            body["output_types"] = self._outputs
        return body

    def _read(self, answer: httpx2.Response, inputs: int) -> tuple[Rows, dict[int, str]]:
        """The rows, and the codes of errors by input."""
        try:
            if self._outputs:
                said = orjson.loads(answer.content)
                data = said["data"]
                if len(data) != inputs:
                    raise ValueError(f"{len(data)} of {inputs} inputs")
                rows = Rows.together([_column(output, data) for output in self._vectors.asked(self.served)])
                errors = {place: row["error"]["code"] for place, row in enumerate(data) if row.get("error")}
            else:
                said = orjson.loads(answer.headers["metadata"])
                values = np.frombuffer(answer.content, "<f4").reshape(said["shape"])
                bounds = said.get("bounds") or list(range(inputs + 1))
                whole = len(bounds) == inputs + 1 and bounds[-1] == len(values)
                if values.shape[1] != self.served.width or not whole:
                    raise ValueError(f"{list(values.shape)} of {inputs} inputs")
                rows = _rows(values, bounds)
                errors = {int(place): code for place, code in said.get("errors", {}).items()}
            details = said["usage"]["prompt_tokens_details"]
            self._images += details["image_tokens"]
            self._cached += details["cached_tokens"]
            return rows, errors
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self._service.url} does not answer as Tessera does: {error}") from error


def _rows(values: npt.NDArray[np.float32], bounds: Sequence[int]) -> Rows:
    return Rows(values, np.asarray(bounds, np.int64), np.ones(len(values), np.float32))


def _column(output: OutputInfo, data: Sequence[dict[str, Any]]) -> Rows:
    """Return the rows of an output, none of an input that failed; raises what a form of another kind does."""
    values: list[npt.NDArray[np.float32]] = []
    ids: list[npt.NDArray[np.int32]] = []
    for row in data:
        if row.get("error"):
            values.append(np.empty((0, output.width), np.float32))
        elif output.kind is OutputKind.SPARSE:
            sparse = row["sparse_embedding"]
            values.append(np.array(sparse["values"], np.float32)[:, None])
            ids.append(np.array(sparse["indices"], np.int32))
        else:
            key = "multi_vector" if output.kind is OutputKind.TOKENS else "embedding"
            values.append(np.frombuffer(pybase64.b64decode(row[key]), "<f4").reshape(-1, output.width))
    rows = _rows(np.concatenate(values), [0, *accumulate(map(len, values))])
    if output.kind is OutputKind.SPARSE:
        rows = replace(rows, indices=np.concatenate([*ids, np.empty(0, np.int32)]))
    return rows


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = pybase64.b64encode_as_string(part.data)
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}


def _embedded(item: Item, rows: Rows) -> Embedded:
    # How many tokens an input had is not in an answer.
    return item.embedded(rows, tokens=0)


def _wait(answer: httpx2.Response) -> float:
    try:
        asked = float(answer.headers.get("retry-after", "1"))
    except ValueError:
        asked = 1.0
    return min(max(asked, _LEAST_WAIT_SECONDS), _MAX_WAIT_SECONDS)


def said_of(answer: httpx2.Response) -> str:
    try:
        error = answer.json()["error"]
        message, param = str(error["message"]), str(error.get("param") or "")
        # Without the input's place in a request: its id says more.
        return f"{error['code']}: {message.removeprefix(param).lstrip(': ') if param else message}"
    except (ValueError, KeyError, TypeError):
        return str(answer.reason_phrase)
