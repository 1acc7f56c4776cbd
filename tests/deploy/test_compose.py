"""``compose.yaml``, up: two frontends, encode and embed workers, etcd and Prometheus in containers.

Grafana is left out: no Debian has it, no package of an index carries it, and no registry may be reachable.
Its queries are sent from where it would be. The files over it come up as well, on CPUs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.deploy.docker_host import DockerHost
from tests.deploy.test_containers import inputs, runs_without_rights
from tests.e2e.service import ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.xdist_group("containers"), pytest.mark.images, pytest.mark.timeout(1500)]
SERVICES = ("frontend", "encode", "embed", "etcd", "prometheus")
REPLICAS = {"frontend": 2, "encode": 1, "embed": 2}
PORTS = (8000, 8001)
MODEL = "tessera"
BACKPLANE = "tessera_backplane"
IN_FLIGHT = "\ntessera_requests_in_flight 1.0"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything of ``compose.yaml`` but Grafana; ``variables`` are those of the user's shell."""

    host: DockerHost
    variables: dict[str, str] = field(default_factory=dict)

    def compose(self, *words: str, over: Iterable[str] = ()) -> str:
        files = [f"--file=deploy/{name}" for name in ("compose.yaml", *over)]
        return self.host.compose(*files, *words, variables=self.variables)

    def container(self, service: str, number: int = 1) -> str:
        return f"tessera-{service}-{number}"

    def embed(self, given: object, port: int = PORTS[0], model: str = MODEL) -> int:
        """The status of the answer; a vector for each input belongs to 200."""
        status, answer = self.host.ask(port, "/v1/embeddings", {"model": model, "input": given})
        if status == 200:
            assert len(json.loads(answer)["data"]) == (len(given) if isinstance(given, list) else 1)
        return status

    def metric(self, service: str, name: str) -> float:
        """The sum of a metric over the containers of a service."""
        code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/metrics').read().decode())"
        total = 0.0
        for number in range(1, REPLICAS[service] + 1):
            text = self.host.docker("exec", self.container(service, number), "python", "-c", code)
            total += sum(map(float, re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)))
        return total

    def until(self, given: object, status: int, model: str = MODEL, seconds: float = 120.0) -> None:
        """Ask both frontends until they answer so."""
        wait_until(
            lambda: {self.embed(given, port, model) for port in PORTS} == {status},
            seconds,
            said=lambda: self.compose("logs", "--tail=40"),
        )


@pytest.fixture(scope="module")
def deployment(docker_host: DockerHost, checkpoint: Path) -> Iterator[Deployment]:
    for target in ("frontend", "worker-cpu"):
        docker_host.image(target)
    variables = {"TESSERA_MODEL_PATH": str(checkpoint), "TESSERA_EMBED_WORKERS": str(REPLICAS["embed"])}
    variables["SECOND_MODEL_PATH"] = str(checkpoint)
    deployment = Deployment(docker_host, variables)
    try:
        deployment.compose("up", "--detach", "--no-build", "--wait", *SERVICES)
        yield deployment
    finally:
        deployment.compose("down", "--volumes", "--timeout=45", "--remove-orphans")


@pytest.mark.parametrize("over", [[], ["compose.cuda.yaml"], ["compose.models.yaml"]])
def test_compose_reads_its_files(docker_host: DockerHost, over: list[str]) -> None:
    files = [f"--file=deploy/{name}" for name in ("compose.yaml", *over)]
    shell = {"TESSERA_MODEL_PATH": "/models/one", "SECOND_MODEL_PATH": "/models/two"}
    said = docker_host.compose(*files, "config", variables=shell)
    assert "/models/one" in said and ("/models/two" in said) == ("compose.models.yaml" in over)


def test_both_frontends_answer_and_rows_travel_by_nixl(
    deployment: Deployment, photos: dict[str, bytes]
) -> None:
    deployment.until(inputs(photos), 200)
    assert deployment.metric("embed", r'tessera_transfers_total\{outcome="ok",route="nixl"\}') >= 1
    for service, count in REPLICAS.items():
        for number in range(1, count + 1):
            runs_without_rights(deployment.host, deployment.container(service, number))


def test_prometheus_finds_every_container(deployment: Deployment) -> None:
    query = ["promtool", "query", "instant", "http://127.0.0.1:9090", "count by (job) (up == 1)"]

    def found() -> dict[str, int]:
        said = deployment.host.docker("exec", deployment.container("prometheus"), *query)
        return {job: int(count) for job, count in re.findall(r'\{job="(\w+)"\} => (\d+)', said)}

    wait_until(lambda: found() == REPLICAS, said=found)


# Asks a Prometheus at the first argument for each of the queries, a JSON list.
_ASK = """\
import json, sys, urllib.parse, urllib.request
for query in json.loads(sys.argv[2]):
    body = urllib.parse.urlencode({"query": query}).encode()
    print(json.load(urllib.request.urlopen(sys.argv[1] + "/api/v1/query", body))["status"])
"""


def test_what_grafana_would_ask_is_answered_where_it_would_ask(deployment: Deployment) -> None:
    """Its data source, its dashboard's queries, from a container of the same networks."""
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    assert compose["grafana"]["networks"] == compose["frontend"]["networks"]
    folder = ROOT / "deploy/grafana"
    (source,) = yaml.safe_load((folder / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    panels = json.loads((folder / "tessera.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    asked = json.dumps([query.replace("$__rate_interval", "1m") for query in queries])
    said = deployment.host.docker(
        *("exec", deployment.container("frontend"), "python", "-c", _ASK, source["url"], asked)
    )
    assert said.split() == ["success"] * len(queries) and len(queries) > 40


def test_a_container_that_dies_is_started_again(deployment: Deployment) -> None:
    victim = deployment.container("embed", 1)
    was = deployment.host.state(victim)
    os.kill(was["Pid"], signal.SIGKILL)
    # The other worker answers meanwhile.
    for _ in range(5):
        assert deployment.embed("a flower") == 200

    def back() -> bool:
        now = deployment.host.state(victim)
        return now["Health"]["Status"] == "healthy" and now["Pid"] != was["Pid"]

    wait_until(back, 180, said=lambda: deployment.host.state(victim))


def test_a_host_that_is_cut_off_returns(deployment: Deployment, photos: dict[str, bytes]) -> None:
    host, encode = deployment.host, deployment.container("encode")
    host.docker("network", "disconnect", BACKPLANE, encode)
    try:
        # Another picture than before, whose rows no cache has.
        url = inputs({"flower": photos["china"]})[1]
        assert deployment.embed([url]) == 503
        assert deployment.embed("a flower") == 200
    finally:
        host.docker("network", "connect", "--alias", "encode", BACKPLANE, encode)
    deployment.until([url], 200)


def test_a_frontend_that_is_cut_off_returns(deployment: Deployment) -> None:
    """It is on another network as well, on which no worker could answer it."""
    host, frontend = deployment.host, deployment.container("frontend")
    host.docker("network", "disconnect", BACKPLANE, frontend)
    try:
        # Until its lease in etcd has run out.
        time.sleep(15)
    finally:
        host.docker("network", "connect", "--alias", "frontend", BACKPLANE, frontend)
    deployment.until("a flower", 200)


def test_what_is_in_flight_is_answered_when_all_is_stopped(deployment: Deployment) -> None:
    deployment.until("a flower", 200)
    host = deployment.host
    with ThreadPoolExecutor(1) as pool:
        # As many texts as it takes to see them in flight: far fewer than the 30 s of a drain are enough for.
        for count in (200, 400, 800, 1600):
            texts = [f"flower number {number} " * 100 for number in range(count)]
            answer = pool.submit(deployment.embed, texts)
            wait_until(
                lambda asked=answer: asked.done() or IN_FLIGHT in host.ask(PORTS[0], "/metrics")[1]  # type: ignore[misc]
            )
            if not answer.done():
                break
        assert not answer.done(), answer.result()
        deployment.compose("stop")
        assert answer.result() == 200
    for service, count in REPLICAS.items():
        for number in range(1, count + 1):
            state = host.state(deployment.container(service, number))
            assert state["ExitCode"] == 0, (service, host.logs(deployment.container(service, number)))


def test_a_second_model_and_the_workers_for_gpus_come_up_over_it(
    deployment: Deployment, photos: dict[str, bytes]
) -> None:
    """What stands for NVIDIA's runtime is runc, without a GPU: the workers run on CPUs."""
    deployment.host.image("worker-cuda")
    over = ("compose.cuda.yaml", "compose.models.yaml")
    services = ("frontend", "encode", "embed", "second", "etcd")
    deployment.compose("up", "--detach", "--no-build", "--wait", *services, over=over)
    for service in ("encode", "embed"):
        container = deployment.container(service)
        words = ["--format={{.HostConfig.Runtime}} {{.HostConfig.PidMode}} {{.Config.Image}}", container]
        assert deployment.host.docker("inspect", *words) == "nvidia host tessera-worker-cuda:0.1.0"
        runs_without_rights(deployment.host, container)
    deployment.until(inputs(photos), 200, "first")
    deployment.until("a flower", 200, "second")
    deployment.until("a flower", 404, "third")
