"""The frontend's command line; names follow Dynamo's where Dynamo has the setting."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tessera.config import FrontendConfig, Limits
from tessera.errors import ConfigError
from tessera.flags import (
    HelpFormatter,
    add_model_arguments,
    add_rpc_arguments,
    add_trace_arguments,
    rpc_config,
    trace_exporters,
)
from tessera.frontend.http.auth import read_keys
from tessera.logs import add_log_arguments

API_KEYS_VARIABLE = "TESSERA_API_KEYS"

_MIB = 1 << 20
_POSITIVE = (
    *("max_body_mb", "max_inputs", "max_images", "max_images_per_input", "max_file_size_mb", "max_media_mb"),
    *("max_image_pixels", "max_in_flight", "request_timeout_seconds", "header_timeout_seconds"),
    *("max_header_kb", "keep_alive_seconds", "media_timeout_seconds"),
)
_NOT_NEGATIVE = (
    *("max_tokens", "requests_per_minute", "tokens_per_minute", "result_cache_mb", "drain_seconds"),
    *("worker_wait_seconds", "expect_embed", "expect_encode"),
)


def parse(argv: Sequence[str] | None = None, *, api_keys: str | None = None) -> FrontendConfig:
    """``api_keys`` is the environment variable's value: keys have no place on a command line.

    Raises ``ConfigError`` for values that argparse cannot judge; exits with status 2 for the rest.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tessera.frontend", description="The Tessera frontend.", formatter_class=HelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="of HTTP")
    parser.add_argument("--embed-endpoint", help="dyn://namespace.component.endpoint of the embed workers")
    parser.add_argument("--encode-endpoint", help="watched for /health only; the embed workers call it")
    _add_limits(parser)
    _add_media(parser)
    _add_access(parser)
    parser.add_argument(
        "--result-cache-mb", type=float, default=0.0, help="final vectors kept for identical inputs; 0: none"
    )
    parser.add_argument(
        "--page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the page at / to try the service on",
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="how long SIGTERM waits for what is in flight"
    )
    parser.add_argument(
        "--worker-wait-seconds",
        type=float,
        default=30.0,
        help="how long after the last worker went away requests wait for another",
    )
    parser.add_argument("--expect-embed", type=int, default=0, help="embed workers that were started")
    parser.add_argument("--expect-encode", type=int, default=0, help="encode workers that were started")
    add_trace_arguments(parser)
    add_rpc_arguments(parser)
    add_log_arguments(parser)
    parsed = parser.parse_args(argv)
    local = parsed.allowed_local_media_path
    if local is not None and not local.is_dir():
        raise ConfigError(f"--allowed-local-media-path {local}: no such directory")
    _check_numbers(parsed)
    rpc = rpc_config(parsed)
    return FrontendConfig(
        model_path=parsed.model_path,
        served_model_name=parsed.served_model_name or parsed.model_path.resolve().name,
        rpc=rpc,
        host=parsed.host,
        port=parsed.port,
        embed_endpoint=parsed.embed_endpoint or f"dyn://{rpc.namespace}.embed.generate",
        encode_endpoint=parsed.encode_endpoint or f"dyn://{rpc.namespace}.encode.generate",
        limits=_limits(parsed),
        allowed_local_media_path=local,
        allowed_media_domains=tuple(parsed.allowed_media_domains),
        blocked_media_domains=tuple(parsed.blocked_media_domains),
        allow_private_media=parsed.allow_private_media,
        media_timeout_seconds=parsed.media_timeout_seconds,
        media_proxy=_proxy(parsed.media_proxy),
        drain_seconds=parsed.drain_seconds,
        worker_wait_seconds=parsed.worker_wait_seconds,
        expected_embed=parsed.expect_embed,
        expected_encode=parsed.expect_encode,
        api_keys=read_keys(parsed.api_keys_file, api_keys)
        if parsed.api_keys_file is not None or api_keys is not None
        else (),
        requests_per_minute=parsed.requests_per_minute,
        tokens_per_minute=parsed.tokens_per_minute,
        result_cache_bytes=int(parsed.result_cache_mb * _MIB),
        page=parsed.page,
        open_metrics=parsed.open_metrics,
        traces=trace_exporters(parsed),
    )


def _check_numbers(parsed: argparse.Namespace) -> None:
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        value = getattr(parsed, name)
        # Written so that what is no number is refused as well.
        if not 0 <= value < math.inf or (value == 0 and name in _POSITIVE):
            kind = "positive" if name in _POSITIVE else "0 or more"
            raise ConfigError(f"--{name.replace('_', '-')} must be {kind}, not {value:g}")
    # Beyond it the socket would take the port's lower 16 bits.
    if not 0 <= parsed.port < 1 << 16:
        raise ConfigError(f"--port must be 0 to 65535, not {parsed.port}")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    group = parser.add_argument_group("limits of one request")
    group.add_argument("--max-body-mb", type=float, default=limits.max_body_bytes / _MIB, help="of its body")
    group.add_argument("--max-inputs", type=int, default=limits.max_inputs, help="in one request")
    group.add_argument("--max-images", type=int, default=limits.max_images, help="in one request")
    group.add_argument(
        "--max-images-per-input", type=int, default=limits.max_images_per_input, help="in one input"
    )
    group.add_argument("--max-tokens", type=int, default=0, help="of one input; 0: the model's own limit")
    group.add_argument(
        "--max-file-size-mb", type=float, default=limits.max_image_bytes / _MIB, help="of one image"
    )
    group.add_argument(
        "--max-media-mb", type=float, default=limits.max_media_bytes / _MIB, help="of all images of a request"
    )
    group.add_argument("--max-image-pixels", type=int, default=limits.max_image_pixels, help="of one image")
    group.add_argument("--max-in-flight", type=int, default=limits.max_in_flight, help="requests, then 429")
    group.add_argument(
        "--request-timeout-seconds", type=float, default=limits.timeout_seconds, help="to answer it, then 504"
    )
    group.add_argument(
        "--header-timeout-seconds", type=float, default=limits.header_seconds, help="for its head, then 408"
    )
    group.add_argument(
        "--max-header-kb", type=float, default=limits.max_header_bytes / 1024, help="of its head"
    )
    group.add_argument(
        "--keep-alive-seconds",
        type=float,
        default=limits.keep_alive_seconds,
        help="that a connection waits for the next one; more than balancers and clients keep theirs",
    )


def _limits(parsed: argparse.Namespace) -> Limits:
    return Limits(
        max_body_bytes=int(parsed.max_body_mb * _MIB),
        max_inputs=parsed.max_inputs,
        max_images=parsed.max_images,
        max_images_per_input=parsed.max_images_per_input,
        max_tokens=parsed.max_tokens,
        max_image_bytes=int(parsed.max_file_size_mb * _MIB),
        max_image_pixels=parsed.max_image_pixels,
        max_media_bytes=int(parsed.max_media_mb * _MIB),
        max_in_flight=parsed.max_in_flight,
        timeout_seconds=parsed.request_timeout_seconds,
        header_seconds=parsed.header_timeout_seconds,
        max_header_bytes=int(parsed.max_header_kb * 1024),
        keep_alive_seconds=parsed.keep_alive_seconds,
    )


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("media")
    group.add_argument(
        "--allowed-local-media-path", type=Path, help="file:// URLs below it are served; none by default"
    )
    group.add_argument(
        "--allowed-media-domains",
        nargs="*",
        default=[],
        metavar="DOMAIN",
        help="image URLs may point to these alone",
    )
    group.add_argument(
        "--blocked-media-domains",
        nargs="*",
        default=[],
        metavar="DOMAIN",
        help="image URLs may not point to these",
    )
    group.add_argument(
        "--allow-private-media",
        action="store_true",
        help="let image URLs reach loopback and private addresses",
    )
    group.add_argument("--media-timeout-seconds", type=float, default=10.0, help="to fetch one image")
    group.add_argument(
        "--media-proxy",
        metavar="URL",
        help="fetch image URLs through this HTTP proxy, which then resolves names and must refuse private "
        "addresses itself; proxies in the environment are never used",
    )


def _proxy(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # It may hold a password, so it is not repeated.
        raise ConfigError("--media-proxy must be an http or https URL with a host")
    return url


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-keys-file",
        type=Path,
        help=f"one key for each line, perhaps with a name behind it; {API_KEYS_VARIABLE} holds more, "
        "separated by commas; without either everybody is answered",
    )
    group.add_argument(
        "--open-metrics",
        action="store_true",
        help="answer /metrics without a key, for a Prometheus that has none",
    )
    group.add_argument("--requests-per-minute", type=float, default=0.0, help="of each key; 0: unlimited")
    group.add_argument("--tokens-per-minute", type=float, default=0.0, help="of each key; 0: unlimited")
