"""What the processes of a service are started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.defaults import ENGINE_CONFIGS
from tessera.frontend.settings import parse as parse_frontend
from tessera.launch import mps
from tessera.launch.processes import PORTS_OF_ONE, Process, agg_workers, e_p_workers, without
from tessera.launch.role import command
from tessera.launch.settings import LaunchSettings, SettingError
from tessera.launch.split import settled, with_frontends
from tessera.machine import Card, Machine
from tessera.worker.settings import parse as parse_worker
from tests.launch.started import processes


def after(process: Process, flag: str) -> str:
    return process.arguments[process.arguments.index(flag) + 1]


def test_ports_cards_and_numbers_of_workers() -> None:
    given = {
        "TESSERA_FRONTENDS": "2",
        "TESSERA_ENCODE_WORKERS": "2",
        "TESSERA_EMBED_WORKERS": "3",
        "TESSERA_ENCODE_CUDA_VISIBLE_DEVICES": "4",
        "TESSERA_EMBED_CUDA_VISIBLE_DEVICES": "0,1",
        "TESSERA_MODEL_PATH": "/models/one",
        "TESSERA_MODEL_OPTIONS": '{"max_pixels": 8192}',
    }
    settings = LaunchSettings.read(given)
    kinds = e_p_workers(settings, ("--colour", "blue"))
    secrets = {"TESSERA_API_KEYS": "sk-secret somebody", "TESSERA_TLS_KEY_PASSWORD": "secret"}
    found = processes(settings, kinds, {"DYN_SYSTEM_PORT": "7"} | secrets, [[1, 1], [1, 2, 1]])
    frontends, workers = found[:2], found[2:]
    assert all(process.environment.items() >= secrets.items() for process in frontends)
    assert all(process.environment.keys().isdisjoint(secrets) for process in workers)
    assert [process.name for process in found] == [
        *("frontend 0", "frontend 1", "encode worker 0", "encode worker 1"),
        *("embed worker 0", "embed worker 1", "embed worker 2"),
    ]
    assert [after(process, "--port") for process in frontends] == ["8000", "8000"]
    assert {
        after(process, "--expect-embed") + after(process, "--expect-encode") for process in frontends
    } == {"32"}
    assert all("DYN_SYSTEM_PORT" not in process.environment for process in frontends)
    assert [worker.environment["DYN_SYSTEM_PORT"] for worker in workers] == [
        str(8081 + at) for at in range(5)
    ]
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4", "4", "0", "1", "0"]
    assert [after(worker, "--workers-on-host") for worker in workers] == ["2", "2", "3", "3", "3"]
    assert ["--workers-on-card" in worker.arguments for worker in workers] == [False] * 3 + [True, False]
    assert ["--colour" in worker.arguments for worker in workers] == [False, False, True, True, True]
    assert after(workers[2], "--encode-endpoint") == "dyn://tessera.encode.generate"
    assert {after(process, "--served-model-name") for process in found} == {"one"}
    assert {after(process, "--model-options") for process in found} == {'{"max_pixels": 8192}'}
    assert {after(worker, "--extra-engine-args") for worker in workers} == {str(ENGINE_CONFIGS)}


def test_a_frontend_understands_its_flags(tmp_path: Path) -> None:
    given = {
        "TESSERA_MODEL_PATH": str(tmp_path),
        "TESSERA_FRONTEND_PAGE": "off",
        "TESSERA_FRONTEND_ARGS": "--max-inputs 7  --open-metrics",
        "TESSERA_ALLOWED_LOCAL_MEDIA_PATH": str(tmp_path),
    }
    machine = Machine(cores=2, nbytes=8 << 30)
    settings = settled(LaunchSettings.read(given), machine)
    settings = with_frontends(settings, agg_workers(settings, ()), machine)
    frontend, worker = processes(settings, agg_workers(settings, ()), {}, [[1]])
    parsed = parse_frontend(frontend.arguments[2:])
    assert not parsed.page
    assert worker.environment == {"DYN_SYSTEM_PORT": "8081"}


CARDS = (Card(entry="0", name="H200"), Card(entry="1", name="H200"))


@pytest.mark.parametrize(
    ("mode", "shared", "cards", "environment", "wanted"),
    [
        ("on", False, (), {}, True),
        ("off", True, CARDS, {}, False),
        ("on", True, CARDS, {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, False),
        ("auto", False, CARDS, {}, False),
        ("auto", True, (), {}, False),
        ("auto", True, (Card(entry="MIG-1", name="MIG 3g.20gb"),), {}, False),
        # Nothing of it is installed here.
        ("auto", True, CARDS, {}, False),
    ],
)
def test_when_mps_is_started(
    mode: str, shared: bool, cards: tuple[Card, ...], environment: dict[str, str], wanted: bool
) -> None:
    assert mps.wanted(mode, shared, cards, environment) is wanted


def test_mps_is_started_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / mps.COMMAND[0]).write_text("#!/bin/sh\n")
    (tmp_path / mps.COMMAND[0]).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mps.wanted("auto", True, CARDS, {})


def test_mps_sees_every_card_so_that_workers_name_them_alike() -> None:
    own = mps.of_service({"CUDA_VISIBLE_DEVICES": "2,3", "HOME": "/root"}, Path("/tmp/mps"))
    assert own == {"HOME": "/root"} | mps.of_workers(Path("/tmp/mps"))


def test_a_role_is_reached_at_its_host_and_further_flags_come_last(tmp_path: Path) -> None:
    environment = {
        "TESSERA_MODEL_PATH": str(tmp_path),
        "TESSERA_HOST_ADDRESS": "127.0.0.1",
        "PYTHON": sys.executable,
    }
    python, words, own = command(["embed", "--colour", "blue"], environment)
    assert (python, words[:2], words[-2:]) == (
        sys.executable,
        ["-m", "tessera.worker"],
        ["--colour", "blue"],
    )
    assert (own["DYN_TCP_RPC_HOST"], own["DYN_SYSTEM_PORT"]) == ("127.0.0.1", "9090")
    assert words[words.index("--override-engine-args") + 1] == '{"transport": {"nixl_interfaces": "lo"}}'
    _, words, _ = command(["encode"], environment | {"TESSERA_NIXL_INTERFACES": ""})
    assert words[words.index("--override-engine-args") + 1] == '{"transport": {"nixl_interfaces": ""}}'
    _, words, own = command(["frontend"], environment | {"DYN_SYSTEM_PORT": "9"})
    assert "DYN_SYSTEM_PORT" not in own and words[words.index("--host") + 1] == "0.0.0.0"


# A host with two interfaces, in a network namespace of its own, where "$0", a Python, runs "$1".
TWO_NETWORKS = """
ip link set lo up
ip link add first type veth peer name first-peer && ip address add 198.18.76.1/24 dev first
ip link add second type veth peer name second-peer && ip address add 198.18.77.1/24 dev second
for name in first second; do ip link set $name-peer up; ip link set $name up; done
exec "$0" -c "$1"
"""
ADDRESS_OF_A_ROLE = """
import json, os
from tessera.launch.role import command
_, words, own = command(["encode"], os.environ)
interfaces = json.loads(words[words.index("--override-engine-args") + 1])["transport"]["nixl_interfaces"]
print(own["DYN_TCP_RPC_HOST"], own["DYN_TCP_RESPONSE_STREAM_HOST"], interfaces)
"""


@pytest.mark.parametrize(
    ("endpoints", "address", "interface"),
    [
        ("http://198.18.77.9:2379", "198.18.77.1", "second"),
        ("http://no-such-host.invalid,198.18.76.9:2379", "198.18.76.1", "first"),
        # The way to etcd on the same host is loopback, where nobody else would find it.
        ("http://[::1]:2379", "198.18.76.1", "first"),
        # A container that was cut off.
        ("http://no-such-host.invalid", "", ""),
        ("http://127.0.0.1:2379", "198.18.76.1", "first"),
    ],
)
def test_a_role_is_reached_on_the_network_of_etcd(
    tmp_path: Path, endpoints: str, address: str, interface: str
) -> None:
    if subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not permitted here (CAP_SYS_ADMIN)")
    ran = subprocess.run(
        ["unshare", "--net", "sh", "-ec", TWO_NETWORKS, sys.executable, ADDRESS_OF_A_ROLE],
        env=os.environ | {"TESSERA_MODEL_PATH": str(tmp_path), "ETCD_ENDPOINTS": endpoints},
        capture_output=True,
        text=True,
        check=False,
    )
    if not address:
        assert f"ETCD_ENDPOINTS={endpoints}: no way leads there from this host" in ran.stderr
    else:
        assert ran.stdout.split() == [address, address, interface], ran.stderr


def test_processes_of_a_host_have_no_port_that_is_for_one() -> None:
    fixed = {
        "DYN_TCP_RPC_PORT": "9091",
        "DYN_TCP_RESPONSE_STREAM_PORT": "9092",
        "UCX_TCP_PORT_RANGE": "9100-9199",
    }
    assert without(fixed | {"HOME": "/"}, PORTS_OF_ONE) == {"UCX_TCP_PORT_RANGE": "9100-9199", "HOME": "/"}


LIST = """
models:
  - {model_path: PATH, served_model_names: [Embed_1, other], model_options: {max_pixels: 8192}}
  - {model_path: org/two, embed_endpoint: "dyn://far.embed.generate", encode_endpoint: "dyn://x.encode.generate"}
"""


def test_roles_of_several_models_read_one_file(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(LIST.replace("PATH", str(checkpoint)))
    environment = {
        "TESSERA_MODELS_FILE": str(file),
        "TESSERA_HOST_ADDRESS": "127.0.0.1",
        "DYN_NAMESPACE": "ns",
    }
    _, words, own = command(["frontend"], environment)
    assert after_word(words, "--models") == str(file) and "--model-path" not in words
    assert own["DYN_NAMESPACE"] == "ns"
    _, words, own = command(["embed"], environment | {"TESSERA_SERVED_MODEL_NAME": "EMBED.1"})
    worker = parse_worker(words[2:])
    assert (worker.model_path, worker.served_model_names) == (checkpoint, ("Embed_1", "other"))
    assert worker.model_options == {"max_pixels": 8192}
    assert worker.rpc.namespace == own["DYN_NAMESPACE"] == "ns-embed-1"
    assert worker.encode_endpoint == "dyn://ns-embed-1.encode.generate"
    _, words, _ = command(["embed"], environment | {"TESSERA_SERVED_MODEL_NAME": "org/two"})
    assert [after_word(words, flag) for flag in ("--model-path", "--namespace", "--encode-endpoint")] == [
        *("org/two", "far"),
        "dyn://x.encode.generate",
    ]


def after_word(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (LIST, "three", "TESSERA_SERVED_MODEL_NAME=three: says which of Embed_1, other, org/two of "),
        (LIST, "", "TESSERA_SERVED_MODEL_NAME=: says which of"),
        ("models: 3", "a", "TESSERA_MODELS_FILE=.*: is no list of models"),
        ("models: [{}]", "a", "TESSERA_MODELS_FILE=.*: is no list of models: 'model_path'"),
        ("{", "a", "TESSERA_MODELS_FILE=.*: is no list of models"),
        (None, "a", "TESSERA_MODELS_FILE=.*: No such file"),
    ],
)
def test_a_worker_of_no_model_of_the_file_is_refused(
    tmp_path: Path, text: str | None, name: str, said: str
) -> None:
    file = tmp_path / "models.yaml"
    if text is not None:
        file.write_text(text.replace("PATH", str(tmp_path)))
    with pytest.raises(SettingError, match=said):
        command(
            ["agg"],
            {
                "TESSERA_MODELS_FILE": str(file),
                "TESSERA_SERVED_MODEL_NAME": name,
                "TESSERA_HOST_ADDRESS": "127.0.0.1",
            },
        )
