"""Where nothing says how a vector is made of the tokens' states, people are told what was assumed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tessera.models import open_model, try_out
from tessera.models.declared import pooling_assumed, pooling_modes
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, ROBERTA_TINY, SPLADE_TINY, TINY, EncoderSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare


def opened(
    path: Path, caplog: pytest.LogCaptureFixture, **options: str
) -> tuple[list[str] | None, bool, str]:
    """The pooling, whether it is assumed, and what the log says when the model is opened and tried."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try_out(model := open_model(path, options))
    return pooling_modes(model), pooling_assumed(model), caplog.text


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
def test_the_mean_is_assumed_aloud(
    spec: EncoderSpec, written: WriteCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Path(shutil.copytree(written(spec), tmp_path / "bare"))
    (bare / "modules.json").unlink()
    modes, assumed, said = opened(bare, caplog)
    assert (modes, assumed) == (["mean"], True)
    assert f"{bare}: declares no pooling" in said
    for mode in ("mean", "cls", "lasttoken"):
        assert opened(bare, caplog, pooling=mode) == ([mode], False, "")
    pooling = Module("Pooling", {"word_embedding_dimension": spec.hidden, "pooling_mode_cls_token": True})
    assert opened(declare(bare, tmp_path / "declared", pooling), caplog) == (["cls"], False, "")


@pytest.mark.parametrize("spec", [RERANK_TINY, SPLADE_TINY], ids=["bert_rerank", "splade"])
def test_what_gives_no_vectors_assumes_nothing(
    spec: EncoderSpec, written: WriteCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(written(spec), caplog) == (None, False, "")
