"""This process as a driver of a Ray cluster that runs, or of one on this machine that ends with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rlcore.config.placement import PlacementConfig
from rlcore.errors import ServiceError


@contextmanager
def connected(ray: ModuleType, placement: PlacementConfig, bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Join the cluster that is named, or start one with room for ``bundles``, unless the caller has joined one.

    Raises:
        ServiceError: there is no cluster at the address.
    """
    if ray.is_initialized():  # the caller's own
        yield
        return
    address = placement.ray.address or os.environ.get("RAY_ADDRESS", "")
    settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
    if address:
        settings |= {"address": address}
    else:  # a machine with fewer processors than that is shared, not refused
        processors = max(os.cpu_count() or 1, int(sum(bundle["CPU"] for bundle in bundles)))
        settings |= {"address": "local", "num_cpus": processors, "include_dashboard": False}
    try:
        with _own_sigterm():
            ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ServiceError(
            f"no Ray cluster: {error}",
            where=f"distributed.ray.address = {address!r}",
            fix="see `ray status` there; an empty address starts a cluster on this machine",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what this process does at SIGTERM, where it does something: Ray puts a handler of its own in its place.

    Ray's ends the cluster's processes first and then raises ``SystemExit``, wherever the main thread is. That may be
    swallowed; then the run misses its processes, starts them again and goes on, cancelled or not.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
