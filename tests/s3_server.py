"""An S3 server on this machine, reached over HTTP with the client that users have."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class S3:
    """Address of a running server."""

    url: str

    def variables(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "tester",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def new_bucket(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Make a bucket, set this process's environment, and return the URL of a folder in it."""
        import fsspec

        for name, value in self.variables().items():
            monkeypatch.setenv(name, value)
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # clients of an earlier server
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        return f"s3://{name}/rlcore"


@contextmanager
def serve_s3() -> Iterator[S3]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3(f"http://{host}:{port}")
    finally:
        server.stop()
