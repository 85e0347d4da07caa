"""Prefect's server behind a check of the Host header, of which it has none: ``python -P prefect_server.py HOST PORT``.

A page on the internet may let its own name mean 127.0.0.1, and is then, to the browser, of one origin with this server.
The name still stands in the request. A script that needs Prefect alone: the servers' image has none of our code.
"""

from __future__ import annotations

import os
import sys

import uvicorn
from prefect.server.api import server
from starlette.middleware.trustedhost import TrustedHostMiddleware

HOSTS = "RLCORE_PREFECT_HOSTS"  # the names by which it may be reached, with commas between; any port
_LOCAL = "127.0.0.1,localhost"


def guarded() -> TrustedHostMiddleware:
    """The whole server: API, page, services. A request for another host is answered with 400."""
    hosts = [name.strip() for name in (os.environ.get(HOSTS) or _LOCAL).split(",")]
    return TrustedHostMiddleware(server.create_app(final=True), allowed_hosts=hosts, www_redirect=False)


if __name__ == "__main__":
    uvicorn.run(guarded(), host=sys.argv[1], port=int(sys.argv[2]), log_level="warning")
