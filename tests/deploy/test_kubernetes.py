"""The manifests: rendered by Kustomize, checked against schemas, and consistent with one another."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validation

from tessera.frontend.settings import parse as parse_frontend
from tessera.worker.settings import parse as parse_worker
from tests.deploy.processes import run_script
from tests.deploy.schemas import CUSTOM
from tests.e2e.service import ROOT

FOLDER = ROOT / "deploy/kubernetes"
RENDERED = (
    "overlays/etcd",
    "overlays/kubernetes",
    "overlays/try",
    "overlays/hub-try",
    "overlays/models",
    "overlays/models-try",
    "dynamo",
)
VERSIONS = ("1.30", "1.37")
ROLES = ("frontend", "encode", "embed")
Resource = dict[str, Any]

# It would read a file of all definitions again for each resource: 4 of 10 s of processor time.
validation.schema_contents = functools.cache(validation.schema_contents)


def roles(name: str) -> tuple[str, ...]:
    """The kinds of pods; with several models each has its own."""
    return (*ROLES, "rerank") if "models" in name else ROLES


@functools.cache
def render(name: str) -> tuple[Resource, ...]:
    command = [ROOT / "scripts/kustomize", FOLDER / name]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode == 127:
        pytest.skip(ran.stderr)
    assert ran.returncode == 0, ran.stderr
    # libyaml: 14 ms, where PyYAML itself takes 146.
    return tuple(yaml.load_all(ran.stdout, yaml.CSafeLoader))


@functools.cache
def custom(kind: str) -> jsonschema.protocols.Validator:
    """What checks a resource, after its schema was checked itself."""
    validator = jsonschema.validators.validator_for(CUSTOM[kind])
    validator.check_schema(CUSTOM[kind])
    return validator(CUSTOM[kind])


def check(resource: Resource, version: str) -> None:
    if resource["kind"] in CUSTOM:
        custom(resource["kind"]).validate(resource)
    else:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("name", "version"), [*((name, VERSIONS[-1]) for name in RENDERED), ("overlays/etcd", VERSIONS[0])]
)
def test_rendered_manifests_fit_their_schemas(name: str, version: str) -> None:
    for resource in render(name):
        check(resource, version)


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_every_file_fits_its_schema(path: Path) -> None:
    for resource in yaml.safe_load_all(path.read_text()):
        if resource["apiVersion"].startswith("kustomize"):
            for key in ("resources", "components"):
                assert all((path.parent / entry).exists() for entry in resource.get(key, []))
        else:
            check(resource, VERSIONS[-1])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("DynamoGraphDeployment", lambda spec: spec["components"][0].update(podTemplte={})),
        ("DynamoGraphDeployment", lambda spec: spec["components"][0].update(type="encode")),
        ("ScaledObject", lambda spec: spec["triggers"][0]["metadata"].update(threshold=5)),
        ("PodMonitor", lambda spec: spec.pop("selector")),
    ],
)
def test_the_schemas_find_mistakes(kind: str, change: Any) -> None:
    (first, *_) = [resource for resource in render("dynamo") if resource["kind"] == kind]
    wrong = yaml.safe_load(yaml.safe_dump(first))
    change(wrong["spec"])
    with pytest.raises(jsonschema.ValidationError):
        check(wrong, VERSIONS[-1])


def templates(name: str) -> dict[str, Resource]:
    """Each role's pod template."""
    found = {}
    for resource in render(name):
        if resource["kind"] == "Deployment":
            template = resource["spec"]["template"]
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        elif resource["kind"] == "DynamoGraphDeployment":
            for component in resource["spec"]["components"]:
                found[component["name"]] = component["podTemplate"]
    assert found.keys() == set(roles(name))
    return found


def settings(name: str, container: Resource) -> dict[str, str]:
    """The variables with a value of their own, from the ConfigMap, the graph and the container."""
    values: dict[str, str] = {}
    for resource in render(name):
        if resource["kind"] == "ConfigMap" and resource["metadata"]["name"] == "tessera":
            values |= resource["data"]
        elif resource["kind"] == "DynamoGraphDeployment":
            values |= {entry["name"]: entry["value"] for entry in resource["spec"]["env"]}
    return values | {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}


@pytest.mark.parametrize("name", RENDERED)
def test_pods_are_hardened_and_have_time_to_drain(name: str) -> None:
    for role, template in templates(name).items():
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": template},
            VERSIONS[-1],
            strict=True,
        )
        pod = template["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "main"
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsUser"] == 10001 and pod["securityContext"]["runAsNonRoot"]
        # What the image declares as writable is what is mounted writable.
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/tmp", "/var/cache/tessera"}
        slept = (
            container.get("lifecycle", {})
            .get("preStop", {})
            .get("exec", {})
            .get("command", ["sleep", "0"])[1]
        )
        drain = float(settings(name, container)["TESSERA_DRAIN_SECONDS"])
        assert pod["terminationGracePeriodSeconds"] > drain + float(slept)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {
            probe["httpGet"]["port"] for key, probe in container.items() if key.endswith("Probe")
        } <= ports.keys()
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        gpus = [key for key in container["resources"]["limits"] if key.startswith("nvidia.com/gpu")]
        assert gpus == ([] if role == "frontend" or name.endswith("try") else ["nvidia.com/gpu"])


def listed_models(name: str, folder: Path) -> Path | None:
    """The file of models that pods read, with a folder in place of each checkpoint; None without one."""
    for resource in render(name):
        if resource["kind"] == "ConfigMap" and "models.yaml" in resource["data"]:
            text = re.sub(r"/models/[\w.-]+", str(folder), resource["data"]["models.yaml"])
            (path := folder / "models.yaml").write_text(text)
            return path
    return None


@pytest.mark.starts
@pytest.mark.parametrize("name", RENDERED)
def test_the_arguments_are_understood(name: str, tmp_path: Path) -> None:
    """start-role is run with a Python that prints what it was given, and the parsers read that."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = tessera.launch ]; then exec "{sys.executable}" "$@"; fi\n'
        "printf '%s\\n' \"$@\"\n"
    )
    python.chmod(0o755)
    (tmp_path / "config.json").write_text('{"model_type": "llama_nemotron_vl"}')
    endpoints: dict[str, set[str]] = {}
    for role, template in templates(name).items():
        (container,) = template["spec"]["containers"]
        environment = settings(name, container) | {
            "PYTHON": str(python),
            "TESSERA_MODEL_PATH": str(tmp_path),
            "POD_IP": "127.0.0.1",
        }
        several = listed_models(name, tmp_path)
        if several is not None:
            assert environment["TESSERA_MODELS_FILE"] == "/etc/tessera/models.yaml"
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            assert volumes[mounts["/etc/tessera"]]["configMap"] == {"name": "tessera-models"}
            environment["TESSERA_MODELS_FILE"] = str(several)
        ran = run_script(ROOT / "deploy/start-role", *container["args"], **environment)
        assert ran.returncode == 0, ran.stderr
        flag, module, *flags = ran.stdout.splitlines()
        assert (flag, module) == ("-m", "tessera.frontend" if role == "frontend" else "tessera.worker")
        if role == "frontend":
            parsed = parse_frontend(flags)
            assert (parsed.host, parsed.port) == ("0.0.0.0", 8000)
            assert parsed.access.open_metrics, "Prometheus has no API key"
            assert len(parsed.models) == (1 if several is None else 2)
            endpoints[role] = {model.embed_endpoint for model in parsed.models}
        else:
            worker = parse_worker(flags)
            assert (
                worker.mode == ("agg" if role == "rerank" else role)
                and worker.stages.transport.nixl_interfaces == "lo"
            )
            assert worker.cache_bytes == (4 << 30 if role == "embed" else None)
            endpoints[role] = {f"dyn://{worker.rpc.namespace}.embed.generate"}
    assert endpoints["embed"] == endpoints["encode"]
    # Frontends look where the workers are.
    assert endpoints["frontend"] == endpoints["embed"] | endpoints.get("rerank", set())


@pytest.mark.starts
def test_a_job_downloads_what_the_pods_read(tmp_path: Path) -> None:
    """Its command, run with its variables, looks for what the pods are told to read."""
    name = "overlays/hub-try"
    (job,) = (resource for resource in render(name) if resource["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    own, pods = settings(name, container), settings(name, {})
    assert (own["HF_HUB_OFFLINE"], pods["HF_HUB_OFFLINE"]) == ("0", "1")
    assert own["HF_HOME"] == pods["HF_HOME"] and own["HF_HOME"].startswith("/models/")
    (volume,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == "/models")
    assert not volume.get("readOnly")
    words = [re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], word) for word in container["command"]]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, *words[1:]], env=environment, capture_output=True, text=True)
    assert own["TESSERA_MODEL_PATH"] in ran.stdout and "HF_HUB_OFFLINE is set" in ran.stdout, ran.stderr


@pytest.mark.parametrize("name", RENDERED)
def test_policies_budgets_and_services_select_pods(name: str) -> None:
    labels = {role: template["metadata"]["labels"] for role, template in templates(name).items()}
    everyone = [*labels.values()] + [
        resource["spec"]["template"]["metadata"]["labels"]
        for resource in render(name)
        if resource["kind"] in ("StatefulSet", "Job")
    ]

    def matched(selector: Resource) -> list[Resource]:
        exact = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
        return [
            pod
            for pod in everyone
            if exact.items() <= pod.items()
            and all(pod.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))
        ]

    kinds = [resource["kind"] for resource in render(name)]
    assert kinds.count("PodDisruptionBudget") == len(labels) and kinds.count("NetworkPolicy") >= 5
    for resource in render(name):
        spec = resource.get("spec", {})
        if resource["kind"] == "Service":
            assert matched(spec["selector"]), resource["metadata"]["name"]
        elif resource["kind"] == "PodDisruptionBudget":
            assert len(matched(spec["selector"])) == 1
        elif resource["kind"] == "NetworkPolicy":
            assert matched(spec["podSelector"])
            for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
                for peer in [*rule.get("from", []), *rule.get("to", [])]:
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        assert matched(peer["podSelector"]), resource["metadata"]["name"]


def allowed(name: str) -> set[tuple[str, str, int]]:
    """Who may open a connection to whom, and where: (from, to, port), both policies agreeing."""
    policies = [resource["spec"] for resource in render(name) if resource["kind"] == "NetworkPolicy"]
    labels = {role: template["metadata"]["labels"] for role, template in templates(name).items()}

    def selects(selector: Resource, role: str) -> bool:
        pod = labels[role]
        return selector.get("matchLabels", {}).items() <= pod.items() and all(
            pod.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", [])
        )

    def side(direction: str, key: str, own: str, other: str) -> set[int]:
        ports: set[int] = set()
        for spec in policies:
            if not selects(spec["podSelector"], own):
                continue
            for rule in spec.get(direction, []):
                peers = rule.get(key)
                if peers is None or any(
                    "podSelector" in peer
                    and "namespaceSelector" not in peer
                    and selects(peer["podSelector"], other)
                    for peer in peers
                ):
                    for port in rule["ports"]:
                        ports |= set(range(port["port"], port.get("endPort", port["port"]) + 1))
        return ports

    return {
        (caller, called, port)
        for caller in roles(name)
        for called in roles(name)
        if caller != called
        for port in side("egress", "to", caller, called) & side("ingress", "from", called, caller)
    }


@pytest.mark.parametrize("name", RENDERED)
def test_who_may_talk_to_whom(name: str) -> None:
    calls = {("frontend", role, 9091) for role in roles(name)[1:]} | {("embed", "encode", 9091)}
    answers = {(called, caller, 9092) for caller, called, _ in calls}
    rows = {
        (*pair, port) for pair in (("embed", "encode"), ("encode", "embed")) for port in range(9100, 9200)
    }
    assert allowed(name) == calls | answers | rows


@pytest.mark.parametrize("name", [name for name in RENDERED if name != "dynamo"])
def test_everybody_may_ask_discovery(name: str) -> None:
    allowed_pods = set()
    for resource in render(name):
        if resource["kind"] != "NetworkPolicy" or resource["metadata"]["name"] == "tessera-nothing-else":
            continue
        for rule in resource["spec"].get("egress", []):
            ports = {port["port"] for port in rule["ports"]}
            if ports & {2379, 6443}:
                (chosen,) = resource["spec"]["podSelector"]["matchExpressions"]
                allowed_pods |= set(chosen["values"])
    assert allowed_pods >= set(roles(name))


def test_the_images_use_the_ports_that_the_policies_open() -> None:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    for setting in (
        "DYN_TCP_RPC_PORT=9091",
        "DYN_TCP_RESPONSE_STREAM_PORT=9092",
        "UCX_TCP_PORT_RANGE=9100-9199",
    ):
        assert setting in text


@pytest.mark.parametrize("name", ["overlays/etcd", "overlays/models", "dynamo"])
def test_autoscaling_asks_for_metrics_that_are_there(name: str, tmp_path: Path) -> None:
    documented = set(re.findall(r"`(tessera_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    scaled = [resource for resource in render(name) if resource["kind"] == "ScaledObject"]
    assert len(scaled) == len(roles(name))
    rules = []
    for resource in scaled:
        target = resource["spec"]["scaleTargetRef"]
        if target.get("kind", "Deployment") == "Deployment":
            assert target["name"] in {
                r["metadata"]["name"] for r in render(name) if r["kind"] == "Deployment"
            }
        else:
            # The operator names an adapter after the graph and the component.
            assert target["name"] in {f"tessera-{role}" for role in ROLES}
        for trigger in resource["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            names = {word.removesuffix("_bucket") for word in re.findall(r"tessera_\w+", query)}
            assert names and names <= documented
            rules.append({"record": "tessera:autoscaling", "expr": query})
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "autoscaling", "rules": rules}]})
    )
    ran = run_script(promtool, "check", "rules", tmp_path / "rules.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr
