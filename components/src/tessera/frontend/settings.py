"""The frontend's settings and its command line; names follow Dynamo's where Dynamo has the setting.

The parts stand beside the code that they are for. The order of the fields is the order of ``--help``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from tessera.checkpoint.source import Source
from tessera.errors import ConfigError
from tessera.flags import check_flags, parse_flags
from tessera.frontend.admission.room import BODY_BYTES, RESPONSES_IN_FLIGHT
from tessera.frontend.door import check_doors, doors
from tessera.frontend.group import Seat
from tessera.frontend.http.auth import API_KEYS_VARIABLE, ApiKey, read_keys
from tessera.frontend.http.connection import ConnectionLimits
from tessera.frontend.http.cors import CorsSettings
from tessera.frontend.http.tls import PASSWORD_VARIABLE, Certificate, TlsSettings
from tessera.frontend.media.policy import ImageLimits, MediaPolicy
from tessera.frontend.model_settings import MODELS_FLAG, ModelSettings, read_models
from tessera.frontend.request import RequestLimits
from tessera.logs import LogSettings
from tessera.rpc.runtime import RpcSettings
from tessera.settings import MIB, NOT_NEGATIVE, PORT, POSITIVE, AccessLogShare, Setting, Traces, exporters


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, and the connection that it comes by, may ask for; ``max_tokens`` 0: the model's."""

    max_body_bytes: Annotated[
        int, Setting(flag="--max-body-mb", unit=MIB, check=POSITIVE, help="largest body of a request")
    ] = 64 << 20
    bodies_bytes: Annotated[
        int,
        Setting(
            flag="--max-bodies-mb",
            unit=MIB,
            check=POSITIVE,
            help="all bodies, as announced, and fetched images until they are answered; more get 429",
            more="The frontends of a port share it, and keys get fair shares. A body that is alone is always "
            "read; images wait for room, as long as one may take to fetch",
        ),
    ] = BODY_BYTES
    max_response_bytes: Annotated[
        int,
        Setting(
            flag="--max-response-mb",
            unit=MIB,
            check=POSITIVE,
            help="largest answer to one request, estimated before any work; a larger one is refused with 413",
            more=f"All answers in progress together may take {RESPONSES_IN_FLIGHT} times that, then 429. "
            "The estimate is 16 bytes for each number in JSON and the real size of base64 and `bytes`, but "
            "never less than the row in float32",
        ),
    ] = 288 << 20  # as many inputs as a request may have, of 2048 values in JSON, and what is around them
    request: RequestLimits = RequestLimits()
    max_tokens: Annotated[
        int,
        Setting(
            flag="--max-tokens", check=NOT_NEGATIVE, help="tokens of one input; 0: the model's own limit"
        ),
    ] = 0
    images: ImageLimits = ImageLimits()
    max_in_flight: Annotated[
        int,
        Setting(
            flag="--max-in-flight", check=POSITIVE, help="requests in progress; more are refused with 429"
        ),
    ] = 1024
    timeout_seconds: Annotated[
        float,
        Setting(flag="--request-timeout-seconds", check=POSITIVE, help="time to answer a request, then 504"),
    ] = 60.0
    connection: ConnectionLimits = ConnectionLimits()


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask, and how much. Without ``keys`` everybody is answered; rates of 0 are unlimited."""

    keys_file: Annotated[
        Path | None,
        Setting(
            flag="--api-keys-file",
            help=f"file with one key in each line, with an optional name behind it; {API_KEYS_VARIABLE} may "
            "hold more, separated by commas; without any key the service is open to everybody",
            more="A key has at least 8 characters and is sent as `Authorization: Bearer` or `X-API-Key`, on "
            "every route but `/` with its files and examples, `/health`, `/live`, `/v1/health/*` and "
            "`/v2/health/*`",
        ),
    ] = None
    open_metrics: Annotated[
        bool,
        Setting(
            flag="--open-metrics",
            help="answer /metrics and /v1/metrics without a key, for a Prometheus that has none",
        ),
    ] = False
    requests_per_minute: Annotated[
        float,
        Setting(flag="--requests-per-minute", check=NOT_NEGATIVE, help="limit for each key; 0: unlimited"),
    ] = 0.0
    tokens_per_minute: Annotated[
        float,
        Setting(flag="--tokens-per-minute", check=NOT_NEGATIVE, help="limit for each key; 0: unlimited"),
    ] = 0.0
    keys: tuple[ApiKey, ...] = ()


def _settings_of_doors() -> type[msgspec.Struct]:
    """Return a Struct with the settings of each door that is installed, below its heading."""
    fields: list[tuple[str, Any, msgspec.Struct]] = []
    for door in doors():
        kind = door.settings()
        fields.append((door.name, Annotated[kind, Setting(group=door.heading)], kind()))
    return msgspec.defstruct("Doors", fields, frozen=True, kw_only=True)


if TYPE_CHECKING:
    Doors = msgspec.Struct
else:
    Doors = _settings_of_doors()


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend process."""

    model: Annotated[ModelSettings, Setting(group="model")] = ModelSettings()
    models_file: Annotated[
        Path | None,
        Setting(
            flag=MODELS_FLAG,
            metavar="FILE",
            help="YAML or JSON file with a list of models, instead of --model-path; read again at SIGHUP",
        ),
    ] = None
    host: Annotated[str, Setting(flag="--host", help="the address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting(flag="--port", check=PORT, help="the port of HTTP")] = 8000
    cors: Annotated[CorsSettings, Setting(group="browsers")] = CorsSettings()
    health_needs: Annotated[
        Literal["one", "all"],
        Setting(
            flag="--health-needs",
            help="models that must be ready for /health to answer 200, if there are several",
        ),
    ] = "one"
    tls: Annotated[TlsSettings, Setting(group="TLS")] = TlsSettings()
    limits: Annotated[Limits, Setting(group="limits of one request")] = Limits()
    media: Annotated[MediaPolicy, Setting(group="media")] = MediaPolicy()
    access: Annotated[Access, Setting(group="access")] = Access()
    doors: Doors = Doors()
    result_cache_bytes: Annotated[
        int,
        Setting(
            flag="--result-cache-mb",
            unit=MIB,
            check=NOT_NEGATIVE,
            help="final vectors kept for identical inputs, by all frontends of a port together; 0: none",
        ),
    ] = 0
    cache_by_key: Annotated[
        bool,
        Setting(
            flag="--cache-by-key",
            help="each API key has entries of its own in the caches of vision embeddings and of vectors",
            more="Otherwise a key may learn from `cached_tokens` and from times whether another one has sent "
            "the same image or text. `cache_salt` in a request does it for that request",
        ),
    ] = False
    page: Annotated[bool, Setting(flag="--page", help="the web page at / to try the service on")] = True
    drain_seconds: Annotated[
        float,
        Setting(
            flag="--drain-seconds",
            check=NOT_NEGATIVE,
            help="how long a process waits for requests in progress after SIGTERM",
        ),
    ] = 30.0
    worker_wait_seconds: Annotated[
        float,
        Setting(
            flag="--worker-wait-seconds",
            check=NOT_NEGATIVE,
            help="how long requests wait for a new worker after the last one has gone",
        ),
    ] = 30.0
    want_traces: Traces = None
    rpc: Annotated[RpcSettings, Setting(group="Dynamo")] = RpcSettings()
    log: Annotated[LogSettings, Setting(group="log")] = LogSettings()
    access_log_share: AccessLogShare = 1.0
    traces: tuple[str, ...] = ()
    """The exporters of traces, by name."""
    seat: Seat | None = None
    """Among the frontends that answer on one port."""
    models: tuple[ModelSettings, ...] = ()
    """Every model, settled; of one that the flags name, or of those that the file lists."""


def parse(
    argv: Sequence[str] | None = None,
    *,
    api_keys: str | None = None,
    seat: str | None = None,
    source: str | None = None,
) -> FrontendSettings:
    """``api_keys`` is the environment variable's value: keys have no place on a command line. ``seat`` and
    ``source`` are what the launcher says (``frontend/group``, ``checkpoint/source``).

    Downloads a model of a hub. Raises ``ConfigError`` for values that argparse cannot judge and
    ``CheckpointError`` for what is no model; exits with status 2 for the rest.
    """
    given = parse_flags(
        FrontendSettings, argv, prog="python -m tessera.frontend", description="The Tessera frontend."
    )
    access = given.access
    if access.keys_file is not None or api_keys is not None:
        access = msgspec.structs.replace(access, keys=read_keys(access.keys_file, api_keys))
    settings = msgspec.structs.replace(
        given, access=access, traces=exporters(given.want_traces), seat=Seat.read(seat)
    )
    check_doors(settings)
    return msgspec.structs.replace(settings, models=_models(settings, source))


def check(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for what a frontend would refuse before it looks for models."""
    given = check_flags(FrontendSettings, words)
    read_keys(given.access.keys_file, environment.get(API_KEYS_VARIABLE))
    Certificate.of(given.tls, environment.get(PASSWORD_VARIABLE))
    check_doors(given)


def _models(given: FrontendSettings, source: str | None) -> tuple[ModelSettings, ...]:
    namespace = given.rpc.namespace
    if given.models_file is not None:
        if given.model != ModelSettings():
            raise ConfigError(f"{MODELS_FLAG}: what its file says of models has no flags beside it")
        return read_models(given.models_file, namespace)
    if given.model.model_path is None:
        raise ConfigError(f"--model-path or {MODELS_FLAG} must say what is served")
    known = Source.of_json(source)
    model = msgspec.structs.replace(given.model, source=known and known.as_dict())
    return (model.settled(namespace),)
