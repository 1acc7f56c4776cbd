"""Configuration: where a wrong value stands is part of every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.defaults import ENGINE_CONFIGS
from tessera.engine.kind import kinds
from tessera.errors import CheckpointError, ConfigError
from tessera.frontend.settings import parse as parse_frontend
from tessera.worker.settings import Mode, StageSettings, load_stages
from tessera.worker.settings import parse as parse_worker
from tessera_engines.cli import builds


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "engine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_nothing_given_means_the_defaults() -> None:
    assert load_stages(None, None) == StageSettings()


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_stages(written(tmp_path, "# nothing yet\n"), None) == StageSettings()


def test_a_file_replaces_only_what_it_names(tmp_path: Path) -> None:
    stages = load_stages(written(tmp_path, "text:\n  max_batch_cost: 64\ntransport: {kind: inline}\n"), None)
    assert stages.text.max_batch_cost == 64
    assert stages.text.max_queue_cost == StageSettings().text.max_queue_cost
    assert stages.vision == StageSettings().vision
    assert stages.transport.kind == "inline"


def test_the_override_is_merged_key_by_key(tmp_path: Path) -> None:
    path = written(tmp_path, "text: {max_batch_cost: 64, dtype: float32}\n")
    stages = load_stages(path, {"text": {"max_batch_cost": 32}, "preprocess_threads": 5})
    assert (stages.text.max_batch_cost, stages.text.dtype, stages.preprocess_threads) == (32, "float32", 5)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vision: {max_batch: 8}", ["max_batch", "$.vision"]),
        ("visoin: {}", ["visoin"]),
        ("text: {max_batch_cost: many}", ["int", "$.text.max_batch_cost"]),
        ("text: {max_batch_cost: -1}", ["max_batch_cost"]),
        ("text: {max_batch_cost: 10, max_queue_cost: 5}", ["max_queue_cost"]),
        ("text: {dtype: float8}", ["float8", "bfloat16"]),
        ("text: {path: 7}", ["str", "$.text.path"]),
        ("text:", ["$.text"]),
        ("preprocess_threads: -1", ["preprocess_threads"]),
        ("threads: -1", ["threads"]),
        ("transport: {slab_mb: -1}", ["slab_mb"]),
        ("transport: {lease_seconds: 0}", ["lease_seconds"]),
        ("transport: {lease_seconds: .inf}", ["lease_seconds"]),
        ("- vision", ["mapping", "list"]),
        ("false", ["mapping", "bool"]),
        ("vision: {", ["YAML"]),
        (b"vision: \xff\xfe", ["YAML"]),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, text: str | bytes, names: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_stages(path, None)
    for part in [str(path), *names]:
        assert part in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_stages(tmp_path / "nowhere.yaml", None)


@pytest.mark.parametrize("override", ["{", "[1]", '{"text": {"colour": 1}}', '{"text": 3}'])
def test_a_wrong_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match="--override-engine-args"):
        parse_worker(["--model-path", "here", "--override-engine-args", override])


def test_model_options_of_the_command_line_go_over_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "model_options: {max_pixels: 4096, min_pixels: 1024}\n")
    flags = ["--model-path", "here", "--model-options", '{"max_pixels": 8192}']
    worker = parse_worker([*flags, "--extra-engine-args", str(path)])
    assert worker.model_options == {"max_pixels": 8192, "min_pixels": 1024}
    assert parse_frontend(flags).models[0].model_options == {"max_pixels": 8192}
    assert parse_frontend(["--model-path", "here"]).models[0].model_options == {}


def test_a_folder_has_a_file_for_each_family_and_mode(tmp_path: Path) -> None:
    for name, cost in (("llama_nemotron_vl/agg", 1), ("default/agg", 2), ("default/encode", 3)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"vision: {{max_batch_cost: {cost}}}")

    def cost(model_type: str, mode: str) -> int:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        flags = ["--model-path", str(tmp_path), "--disaggregation-mode", mode]
        return parse_worker([*flags, "--extra-engine-args", str(tmp_path)]).stages.vision.max_batch_cost

    assert cost("llama_nemotron_vl", "agg") == 1
    assert cost("llama_nemotron_vl", "encode") == 3
    assert cost("qwen3", "agg") == 2
    with pytest.raises(ConfigError, match=r"default/embed\.yaml: No such file"):
        cost("llama_nemotron_vl", "embed")
    with pytest.raises(CheckpointError, match="steam"):
        cost("steam", "agg")


def test_a_file_that_comes_with_it_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path("llama_nemotron_vl/agg_h100.yaml")
    assert load_stages(name, None) == load_stages(ENGINE_CONFIGS / name, None) != StageSettings()
    # One that is there goes before it.
    name.parent.mkdir()
    name.write_text("threads: 7")
    assert load_stages(name, None).threads == 7


def test_every_mode_has_a_file_for_families_without_any() -> None:
    for mode in Mode:
        assert (ENGINE_CONFIGS / "default" / f"{mode.value}.yaml").is_file()


@pytest.mark.parametrize("options", ["{", "[1]", "7"])
@pytest.mark.parametrize("parse", [parse_worker, parse_frontend])
def test_wrong_model_options_are_named(parse: Callable[[list[str]], object], options: str) -> None:
    with pytest.raises(ConfigError, match=r"^--model-options: "):
        parse(["--model-path", "here", "--model-options", options])


@pytest.mark.parametrize("path", sorted(ENGINE_CONFIGS.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_the_files_that_come_with_it_are_valid(path: Path) -> None:
    load_stages(path, None)


BUILT = kinds()["aoti"].configs


@pytest.mark.parametrize("path", sorted(BUILT.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_file_that_comes_with_built_engines_goes_by_its_name(path: Path) -> None:
    stages = load_stages(path.relative_to(BUILT), None)
    assert stages == load_stages(path, None) != StageSettings()
    assert builds(path) and len(builds(path)) == len(stages.build)


def test_worker_flags(tmp_path: Path) -> None:
    config = parse_worker(
        [
            *("--model-path", str(tmp_path / "my-model"), "--disaggregation-mode", "embed"),
            *("--multimodal-embedding-cache-capacity-gb", "0.5", "--namespace", "here"),
            *("--modality", "text"),
        ]
    )
    assert config.mode is Mode.EMBED
    assert config.served_model_names == ("my-model",)
    assert config.cache_bytes == 1 << 29
    assert config.encode_endpoint == "dyn://here.encode.generate"
    assert config.images is False


@pytest.mark.parametrize(
    "flags",
    [
        ["--multimodal-embedding-cache-capacity-gb", "-1"],
        ["--multimodal-embedding-cache-capacity-gb", "nan"],
        ["--multimodal-embedding-cache-capacity-gb", "inf"],
        ["--max-image-pixels", "0"],
        ["--drain-seconds", "-1"],
    ],
    ids=" ".join,
)
def test_worker_flags_that_make_no_sense(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        parse_worker(["--model-path", "m", *flags])


def test_frontend_flags() -> None:
    config = parse_frontend(["--model-path", "m", "--max-body-mb", "0.5", "--max-inputs", "3"])
    assert config.limits.max_body_bytes == 1 << 19
    assert config.limits.request.inputs == 3
    assert config.models[0].embed_endpoint == "dyn://tessera.embed.generate"


@pytest.mark.parametrize(
    "flags",
    [
        *(["--max-inputs", "0"], ["--request-timeout-seconds", "-1"], ["--max-tokens", "-1"]),
        *(["--max-body-mb", "nan"], ["--max-file-size-mb", "inf"], ["--media-timeout-seconds", "0"]),
        *(["--drain-seconds", "nan"], ["--worker-wait-seconds", "-1"], ["--port", "65536"], ["--port", "-1"]),
    ],
    ids=" ".join,
)
def test_frontend_flags_that_make_no_sense(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        parse_frontend(["--model-path", "m", *flags])


@pytest.mark.starts
@pytest.mark.parametrize("module", ["tessera.worker", "tessera.frontend"])
@pytest.mark.usefixtures("forks")
def test_help_answers_without_a_gpu_and_names_the_flags(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "--model-path" in done.stdout and "--discovery-backend" in done.stdout


@pytest.mark.starts
@pytest.mark.parametrize("mode", ["agg", "embed", "encode"])
@pytest.mark.usefixtures("forks")
def test_a_worker_with_a_wrong_file_ends_with_one_line(tmp_path: Path, mode: str) -> None:
    path = written(tmp_path, "vision: {bathc: 1}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tessera.worker", "--model-path", str(tmp_path)),
            *("--disaggregation-mode", mode, "--extra-engine-args", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1
    assert str(path) in done.stderr and "bathc" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_what_embeds_can_be_a_model_of_dynamos(tmp_path: Path) -> None:
    flags = ["--model-path", str(tmp_path), "--dynamo-model", "--disaggregation-mode"]
    assert parse_worker([*flags, "embed"]).dynamo_model
    with pytest.raises(ConfigError, match="--dynamo-model"):
        parse_worker([*flags, "encode"])
