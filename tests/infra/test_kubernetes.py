from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from rlcore.tasks.operations.postgres import DATABASES
from tests.infra.documents import INFRA, has_digest, kustomized, leaves, read
from tests.infra.rendered import job_template, render

OVERLAYS = ("cpu", "gpu")
DIGEST = "sha256:DIGEST-OF-YOUR-PUSH"  # a placeholder that no cluster takes for an image
TEMPLATE = read("kubernetes/job-template.yaml")
VERSION = "1.33"  # the oldest that pods with users of their own (host_users) can be relied on


def workloads(overlay: str) -> list[dict[str, Any]]:
    return [each for each in kustomized(overlay) if each["kind"] in ("Deployment", "StatefulSet", "Job", "CronJob")]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    job = workload["spec"].get("jobTemplate", workload)
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def validate(document: dict[str, Any]) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed (pip install kubernetes-validate)")
    import kubernetes_validate

    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_the_schema_of_kubernetes(overlay: str) -> None:
    objects = kustomized(overlay)
    assert len(objects) > 20
    for each in objects:
        validate(each)


def test_the_schema_check_can_fail() -> None:
    wrong = next(each for each in workloads("cpu") if each["kind"] == "Deployment")
    wrong["spec"]["replicas"] = "one"
    with pytest.raises(Exception, match="one"):
        validate(wrong)


def test_the_job_of_a_run_fits_the_schema_too() -> None:
    values = {"gpu_count": 2, "seccomp_profile": "Unconfined", "proc_mount": "Unmasked", "host_users": False}
    made = render("gpu", values=values)
    spec = made["spec"]["template"]["spec"]
    assert (spec.pop("parallelism"), spec.pop("completions")) == (1, 1)  # Prefect insists on them at this wrong place
    made["metadata"]["name"] = "run"  # the schema check asks for one; the API server takes generateName
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert spec["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
    assert spec["hostUsers"] is False
    validate(made)


def test_each_variable_of_the_job_template_is_named_in_its_configuration_and_the_other_way_round() -> None:
    named = {
        name for _, value in leaves(TEMPLATE["job_configuration"]) for name in re.findall(r"{{ *(\w+) *}}", str(value))
    }
    assert named == set(TEMPLATE["variables"]["properties"])


def test_a_gpu_is_asked_for_in_requests_and_limits_alike() -> None:
    resources = TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert {half["nvidia.com/gpu"] for half in resources.values()} == {"{{ gpu_count }}"}
    assert set(resources) == {"requests", "limits"}


def test_a_run_finds_the_objects_that_its_job_names() -> None:
    made, objects = render("gpu")["spec"]["template"]["spec"], kustomized("gpu")
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert ("ConfigMap", made["containers"][0]["envFrom"][0]["configMapRef"]["name"]) in names
    assert ("PersistentVolumeClaim", made["volumes"][0]["persistentVolumeClaim"]["claimName"]) in names
    assert ("ServiceAccount", made["serviceAccountName"]) in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_probed_bounded_and_without_rights(overlay: str) -> None:
    for each in workloads(overlay):
        assert pod(each)["securityContext"]["runAsNonRoot"] is True
        assert pod(each)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod(each).get("automountServiceAccountToken") is False or each["metadata"]["name"] == "worker"
        for container in containers(each):
            assert has_digest(container["image"]), container["image"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            probes = {"startupProbe", "readinessProbe", "livenessProbe"}
            assert probes <= container.keys() or each["kind"] in ("Job", "CronJob")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_password_comes_from_a_secret_that_is_not_written_here(overlay: str) -> None:
    objects = kustomized(overlay)
    assert [each for each in objects if each["kind"] == "Secret"] == []
    entries = [entry for each in workloads(overlay) for c in containers(each) for entry in c.get("env", [])]
    secret = [entry for entry in entries if "PASSWORD" in entry["name"]]
    places = [entry["valueFrom"]["secretKeyRef"] for entry in secret]
    assert sorted(place["name"] for place in places) == ["rlcore-database"] * 7 + ["rlcore-web"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_both_servers_ask_for_the_password_that_their_clients_have(overlay: str) -> None:
    first = {each["metadata"]["name"]: pod(each)["containers"][0] for each in workloads(overlay)}
    told = {name: {each["name"]: each for each in first[name]["env"]} for name in ("prefect", "mlflow")}
    web = {"secretKeyRef": {"name": "rlcore-web", "key": "PREFECT_API_AUTH_STRING"}}
    assert told["prefect"]["PREFECT_SERVER_API_AUTH_STRING"]["valueFrom"] == web
    assert "*" not in told["prefect"]["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]["value"]
    assert first["prefect"]["command"][2] == "/opt/rlcore/prefect_server.py"
    assert "basic-auth" in first["mlflow"]["command"]
    clients = (
        first["worker"],
        first["register"],
        first["backup"],
        render(overlay)["spec"]["template"]["spec"]["containers"][0],
    )
    assert all({"secretRef": {"name": "rlcore-web"}} in each["envFrom"] for each in clients)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (host,) = first["prefect"][probe]["httpGet"]["httpHeaders"]
        assert host["value"] in told["prefect"]["RLCORE_PREFECT_HOSTS"]["value"].split(",")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_reached_that_no_rule_allows(overlay: str) -> None:
    policies = {
        each["metadata"]["name"]: each["spec"] for each in kustomized(overlay) if each["kind"] == "NetworkPolicy"
    }
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    allowed = policies["database"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert allowed == ["prefect", "mlflow", "home-backup"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_worker_may_make_jobs_in_its_namespace_and_nothing_more(overlay: str) -> None:
    objects = kustomized(overlay)
    assert [each for each in objects if each["kind"].startswith("ClusterRole")] == []
    (role,) = [each for each in objects if each["kind"] == "Role"]
    may_change = {name for rule in role["rules"] if "create" in rule["verbs"] for name in rule["resources"]}
    assert may_change == {"jobs"}
    assert {each["metadata"]["namespace"] for each in objects if each["kind"] != "Namespace"} == {"rlcore"}


def test_a_backup_has_both_databases_and_all_files_and_waits_to_be_enabled() -> None:
    objects = kustomized("cpu")
    (job,) = [each for each in objects if each["kind"] == "CronJob"]
    assert (job["spec"]["suspend"], job["spec"]["concurrencyPolicy"]) == (True, "Forbid")
    dumped = [each["env"][0]["value"] for each in pod(job)["initContainers"]]
    assert dumped == [*DATABASES]
    volumes = [each for each in pod(job)["volumes"] if "persistentVolumeClaim" in each]
    claims = {each["persistentVolumeClaim"]["claimName"] for each in volumes}
    assert claims <= {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"}
    mounts = {each["name"]: each["mountPath"] for each in containers(job)[-1]["volumeMounts"]}
    (served,) = [each for each in workloads("cpu") if each["metadata"]["name"] == "mlflow"]
    files = next(each["value"] for each in pod(served)["containers"][0]["env"] if "DESTINATION" in each["name"])
    assert (mounts["mlflow"], files) == (f"{mounts['home']}/home/services/mlflow-artifacts", "/state/artifacts")


def test_the_overlays_differ_in_the_image_and_in_the_gpus_that_a_run_gets() -> None:
    found = {}
    for overlay in OVERLAYS:
        variables = job_template(overlay)["variables"]["properties"]
        image, _, digest = variables["image"]["default"].partition("@")
        found[overlay] = (image, digest, variables["gpu_count"]["default"])
    assert found == {"cpu": ("rlcore-cpu", DIGEST, 0), "gpu": ("rlcore-gpu", DIGEST, 1)}


def test_the_databases_of_compose_and_kubernetes_are_made_by_one_script() -> None:
    mounts = read("compose.yaml")["services"]["postgres"]["volumes"]
    assert any("kubernetes/base/databases.sh" in mount for mount in mounts)
    (configured,) = [
        each["data"]["databases.sh"] for each in kustomized("cpu") if "databases.sh" in each.get("data", {})
    ]
    assert configured == (INFRA / "kubernetes" / "base" / "databases.sh").read_text(encoding="utf-8")
