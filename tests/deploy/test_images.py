"""The images and compose, as far as files can show."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import yaml

from tessera.frontend.model_settings import read_models
from tessera.launch.role import command
from tests.deploy.dockerfile import Dockerfile
from tests.deploy.processes import run_script
from tests.e2e.service import ROOT

pytestmark = [pytest.mark.xdist_group("images"), pytest.mark.images, pytest.mark.timeout(600)]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
TARGETS = ("frontend", "worker-cpu", "worker-cuda", "worker-tensorrt", "serve")


def test_the_linter_has_nothing_to_say() -> None:
    ran = run_script(Path(sys.executable).with_name("hadolint"), DOCKERFILE)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_without_rights_and_reports_its_health(dockerfile: Dockerfile, target: str) -> None:
    settings = dockerfile.settings(target)
    assert settings["USER"] == "10001:10001"
    assert settings["VOLUME"] == '["/tmp", "/var/cache/tessera"]'
    assert ("tessera" if target == "serve" else "start-role") in settings["ENTRYPOINT"]
    assert "healthcheck" in settings["HEALTHCHECK"]
    # On a busy machine a frontend, too, takes more than a minute. Whoever was healthy once has no such time.
    assert "--start-period=600s" in settings["HEALTHCHECK"]


def test_base_images_are_pinned(dockerfile: Dockerfile) -> None:
    assert "@sha256:" in dockerfile.arguments["PYTHON_IMAGE"]
    bodies = dockerfile.bodies
    assert {base for base, _ in bodies.values() if base not in bodies} == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["decode"], {}, "expected frontend, agg, encode or embed, not 'decode'"),
        (["frontend"], {"TESSERA_MODEL_PATH": ""}, "TESSERA_MODEL_PATH must name a checkpoint directory"),
        (["frontend"], {"TESSERA_MODEL_PATH": "/nowhere/model"}, "/nowhere/model"),
    ],
)
def test_what_start_role_cannot_start_is_named(
    arguments: list[str], environment: dict[str, str], said: str
) -> None:
    ran = run_script(ROOT / "deploy/start-role", *arguments, **environment)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_an_empty_variable_takes_no_index_of_pip_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As TORCH_INDEX is for CUDA."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nextra-index-url = https://one.example https://two.example\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    uv = runpy.run_path(str(ROOT / "scripts/uv"), run_name="uv")
    for said, indexes in (("", "https://one.example https://two.example"), ("https://own.example",) * 2):
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", said)
        assert uv["uv_variables"](uv["pip_settings"]())["UV_INDEX"] == indexes


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml", "compose.models.yaml"])
def test_a_compose_file_fits_its_schema(file: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    ran = run_script(*command, ROOT / "deploy" / file)
    assert ran.returncode == 0, ran.stdout


def test_a_second_model_of_compose_is_where_frontends_look_for_it(tmp_path: Path) -> None:
    folder = ROOT / "deploy"
    over = yaml.safe_load((folder / "compose.models.yaml").read_text())
    text = (folder / "models.yaml").read_text()
    for name in ("model", "second"):
        text = text.replace(f"/models/{name}", str(tmp_path))
    (file := tmp_path / "models.yaml").write_text(text)
    looked_at = {(model.name, model.embed_endpoint) for model in read_models(file, "tessera")}
    there = set()
    for name, service in over["services"].items():
        if name == "prometheus":
            continue
        assert "./models.yaml:/etc/tessera/models.yaml:ro" in service["volumes"]
        assert service["environment"]["TESSERA_MODELS_FILE"] == "/etc/tessera/models.yaml"
        if name != "frontend":
            served = service["environment"]["TESSERA_SERVED_MODEL_NAME"]
            own = {
                "TESSERA_MODELS_FILE": str(file),
                "TESSERA_HOST_ADDRESS": "127.0.0.1",
                "TESSERA_SERVED_MODEL_NAME": served,
            }
            _, words, _ = command(service.get("command", [name]), own)
            space = words[words.index("--namespace") + 1]
            there.add((served, f"dyn://{space}.embed.generate"))
    assert looked_at == there
    assert (folder / "prometheus/models/second.yaml").is_file()


def test_a_compose_file_names_what_is_there() -> None:
    folder = ROOT / "deploy"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    targets = set()
    for name, service in compose["services"].items():
        if "build" in service:
            targets.add(service["build"]["target"])
            assert service["read_only"] and service["cap_drop"] == ["ALL"]
            grace = float(service["stop_grace_period"].removesuffix("s"))
            assert grace > float(service["environment"]["TESSERA_DRAIN_SECONDS"]), name
            assert (folder / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        else:
            assert service["image"].rpartition(":")[2] not in ("latest", service["image"])
        for network in service["networks"]:
            assert network in compose["networks"]
        for volume in service.get("volumes", []):
            source = volume.rsplit(":", 2)[0] if volume.endswith(":ro") else volume.rpartition(":")[0]
            if source.startswith("."):
                assert (folder / source).is_dir()
            elif not source.startswith("$"):
                assert source in compose["volumes"]
    assert targets <= set(TARGETS)
    assert "--open-metrics" in compose["services"]["frontend"]["command"], "Prometheus has no API key"
