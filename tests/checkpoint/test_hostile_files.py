"""Checkpoints that somebody else wrote: what is no small file, no size of a model, or no good tokenizer."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.checkpoint import trial
from tessera.checkpoint.section import Section, most_of
from tessera.errors import CheckpointError
from tessera.models import open_model, try_out
from tessera_tools.random_checkpoint.checkpoint import main
from tests.special_files import endless, fifo, folder, large

pytestmark = [pytest.mark.starts, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that reads texts alone."""
    path = tmp_path_factory.mktemp("texts") / "checkpoint"
    main(["--out", str(path), "--family", "qwen3_embedding"])
    return path


@pytest.fixture
def hostile(texts: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    path = tmp_path / "checkpoint"
    shutil.copytree(texts, path)
    return path


def deep(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


SAMPLES = [fifo, endless, folder, large, deep]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *(("config.json", make) for make in SAMPLES),
        *((name, make) for name in ("tokenizer.json", "modules.json") for make in (deep, large)),
        *((name, fifo) for name in ("tokenizer_config.json", "model.safetensors")),
    ],
)
def test_what_is_no_small_file_is_refused_by_name(
    hostile: Path, name: str, make: Callable[[Path], None]
) -> None:
    (hostile / name).unlink(missing_ok=True)
    make(hostile / name)
    with pytest.raises(CheckpointError, match=name):
        # Weights are looked at for the fingerprint.
        assert open_model(hostile).fingerprint


SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")


@pytest.mark.parametrize("digits", [10, 5000])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_no_model_has_is_refused_before_anything_is_made_of_it(
    hostile: Path, key: str, digits: int
) -> None:
    path = hostile / "config.json"
    values = json.loads(path.read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = json.dumps({**values, key: 4242424242})
    path.write_text(text.replace("4242424242", "1" * digits))
    with pytest.raises(CheckpointError, match=rf"{key} must be at most|Exceeds the limit"):
        open_model(hostile)
    # In KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (256 << 10)


def test_the_bounds_are_above_what_is_published() -> None:
    # Llama 3.1 405B, DeepSeek V3, Llama 4 Scout, XLM-V, SigLIP at 1,536 pixels.
    for key, value in {
        "num_hidden_layers": 126,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_attention_heads": 128,
        "vocab_size": 901_629,
        "max_position_embeddings": 10_485_760,
        "image_size": 1536,
        "patch_size": 32,
        "max_dynamic_patch": 40,
        "num_position_embeddings": 2304,
    }.items():
        assert 2 * value <= most_of(key) + value // 2, key


def test_a_list_and_a_number_have_bounds_too(tmp_path: Path) -> None:
    section = Section(
        path=tmp_path / "x.json", values={"matryoshka_dimensions": [64, 10**9], "rope_theta": 10**400}
    )
    with pytest.raises(CheckpointError, match="matryoshka_dimensions must be at most 131072, not 1000000000"):
        section.integers("matryoshka_dimensions")
    with pytest.raises(CheckpointError, match="rope_theta must be positive and finite, not a number of more"):
        section.number("rope_theta")


def spoiled(checkpoint: Path, **parts: Any) -> Path:
    # The class that takes the file as it is: others would make these parts anew.
    changes = {
        "tokenizer.json": parts,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, values in changes.items():
        path = checkpoint / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return checkpoint


def grows(text: str) -> dict[str, Any]:
    """A normalizer that makes 10**8 characters of each place where it finds ``text``."""
    rule = {"type": "Replace", "pattern": {"String": text}, "content": text * 100}
    return {"type": "Sequence", "normalizers": [rule] * 4}


@pytest.mark.parametrize("text", ["a", "abc", "\u4e00\u4e01"])
def test_a_tokenizer_that_aborts_ends_a_child_alone(
    hostile: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[int] = []
    fork = os.fork

    def forked() -> int:
        if pid := fork():
            children.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", forked)
    model = open_model(spoiled(hostile, normalizer=grows(text)))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: this tokenizer ends the process \(SIGABRT\)"
    ):
        try_out(model)
    (child,) = children
    # Nothing of it is left to be waited for.
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_tokenizer_that_takes_for_ever_is_refused(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_CPU_SECONDS", 1)
    # The library gives up after ten million steps, but it tries at each character, and for each of these.
    cut = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    many = {"type": "Sequence", "pretokenizers": [cut] * 300}
    model = open_model(spoiled(hostile, pre_tokenizer=many))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: this tokenizer takes more than 1 s"):
        try_out(model)


@pytest.fixture
def busy() -> Iterator[None]:
    """Threads beside the one that tries: a child has none of them."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("family", ["llama_nemotron_embed", "qwen3_embedding", "bert", "xlm_roberta"])
def test_a_good_tokenizer_passes(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    main(["--out", str(tmp_path / "checkpoint"), "--family", family])
    model = open_model(tmp_path / "checkpoint")
    failed: list[BaseException] = []

    def run() -> None:
        try:
            try_out(model)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    # It was tried: a child that could not says so.
    assert not [record for record in caplog.records if "declares no prompts" not in record.getMessage()]


@pytest.mark.service
@pytest.mark.usefixtures("forks")
def test_the_launcher_and_a_frontend_refuse_it(hostile: Path, tmp_path: Path) -> None:
    spoiled(hostile, normalizer=grows("a"))
    # Qwen's class makes a normaliser of its own, and the file would be refused for that.
    (hostile / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    says = f"{hostile}/tokenizer.json: this tokenizer ends the process (SIGABRT) over 28 equal characters"
    environment = os.environ | {"DYN_FILE_KV": str(tmp_path / "discovery")}
    for module in ("tessera.models", "tessera.frontend"):
        command = [sys.executable, "-m", module, "--model-path", str(hostile)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert ended.returncode == 1
        assert says in (ended.stdout if module == "tessera.models" else ended.stderr.splitlines()[-1])
        # Its library's own words are not shown.
        assert "memory allocation" not in ended.stderr
