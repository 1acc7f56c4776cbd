"""Pixels that a client normalised itself, with token ids, masks and placeholders, through the KServe door."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import cosine, data_url
from tests.e2e.kserve import Door, KserveClient, kserve_frontend, refused
from tests.references.llama_nemotron_vl import Reference

pytestmark = [pytest.mark.service, pytest.mark.kserve, pytest.mark.xdist_group("shared-service")]

Row = tuple[list[int], np.ndarray]


@pytest.fixture(scope="module")
def door(service: Disaggregated) -> Iterator[Door]:
    with kserve_frontend(service) as door:
        yield door


@pytest.fixture(scope="module")
def kserve(door: Door) -> Iterator[KserveClient]:
    client = door.client("grpc")
    yield client
    client.close()


def row(reference: Reference, data: bytes, text: str = "") -> Row:
    """Token ids and normalised tiles ``[tiles, 3, size, size]``, as the model's own processor makes them."""
    tiles = reference.tiles(data)
    return reference.tokens(text, [len(tiles)], "passage"), reference.pixels(tiles)


def batch(rows: list[Row], kind: type = np.float32) -> dict[str, np.ndarray]:
    """Rows padded to the longest, and tiles to the most."""
    length = max(len(ids) for ids, _ in rows) + 3
    most = max(len(tiles) for _, tiles in rows)
    ids, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.int64)
    pixels = np.full((len(rows), most, *rows[0][1].shape[1:]), 0.25, kind)
    for index, (tokens, tiles) in enumerate(rows):
        ids[index, : len(tokens)], mask[index, : len(tokens)] = tokens, 1
        pixels[index, : len(tiles)] = tiles
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def expected(reference: Reference, ids: list[int], pixels: np.ndarray) -> np.ndarray:
    rows = reference.projected(reference.pixel_features(torch.from_numpy(pixels)))
    vector = reference.pooled(reference.last_hidden(reference.fused(ids, [rows])))
    return (vector / vector.norm()).numpy()


def pooled(kserve: KserveClient, inputs: dict[str, np.ndarray]) -> np.ndarray:
    found: np.ndarray = kserve.infer("router", inputs).as_numpy("pooled")
    return found


def encoded(service: Disaggregated) -> float:
    """Images that the encode worker has had."""
    return sum(
        service.running.worker_metric(worker, "tessera_items_total", stage="encode") for worker in (0, 1)
    )


def test_pixels_give_the_vector_of_their_image(
    service: Disaggregated, kserve: KserveClient, reference: Reference, photos: dict[str, bytes]
) -> None:
    rows = [row(reference, data, text) for data, text in zip(photos.values(), ("", "a word"), strict=False)]
    wanted = [
        np.array(
            service.embed(
                [
                    *([{"type": "text", "text": text}] if text else []),
                    {"type": "image_url", "image_url": {"url": data_url(data)}},
                ],
                input_type="passage",
            )[0]
        )
        for data, text in zip(photos.values(), ("", "a word"), strict=False)
    ]
    together = pooled(kserve, batch(rows))
    for index, one in enumerate(rows):
        assert cosine(together[index], wanted[index]) >= 0.9999999
        assert cosine(pooled(kserve, batch([one]))[0], wanted[index]) >= 0.9999999
        assert cosine(together[index], expected(reference, *one)) >= 0.999999


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_values_that_no_byte_has_are_not_rounded(
    kserve: KserveClient, reference: Reference, photos: dict[str, bytes], kind: type
) -> None:
    ids, tiles = row(reference, next(iter(photos.values())))
    chance = np.random.default_rng(3)
    other = (tiles + chance.normal(0, 0.5, tiles.shape)).astype(kind)
    found = pooled(kserve, batch([(ids, other)], kind))[0]
    wanted = expected(reference, ids, other.astype(np.float32))
    assert cosine(found, wanted) >= 0.999999
    assert cosine(wanted, expected(reference, ids, tiles)) < 0.99999
    levels = np.clip(np.round((other.astype(np.float32) * 0.5 + 0.5) * 255), 0, 255)
    rounded = expected(reference, ids, (levels / 255 - 0.5).astype(np.float32) / np.float32(0.5))
    assert np.abs(found - wanted).max() < 0.1 * np.abs(rounded - wanted).max()


def test_rows_of_text_among_them_and_empty_ones(
    kserve: KserveClient, reference: Reference, photos: dict[str, bytes]
) -> None:
    image = row(reference, next(iter(photos.values())))
    text = (reference.tokens("a yellow heart", [], "query"), image[1][:0])
    inputs = batch([image, text, text])
    inputs["attention_mask"][2] = 0
    found = pooled(kserve, inputs)
    alone = {name: values[1:2] for name, values in inputs.items() if name != "pixel_values"}
    assert cosine(found[1], pooled(kserve, alone)[0]) >= 0.9999999
    assert cosine(found[0], pooled(kserve, batch([image]))[0]) >= 0.9999999
    assert not found[2].any()


def test_the_zero_form_of_perf_analyzer_runs(kserve: KserveClient) -> None:
    shape = (3, *[kserve_size(kserve)] * 2)
    inputs = {
        "input_ids": np.zeros((1, 1024), np.int64),
        "attention_mask": np.zeros((1, 1024), np.int64),
        "pixel_values": np.zeros((1, *shape), np.float32),
    }
    assert not pooled(kserve, inputs).any()


def kserve_size(kserve: KserveClient) -> int:
    metadata = kserve.client.get_model_metadata("router")
    (pixels,) = [one for one in metadata.inputs if one.name == "pixel_values"]
    return int(pixels.shape[-1])


def test_text_with_pixels_beside_it_never_comes_to_an_encode_worker(
    service: Disaggregated, kserve: KserveClient, reference: Reference, photos: dict[str, bytes]
) -> None:
    _, tiles = row(reference, next(iter(photos.values())))
    before = encoded(service)
    tokens = reference.tokens("no picture here", [], "query")
    assert pooled(kserve, batch([(tokens, tiles + np.float32(0.125))])).any()
    assert encoded(service) == before
    image = row(reference, next(iter(photos.values())))
    pooled(kserve, batch([(image[0], image[1] + np.float32(0.0625))]))
    assert encoded(service) == before + 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda made: made | {"pixel_values": made["pixel_values"][..., :-1]},
            "pixel_values: expected the shape",
        ),
        (
            lambda made: made | {"pixel_values": made["pixel_values"].astype(np.int32)},
            "pixel_values: expected FP32",
        ),
        (lambda made: made | {"pixel_values": np.full_like(made["pixel_values"], np.nan)}, "not finite"),
        (
            lambda made: made | {"pixel_values": np.full_like(made["pixel_values"], 1e9)},
            "not finite or beyond",
        ),
        (
            lambda made: made | {"pixel_values": made["pixel_values"][:, :1]},
            "image tokens in the row, and its 1",
        ),
        (lambda made: {name: made[name] for name in ("input_ids", "attention_mask")}, "has no image"),
        (
            lambda made: (
                made
                | {"attention_mask": made["attention_mask"] * (np.arange(made["input_ids"].shape[1]) < 40)}
            ),
            "image tokens in the row",
        ),
    ],
    ids=["size", "type", "nan", "large", "none", "absent", "cut"],
)
def test_what_is_refused_is_named(
    kserve: KserveClient, reference: Reference, photos: dict[str, bytes], change: Any, words: str
) -> None:
    inputs = batch([row(reference, next(iter(photos.values())))])
    with pytest.raises(InferenceServerException) as caught:
        pooled(kserve, change(inputs))
    status, message = refused(caught.value)
    assert status == 400 and words in message


def test_hidden_states_are_those_of_the_reference(
    kserve: KserveClient, reference: Reference, photos: dict[str, bytes]
) -> None:
    image = row(reference, next(iter(photos.values())), "a word")
    text = (reference.tokens("a yellow heart", [], "query"), image[1][:0])
    inputs = batch([image, text, text])
    inputs["attention_mask"][2] = 0
    states = kserve.infer("hidden", inputs).as_numpy("last_hidden_state")
    assert states.shape[:2] == inputs["input_ids"].shape
    assert not states[inputs["attention_mask"] == 0].any()
    for index, (ids, pixels) in enumerate((image, text)):
        rows = (
            [reference.projected(reference.pixel_features(torch.from_numpy(pixels)))] if len(pixels) else []
        )
        wanted = reference.last_hidden(reference.fused(ids, rows)).numpy()
        np.testing.assert_allclose(states[index, : len(ids)], wanted, atol=2e-4, rtol=2e-3)
    alone = {"input_ids": np.array([text[0]])}
    np.testing.assert_allclose(
        kserve.infer("hidden", alone).as_numpy("last_hidden_state")[0], states[1, : len(text[0])], atol=1e-4
    )


def test_states_and_vectors_are_asked_for_at_the_same_time(
    kserve: KserveClient, door: Door, reference: Reference
) -> None:
    inputs = [
        {"input_ids": np.array([reference.tokens(f"word {number}", [], "query")])} for number in range(24)
    ]
    wanted = [pooled(kserve, made)[0] for made in inputs]

    def ask(number: int) -> np.ndarray:
        client = door.client("grpc")
        try:
            if number % 3:
                return pooled(client, inputs[number])[0]
            states = (
                client.infer("hidden", inputs[number]).as_numpy("last_hidden_state")[0].astype(np.float64)
            )
            vector = states.mean(axis=0)
            return np.asarray(vector / np.linalg.norm(vector))
        finally:
            client.close()

    with ThreadPoolExecutor(8) as threads:
        for number, found in enumerate(threads.map(ask, range(len(inputs)))):
            assert cosine(found, wanted[number]) >= 0.9999999


def test_vit_gives_the_rows_of_the_reference(
    kserve: KserveClient, reference: Reference, photos: dict[str, bytes]
) -> None:
    _, tiles = row(reference, next(iter(photos.values())))
    other = tiles + np.float32(0.03125)
    wanted = reference.projected(reference.pixel_features(torch.from_numpy(other))).numpy()
    found = kserve.infer("vit", {"pixel_values": other}).as_numpy("image_features")
    assert found.shape[0] == len(tiles)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, atol=2e-4, rtol=2e-3)
    together = kserve.infer("vit", {"pixel_values": other[None]}).as_numpy("image_features")
    np.testing.assert_allclose(together[0], wanted, atol=2e-4, rtol=2e-3)


def test_an_answer_that_is_too_large_is_refused_before_it_is_computed(kserve: KserveClient) -> None:
    width = kserve.client.get_model_metadata("hidden").outputs[0].shape[-1]
    tokens = (288 << 20) // (4 * width * 256) + 1
    zeros = np.zeros((256, tokens), np.int64)
    with pytest.raises(InferenceServerException, match="over the limit"):
        kserve.infer("hidden", {"input_ids": zeros, "attention_mask": zeros})
