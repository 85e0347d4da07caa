"""Connection to a running Ray cluster, or to a local one that ends with this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rlcore.config.distributed import DistributedConfig
from rlcore.errors import ServiceError


@contextmanager
def connected(ray: ModuleType, config: DistributedConfig, bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Join the configured cluster, or start one with room for ``bundles``, unless the caller has joined one.

    Raises:
        ServiceError: There is no cluster at the address.
    """
    if ray.is_initialized():  # by the caller
        yield
        return
    address = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
    if address:
        settings |= {"address": address}
    else:  # a machine with fewer processors is oversubscribed
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
    """Restore this process's SIGTERM handler, which Ray replaces.

    Ray's handler ends the cluster's processes and then raises ``SystemExit`` anywhere in the main thread. If that is
    swallowed, the run restarts its processes and continues although it was cancelled.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
