"""A small model hub: the few requests by which huggingface_hub makes a repository and uploads a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_of_a_test"


@dataclass
class Hub:
    """Repositories by name: whether they are private, and their files after the last commit. ``url``: its address."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: int = 0
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _mode(path: str) -> dict[str, Any]:
    return {"uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        if path != "/api/validate-yaml" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
            return
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            header = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            self._answer(
                200, {"errors": [], "warnings": []} if header["license"] else {"errors": [{"message": "license"}]}
            )
        elif path.endswith("/preupload/main"):
            self._answer(200, {"files": [each | _mode(each["path"]) for each in json.loads(body)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body)["objects"])
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        else:
            self._answer(404, {"error": f"no {path}"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.large[digest] = content
        self._answer(200, {})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.private:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
            return
        self.hub.private[name] = wanted.get("private", wanted.get("visibility") == "private")
        self.hub.files[name] = {}
        self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        target = f"{self.hub.url}/lfs"
        found = [each | {"actions": {"upload": {"href": f"{target}/{each['oid']}", "header": {}}}} for each in objects]
        self._answer(200, {"transfer": "basic", "objects": found})

    def _commit(self, name: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.files[name][value["path"]] = self.hub.large[value["oid"]]
        self.hub.commits += 1
        address = f"{self.hub.url}/{name}/commit/{'a' * 40}"
        self._answer(200, {"success": True, "commitUrl": address, "commitOid": "a" * 40})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
