"""Prometheus page with the newest metrics of the running stage; off unless ``RLCORE_METRICS_ADDRESS`` is set.

The page belongs to the process: it opens with the first computed stage and closes with the run. Each metric has a
gauge: ``reward/mean`` is ``rlcore_reward_mean``, labeled with preset, stage and recipe (the algorithm of a stage that
has one). ``infra/grafana/dashboard.json`` plots them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError
from rlcore.metrics import find_metric
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import rl_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily

logger = logging.getLogger(__name__)

ADDRESS = "RLCORE_METRICS_ADDRESS"
STEP, LOGGED = "step", "logged_timestamp_seconds"
Show = Callable[[Mapping[str, float], int], None]

PORTS = 4  # tries this port and the next ones: several runs may share a machine
_HELP = {STEP: "the last step that was logged", LOGGED: "when it was logged, in seconds since 1970"}


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Labels of a stage's metrics."""

    preset: str
    stage: str
    recipe: str


class MetricsPage:
    """Content of the page. One thread logs while others read the page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[Labels, dict[str, float]] = {}

    def show(self, labels: Labels, metrics: Mapping[str, float], step: int) -> None:
        """Show a step's metrics on the page. A stage's summary has no step and is not shown."""
        with self._lock:
            known = self._stages.setdefault(labels, {})
            known |= {**metrics, STEP: max(known.get(STEP, 0.0), float(step)), LOGGED: time.time()}

    def remove(self, labels: Labels) -> None:
        """Take a stage off the page."""
        with self._lock:
            self._stages.pop(labels, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges for ``prometheus_client``."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        with self._lock:
            stages = {labels: dict(values) for labels, values in self._stages.items()}
        for name in sorted({name for values in stages.values() for name in values}):
            family = GaugeMetricFamily(gauge_name(name), _help(name), labels=[each.name for each in fields(Labels)])
            for labels, values in stages.items():
                if name in values:
                    family.add_metric(astuple(labels), values[name])
            yield family


@contextmanager
def exported(config: RunConfig, stage: str) -> Iterator[Show | None]:
    """Export a stage's metrics while the block runs; yield None if ``RLCORE_METRICS_ADDRESS`` is not set.

    Raises:
        ConfigError: ``RLCORE_METRICS_ADDRESS`` is not ``host:port``.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        yield None
        return
    board, labels = _open_page(address), labels_of(config, stage)
    try:
        yield functools.partial(board.show, labels)
    finally:
        board.remove(labels)


def labels_of(config: RunConfig, stage: str) -> Labels:
    """Return a stage's labels. Its recipe is the algorithm that it names, else the stage's name."""
    rl = rl_of(config.stages.get(stage))
    recipe = rl.algorithm if rl else stage
    return Labels(preset=config.name, stage=stage, recipe=recipe)


def gauge_name(metric: str) -> str:
    """Return the Prometheus name of a metric."""
    return "rlcore_" + re.sub(r"\W", "_", metric, flags=re.ASCII)


@functools.cache
def _open_page(address: str) -> MetricsPage:
    """Start the page's server, once per process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    host, first = parse_address(address)
    board, registry = MetricsPage(), CollectorRegistry()
    registry.register(board)
    ProcessCollector(registry=registry)
    for port in range(first, first + PORTS):
        try:
            start_http_server(port, host, registry)
        except OSError as error:
            reason = error
        else:
            logger.info("metrics for Prometheus: http://%s:%d/metrics", host, port)
            return board
    logger.warning("no metrics for Prometheus: ports %d to %d of %s: %s", first, first + PORTS - 1, host, reason)
    return board


def parse_address(address: str) -> tuple[str, int]:
    """Return host and first port of ``RLCORE_METRICS_ADDRESS``.

    Raises:
        ConfigError: it is not ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        fix = "set it to host:port, for example 127.0.0.1:9464"
        raise ConfigError(f"{address!r} is not an address", where=ADDRESS, fix=fix)
    return host, int(port)


def _help(metric: str) -> str:
    known = find_metric(metric)
    return f"{known.formula} ({known.unit})" if known else _HELP.get(metric, metric)
