"""Vectors, scores and vectors of tokens from each engine on the card, beside float32 of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.carrying import COMPILED, ENCODERS, TOWERS, assert_text, assert_towers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

KINDS = ("graphs", "plain", "fp8", "aoti")
# Nothing is compiled of encoders.
CASES = [
    (name, kind) for name in (*COMPILED, *ENCODERS) for kind in KINDS if name in COMPILED or kind != "aoti"
]
# Eight bits move the seven logits of this one by 1.12 of their deviation, which tells nothing.
CASES.remove(("qwen3_rerank", "fp8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of engine that the card has."""
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of capability 8.9 or above")
    return str(request.param)


@pytest.mark.parametrize(("name", "kind"), CASES, indirect=["kind"])
def test_outputs(folder: Path, name: str, kind: str) -> None:
    assert_text(name, kind, folder, "cuda")


@pytest.mark.parametrize("kind", ("graphs", "plain", "fp8"), indirect=True)
@pytest.mark.parametrize("name", TOWERS)
def test_two_towers(folder: Path, name: str, kind: str) -> None:
    """Both engines of two towers."""
    assert_towers(name, kind, folder, "cuda")
