"""The images, as far as files can show: lint, every line of every target, and the entry points run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tessera.frontend.model_settings import read_models
from tessera.launch.role import command
from tests.deploy.conftest import run_script
from tests.deploy.dockerfile import PREFIX, Build, Stage
from tests.deploy.processes import etcd, healthy, running, wait_for
from tests.e2e.service import MODEL, ROOT, free_ports

# Packages come from the index.
pytestmark = [pytest.mark.xdist_group("images"), pytest.mark.images, pytest.mark.timeout(600)]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
TARGETS = ("frontend", "worker-cpu", "worker-cuda", "worker-tensorrt")


def ancestry(build: Build, target: str) -> list[str]:
    """The target and the stages that it is built from, each with its instructions."""
    names = [target]
    while (base := build.bodies[names[-1]][0]) in build.bodies:
        names.append(base)
    return names


def test_the_linter_has_nothing_to_say() -> None:
    ran = run_script(Path(sys.executable).with_name("hadolint"), DOCKERFILE)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_without_rights_and_reports_its_health(build: Build, target: str) -> None:
    settings: dict[str, str] = {}
    for name in reversed(ancestry(build, target)):
        settings |= dict(build.bodies[name][1])
    assert settings["USER"] == "10001:10001"
    assert settings["VOLUME"] == '["/tmp", "/var/cache/tessera"]'
    assert "start-role" in settings["ENTRYPOINT"]
    assert "healthcheck" in settings["HEALTHCHECK"]


def test_base_images_are_pinned(build: Build) -> None:
    assert "@sha256:" in build.arguments["PYTHON_IMAGE"]
    assert {base for base, _ in build.bodies.values() if base not in build.bodies} == {"${PYTHON_IMAGE}"}


def test_what_every_worker_image_copies_is_there(build: Build) -> None:
    stage = build.stage("cuda-runtime")
    assert (stage.root / f"{PREFIX}/deploy/start-role".lstrip("/")).is_file()
    # What was not executed is what changes the system.
    assert all("apt-get" in line or "useradd" in line for line in stage.skipped)


@pytest.fixture(scope="module")
def backplane(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """etcd and one aggregated worker that deploy/start-role started; what a frontend needs to join them."""
    folder = tmp_path_factory.mktemp("backplane")
    ports = free_ports(3)
    with etcd(folder, *ports[:2]) as endpoint:
        member = {
            "TESSERA_MODEL_PATH": str(checkpoint),
            "TESSERA_SERVED_MODEL_NAME": MODEL,
            "ETCD_ENDPOINTS": endpoint,
            "TESSERA_HOST_ADDRESS": "127.0.0.1",
        }
        worker = member | {
            "PYTHON": sys.executable,
            "DYN_SYSTEM_PORT": str(ports[2]),
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        log = folder / "worker.log"
        with running([ROOT / "deploy/start-role", "agg"], os.environ | worker, log) as process:
            wait_for(f"http://127.0.0.1:{ports[2]}/health", process, log)
            yield member


def test_a_frontend_image_answers_requests(
    frontend_image: Stage, backplane: dict[str, str], tmp_path: Path
) -> None:
    port = str(free_ports(1)[0])
    environment = frontend_image.process_environment() | backplane
    environment |= {"TESSERA_HOST": "127.0.0.1", "TESSERA_PORT": port}
    command = frontend_image.command("ENTRYPOINT") + frontend_image.command("CMD")
    log = tmp_path / "log"
    assert not healthy(frontend_image, environment)
    with running(command, environment, log) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        assert healthy(frontend_image, environment)
        body = {"model": MODEL, "input": ["a flower"]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    assert process.returncode == 0, log.read_text()


# A read-only root with the image's own places to write, and a user that owns none of it.
READ_ONLY = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /mnt
mkdir /mnt/root /mnt/model /mnt/cache /mnt/tmp
mount --bind "$IMAGE_ROOT" /mnt/root
mount --bind "$TESSERA_MODEL_PATH" /mnt/model
mount -t tmpfs -o uid=10001,mode=700 none /mnt/cache
mount -t tmpfs -o mode=1777 none /mnt/tmp
case $BASE in /root/*) # an interpreter that only root could reach
    mkdir /mnt/base && mount --bind "$BASE" /mnt/base
    mount -t tmpfs -o mode=755 none /root && mkdir -p "$BASE" && mount --bind /mnt/base "$BASE"
esac
mount -o remount,bind,ro /mnt/root
mount -o remount,ro /mnt
mount -o remount,bind,ro /
if touch /mnt/root/here 2>/dev/null || touch /var/tmp/here 2>/dev/null; then exit 99; fi
cd /mnt/cache
export HOME=/mnt/cache TMPDIR=/mnt/tmp TESSERA_MODEL_PATH=/mnt/model
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all "$@"
"""


def test_a_frontend_image_needs_no_rights_and_no_writable_root(
    frontend_image: Stage, backplane: dict[str, str], tmp_path: Path
) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--mount", "true"], check=False).returncode:
        pytest.skip("mount namespaces are not permitted here (CAP_SYS_ADMIN)")
    port = str(free_ports(1)[0])
    root = str(frontend_image.root)
    environment = frontend_image.process_environment() | backplane
    environment |= {"TESSERA_HOST": "127.0.0.1", "TESSERA_PORT": port}
    environment = {name: value.replace(root, "/mnt/root") for name, value in environment.items()}
    environment |= {"IMAGE_ROOT": root, "BASE": sys.base_prefix}
    image = [word.replace(root, "/mnt/root") for word in frontend_image.command("ENTRYPOINT")]
    log = tmp_path / "log"
    command = [unshare, "--mount", "bash", "-c", READ_ONLY, "bash", *image, "frontend"]
    with running(command, environment, log) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "Uid:\t10001\t10001\t10001\t10001" in status and "CapEff:\t0000000000000000" in status
        body = {"model": MODEL, "input": ["a flower"]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body, timeout=60)
        assert answer.status_code == 200, answer.text


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
