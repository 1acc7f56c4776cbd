"""Pixels that a client normalised itself, with token ids, masks and placeholders, through the KServe door."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.faults.traffic import picture
from tests.e2e.inputs import cosine, data_url
from tests.e2e.kserve import Door, KserveClient, kserve_frontend, refused
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference
from tests.tracing.collector import Collector, Exported

pytestmark = [pytest.mark.service, pytest.mark.kserve, pytest.mark.xdist_group("shared-service")]

Row = tuple[list[int], np.ndarray]


@pytest.fixture(scope="module")
def door(service: Disaggregated, traces: Collector) -> Iterator[Door]:
    with kserve_frontend(service, settings=traces.environment()) as door:
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
    """Images that the encode worker has answered."""
    return service.running.worker_metric(0, "tessera_items_total", stage="encode", outcome="ok")


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


KINDS = ("FP32", "FP16", "file")
ROUNDS, CALLS, CALL_ROWS = 8, 8, 2
"""Of the test below: rounds at most, calls of each kind in a round, rows of a call."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """One call of a kind, in two forms that no cache takes for one: the same pixels in other bytes."""

    kind: str
    number: int
    forms: tuple[dict[str, Any], dict[str, Any]]

    @classmethod
    def of(cls, reference: Reference, kind: str, number: int) -> Mixed:
        seeds = range(9000 + CALL_ROWS * number, 9000 + CALL_ROWS * (number + 1))
        if kind == "file":
            files = [picture(seed) for seed in seeds]
            # What follows the end of a PNG is not read.
            first, second = ({"image": [[data + more] for data in files]} for more in (b"", b"\0"))
            return cls(kind, number, (first, second))
        chance = np.random.default_rng(number)
        given = []
        for seed in seeds:
            ids, tiles = row(reference, picture(seed), f"word {seed}")
            tiles = (tiles + chance.normal(0, 0.1, tiles.shape)).astype(np.float32)
            tiles[..., 0, 0] = 0.0
            given.append((ids, tiles))
        first, second = (batch(given, np.float32 if kind == "FP32" else np.float16) for _ in range(2))
        second["pixel_values"][..., 0, 0] = -0.0
        return cls(kind, number, (first, second))

    def ask(self, kserve: KserveClient, form: int) -> np.ndarray:
        model, output = (MODEL, "embeddings") if self.kind == "file" else ("router", "pooled")
        headers = {"traceparent": f"00-{self.trace}-00f067aa0ba902b7-01"} if form else {}
        found: np.ndarray = kserve.infer(model, self.forms[form], headers=headers).as_numpy(output)
        return found

    @property
    def trace(self) -> str:
        """Of the call in its second form."""
        return f"{1 + KINDS.index(self.kind):016x}{self.number:016x}"

    @staticmethod
    def kind_of(trace: str) -> str | None:
        place = int(trace[:16], 16)
        return KINDS[place - 1] if 0 < place <= len(KINDS) else None


def kinds_of_batches(spans: list[Exported]) -> set[frozenset[str]]:
    """The kinds of pixels that were together in a batch of the encode worker."""
    batches = [span for span in spans if span.name == "vision batch"]
    kinds = [{Mixed.kind_of(trace) for trace, _ in span.links} for span in batches]
    return {frozenset(kind for kind in found if kind) for found in kinds}


def test_pixels_of_all_types_in_one_batch_are_those_of_each_alone(
    service: Disaggregated, door: Door, kserve: KserveClient, reference: Reference, traces: Collector
) -> None:
    """Rounds of calls all at once, until an engine has had a batch with every kind."""
    clients = [door.client("grpc") for _ in range(len(KINDS) * CALLS)]
    try:
        for round_ in range(ROUNDS):
            calls = [
                Mixed.of(reference, kind, round_ * CALLS + number)
                for number in range(CALLS)
                for kind in KINDS
            ]
            alone = [call.ask(kserve, 0) for call in calls]
            before = encoded(service)
            with ThreadPoolExecutor(len(clients)) as threads:
                together = list(threads.map(lambda call, client: call.ask(client, 1), calls, clients))
            # More where a worker stood still and was asked again, never fewer.
            assert encoded(service) >= before + CALL_ROWS * len(calls), "some were not computed again"
            for call, one, other in zip(calls, alone, together, strict=True):
                np.testing.assert_allclose(other, one, atol=1e-5, err_msg=f"{call.kind} {call.number}")
            wanted = {call.trace for call in calls}
            traces.wait(lambda spans, wanted=wanted: wanted <= batched(spans))
            if frozenset(KINDS) in kinds_of_batches(traces.all()):
                break
        else:
            raise AssertionError(f"batches had {kinds_of_batches(traces.all())}")
    finally:
        for client in clients:
            client.close()


def batched(spans: list[Exported]) -> set[str]:
    """The traces that batches of the encode worker link to."""
    return {trace for span in spans if span.name == "vision batch" for trace, _ in span.links}


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
