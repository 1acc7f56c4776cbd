"""The messages between Tessera's processes: typed, versioned, one codec.

A payload is one version byte followed by one MessagePack map. The map's ``type`` key names the
message, so that one endpoint can take several. Decoding checks every field's type and refuses unknown
fields; what a message means (shapes, bounds, limits) is checked where it is used.

A caller sends one payload, ``Calls``: requests that go to the same instance at the same moment, often one.
The instance answers with a stream of payloads: ``Replies``, each with those requests that are ready by then,
in any order. One that would be long comes in ``Piece``s, and shorter ones between them. A call costs the
runtime a message and a stream, however many requests are in it: 0.4 ms of processor time on both sides
together. A ``Failure`` in place of ``Replies`` says that the payload could not be read; it is the answer to
all of its requests and ends the stream.

The version changes with any message. Processes of different versions refuse each other's payloads with
``ProtocolError``, so that neither gets work from the other.

Token ids travel as little-endian int32 bytes and vectors as little-endian float32 bytes: a list of
numbers costs ten times the space and a Python object for each.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal, TypeVar

import msgspec

from tessera.errors import ProtocolError, TesseraError, from_code
from tessera.image_plan import ImagePlan

VERSION: Final = 14

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that crosses a process boundary."""

    @property
    def size(self) -> int:
        """The bytes of a message's files, tokens and rows: what makes it long."""
        return 0


Same = tuple[bytes, int, int, tuple[int, int, int] | None]
"""A digest with the units, the rows and the grid of a plan: what images that become the same rows share."""


class Failure(Message, frozen=True, kw_only=True):
    """A ``TesseraError`` on its way to another process."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: TesseraError) -> Failure:
        return cls(code=error.code, message=error.message, param=error.param, retry_after=error.retry_after)

    def error(self) -> TesseraError:
        return from_code(self.code, self.message, param=self.param, retry_after=self.retry_after)


class Image(Message, frozen=True, kw_only=True):
    """One encoded image file, or its pixels as a client normalised them.

    ``pixels`` is float32 or float16 where ``data`` are pixels, little-endian ``[units, *unit_shape]``, and
    empty for a file.
    ``data`` is empty for one that an item before it in the same request has (``same``), or that was sent
    before and is to be in the cache.
    ``digest`` is the 32-byte blake3 hash of ``data``, of another kind for each type of pixels; ``units``,
    ``rows`` and ``grid`` are the plan that the frontend made, from a file's header, and so what the prompt's
    placeholders were built from.
    """

    digest: bytes
    data: bytes
    units: int
    rows: int
    grid: tuple[int, int, int] | None = None
    pixels: Literal["", "float32", "float16"] = ""
    param: str

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def plan(self) -> ImagePlan:
        return ImagePlan(units=self.units, rows=self.rows, grid=self.grid)

    @property
    def same(self) -> Same:
        """What it has in common with others that become the same rows."""
        return self.digest, self.units, self.rows, self.grid


class Handle(Message, frozen=True, kw_only=True):
    """Where one image's vision rows lie: ``[rows, row_width]`` of ``dtype`` at ``offset`` bytes in a slab.

    ``lease`` is never reused by its producer. ``data`` is filled by the inline kind alone. ``checksum`` is
    the 16-byte blake3 hash of the rows, where the producer is configured to give one.
    """

    kind: str
    producer: str
    slab: str
    offset: int
    shape: tuple[int, int]
    dtype: str
    lease: int
    data: bytes = b""
    checksum: bytes = b""


class SlabInfo(Message, frozen=True, kw_only=True):
    """How a peer can reach a slab by one transport kind; ``address`` is that kind's own encoding."""

    kind: str
    producer: str
    slab: str
    nbytes: int
    address: bytes


class Embeddings(Message, frozen=True, kw_only=True):
    """Vision rows that the client computed itself: they need no encoder and stay out of its cache.

    The rows, whose values have been checked to be finite, lie where ``handle`` says; ``slab`` is how to get
    there, None when they are in the handle itself. ``digest`` is the 32-byte blake3 hash of the file they
    came in. A handle of the inline kind without data is that of the same rows in an item before it in the
    same request.
    """

    digest: bytes
    handle: Handle
    slab: SlabInfo | None = None
    grid: tuple[int, int, int] | None = None
    param: str

    @property
    def size(self) -> int:
        return len(self.handle.data)

    @property
    def plan(self) -> ImagePlan:
        return ImagePlan(units=0, rows=self.handle.shape[0], grid=self.grid)

    @property
    def same(self) -> Same:
        """As ``Image.same``."""
        return self.digest, 0, self.handle.shape[0], self.grid


class Item(Message, frozen=True, kw_only=True):
    """One input: ``tokens`` is int32 little-endian, images are in the order of their placeholders.

    ``param`` names the input in the client's request, for errors. ``query`` is the number of the one of the
    request's queries that its rows are compared with. ``chunks``, int32 little-endian ``[chunks + 1]``,
    bounds the chunks of its tokens where a row is asked for each.
    """

    tokens: bytes
    images: tuple[Image | Embeddings, ...] = ()
    param: str
    query: int = 0
    chunks: bytes = b""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4

    @property
    def chunk_count(self) -> int:
        return max(0, len(self.chunks) // 4 - 1)

    @property
    def size(self) -> int:
        return len(self.tokens) + len(self.chunks) + sum([image.size for image in self.images])


class EmbedRequest(Message, frozen=True, kw_only=True):
    """Items to embed, with the milliseconds left until the client's deadline.

    With ``queries`` each item is answered with one number in place of its rows: the sum, over the rows of
    its query, of the largest dot product with one of its own (MaxSim). Each query is float32 little-endian
    ``[rows, width]``.
    ``outputs`` are the names of what is asked for of each item, the model's default without any; with
    ``vision``, which stands alone, its tokens are the placeholders of its images. So does ``chunks``.
    ``priority`` is the client's, a smaller one is more urgent. ``client`` names the API key, empty where
    there are none: clients share a worker fairly. ``into`` is memory of the caller on the worker's
    host: the rows of a lone output may be written there. ``trace`` is the caller's span as headers of the
    W3C's Trace Context (or of what ``OTEL_PROPAGATORS`` says), empty where traces are off.
    """

    request_id: str
    items: tuple[Item, ...]
    timeout_ms: int
    priority: int = 0
    client: str = ""
    queries: tuple[bytes, ...] = ()
    outputs: tuple[str, ...] = ()
    into: SlabInfo | None = None
    trace: dict[str, str] = {}

    @property
    def size(self) -> int:
        return sum([item.size for item in self.items]) + sum(map(len, self.queries))


class Timings(Message, frozen=True, kw_only=True):
    """Where the time of a request went, milliseconds; the largest of its items for each stage."""

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    encode_ms: float = 0.0
    transfer_ms: float = 0.0
    embed_ms: float = 0.0

    def merge(self, other: Timings) -> Timings:
        return Timings(
            queue_ms=max(self.queue_ms, other.queue_ms),
            preprocess_ms=max(self.preprocess_ms, other.preprocess_ms),
            encode_ms=max(self.encode_ms, other.encode_ms),
            transfer_ms=max(self.transfer_ms, other.transfer_ms),
            embed_ms=max(self.embed_ms, other.embed_ms),
        )

    def spent(self) -> dict[str, float]:
        """The stages that took any time, for a log line."""
        return {name: round(ms, 1) for name in self.__struct_fields__ if (ms := getattr(self, name))}


class OutputRows(Message, frozen=True, kw_only=True):
    """The rows of an output, of all items that have not failed.

    Float32 ``[rows, width]``. ``norms``, float32 ``[rows]``, says how long the model had made the rows, where
    they are scaled to unit length, and is 1 elsewhere. ``indices``, int32 ``[rows]``, is as in ``Rows``, and
    empty where there are none. ``rows`` is empty where they are in the caller's memory.
    """

    # Read where they lie in the payload: copying a page of 22 MB blocks the event loop for 17 ms.
    rows: memoryview
    norms: memoryview
    width: int
    indices: memoryview = memoryview(b"")

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.norms) + len(self.indices)


class EmbedReply(Message, frozen=True, kw_only=True):
    """The rows of each output; ``counts`` says how many of the first one's each item became.

    A failed item has none, and its failure is listed; where all have failed there are no ``outputs``.
    ``cached_tokens`` counts, for each item, the image tokens whose rows came from the cache.
    """

    outputs: tuple[OutputRows, ...]
    counts: tuple[int, ...]
    failures: dict[int, Failure] = {}
    cached_tokens: tuple[int, ...]
    timings: Timings

    @property
    def size(self) -> int:
        return sum([output.size for output in self.outputs])


class ReaderInfo(Message, frozen=True, kw_only=True):
    """Who will read the rows, so that the producer can pick a route that reaches it.

    ``host`` identifies a kernel and its process namespace, ``devices`` the CUDA devices by UUID, ``kinds``
    the transports the reader can use for this producer, best first.
    """

    host: str
    devices: tuple[str, ...] = ()
    kinds: tuple[str, ...]


class EncodeRequest(Message, frozen=True, kw_only=True):
    """One image to encode for the reader; ``priority``, ``client`` and ``trace`` as in ``EmbedRequest``.

    ``call`` is the reader's own name for this call, by which it can say later that it has gone (``Forget``).
    """

    request_id: str
    image: Image
    timeout_ms: int
    reader: ReaderInfo
    priority: int = 0
    client: str = ""
    call: str = ""
    trace: dict[str, str] = {}

    @property
    def size(self) -> int:
        return self.image.size


class Forget(Message, frozen=True, kw_only=True):
    """The reader no longer wants what this call gave or will give; its rows may be reclaimed at once."""

    call: str


class Forgotten(Message, frozen=True, kw_only=True):
    """The answer to ``Forget``."""


class EncodeReply(Message, frozen=True, kw_only=True):
    handle: Handle
    timings: Timings

    @property
    def size(self) -> int:
        return len(self.handle.data)


class Describe(Message, frozen=True, kw_only=True):
    """Ask an instance what it is; ``caller`` names the frontends of one port, which share their part."""

    caller: str = ""


class WorkerInfo(Message, frozen=True, kw_only=True):
    """What an instance is; ``host`` as in ``ReaderInfo``.

    Work is sent only where ``fingerprint`` (the checkpoint's) equals the caller's own; an embed worker also
    asks that the rows it would get are of its own ``dtype``. ``rounding`` says what its engines round beyond
    that; what was kept of another rounding is not taken for its own. ``width`` is that of an output row,
    ``row_width`` that of a vision row, 0 without a vision stage. ``tokens`` and ``units`` say how much the
    instance takes from the caller at a time, at its pace of now; 0 where it has no such stage or does
    not know.
    """

    role: str
    model: str
    fingerprint: str
    dtype: str
    width: int
    row_width: int
    images: bool
    rounding: str = ""
    host: str = ""
    slabs: tuple[SlabInfo, ...] = ()
    tokens: int = 0
    units: int = 0


class Inspect(Message, frozen=True, kw_only=True):
    """Ask an instance how busy it is."""


class CacheState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cache of vision rows: lookups since the start, and images and bytes held now."""

    hits: int
    misses: int
    entries: int
    nbytes: int
    capacity_bytes: int


class SlabState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An encode worker's slab now: bytes lent or reserved, and leases outstanding."""

    used_bytes: int
    capacity_bytes: int
    leases: int


class WorkerState(Message, frozen=True, kw_only=True):
    """How busy an instance is; ``queued`` is in tokens for the text stage, in units for the vision stage."""

    queued: dict[str, float]
    cache: CacheState | None = None
    slab: SlabState | None = None


Request = EmbedRequest | EncodeRequest | Describe | Inspect | Forget
Reply = EmbedReply | EncodeReply | WorkerInfo | WorkerState | Forgotten | Failure


class Calls(Message, frozen=True, kw_only=True):
    """Requests that travel together; each has its own deadline, trace and client, and gets its own reply.

    ``caller`` is a random number of the process that calls; it counts its requests to an instance, and
    ``first`` is the number of the first one here. ``cancelled`` are numbers of requests in earlier messages
    that it wants no longer; their work stops. A caller that wants none of a message's ends the stream.
    """

    caller: int
    first: int
    requests: tuple[Request, ...]
    cancelled: tuple[int, ...] = ()


class Replies(Message, frozen=True, kw_only=True):
    """Replies by the position of their request in ``Calls``; each position comes once in a stream."""

    replies: dict[int, Reply]


class Piece(Message, frozen=True, kw_only=True):
    """The next part of a payload of ``nbytes``, the ``payload``th of those in the stream that are cut."""

    payload: int
    nbytes: int
    data: memoryview


_encoder = msgspec.msgpack.Encoder()
# Text that is not UTF-8 is reported by Python, not by the codec.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)


def encode(message: Message) -> bytes:
    return bytes((VERSION,)) + _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[M], kind: str, payload: object) -> M:
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise ProtocolError(f"a message must be bytes, not {type(payload).__name__}")
    view = memoryview(payload)
    if not view:
        raise ProtocolError("an empty message")
    if view[0] != VERSION:
        raise ProtocolError(f"this process speaks wire version {VERSION}, its peer sent version {view[0]}")
    try:
        return decoder.decode(view[1:])
    except _MALFORMED as error:
        raise ProtocolError(f"malformed {kind}: {error}") from error


decode_calls = partial(_decode, msgspec.msgpack.Decoder(Calls), "request")
"""Reads what a caller sent; raises ``ProtocolError``."""

_Answer = Replies | Failure | Piece
_answers: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)
decode_replies = partial(_decode, _answers, "reply")
"""Reads what an instance answered; raises ``ProtocolError``."""
