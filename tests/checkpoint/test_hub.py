"""Models of a hub, downloaded by real processes from a hub on this host."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.checkpoint.source import HubModel, Source, find
from tessera.errors import ConfigError
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.colbert import TINY as COLBERT
from tessera_tools.random_checkpoint.qwen3 import TINY
from tests.checkpoint.local_hub import COMMIT, REPOSITORY, LocalHub, files_of, local_hub
from tests.models.declaring import Module, declare, dense, nest
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forks")

TOKEN = "hf_notToBeSeenAnywhere"
NEEDED = {
    "config.json",
    "config_sentence_transformers.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[LocalHub]:
    with local_hub(files_of(checkpoint)) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Said:
    status: int
    source: dict[str, str]
    error: str
    log: str


def start(hub: LocalHub, cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tessera.models", "--model-path", *(arguments or (REPOSITORY,))],
        env=hub.environment(cache) | {"HF_TOKEN": TOKEN} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> Said:
    out, log = process.communicate(timeout=180)
    assert TOKEN not in out + log
    assert "Traceback" not in log
    answer: dict[str, Any] = json.loads(out)
    error = answer.get("error", "")
    assert (process.returncode == 1) == bool(error)
    assert "\n" not in error
    return Said(process.returncode, answer.get("source", {}), error, log)


def run(hub: LocalHub, cache: Path, *arguments: str, **environment: str) -> Said:
    return end(start(hub, cache, *arguments, **environment))


@pytest.mark.service
def test_what_a_model_needs_is_downloaded_once(hub: LocalHub, tmp_path: Path) -> None:
    hub.files["chat_template.jinja"] = b"{{ messages[0].content }}"
    # It hangs up once on the way; the library writes pieces of 10 MiB.
    hub.files["model.safetensors"] += bytes(16 << 20)
    hub.stop_after = 12 << 20
    hub.stores, hub.token = True, TOKEN
    said = run(hub, tmp_path)
    assert said.source["commit"] == COMMIT and said.source["cached"] == ""
    ((name, began),) = hub.resumed
    assert name == "model.safetensors" and began >= 10 << 20
    assert hub.told == [None, None]
    folder = Path(said.source["directory"])
    needed = {*NEEDED, "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == needed == hub.sent.keys()
    assert all((folder / name).read_bytes() == hub.files[name] for name in needed)
    assert f"serving {REPOSITORY} at commit {COMMIT} (main)" in said.log
    hub.forget()
    assert run(hub, tmp_path).source == said.source
    assert not hub.sent and len(hub.asked) == 2
    # A commit is what it is, and needs no hub.
    hub.forget()
    assert run(hub, tmp_path, f"{REPOSITORY}@{COMMIT}").source["directory"] == str(folder)
    assert not hub.asked


@pytest.mark.service
def test_weights_that_are_states_alone_are_downloaded(tmp_path: Path) -> None:
    """As of bge-m3, whose heads are states, too; and of a module."""
    write_checkpoint(tmp_path / "base", TINY)
    modules = (Module("Pooling", {"pooling_mode": "mean"}), dense(TINY.hidden, 16))
    files = files_of(declare(tmp_path / "base", tmp_path / "declared", *modules))
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        del files[name]
    weights = ("pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt", "2_Dense/pytorch_model.bin")
    others = ("flax_model.msgpack", "training_args.bin", "onnx/pytorch_model.bin")
    # Equal files, of which a cache has one copy.
    files |= dict.fromkeys((*weights, *others), b"some" * 100_000)
    cache = tmp_path / "cache"
    with local_hub(files) as hub:
        hub.pause = 0.01
        said = run(hub, cache)
        assert not said.error
        folder = Path(said.source["directory"])
        assert all((folder / name).read_bytes() == files[name] for name in weights)
        assert not any((folder / name).exists() for name in others)
        assert run(hub, cache, HF_HUB_OFFLINE="1").source["directory"] == str(folder)
        (folder / weights[-1]).unlink()
        assert "has no whole copy" in run(hub, cache, HF_HUB_OFFLINE="1").error


@pytest.mark.service
def test_the_folders_of_declared_modules_are_downloaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", TINY)
    pooling = Module("Pooling", {"pooling_mode": "mean"})
    modules = (pooling, dense(TINY.hidden, 16), Module("Normalize"))
    files = files_of(declare(tmp_path / "base", tmp_path / "declared", *modules))
    needed = ["modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    cache = tmp_path / "cache"
    with local_hub(files | {"2_Dense/pytorch_model.bin": b"never fetched"}) as hub:
        said = run(hub, cache)
        folder = Path(said.source["directory"])
        assert all((folder / name).read_bytes() == files[name] for name in needed)
        assert "2_Dense/pytorch_model.bin" not in hub.sent
        hub.forget()
        assert run(hub, cache).source == said.source
        assert not hub.sent
        # A copy from before these files were downloaded lacks some.
        (folder / needed[1]).unlink()
        assert "has no whole copy" in run(hub, cache, HF_HUB_OFFLINE="1").error
        again = run(hub, cache)
        assert again.source == said.source, again
        assert hub.sent.keys() <= {needed[1]}
        del hub.files[needed[3]], hub.files["2_Dense/pytorch_model.bin"]
        error = run(hub, tmp_path / "another").error
        assert f"modules.json needs {needed[3]}, which the hub does not have" in error


@pytest.mark.service
def test_a_transformer_in_a_folder_is_downloaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", TINY)
    modules = (Module("Pooling", {"pooling_mode": "mean"}), dense(TINY.hidden, 16))
    files = files_of(nest(declare(tmp_path / "base", tmp_path / "declared", *modules)))
    del files["pytorch_model.bin"]
    weights, cache = "0_Transformer/model.safetensors", tmp_path / "cache"
    needed = {
        "modules.json",
        *(f"0_Transformer/{name}" for name in NEEDED if (tmp_path / "base" / name).exists()),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    } - {"0_Transformer/config_sentence_transformers.json"}
    with local_hub(files | {"0_Transformer/pytorch_model.bin": b"never fetched"}) as hub:
        said = run(hub, cache)
        assert not said.error
        folder = Path(said.source["directory"])
        assert hub.sent.keys() - {"config_sentence_transformers.json"} == needed
        assert all((folder / name).read_bytes() == files[name] for name in needed)
        hub.forget()
        assert run(hub, cache).source == said.source
        assert not hub.sent
        assert run(hub, cache, f"{REPOSITORY}@{COMMIT}").source["directory"] == str(folder)
        for lost in (weights, "0_Transformer/tokenizer.json"):
            (folder / lost).unlink()
            assert run(hub, cache).source == said.source
            assert hub.sent.keys() <= {lost}
            hub.forget()
        (folder / weights).unlink()
        assert "has no whole copy" in run(hub, cache, HF_HUB_OFFLINE="1").error
        del hub.files["0_Transformer/config.json"]
        error = run(hub, tmp_path / "another").error
        assert "has no 0_Transformer/config.json, so it is no checkpoint" in error


@pytest.mark.service
def test_vocabularies_without_a_tokenizer_are_downloaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", TINY)
    files = files_of(tmp_path / "it")
    vocabularies = ("vocab.txt", "vocab.json", "merges.txt")
    files |= {name: name.encode() for name in vocabularies}
    with local_hub(files) as hub:
        run(hub, tmp_path / "cache")
        assert not {"vocab.txt", "merges.txt"} & hub.sent.keys()
        del hub.files["tokenizer.json"]
        hub.forget()
        # They are none, which is seen when they are there.
        assert "vocab.txt" in run(hub, tmp_path / "another").error
        assert hub.sent.keys() >= {*vocabularies}


@pytest.mark.service
def test_the_metadata_of_colbert_is_downloaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", COLBERT)
    files = files_of(tmp_path / "it")
    with local_hub(files) as hub:
        said = run(hub, tmp_path / "cache")
        folder = Path(said.source["directory"])
        assert (folder / "artifact.metadata").read_bytes() == files["artifact.metadata"]


def largest(paths: Iterable[Path]) -> int:
    """The bytes of the largest one, 0 without any; files that come in meanwhile have another name by then."""
    sizes = [0]
    for path in paths:
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


@pytest.mark.service
def test_the_next_process_goes_on_where_a_killed_one_was(hub: LocalHub, tmp_path: Path) -> None:
    # The library writes pieces of 10 MiB.
    hub.files["model.safetensors"] += bytes(32 << 20)
    hub.pause = 0.003
    first = start(hub, tmp_path)
    blobs = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"
    wait_until(lambda: largest(blobs.glob("*.incomplete")) >= 10 << 20, process=first)
    # However long the second takes to start, the first is not done by then.
    hub.pause = 2.0
    second = start(hub, tmp_path)
    assert second.stderr is not None
    waiting = second.stderr.readline()
    assert "another process downloads" in waiting
    first.kill()
    first.communicate()
    hub.pause = 0
    said = end(second)
    assert said.source["commit"] == COMMIT
    (going_on,) = [line for line in said.log.splitlines() if "of it from before" in line]
    assert "downloading" in going_on
    # What the killed process had taken is sent by no one again.
    asked = [line for line in hub.asked if line.startswith("GET") and line.endswith("model.safetensors")]
    assert len(asked) == 2
    (began,) = [start for name, start in hub.resumed if name == "model.safetensors"]
    assert began >= 10 << 20
    assert (Path(said.source["directory"]) / "model.safetensors").read_bytes() == hub.files[
        "model.safetensors"
    ]


def refused(status: int, **headers: str) -> tuple[int, Mapping[str, str]]:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}


FAULTS: dict[str, tuple[tuple[int, Mapping[str, str]], str]] = {
    "gated": (refused(401, X_Error_Code="GatedRepo"), "says that it is gated (401); ask for access at"),
    "forbidden": (refused(403, X_Error_Message=TOKEN), "refused (403); look for a mistake in the name"),
    "missing": (refused(404, X_Error_Code="RepoNotFound"), "has no such model, or not for everybody (404)"),
    "unavailable": (refused(503), "refused (503); try again later"),
    "strange": (refused(200), "answers with something else than a hub; try again later"),
    "slow": (refused(200), "did not answer in time; try again with a network"),
}
EACH: Final = """
import sys
from tessera.checkpoint.source import find
from tessera.errors import TesseraError
for model in sys.argv[1:]:
    try:
        find(model, recognise=lambda path: None)
    except TesseraError as error:
        print(error.message)
"""


@pytest.mark.service
def test_a_hub_that_refuses_is_one_line(hub: LocalHub, tmp_path: Path) -> None:
    def answer(path: str) -> tuple[int, Mapping[str, str]]:
        name = path.split("/")[4]
        time.sleep(2 if name == "slow" else 0)
        return FAULTS[name][0]

    hub.answer = answer
    environment = hub.environment(tmp_path) | {"HF_TOKEN": TOKEN, "HF_HUB_ETAG_TIMEOUT": "1"}
    models = [f"org/{name}" for name in FAULTS]
    said = subprocess.run(
        [sys.executable, "-c", EACH, *models], env=environment, capture_output=True, text=True, timeout=180
    )
    assert TOKEN not in said.stdout + said.stderr and "Traceback" not in said.stderr
    lines = said.stdout.splitlines()
    assert len(lines) == len(FAULTS), said
    for (name, (_, expected)), line in zip(FAULTS.items(), lines, strict=True):
        assert line.startswith(f"org/{name}@main: the hub at {hub.url} ") and expected in line


@pytest.mark.service
def test_a_copy_from_before_is_used_and_said(hub: LocalHub, tmp_path: Path) -> None:
    commit = run(hub, tmp_path).source["commit"]
    offline = start(hub, tmp_path, HF_HUB_OFFLINE="1")
    gone = start(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    other = start(hub, tmp_path, REPOSITORY, "--revision", "v2")
    for process, why in ((offline, "HF_HUB_OFFLINE is set"), (gone, "cannot be reached (ConnectError)")):
        said = end(process)
        assert said.source["commit"] == commit
        assert said.source["cached"].endswith(why) and f"from the cache: {said.source['cached']}" in said.log
    assert f"{REPOSITORY}@v2: the hub at {hub.url} has no such revision" in end(other).error
    # A new commit that cannot be had leaves the one before in use.
    hub.commits["main"] = "b2" * 20
    hub.answer = lambda path: (403, {}) if "/resolve/" in path else None
    said = run(hub, tmp_path)
    assert said.source["commit"] == commit and said.source["cached"].endswith("refused (403)")


@pytest.mark.service
def test_nothing_without_a_network_is_one_line(hub: LocalHub, tmp_path: Path) -> None:
    said = run(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert f"HF_HUB_OFFLINE is set, and {tmp_path}/hub has no whole copy of it; download it" in said.error
    said = run(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub at http://127.0.0.1:9 cannot be reached (ConnectError); try again with a" in said.error


@pytest.mark.service
def test_sizes_are_looked_at_before_anything_is_fetched(hub: LocalHub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**16
    said = run(hub, tmp_path)
    assert "needs 10000.0 TB in " in said.error and "make room, or set HF_HOME" in said.error
    hub.sizes["model.safetensors"] = 10**6
    assert "lists model.safetensors with 1000000 bytes and has " in run(hub, tmp_path).error
    assert "model.safetensors" not in hub.sent
    hub.sizes["tokenizer.json"] = 10**9
    assert "has tokenizer.json of 1.0 GB; 128.0 MB is the most" in run(hub, tmp_path).error


@pytest.mark.service
def test_a_part_of_something_else_is_not_served(hub: LocalHub, tmp_path: Path) -> None:
    said = run(hub, tmp_path)
    blob = (Path(said.source["directory"]) / "model.safetensors").resolve()
    (Path(said.source["directory"]) / "model.safetensors").unlink()
    partial = blob.with_name(f"{blob.name}.incomplete")
    partial.write_bytes(b"another" * 100)
    blob.unlink()
    assert "sent a model.safetensors that is not the one it lists" in run(hub, tmp_path).error
    assert not partial.exists() and not blob.exists()


@pytest.mark.service
def test_an_unknown_family_is_refused_before_its_weights_are_fetched(hub: LocalHub, tmp_path: Path) -> None:
    hub.files["config.json"] = b'{"model_type": "t5"}'
    said = run(hub, tmp_path)
    assert said.error.startswith(f"{REPOSITORY}@main: ") and "model_type 't5' is none of" in said.error
    assert hub.sent.keys() == {"config.json"}
    # Engines are built of the same names.
    build = ["build", "--stage", "text", "--flavour", "aoti", "--out", str(tmp_path / "engine")]
    ran = subprocess.run(
        [sys.executable, "-m", "tessera.cli", "engine", *build, "--model-path", REPOSITORY],
        env=hub.environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1 and ran.stderr.endswith(f"tessera engine: {said.error}\n")


@pytest.mark.service
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_weights_that_are_not_read_are_refused_before_they_are_fetched(
    hub: LocalHub, tmp_path: Path, file: str
) -> None:
    if file == "config.json":
        declared = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}
        hub.files[file] = json.dumps(json.loads(hub.files[file]) | declared).encode()
    else:
        hub.files[file] = b'{"quantization": {"quant_algo": "W4A8_AWQ"}}'
    assert "quant_algo is 'W4A8_AWQ'; read are FP8, " in run(hub, tmp_path).error
    assert file in hub.sent and "model.safetensors" not in hub.sent


def test_a_directory_wins_over_a_hub(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "some-org").mkdir()
    (tmp_path / REPOSITORY.replace("tessera.random-1", "model")).symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        found = find("some-org/model", recognise=lambda path: None)
    assert found == Source(directory=Path("some-org/model")) and found.described() is None
    assert "some-org/model is a directory here, which is served; no hub is asked" in caplog.text
    with pytest.raises(ConfigError, match="--revision main: some-org/model is a directory here"):
        find("some-org/model", "main", recognise=lambda path: None)


def test_a_snapshot_says_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    found = find(str(folder), recognise=lambda path: None)
    assert (found.repository, found.commit, found.name) == ("org/name", COMMIT, "org/name")
    assert Source.of_json(found.as_json()) == found


@pytest.mark.parametrize(
    ("model", "revision", "named"),
    [
        ("org/name", "", HubModel("org/name", "main")),
        ("org/name@v1.0", "", HubModel("org/name", "v1.0")),
        ("org/name", "refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/name@v1", "v1", HubModel("org/name", "v1")),
        ("/org/name", "", None),
        ("./org/name", "", None),
        ("a/b/c", "", None),
        ("name", "", None),
        ("", "", None),
    ],
)
def test_what_names_a_model_of_a_hub(model: str, revision: str, named: HubModel | None) -> None:
    assert HubModel.named(model, revision) == named


@pytest.mark.parametrize(
    ("model", "revision"), [("o/n@a", "b"), ("o/n@../a", ""), ("o/n", "-x"), ("o/n@a b", "")]
)
def test_what_cannot_be_a_revision_is_refused(model: str, revision: str) -> None:
    with pytest.raises(ConfigError):
        HubModel.named(model, revision)
