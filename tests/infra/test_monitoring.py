"""Prometheus and Grafana: every metric that the dashboard asks for is one that something here exports."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path

import yaml

from rlcore.metrics import METRICS
from rlcore.sampling.vllm import server_load as engine_metrics
from rlcore.tasks.operations.health_page import CHECKED, LEVEL, VALUE
from rlcore.tasks.pipeline.exporter import ADDRESS, LOGGED, PORTS, STEP, gauge_name
from tests.infra.documents import INFRA, read, tool
from tests.tasks.operations.test_service_checks import SUBJECTS

DASHBOARD = json.loads((INFRA / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
ASKED = frozenset(re.findall(r"\b(?:rlcore|process|vllm)[_:]\w+", " ".join(QUERIES)))
FROM_PROMETHEUS = {"up", "rate", "time"}
RULES_TEST = Path(__file__).with_name("prometheus_rules.yml")
ALERTS = read("prometheus-rules.yml")["groups"][0]["rules"]


def test_the_dashboard_asks_for_metrics_of_the_glossary_alone() -> None:
    """That a run exports each of them, a real worker shows (tests/integration/test_services.py)."""
    known = {gauge_name(name) for name in (*METRICS, STEP, LOGGED)} | {LEVEL, VALUE}  # of runs, and of the worker
    asked = {name for name in ASKED if name.startswith("rlcore_")}
    assert len(asked) > 30
    assert asked - known == set()


def test_the_dashboard_asks_vllm_for_what_the_engine_is_watched_by() -> None:
    asked = {name.removeprefix("vllm:").removesuffix("_total") for name in ASKED if name.startswith("vllm:")}
    assert asked
    assert asked <= {*engine_metrics._PEAKS, *engine_metrics._COUNTS}  # held to a real server's page by test_vllm.py


def test_no_query_asks_for_anything_else() -> None:
    words = {word for query in QUERIES for word in re.findall(r"[a-z_:]{3,}", re.sub(r"\{.*?\}|\[.*?\]", "", query))}
    assert words <= ASKED | FROM_PROMETHEUS


def test_panels_have_a_place_of_their_own_and_are_filtered_by_preset_and_stage() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        covered = {(place["x"] + x, place["y"] + y) for x, y in itertools.product(range(place["w"]), range(place["h"]))}
        assert not covered & cells, panel["title"]
        assert max(x for x, _ in covered) < 24, panel["title"]
        cells |= covered
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    ours = [query for query in QUERIES if "rlcore_" in query and not re.search("rlcore_(service|accepted)", query)]
    assert all('{preset=~"$preset",stage=~"$stage"}' in query for query in ours)
    assert {each["name"] for each in DASHBOARD["templating"]["list"]} == {"preset", "stage"}


def test_grafana_finds_the_dashboard_and_its_data_where_compose_puts_them() -> None:
    services = read("compose.yaml")["services"]
    (source,) = read("grafana/provisioning/datasource.yaml")["datasources"]
    (provider,) = read("grafana/provisioning/dashboards.yaml")["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    assert mounts["./grafana/dashboard.json"].startswith(provider["options"]["path"])
    assert {mounts[f"./grafana/provisioning/{name}.yaml"] for name in ("datasource", "dashboards")} == {
        "/etc/grafana/provisioning/datasources/rlcore.yaml",
        "/etc/grafana/provisioning/dashboards/rlcore.yaml",
    }


def test_prometheus_reads_services_of_compose_at_the_ports_where_they_serve() -> None:
    services = read("compose.yaml")["services"]
    jobs = {job["job_name"]: job for job in read("prometheus.yml")["scrape_configs"]}
    targets = {
        target
        for job in ("runs", "worker", "prefect")
        for each in jobs[job]["static_configs"]
        for target in each["targets"]
    }
    assert {target.partition(":")[0] for target in targets} == {"worker", "worker-gpu", "prefect"}
    host, _, port = services["worker"]["environment"][ADDRESS].rpartition(":")
    assert host == "0.0.0.0"
    assert {f"{name}:{each}" for name in ("worker", "worker-gpu") for each in (port, int(port) + PORTS)} <= targets
    assert services["prefect"]["environment"]["PREFECT_SERVER_METRICS_ENABLED"] == "true"


def test_prometheus_itself_accepts_the_configuration_and_every_query(tmp_path: Path) -> None:
    config = run(tool("promtool"), "check", "config", str(INFRA / "prometheus.yml"))
    assert config.returncode == 0, config.stderr
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(QUERIES)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    checked = run(tool("promtool"), "check", "rules", str(path))
    assert f"{len(QUERIES)} rules found" in checked.stdout, checked.stdout + checked.stderr


def test_every_check_has_an_alert_that_says_what_to_do() -> None:
    asked = {each for alert in ALERTS for each in re.findall(r'check="([\w ]+)"', alert["expr"])}
    assert asked == set(SUBJECTS)  # what a healthy installation passes
    assert all(alert["labels"]["severity"] in ("page", "ticket") for alert in ALERTS)
    assert all({"summary", "fix"} == alert["annotations"].keys() for alert in ALERTS)
    names = set(re.findall(r"\brlcore_\w+", " ".join(alert["expr"] for alert in ALERTS)))
    assert names == {LEVEL, CHECKED}


def test_prometheus_finds_the_alerts_where_compose_puts_them() -> None:
    mounts = dict(mount.split(":")[:2] for mount in read("compose.yaml")["services"]["prometheus"]["volumes"])
    (rules,) = read("prometheus.yml")["rule_files"]
    assert mounts[f"./{rules}"] == f"{Path(mounts['./prometheus.yml']).parent}/{rules}"


def test_alerts_fire_as_their_tests_say() -> None:
    done = run(tool("promtool"), "test", "rules", str(RULES_TEST))
    assert done.returncode == 0, done.stdout + done.stderr


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
