"""JSON schemas of the custom resources that the manifests use.

Written by hand from the field names and limits of the operators' Go types, for no package of the index
carries the definitions: the types of Dynamo's operator, v1beta1, and of KEDA, v1alpha1. Everything that is
not listed is refused, so they allow less than the clusters do. A component's ``podTemplate`` is checked
against Kubernetes' own schema beside this one.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def closed(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


TEXT: Final[Schema] = {"type": "string", "minLength": 1}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
ANY: Final[Schema] = {"type": "object"}
METADATA: Final = closed(("name",), name=TEXT, namespace=TEXT, labels=ANY, annotations=ANY)

COMPONENT: Final = closed(
    ("name",),
    name={"type": "string", "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$", "maxLength": 63},
    type={"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
    runtimeVersionOverride={"type": "string", "pattern": r"^(0|[1-9]\d{0,3})(\.(0|[1-9]\d{0,3})){2}$"},
    globalDynamoNamespace={"type": "boolean"},
    podTemplate=ANY,
    replicas=COUNT,
    minAvailable={"type": "integer", "minimum": 1},
    sharedMemorySize={"type": ["string", "integer"]},
    modelRef=closed(("name",), name=TEXT, revision=TEXT),
    scalingAdapter=closed(),
    frontendSidecar=TEXT,
    compilationCache=closed(("pvcName",), pvcName=TEXT, mountPath=TEXT),
)
GRAPH: Final = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "nvidia.com/v1beta1"},
    kind={"const": "DynamoGraphDeployment"},
    metadata=METADATA,
    spec=closed(
        ("components",),
        annotations=ANY,
        labels=ANY,
        env={"type": "array", "items": closed(("name",), name=TEXT, value={"type": "string"}, valueFrom=ANY)},
        backendFramework={"enum": ["sglang", "vllm", "trtllm"]},
        components={"type": "array", "items": COMPONENT, "minItems": 1, "maxItems": 25},
    ),
)

RULES: Final = closed(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies={
        "type": "array",
        "items": closed(
            ("type", "value", "periodSeconds"),
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        ),
    },
)
SCALED_OBJECT: Final = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=METADATA,
    spec=closed(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=closed(("name",), name=TEXT, apiVersion=TEXT, kind=TEXT),
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        advanced=closed(
            horizontalPodAutoscalerConfig=closed(name=TEXT, behavior=closed(scaleUp=RULES, scaleDown=RULES))
        ),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": closed(
                ("type", "metadata"),
                type={"const": "prometheus"},
                name=TEXT,
                metricType={"enum": ["AverageValue", "Value"]},
                # KEDA takes every one of these as a string.
                metadata=closed(
                    ("serverAddress", "query", "threshold"),
                    serverAddress=TEXT,
                    query=TEXT,
                    threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
                    activationThreshold=TEXT,
                    ignoreNullValues=TEXT,
                ),
            ),
        },
    ),
)
POD_MONITOR: Final = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata=METADATA,
    spec=closed(
        ("selector", "podMetricsEndpoints"),
        selector=ANY,
        podTargetLabels={"type": "array", "items": TEXT},
        podMetricsEndpoints={
            "type": "array",
            "items": closed(("port",), port=TEXT, path=TEXT, interval=TEXT, scrapeTimeout=TEXT),
        },
    ),
)

CUSTOM: Final = {"DynamoGraphDeployment": GRAPH, "ScaledObject": SCALED_OBJECT, "PodMonitor": POD_MONITOR}
