"""Load of a vLLM server while it samples, read from its Prometheus page several times a second."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlcore.sampling.vllm.client import Address, EngineUnreachableError, call

_EVERY_SECONDS = 0.25
_PAGE_SECONDS = 5.0
_LINE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{.*\})? (\S+)$", re.MULTILINE)
_PEAKS = {
    "num_requests_running": "engine/running",
    "num_requests_waiting": "engine/waiting",
    "kv_cache_usage_perc": "engine/kv_cache_usage",
}
_COUNTS = ("generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")


class EngineWatch:
    """Statistics of a server between two calls of :meth:`take`. Only time within :meth:`over` counts.

    A server that publishes no statistics (``--disable-log-stats``) gives only ``engine/retries``.
    """

    def __init__(self) -> None:
        self.num_retries = 0
        self._peaks: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._seconds = 0.0

    @contextmanager
    def over(self, address: Callable[[], Address]) -> Iterator[None]:
        """Watch a block in which the server samples. A restarted server has another address."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(address, done), name="vllm-metrics", daemon=True)
        before, started = read_page(address()), time.monotonic()
        watcher.start()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - started
            done.set()
            watcher.join()
            self._count(before, read_page(address()))

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        metrics = {"engine/retries": float(self.num_retries), **self._peaks}
        if self._counts and self._seconds > 0.0:
            queries = self._counts["prefix_cache_queries"]
            metrics["engine/tokens_per_second"] = self._counts["generation_tokens"] / self._seconds
            metrics["engine/preemptions"] = self._counts["num_preemptions"]
            metrics["engine/prefix_cache_hit_rate"] = self._counts["prefix_cache_hits"] / queries if queries else 0.0
        self.num_retries, self._peaks, self._counts, self._seconds = 0, {}, {}, 0.0
        return metrics

    def _watch(self, address: Callable[[], Address], done: threading.Event) -> None:
        while not done.wait(_EVERY_SECONDS):
            page = read_page(address())
            for name, metric in _PEAKS.items():
                if name in page:
                    self._peaks[metric] = max(page[name], self._peaks.get(metric, 0.0))

    def _count(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add the increase between two readings. A restarted server counts from 0 again."""
        if not all(name in after for name in _COUNTS):
            return
        restarted = any(after[name] < before.get(name, 0.0) for name in _COUNTS)
        for name in _COUNTS:
            new = after[name] - (0.0 if restarted else before.get(name, 0.0))
            self._counts[name] = self._counts.get(name, 0.0) + new


def read_page(address: Address) -> dict[str, float]:
    """Return the server's statistics by name, summed over its engines; empty if it publishes none."""
    with contextlib.suppress(EngineUnreachableError):
        status, page = call(address, "/metrics", None, seconds=_PAGE_SECONDS)
        if status == 200 and isinstance(page, str):
            return parse_page(page)
    return {}


def parse_page(page: str) -> dict[str, float]:
    """Parse lines ``vllm:name{labels} value``, by name without ``_total``: the maximum of fractions, else the sum."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        if name in _PEAKS or name in _COUNTS:
            together = max if name == "kv_cache_usage_perc" else float.__add__
            found[name] = together(found.get(name, 0.0), float(value))
    return found
