"""The workers' images: every line of theirs is carried out, and what comes of it serves.

``scripts/test all`` alone runs them, since torch for CUDA is gigabytes where the index has it for this
Python. The frontend's image is small and in ``test_images.py``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.deploy.dockerfile import Build
from tests.deploy.processes import etcd, healthy, running, wait_for
from tests.e2e.service import MODEL, free_ports

pytestmark = [
    pytest.mark.xdist_group("images"),
    pytest.mark.images,
    pytest.mark.timeout(900),
]
NEEDED_BYTES = 8 << 30
# After the test of each image. The last environment is built on the one before it.
NEEDED_NO_MORE = {
    "worker-cpu": ["cpu-environment"],
    "worker-cuda": [],
    "worker-tensorrt": ["tensorrt-environment", "cuda-environment"],
}


@pytest.mark.parametrize("target", NEEDED_NO_MORE)
def test_a_worker_image_serves(
    build: Build, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    if shutil.disk_usage(build.scratch).free < NEEDED_BYTES:
        pytest.skip(f"{build.scratch} has less than {NEEDED_BYTES >> 30} GiB left")
    # The index of torch for CPUs may be out of reach, where another has the wheel.
    monkeypatch.setenv("PIP_RETRIES", "1")
    # The frontend's image fetches setuptools to build the wheel of this checkout; once is enough, 5 s each.
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    image = build.stage(target)
    ports = free_ports(3)
    with etcd(tmp_path, *ports[:2]) as endpoint:
        environment = image.process_environment() | {
            "TESSERA_MODEL_PATH": str(checkpoint),
            "TESSERA_SERVED_MODEL_NAME": MODEL,
            "ETCD_ENDPOINTS": endpoint,
            "TESSERA_HOST_ADDRESS": "127.0.0.1",
            "DYN_SYSTEM_PORT": str(ports[2]),
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        log = tmp_path / "log"
        assert not healthy(image, environment)
        with running(image.command("ENTRYPOINT") + image.command("CMD"), environment, log) as process:
            wait_for(f"http://127.0.0.1:{ports[2]}/health", process, log)
            assert healthy(image, environment)
        assert process.returncode == 0, log.read_text()
    if target == "worker-tensorrt":
        builder = Path(image.root, "opt/tessera/venv/bin/python")
        code = "from tessera_engines.tensorrt.module import load_tensorrt as load; load('tensorrt_rtx')"
        assert os.spawnv(os.P_WAIT, builder, [str(builder), "-c", code]) == 0
    # Gigabytes, and pytest keeps the folders of its last runs.
    build.discard(target, *NEEDED_NO_MORE[target])
