from __future__ import annotations

import ipaddress
import itertools
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prefect.settings import Settings
from pydantic import BaseModel

from tests.infra.documents import INFRA, has_digest, kustomized, read_all
from tests.infra.rendered import DEPLOYMENTS, SECRETS, placeholders, render, worker_environment

OVERLAYS = ("cpu", "gpu")
EACH = tuple(itertools.product(OVERLAYS, DEPLOYMENTS))
NAMES = [f"{overlay}-{deployment['name']}" for overlay, deployment in EACH]
PLANTED = "planted"


def secret_settings(model: type[BaseModel] = Settings, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The environment variable of every setting of Prefect whose type is a secret's."""
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        if any(getattr(kind, "__name__", "").startswith("Secret") or "SecretStr" in str(kind) for kind in kinds):
            yield "PREFECT_" + "_".join((*path, name)).upper()
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from secret_settings(kind, (*path, name))


@pytest.mark.parametrize(("overlay", "deployment"), EACH, ids=NAMES)
def test_no_value_of_a_secret_stands_in_a_job(overlay: str, deployment: Mapping[str, Any]) -> None:
    made = render(overlay, deployment, environment=worker_environment(overlay))
    assert PLANTED not in json.dumps(made)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    by_reference = {source["secretRef"]["name"] for source in container["envFrom"] if "secretRef" in source}
    assert by_reference == {"rlcore-web"}  # what lets a run in is there all the same
    assert placeholders(made) == []
    assert has_digest(container["image"])


def test_the_worker_has_the_secrets_that_its_jobs_do_not_show() -> None:
    environment = worker_environment("gpu")
    assert {name for name, value in environment.items() if PLANTED in value} == {
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_PASSWORD",
        *(f"RLCORE_{name}_URL" for name in ("WEBHOOK", "SLACK", "MAIL")),
    }
    assert environment.keys() >= SECRETS["rlcore-web"].keys()


def test_no_setting_of_prefect_that_is_a_secret_stands_in_a_job_either() -> None:
    found = set(secret_settings())
    assert {"PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_DATABASE_PASSWORD"} <= found
    planted = dict.fromkeys(found, PLANTED) | {"PREFECT_CLIENT_CUSTOM_HEADERS": json.dumps({"X-Proxy": PLANTED})}
    planted["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = f"postgresql+asyncpg://a:{PLANTED}@b/c"
    assert PLANTED not in json.dumps(render("gpu", environment=planted))


def test_what_is_no_secret_still_reaches_a_job() -> None:
    made = render("gpu", environment={"PREFECT_CLIENT_MAX_RETRIES": "7"})
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert {"name": "PREFECT_CLIENT_MAX_RETRIES", "value": "7"} in container["env"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_light_waits_for_no_gpu(overlay: str) -> None:
    for deployment in DEPLOYMENTS:
        (container,) = render(overlay, deployment)["spec"]["template"]["spec"]["containers"]
        is_light = deployment["work_pool"].get("work_queue_name") is None
        asked = container["resources"]["requests"]
        assert asked["nvidia.com/gpu"] == (1 if overlay == "gpu" and not is_light else 0), deployment["name"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == asked["nvidia.com/gpu"]
        if is_light:
            assert (asked["cpu"], asked["memory"]) == ("500m", "2Gi"), deployment["name"]


Pod = Mapping[str, str]  # its labels, and its namespace under "namespace"


def is_chosen(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """True if a label selector takes an object with these labels."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return exact and all(labels.get(rule["key"]) in rule["values"] for rule in rules)


def is_meant(peer: Mapping[str, Any], other: Pod | str) -> bool:
    """True if a peer of a rule is this pod, or this address where it is a text."""
    if isinstance(other, str):
        return "ipBlock" in peer and ipaddress.ip_address(other) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if "ipBlock" in peer:
        return False
    namespace = {"kubernetes.io/metadata.name": other["namespace"]}
    inside = is_chosen(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else None
    within = other["namespace"] == "rlcore" if inside is None else inside
    return within and is_chosen(peer.get("podSelector", {}), other)


def allows(policies: list[dict[str, Any]], pod: Pod, other: Pod | str, port: int, *, way: str) -> bool:
    """Return True if a namespace's rules allow a connection: Ingress to ``pod`` or Egress from it."""
    peers = {"Ingress": "from", "Egress": "to"}[way]
    about = [each["spec"] for each in policies if is_chosen(each["spec"]["podSelector"], pod)]
    about = [each for each in about if way in each["policyTypes"]]
    for rule in (rule for each in about for rule in each.get(way.lower(), [])):
        ports = rule.get("ports", [{"port": port}])
        is_port = any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)
        if is_port and (peers not in rule or any(is_meant(peer, other) for peer in rule[peers])):
            return True
    return not about


def rules(overlay: str) -> list[dict[str, Any]]:
    here = [each for each in kustomized(overlay) if each["kind"] == "NetworkPolicy"]
    return [*here, *read_all("ray/network.yaml")]


def named(name: str) -> Pod:
    return {"app.kubernetes.io/name": name, "namespace": "rlcore"}


@pytest.mark.parametrize(("overlay", "deployment"), EACH, ids=NAMES)
def test_the_network_knows_the_pod_of_a_run(overlay: str, deployment: Mapping[str, Any]) -> None:
    labels = render(overlay, deployment)["spec"]["template"]["metadata"]["labels"]
    run, policies = {**labels, "namespace": "rlcore"}, rules(overlay)
    for server, port in (("prefect", 4200), ("mlflow", 5000)):
        assert allows(policies, named(server), run, port, way="Ingress")
        assert allows(policies, run, named(server), port, way="Egress")
    assert not allows(policies, named("postgres"), run, 5432, way="Ingress")
    assert not allows(policies, run, "203.0.113.9", 443, way="Egress")
    assert not allows(policies, run, named("prefect"), 9464, way="Ingress")


PEERS = ({"app.kubernetes.io/component": "run", "namespace": "rlcore"}, named("ray"))


@pytest.mark.parametrize("pod", PEERS, ids=["run", "ray"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_found_by_a_pod_of_dns_and_by_a_cache_on_the_node(overlay: str, pod: Pod) -> None:
    policies = rules(overlay)
    dns: Pod = {"k8s-app": "kube-dns", "namespace": "kube-system"}
    for resolver in (dns, "169.254.20.10", "10.96.0.10", "172.20.0.10", "192.168.0.10", "fd00:10:96::a"):
        assert allows(policies, pod, resolver, 53, way="Egress"), resolver
    assert not allows(policies, pod, "203.0.113.9", 53, way="Egress")
    assert not allows(policies, pod, "169.254.169.254", 80, way="Egress")


@pytest.mark.parametrize("pod", PEERS, ids=["run", "ray"])
def test_metrics_of_a_run_are_read_from_the_namespace_of_monitoring_alone(pod: Pod) -> None:
    policies = rules("gpu")
    reader: Pod = {"app.kubernetes.io/name": "prometheus", "namespace": "monitoring"}
    stranger: Pod = {"app.kubernetes.io/name": "prometheus", "namespace": "default"}
    for port in (9464, 9465, 9466, 9467):
        assert allows(policies, pod, reader, port, way="Ingress")
        assert not allows(policies, pod, stranger, port, way="Ingress")
    assert not allows(policies, pod, reader, 9468, way="Ingress")
    (clients,) = [each for each in kustomized("gpu") if each["metadata"]["name"] == "clients"]
    assert clients["data"]["RLCORE_METRICS_ADDRESS"] == "0.0.0.0:9464"


def test_the_page_says_how_the_secrets_are_made_that_the_manifests_name() -> None:
    page = (INFRA.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    for key in SECRETS["rlcore-web"]:
        assert f"--from-literal={key}=" in page
