"""The manifests for KubeRay: every field is one that it knows, pods are Kubernetes' own, limits are set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.infra.documents import INFRA, has_digest, leaves, read
from tests.infra.test_images import instructions
from tests.infra.test_kubernetes import validate

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
POD = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"metadata": {}, "spec": {}},
}


def record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "additionalProperties": False, "properties": fields}


# The fields of ray.io/v1 (kuberay, ray-operator/apis/ray/v1) with their types; pods are checked by themselves.
CLUSTER = record(
    ("headGroupSpec",),
    rayVersion={"type": "string"},
    enableInTreeAutoscaling={"type": "boolean"},
    suspend={"type": "boolean"},
    headServiceAnnotations=TEXTS,
    autoscalerOptions=record(
        resources={},
        image={"type": "string"},
        imagePullPolicy={"type": "string"},
        env={},
        envFrom={},
        volumeMounts={},
        securityContext={},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    ),
    headGroupSpec=record(
        ("rayStartParams", "template"),
        serviceType={"type": "string"},
        headService={},
        enableIngress={"type": "boolean"},
        rayStartParams=TEXTS,
        template=POD,
    ),
    workerGroupSpecs={
        "type": "array",
        "items": record(
            ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
            groupName={"type": "string"},
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            rayStartParams=TEXTS,
            template=POD,
            scaleStrategy={},
        ),
    },
)
JOB = record(
    ("entrypoint", "rayClusterSpec"),
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    rayClusterSpec=CLUSTER,
    submitterPodTemplate=POD,
    submitterConfig=record(backoffLimit=COUNT),
    metadata=TEXTS,
    clusterSelector=TEXTS,
    managedBy={"type": "string"},
    deletionStrategy={},
    entrypoint={"type": "string"},
    runtimeEnvYAML={"type": "string"},
    jobId={"type": "string"},
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    entrypointResources={"type": "string"},
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    ttlSecondsAfterFinished=COUNT,
    shutdownAfterJobFinishes={"type": "boolean"},
    suspend={"type": "boolean"},
)
SCHEMAS = {"cluster": ("RayCluster", CLUSTER), "job": ("RayJob", JOB)}


def cluster_of(name: str) -> dict[str, Any]:
    spec = read(f"ray/{name}.yaml")["spec"]
    found: dict[str, Any] = spec.get("rayClusterSpec", spec)
    return found


def pods(name: str) -> list[dict[str, Any]]:
    spec = cluster_of(name)
    submitter = read(f"ray/{name}.yaml")["spec"].get("submitterPodTemplate")
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [*(group["template"] for group in groups), *([submitter] if submitter else [])]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_is_one_that_kuberay_knows(name: str) -> None:
    document = read(f"ray/{name}.yaml")
    kind, schema = SCHEMAS[name]
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
    jsonschema.validate(document["spec"], schema)


def test_the_schema_check_can_fail() -> None:
    spec = cluster_of("cluster")
    spec["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(spec, CLUSTER)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_pod_fits_the_schema_of_kubernetes_and_is_bounded_and_without_rights(name: str) -> None:
    for each in pods(name):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": each["spec"]})
        assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "ray"  # what the network's rules look at
        assert each["spec"]["securityContext"]["runAsNonRoot"] is True
        assert each["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = each["spec"]["containers"]
        assert has_digest(container["image"])
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        is_submitter = container["name"] == "submitter"  # it asks the cluster's head, and no server
        assert is_submitter or {"secretRef": {"name": "rlcore-web"}} in container["envFrom"]
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys() and "memory" in resources["limits"]
        assert resources["requests"].get("nvidia.com/gpu") == resources["limits"].get("nvidia.com/gpu")
        (token,) = [entry for entry in container["env"] if entry["name"] == "RAY_AUTH_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "rlcore-ray", "key": "token"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_cluster_grows_and_shrinks_within_limits_and_the_head_computes_nothing(name: str) -> None:
    spec = cluster_of(name)
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["idleTimeoutSeconds"] > 0
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] < 1000
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_a_run_has_the_cluster_that_outlives_runs_and_goes_on_when_it_is_lost() -> None:
    assert cluster_of("job") == cluster_of("cluster")
    job = read("ray/job.yaml")["spec"]
    assert job["backoffLimit"] > 0 and job["shutdownAfterJobFinishes"]
    assert job["entrypoint"].startswith("rlcore run /state/")


def test_the_network_lets_the_pods_reach_each_other_and_the_servers() -> None:
    policy = read("ray/network.yaml")
    validate(policy)
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "ray"}
    everywhere = [value for _, value in leaves(policy)]
    assert {"ray", "prefect", "mlflow", "kuberay-operator"} <= set(map(str, everywhere))
    servers = (INFRA / "kubernetes" / "base" / "network.yaml").read_text(encoding="utf-8")
    allowed = [each for each in yaml.safe_load_all(servers) if each["metadata"]["name"] == "servers"]
    names = allowed[0]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert "ray" in names


def test_ray_is_of_one_version_everywhere_and_in_the_image() -> None:
    pins = (INFRA / "locks" / "pipeline.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ray==(\S+)", pins, re.MULTILINE)
    assert {cluster_of(name)["rayVersion"] for name in SCHEMAS} == {version}
    assert any("--editable" in line and ",ray]" in line for line in instructions("packages"))
    assert {Path(path).name for path in (INFRA / "ray").iterdir()} == {"cluster.yaml", "job.yaml", "network.yaml"}
