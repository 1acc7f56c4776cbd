"""Every error a Tessera process raises on purpose, in one tree.

TesseraError
├── ConfigError               a flag or a configuration file is wrong; the process does not start
│   └── EngineMismatch        a built engine is not for this checkpoint, configuration or machine
├── EngineBuildFailed         a compiler could not build an engine from a checkpoint
├── CheckpointError           a checkpoint file is missing, malformed or of another shape
├── RequestError              the caller's fault; retrying the same request cannot help
│   ├── InvalidInput          a value is malformed or out of range
│   │   └── EmptyInput        there is nothing to embed
│   ├── PayloadTooLarge       a body, file or image is over its limit
│   │   └── ResponseTooLarge  the answer would be over its limit
│   ├── UnsupportedMedia      the bytes are not an image format that is served
│   ├── MediaFetchError       a URL could not be fetched, or may not be
│   ├── MediaNotCached        an image was named and not sent, and nobody knows it or has its rows
│   ├── DecodeFailed          an image made its decoder crash, or took it too long
│   ├── RequestTimeout        the client took too long to send its request
│   ├── ModelNotFound         the request names a model that is not served here
│   └── UnsupportedRoute      the served model has another output than the route answers
│       └── UnsupportedOperation  a client's protocol has it, and this service has not
├── ServiceError              the service's state; the same request may succeed later
│   ├── Overloaded            a queue, slab or admission limit is full
│   │   └── RateLimited       an API key has used up its rate
│   ├── Unavailable           no worker that can serve is there, or it went away
│   │   ├── EngineDead        its engine can run nothing any more, and its process ends
│   │   └── DiscoveryLost     this process has lost its place in discovery for good, and ends
│   ├── DeadlineExceeded      the request's time ran out
│   ├── RequestCancelled      the caller went away
│   └── EngineFailed          the engine raised; the input was accepted
├── CorpusError               embedding a corpus ends before its end
│   ├── OutputFailed          what was embedded could not be written
│   └── TooManyFailures       more items failed than --max-errors allows
├── ProtocolError             a peer speaks another wire version, or sent bytes that are no message
└── HandOffError              a vision hand-off between two workers failed
    ├── LeaseExpired          the rows were reclaimed before the reader had finished
    └── TransportUnavailable  this transport cannot reach that peer

``code`` is the stable name that crosses process boundaries; the HTTP status of each code stands in
``tessera.frontend.http.errors``.
"""

from __future__ import annotations

from typing import ClassVar, Self


class TesseraError(Exception):
    """Root of the tree.

    ``param`` names the input at fault in the request's own terms (``input[3].content[0].image_url``),
    ``retry_after`` is the number of seconds after which a retry makes sense.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @classmethod
    def at(cls, param: str, message: str, *, retry_after: float | None = None) -> Self:
        """Return the error of the input that is called ``param``, which the message then begins with."""
        return cls(f"{param}: {message}", param=param, retry_after=retry_after)

    def named(self, param: str) -> Self:
        """Return the same error about an input that is called ``param``, at the message's head, too."""
        rest = self.message.removeprefix(f"{self.param}: ")
        message = f"{param}: {rest}" if rest != self.message or self.param is None else self.message
        return type(self)(message, param=param, retry_after=self.retry_after)

    def kept(self) -> Self:
        """Return the same error as a result, which no longer knows the frames that it has left.

        Frames hold what they work on, and those that called them, down to a thread's with its result: a cycle
        that only a full collection takes apart. 8,192 inputs of 512 token ids, refused, stayed for minutes.
        """
        error: BaseException | None = self
        while error is not None and error.__traceback__ is not None:
            error = error.with_traceback(None).__context__
        return self


class ConfigError(TesseraError):
    code = "config_error"


class EngineMismatch(ConfigError):
    code = "engine_mismatch"


class EngineBuildFailed(TesseraError):
    code = "engine_build_failed"


class CheckpointError(TesseraError):
    code = "checkpoint_error"


class RequestError(TesseraError):
    code = "invalid_request"


class InvalidInput(RequestError):
    code = "invalid_input"


class EmptyInput(InvalidInput):
    code = "empty_input"


class PayloadTooLarge(RequestError):
    code = "payload_too_large"


class ResponseTooLarge(PayloadTooLarge):
    code = "response_too_large"


class UnsupportedMedia(RequestError):
    code = "unsupported_media"


class MediaFetchError(RequestError):
    code = "media_fetch_failed"


class MediaNotCached(RequestError):
    code = "media_not_cached"


class DecodeFailed(RequestError):
    code = "decode_failed"


class RequestTimeout(RequestError):
    code = "request_timeout"


class ModelNotFound(RequestError):
    code = "model_not_found"


class UnsupportedRoute(RequestError):
    code = "unsupported_route"


class UnsupportedOperation(UnsupportedRoute):
    code = "unsupported_operation"


class ServiceError(TesseraError):
    code = "service_error"


class Overloaded(ServiceError):
    code = "overloaded"


class RateLimited(Overloaded):
    code = "rate_limited"


class Unavailable(ServiceError):
    code = "unavailable"


class EngineDead(Unavailable):
    code = "engine_dead"


class DiscoveryLost(Unavailable):
    code = "discovery_lost"


class DeadlineExceeded(ServiceError):
    code = "deadline_exceeded"


class RequestCancelled(ServiceError):
    code = "cancelled"


class EngineFailed(ServiceError):
    code = "engine_failed"


class CorpusError(TesseraError):
    code = "corpus_failed"


class OutputFailed(CorpusError):
    code = "output_failed"


class TooManyFailures(CorpusError):
    code = "too_many_failures"


class ProtocolError(TesseraError):
    code = "protocol_error"


class HandOffError(TesseraError):
    code = "hand_off_failed"


class LeaseExpired(HandOffError):
    code = "lease_expired"


class TransportUnavailable(HandOffError):
    code = "transport_unavailable"


def internal_error(error: Exception) -> TesseraError:
    """What callers are told of an unexpected error: its class and not its message."""
    return TesseraError(f"internal error: {type(error).__name__}")


def _tree(root: type[TesseraError]) -> dict[str, type[TesseraError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_code(
    code: str, message: str, *, param: str | None = None, retry_after: float | None = None
) -> TesseraError:
    """Rebuild an error that another process sent; an unknown code becomes a plain ``TesseraError``."""
    kind = _tree(TesseraError).get(code, TesseraError)
    return kind(message, param=param, retry_after=retry_after)
