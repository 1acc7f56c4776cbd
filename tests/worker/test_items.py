"""The chunks of an item, whose bounds come from another process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tessera import wire
from tessera.errors import InvalidInput, UnsupportedOperation
from tessera.models import open_model
from tessera.models.base import CHUNKS, STATES
from tessera.worker.items import ItemReader
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import TINY
from tessera_tools.random_checkpoint.towers import CLIP_TINY

TOKENS = np.arange(1, 9, dtype="<i4")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "checkpoint"
    write_checkpoint(path, TINY, seed=0)
    return path


def item(*bounds: int, chunks: bytes | None = None) -> wire.Item:
    given = np.array(bounds, "<i4").tobytes() if chunks is None else chunks
    return wire.Item(tokens=TOKENS.tobytes(), param="input[3]", chunks=given)


def request(given: wire.Item, *outputs: str) -> wire.EmbedRequest:
    return wire.EmbedRequest(request_id="r", items=(given,), timeout_ms=1000, outputs=outputs)


def test_bounds_are_read(path: Path) -> None:
    reader = ItemReader(open_model(path), images=False, gives=(CHUNKS,))
    (output,) = reader.outputs(request(item(1, 4, 8), CHUNKS))
    assert (output.name, output.width) == (CHUNKS, TINY.hidden)
    read = reader.read(item(1, 4, 8), (CHUNKS,))
    assert (read.chunks.tolist(), read.asked) == ([1, 4, 8], (CHUNKS,))
    assert item(1, 4, 8).chunk_count == 2 and item(chunks=b"").chunk_count == 0


@pytest.mark.parametrize(
    "given",
    [
        item(4),
        item(4, 4),
        item(1, 5, 3),
        item(-1, 3),
        item(1, 9),
        item(-(2**31), 2**31 - 1),
        item(chunks=b"\0" * 9),
        item(chunks=b"\0" * 3),
    ],
    ids=repr,
)
def test_bounds_that_are_none_are_refused(given: wire.Item, path: Path) -> None:
    reader = ItemReader(open_model(path), images=False, gives=(CHUNKS,))
    with pytest.raises(InvalidInput, match="bounds in 8 tokens") as refused:
        reader.read(given, (CHUNKS,))
    assert refused.value.param == "input[3]"


def test_what_the_engine_does_not_give_or_the_item_does_not_bound_is_refused(path: Path) -> None:
    model = open_model(path)
    with pytest.raises(InvalidInput) as refused:
        ItemReader(model, images=False, gives=(CHUNKS,)).outputs(request(item(chunks=b""), CHUNKS))
    assert refused.value.param == "input[3]"
    with pytest.raises(UnsupportedOperation, match="'chunks'"):
        ItemReader(model, images=False, gives=()).outputs(request(item(1, 4), CHUNKS))


def test_an_image_that_is_the_output_stands_alone(tmp_path: Path) -> None:
    """Of its tokens the placeholder is the only one, although no vocabulary has it."""
    write_checkpoint(tmp_path / "clip", CLIP_TINY)
    model = open_model(tmp_path / "clip")
    reader = ItemReader(model, images=True, gives=())
    token = np.array([model.vocab_size], "<i4")
    plan = model.plan(30, 20, param="x")
    image = wire.Image(digest=bytes(32), data=b"", units=plan.units, rows=plan.rows, param="input[3].image")
    alone = wire.Item(tokens=token.tobytes(), images=(image,), param="input[3]")
    assert len(reader.read(alone).tokens) == 0
    many = np.repeat(token, 2).tobytes()
    for tokens, images in (
        (b"", (image,)),
        (token.tobytes()[:3], (image,)),
        ((token - 1).tobytes(), (image,)),
        ((token + 1).tobytes(), (image,)),
        (many, (image,)),
        (many, (image, image)),
        (token.tobytes(), (image, image)),
        (token.tobytes(), (msgspec.structs.replace(image, rows=2),)),
    ):
        with pytest.raises(InvalidInput, match="an input of its own") as caught:
            reader.read(wire.Item(tokens=tokens, images=images, param="input[3]"))
        assert caught.value.param == "input[3]"
    with pytest.raises(InvalidInput, match="no hidden states"):
        reader.read(alone, (STATES,))
    with pytest.raises(InvalidInput, match="text alone") as caught:
        ItemReader(model, images=False, gives=()).read(alone)
    assert caught.value.param == "input[3].image"
    with pytest.raises(InvalidInput, match="token ids must be in"):
        reader.read(wire.Item(tokens=token.tobytes(), param="input[3]"))
