"""Encode and embed workers on one card: rows that stay on it, and workers that go over to FP8."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tessera.models import open_model
from tessera.models.base import Role
from tessera_engines.cli import main
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, Service, launch, post
from tests.models.carrying import BARS
from tests.models.running import Given, batch_of, cosines, vectors
from tests.references.carry import ALL
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.service, pytest.mark.timeout(600)]

TEXT = "a yellow heart"
NEW = "fp8 as stored"
FAMILIES = ("qwen3_vl_embedding_wide_heads", "nemotron_3_5_embed")


@pytest.fixture(autouse=True)
def device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def vector(service: Service, value: object) -> np.ndarray:
    answer = post(service, input=[value], input_type="passage")
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_reach_the_text_stage_within_the_card(
    family: str, photos: dict[str, bytes], tmp_path: Path
) -> None:
    checkpoint = ALL[family].checkpoint(tmp_path)
    model, photo = open_model(checkpoint), photos["flower"]
    given = [Given(parts=each, role=Role.PASSAGE) for each in ((TEXT,), (photo,), (photo, TEXT))]
    vision, text = (load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text))
    expected = vectors(model, text, batch_of(model, vision, given))
    with launch("e_p.sh", checkpoint, tmp_path / "log", workers=2) as service:
        found = np.stack([vector(service, one) for one in (TEXT, parts(None, photo), parts(TEXT, photo))])
        assert cosines(found, expected).min() > BARS["bfloat16"]
        # The photograph is kept from its first input on.
        assert service.worker_metric(1, "tessera_transfers_total", route="cuda_ipc", outcome="ok") == 1
        assert service.worker_metric(1, "tessera_transfers_total") == 1


@pytest.fixture
def eight(checkpoint: Path, photos: dict[str, bytes], tmp_path: Path) -> Path:
    """Both towers in FP8."""
    folder = tmp_path / "calibration"
    folder.mkdir()
    (folder / "texts.txt").write_text(f"{TEXT}\ntwo cats on a sofa\nthe river under the bridge\n")
    (folder / "flower.jpg").write_bytes(photos["flower"])
    words = ["--model-path", str(checkpoint), "--calibration", str(folder), "--out", str(tmp_path / "out")]
    main(["quantize", *words, "--stage", "all", "--most-loss", "1"])
    return tmp_path / "out"


def test_workers_go_over_to_fp8_one_role_beside_the_other(
    eight: Path, photos: dict[str, bytes], tmp_path: Path
) -> None:
    """Whoever is asked answers in its own precision, and keeps no rows of the other."""
    # What comes after a JPEG changes its hash alone: an image that no cache has seen.
    number = count()

    def new() -> list[dict[str, object]]:
        return parts(None, photos["flower"] + str(next(number)).encode())

    plain = tmp_path / "plain.yaml"
    plain.write_text("vision: {quantization: none}\ntext: {quantization: none}\n")
    shared = {"DYN_FILE_KV": str(tmp_path / "discovery")}
    nobody = {"TESSERA_ENCODE_WORKERS": "0", "TESSERA_EMBED_WORKERS": "0"}
    with ExitStack() as stack, ExitStack() as leaving:

        def start(name: str, within: ExitStack, workers: int, settings: Mapping[str, str]) -> Service:
            return within.enter_context(
                launch(
                    "e_p.sh",
                    eight,
                    tmp_path / f"{name}.log",
                    workers=workers,
                    frontends=1 - workers // 2,
                    environment={**shared, **settings},
                )
            )

        service = start("frontend", stack, 0, nobody)
        start("old", leaving, 2, {"TESSERA_ENGINE_ARGS": str(plain)})
        wait(service, "")
        old = [vector(service, value) for value in (TEXT, new())]
        start("new", stack, 2, {})
        wait(service, "", NEW)
        same, seen = parts(None, photos["flower"] + b"kept"), set[str]()

        def answered() -> set[str]:
            """By which embed workers, told apart by a text; each also reads an image that stays the same."""
            vector(service, same)
            found = vector(service, TEXT)
            seen.add("old" if apart(found, old[0]) < apart(found, other) else "new")
            return seen

        other = unlike(service, old[0])
        wait_until(lambda: answered() == {"old", "new"}, said=lambda: seen)
        leaving.close()
        wait(service, NEW)
        now = [vector(service, value) for value in (TEXT, new())]
        for value, before, fresh in zip((TEXT, same), old, now, strict=True):
            # Rows that an encode worker in bfloat16 gave are none of this image any more.
            assert apart(vector(service, value), fresh) < apart(before, fresh) / 4
            assert apart(before, fresh) < 0.1


def unlike(service: Service, exact: np.ndarray) -> np.ndarray:
    """The first answer in the other precision."""
    found: list[np.ndarray] = []

    def other() -> bool:
        found.append(vector(service, TEXT))
        return apart(found[-1], exact) > 1e-5

    wait_until(other, said=lambda: [apart(each, exact) for each in found])
    return found[-1]


def apart(found: np.ndarray, exact: np.ndarray) -> float:
    return 1 - float(cosines(found[None], exact[None])[0])


def wait(service: Service, *roundings: str) -> None:
    """Until the frontend has workers of both roles in each of these precisions, and no other."""
    wanted = [(role, rounding) for role in ("embed", "encode") for rounding in roundings]

    def found() -> list[tuple[str, str]]:
        card = httpx.get(f"{service.url}/v1/models/{MODEL}").json()
        return [(kind["role"], kind["rounding"]) for kind in card["precision"]]

    wait_until(lambda: found() == wanted, 240, process=service.script, said=found)
