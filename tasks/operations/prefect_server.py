"""Prefect's server with a check of the Host header, which it lacks: ``python -P prefect_server.py HOST PORT``.

A web page may resolve its own name to 127.0.0.1 and then has, for the browser, the same origin as this server (DNS
rebinding). The request still carries that name. This script imports Prefect alone: the servers' image has no rlcore.
"""

from __future__ import annotations

import os
import sys

import uvicorn
from prefect.server.api import server
from starlette.middleware.trustedhost import TrustedHostMiddleware

HOSTS = "RLCORE_PREFECT_HOSTS"  # allowed host names, separated by commas; any port
_LOCAL = "127.0.0.1,localhost"


def guarded() -> TrustedHostMiddleware:
    """Guard the whole server: API, page, services. A request for another host is answered with 400."""
    hosts = [name.strip() for name in (os.environ.get(HOSTS) or _LOCAL).split(",")]
    return TrustedHostMiddleware(server.create_app(final=True), allowed_hosts=hosts, www_redirect=False)


if __name__ == "__main__":
    uvicorn.run(guarded(), host=sys.argv[1], port=int(sys.argv[2]), log_level="warning")
