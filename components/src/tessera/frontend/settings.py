"""The frontend's settings and its command line; names follow Dynamo's where Dynamo has the setting.

The parts stand beside the code that they are for. The order of the fields is the order of ``--help``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tessera.checkpoint.source import Source
from tessera.frontend.group import Seat
from tessera.frontend.http.admission import RESPONSES_IN_FLIGHT
from tessera.frontend.http.auth import API_KEYS_VARIABLE, ApiKey, read_keys
from tessera.frontend.http.connection import ConnectionLimits
from tessera.frontend.http.tls import TlsSettings
from tessera.frontend.media.policy import ImageLimits, MediaPolicy
from tessera.frontend.request import RequestLimits
from tessera.frontend.widths import no_widths
from tessera.logs import LogSettings
from tessera.models import find
from tessera.rpc.runtime import RpcSettings
from tessera.settings import (
    MIB,
    NOT_NEGATIVE,
    PORT,
    POSITIVE,
    ModelOptions,
    ModelPath,
    Revision,
    ServedModelNames,
    Setting,
    Traces,
    exporters,
    parse_flags,
    served_names,
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, and the connection that it comes by, may ask for; ``max_tokens`` 0: the model's."""

    max_body_bytes: Annotated[
        int, Setting(flag="--max-body-mb", unit=MIB, check=POSITIVE, help="of its body")
    ] = 64 << 20
    max_response_bytes: Annotated[
        int,
        Setting(
            flag="--max-response-mb",
            unit=MIB,
            check=POSITIVE,
            help="of its answer, as counted before any work, then 413",
            more=f"The answers under way may take {RESPONSES_IN_FLIGHT} times as much together, then 429. "
            "A number in JSON counts 16 bytes, base64 and `bytes` count what they take, and a row counts at "
            "least the float32 that it comes as",
        ),
        # As many inputs as a request may have, of 2048 values in JSON, and what stands around them.
    ] = 288 << 20
    request: RequestLimits = RequestLimits()
    max_tokens: Annotated[
        int,
        Setting(flag="--max-tokens", check=NOT_NEGATIVE, help="of one input; 0: the model's own limit"),
    ] = 0
    images: ImageLimits = ImageLimits()
    max_in_flight: Annotated[
        int, Setting(flag="--max-in-flight", check=POSITIVE, help="requests, then 429")
    ] = 1024
    timeout_seconds: Annotated[
        float, Setting(flag="--request-timeout-seconds", check=POSITIVE, help="to answer it, then 504")
    ] = 60.0
    connection: ConnectionLimits = ConnectionLimits()


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask, and how much. Without ``keys`` everybody is answered; rates of 0 are unlimited."""

    keys_file: Annotated[
        Path | None,
        Setting(
            flag="--api-keys-file",
            help=f"one key for each line, perhaps with a name behind it; {API_KEYS_VARIABLE} holds more, "
            "separated by commas; without either everybody is answered",
            more="A key has 8 characters at least and is sent as `Authorization: Bearer` or `X-API-Key`, on "
            "every route but `/` with its files and examples, `/health`, `/live` and `/v1/health/*`",
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
        Setting(flag="--requests-per-minute", check=NOT_NEGATIVE, help="of each key; 0: unlimited"),
    ] = 0.0
    tokens_per_minute: Annotated[
        float, Setting(flag="--tokens-per-minute", check=NOT_NEGATIVE, help="of each key; 0: unlimited")
    ] = 0.0
    keys: tuple[ApiKey, ...] = ()


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend process."""

    model_path: ModelPath
    revision: Revision = ""
    model_options: ModelOptions = {}
    served_model_names: ServedModelNames = ()
    dimensions_allowed: Annotated[
        str,
        Setting(
            flag="--dimensions-allowed",
            metavar="WIDTHS",
            check=no_widths,
            help="widths of vectors that requests may ask for (`dimensions`) beside those that the "
            "checkpoint lists, such as 256,512,1024 or 64-2048",
            more="A vector is cut and has unit length again. A model that was not trained for it loses more "
            "than one that was: measure what your search loses",
        ),
    ] = ""
    host: Annotated[str, Setting(flag="--host", help="the address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting(flag="--port", check=PORT, help="of HTTP")] = 8000
    tls: Annotated[TlsSettings, Setting(group="TLS")] = TlsSettings()
    embed_endpoint: Annotated[
        str,
        Setting(flag="--embed-endpoint", help="dyn://namespace.component.endpoint of the embed workers"),
    ] = ""
    encode_endpoint: Annotated[
        str, Setting(flag="--encode-endpoint", help="watched for /health only; the embed workers call it")
    ] = ""
    limits: Annotated[Limits, Setting(group="limits of one request")] = Limits()
    media: Annotated[MediaPolicy, Setting(group="media")] = MediaPolicy()
    access: Annotated[Access, Setting(group="access")] = Access()
    result_cache_bytes: Annotated[
        int,
        Setting(
            flag="--result-cache-mb",
            unit=MIB,
            check=NOT_NEGATIVE,
            help="final vectors kept for identical inputs, by all frontends of a port together; 0: none",
        ),
    ] = 0
    page: Annotated[bool, Setting(flag="--page", help="the page at / to try the service on")] = True
    drain_seconds: Annotated[
        float,
        Setting(
            flag="--drain-seconds",
            check=NOT_NEGATIVE,
            help="how long SIGTERM waits for what is in flight",
        ),
    ] = 30.0
    worker_wait_seconds: Annotated[
        float,
        Setting(
            flag="--worker-wait-seconds",
            check=NOT_NEGATIVE,
            help="how long after the last worker went away requests wait for another",
        ),
    ] = 30.0
    expected_embed: Annotated[
        int, Setting(flag="--expect-embed", check=NOT_NEGATIVE, help="embed workers that were started")
    ] = 0
    expected_encode: Annotated[
        int, Setting(flag="--expect-encode", check=NOT_NEGATIVE, help="encode workers that were started")
    ] = 0
    want_traces: Traces = None
    rpc: Annotated[RpcSettings, Setting(group="Dynamo")] = RpcSettings()
    log: Annotated[LogSettings, Setting(group="log")] = LogSettings()
    traces: tuple[str, ...] = ()
    """The exporters of traces, by name."""
    seat: Seat | None = None
    """Among the frontends that answer on one port."""
    source: Source | None = None
    """What ``model_path``, a directory then, holds."""


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
    namespace = given.rpc.namespace
    found = find(str(given.model_path), given.revision, known=Source.of_json(source))
    return msgspec.structs.replace(
        given,
        model_path=found.directory,
        source=found,
        served_model_names=served_names(given.served_model_names, found.name),
        embed_endpoint=given.embed_endpoint or f"dyn://{namespace}.embed.generate",
        encode_endpoint=given.encode_endpoint or f"dyn://{namespace}.encode.generate",
        access=access,
        traces=exporters(given.want_traces),
        seat=Seat.read(seat),
    )
