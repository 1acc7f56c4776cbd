"""Request bodies of each workload: seeded, distinct, and of the exact size that the workload names."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from tessera_tools.load.words import Words

_START_OF_IMAGE = b"\xff\xd8"

IMAGE_TEXT = "a page"
"""What every image comes with that is not alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpWorkload:
    """``inputs`` texts of ``tokens`` tokens each in a request, or one image of ``size`` (width, height).

    With ``query``, a text of so many tokens, the inputs are documents that are scored for it: texts, or as
    many images.
    An image that is ``alone`` has no text beside it, for models that embed either.
    ``fresh`` images are never the same twice; others come from a fixed set that a cache can hold.
    ``text_share`` of the requests are texts of ``tokens`` tokens without an image; with ``always_image`` they
    carry a blank one that no cache has seen, as if the encoder ran for every request.
    """

    name: str
    tokens: int = 0
    inputs: int = 1
    size: tuple[int, int] | None = None
    fresh: bool = True
    alone: bool = False
    text_share: float = 0.0
    always_image: bool = False
    query: int = 0


def _by_name(*workloads: HttpWorkload) -> dict[str, HttpWorkload]:
    return {workload.name: workload for workload in workloads}


EMBEDDING = _by_name(
    HttpWorkload(name="text-1024", tokens=1024),
    HttpWorkload(name="text-128", tokens=128),
    HttpWorkload(name="text-32x64", tokens=32, inputs=64),
    HttpWorkload(name="text-32", tokens=32),
    HttpWorkload(name="tile", size=(512, 512)),
    HttpWorkload(name="page", size=(1275, 1650)),
    HttpWorkload(name="tile-again", size=(512, 512), fresh=False),
    HttpWorkload(name="mixed", size=(512, 512), tokens=128, text_share=0.7),
    HttpWorkload(name="mixed-always-encode", size=(512, 512), tokens=128, text_share=0.7, always_image=True),
)
"""For models whose output is a vector."""

SCORING = _by_name(
    HttpWorkload(name="rerank-128x100", query=16, tokens=128, inputs=100),
    HttpWorkload(name="rerank-page-x20", query=16, size=(1275, 1650), inputs=20),
    HttpWorkload(name="rerank-page-x20-again", query=16, size=(1275, 1650), inputs=20, fresh=False),
)
"""For models of every output."""

BY_NAME = _by_name(
    HttpWorkload(name="text-500", tokens=500),
    HttpWorkload(name="text-128x64", tokens=128, inputs=64),
    HttpWorkload(name="text-500x64", tokens=500, inputs=64),
    HttpWorkload(name="image", size=(512, 512), alone=True),
    HttpWorkload(name="image-again", size=(512, 512), alone=True, fresh=False),
)
"""For embedders of at most 512 tokens, special ones included, or of two towers; measured where they are asked
for alone."""

WORKLOADS = EMBEDDING | SCORING | BY_NAME


@dataclass(frozen=True, slots=True)
class Body:
    """JSON bytes for a POST to ``path``; equal ``key`` means equal vectors or scores."""

    data: bytes
    key: int
    inputs: int
    path: str = "/v1/embeddings"


class Bodies:
    """An endless supply for one client process."""

    def __init__(
        self,
        workload: HttpWorkload,
        words: Words,
        name: str,
        *,
        seed: int,
        variety: int = 64,
        encoding: str = "base64",
        chat: bool = False,
        path: str = "/v1/embeddings",
    ) -> None:
        """With ``chat`` a text is a conversation, for servers that have no prompt for other texts.

        ``path`` is where inputs are embedded; documents with a query are scored elsewhere.
        """
        self._workload = workload
        self._encoding = encoding
        self._chat = chat
        self._path = path
        self._name = name
        self._random = random.Random(seed)
        self._seed = seed
        self._queries = [self._text(words, workload.query) for _ in range(8)] if workload.query else []
        self._texts: list[Body] = []
        if workload.tokens:
            make = self._make_passages if self._queries else self._make_texts
            self._texts = make(words, variety)
        self._images = self._make_images(8) if workload.size else []
        self._blank = jpeg(Image.new("RGB", workload.size)) if workload.size else b""

    def __iter__(self) -> Iterator[Body]:
        count = 0
        while True:
            count += 1
            if not self._images or self._random.random() < self._workload.text_share:
                key = count % len(self._texts)
                yield self._with_blank(key, count) if self._workload.always_image else self._texts[key]
            else:
                yield self._image(count)

    def _with_blank(self, key: int, count: int) -> Body:
        text = json.loads(self._texts[key].data)["input"]
        return self._body(_marked(self._blank, f"{self._seed}.{count}"), text, key)

    def _image(self, count: int) -> Body:
        if self._queries:
            return self._pages(count)
        key = count % (len(self._images) * 8)
        picture = self._images[key % len(self._images)]
        mark = f"{self._seed}.{count if self._workload.fresh else key}"
        text = "" if self._workload.alone else IMAGE_TEXT
        return self._body(_marked(picture, mark), text, -1 - key % len(self._images))

    def _body(self, image: bytes, text: str, key: int) -> Body:
        """In vLLM's form, which it and this service take alike."""
        url = b"data:image/jpeg;base64," + base64.b64encode(image)
        parts: list[object] = [{"type": "image_url", "image_url": {"url": "@"}}]
        if text:
            parts.append({"type": "text", "text": text})
        head, tail = self._envelope(messages=[{"role": "user", "content": parts}])
        return Body(head + url + tail, key, 1, self._path)

    def _pages(self, count: int) -> Body:
        """A query with images; where they are not fresh, those of one query are some of the next one's."""
        key = count % len(self._queries)
        documents = []
        for index in range(self._workload.inputs):
            picture = self._images[(key + index) % len(self._images)]
            mark = f"{self._seed}.{count}.{index}" if self._workload.fresh else f"{self._seed}.{key + index}"
            url = "data:image/jpeg;base64," + base64.b64encode(_marked(picture, mark)).decode()
            documents.append({"content": [{"type": "image_url", "image_url": {"url": url}}]})
        return self._scored(self._queries[key], documents, -1 - key)

    def _scored(self, query: str, documents: Sequence[object], key: int) -> Body:
        """In vLLM's form, with logits for an answer."""
        body = {"model": self._name, "queries": query, "documents": documents, "use_activation": False}
        return Body(json.dumps(body).encode(), key, len(documents), "/v1/score")

    def _make_passages(self, words: Words, variety: int) -> list[Body]:
        """Each query with some of twice as many passages as go into a request."""
        count = self._workload.inputs
        passages = [self._text(words, self._workload.tokens) for _ in range(2 * count)]
        return [
            self._scored(self._queries[key % len(self._queries)], self._random.sample(passages, count), key)
            for key in range(variety)
        ]

    def _envelope(self, **value: object) -> tuple[bytes, bytes]:
        body = json.dumps({"model": self._name, "encoding_format": self._encoding, **value})
        head, _, tail = body.partition("@")
        return head.encode(), tail.encode()

    def _make_texts(self, words: Words, variety: int) -> list[Body]:
        found = []
        for key in range(variety):
            texts = [self._text(words, self._workload.tokens) for _ in range(self._workload.inputs)]
            asked: list[object] = list(texts)
            if self._chat:
                asked = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
            field = "messages" if self._chat else "input"
            head, tail = self._envelope(**{field: asked if len(asked) > 1 else asked[0]})
            found.append(Body(head + tail, key, len(texts), self._path))
        return found

    def _text(self, words: Words, tokens: int) -> str:
        """Words until the prompt has so many tokens, or one word where it has more anyway."""
        some: list[str] = []
        while (missing := tokens - words.tokens(" ".join(some))) > 0:
            some += self._random.choices(words.all(), k=missing)
            while (excess := words.tokens(" ".join(some)) - tokens) > 0:
                if len(some) == 1:
                    return some[0]
                del some[max(1, len(some) - excess) :]
        return " ".join(some)

    def _make_images(self, variety: int) -> list[bytes]:
        assert self._workload.size is not None
        width, height = self._workload.size
        noise = np.random.default_rng(self._seed)
        found = []
        for _ in range(variety):
            small = noise.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
            found.append(jpeg(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)))
        return found


def jpeg(picture: Image.Image) -> bytes:
    """A file of the quality that cameras and scanners use."""
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    assert buffer.getvalue().startswith(_START_OF_IMAGE)
    return buffer.getvalue()


def _marked(picture: bytes, mark: str) -> bytes:
    """The same picture with a comment, which makes it a new image to every cache."""
    comment = mark.encode()
    return picture[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + picture[2:]
