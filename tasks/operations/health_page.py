"""Page for Prometheus with the health of the installation, served by the worker next to the pages of its runs.

``infra/prometheus-rules.yml`` has an alert for each check.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.errors import RlcoreError
from rlcore.tasks.operations.service_checks import ServiceCheck, check_services
from rlcore.tasks.pipeline.accepted import accepted_presets, per_accepted, tries_of
from rlcore.tasks.pipeline.exporter import ADDRESS, PORTS, gauge_name, parse_address
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily

logger = logging.getLogger(__name__)

LEVEL, VALUE, CHECKED = "rlcore_service_check", "rlcore_service_check_value", "rlcore_service_checked_timestamp_seconds"
REFRESH_SECONDS = 120.0  # between two checks, which ask the servers and read the state directory
_Values = Mapping[tuple[str, ...], float]  # by the values of the labels
_LEVELS = {"ok": 0.0, "warn": 1.0, "fail": 2.0}


class HealthPage:
    """Content of the page: the newest results."""

    def __init__(self) -> None:
        self._checks: tuple[ServiceCheck, ...] = ()
        self._accepted: Mapping[str, Mapping[str, float]] = {}
        self._checked = 0.0

    def refresh(self, home: Home) -> None:
        """Check everything now."""
        self._checks = tuple(check_services(home))
        self._accepted = {preset: per_accepted(tries_of(home, preset)) for preset in accepted_presets(home)}
        self._checked = time.time()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges for ``prometheus_client``."""
        levels: _Values = {(each.subject,): _LEVELS[each.state] for each in self._checks}
        values: _Values = {(each.subject, each.unit): each.value for each in self._checks if each.unit}
        yield _family(LEVEL, "0: the check passed, 1: it warns, 2: it failed", ("check",), levels)
        yield _family(VALUE, "figure of the check in its unit", ("check", "unit"), values)
        yield _family(CHECKED, "time of the checks, in seconds since 1970", (), {(): self._checked})
        for name in sorted({name for found in self._accepted.values() for name in found}):
            found: _Values = {(preset,): metrics[name] for preset, metrics in self._accepted.items() if name in metrics}
            yield _family(gauge_name(name), "see docs/metrics.md", ("preset",), found)


def serve_health(home: Home) -> None:
    """Serve the page on the port after those of the runs, for ever, if ``RLCORE_METRICS_ADDRESS`` is set.

    Raises:
        ConfigError: ``RLCORE_METRICS_ADDRESS`` is not ``host:port``.
    """
    if not os.environ.get(ADDRESS):
        return
    from prometheus_client import CollectorRegistry, start_http_server

    host, first = parse_address(os.environ[ADDRESS])
    page, registry = HealthPage(), CollectorRegistry()
    registry.register(page)
    try:
        start_http_server(first + PORTS, host, registry)
    except OSError as error:
        logger.warning("no page of the health for Prometheus: port %d of %s: %s", first + PORTS, host, error)
        return
    while True:
        try:
            page.refresh(home)
        except (RlcoreError, OSError) as error:  # a damaged log of audits, a full disk: the page's time stands still
            logger.warning("the health could not be checked: %s", error)
        time.sleep(REFRESH_SECONDS)


def _family(name: str, text: str, labels: Sequence[str], values: _Values) -> GaugeMetricFamily:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
