"""The page that Prometheus reads from the worker."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlcore.tasks.operations import health_page
from rlcore.tasks.operations.health_page import serve_health
from rlcore.tasks.operations.service_checks import ServiceCheck
from rlcore.tasks.pipeline.exporter import ADDRESS, PORTS
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.settings import Home
from tests.http_servers import free_port
from tests.waiting import LONG, until

CHECKS = (
    ServiceCheck(subject="disk", state="warn", text="little", value=12.0, unit="days"),
    ServiceCheck(subject="Prefect server", state="fail", text="silent"),
)


def read(port: int) -> dict[tuple[str, str], float]:
    """The page: value by gauge and its first label, when it has been filled."""

    def filled() -> dict[tuple[str, str], float]:
        try:
            with urllib.request.build_opener().open(f"http://127.0.0.1:{port}/metrics", timeout=LONG) as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
        except OSError:
            return {}
        samples = [sample for family in families for sample in family.samples]
        found = {(each.name, next(iter(each.labels.values()), "")): each.value for each in samples}
        return found if found.get((health_page.CHECKED, ""), 0.0) else {}

    return until(filled, "the page")


def test_the_page_has_a_level_and_a_figure_for_each_check_and_the_cost_of_models(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_port() - PORTS
    monkeypatch.setenv(ADDRESS, f"127.0.0.1:{first}")
    monkeypatch.setattr(health_page, "check_services", lambda _: iter(CHECKS))
    record_action(home, "promote", "toy-grpo/1", {})
    threading.Thread(target=serve_health, args=(home,), daemon=True).start()
    page = read(first + PORTS)
    assert page["rlcore_service_check", "disk"] == 1.0
    assert page["rlcore_service_check", "Prefect server"] == 2.0
    assert page["rlcore_service_check_value", "disk"] == 12.0
    assert ("rlcore_service_check_value", "Prefect server") not in page
    assert page[health_page.CHECKED, ""] == pytest.approx(time.time(), abs=LONG)
    assert page["rlcore_accepted_models", "toy"] == 1.0


def test_without_an_address_nothing_is_served(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    serve_health(home)  # returns at once
