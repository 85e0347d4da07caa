"""A stand-in for vLLM's server, started in its place: its routes, its rules of sleep, and faults on demand.

The folder STAND_IN has ``log``, a line for each request, and ``trouble``, which says once what happens on which route.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FOLDER = Path(os.environ["STAND_IN"])
ASLEEP: set[str] = set()
SERVED = {"version": ""}


class Routes(BaseHTTPRequestHandler):
    """Answers of vLLM 0.32; where it would crash or wait for ever, status 500."""

    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        route = payload.get("method", self.path)
        version = payload.get("new_version", "")
        with (FOLDER / "log").open("a", encoding="utf-8") as log:
            log.write(f"{route} {version}".strip() + "\n")
        trouble = FOLDER / "trouble"
        if trouble.is_file() and trouble.read_text(encoding="utf-8").endswith(f" {route}"):
            kind = trouble.read_text(encoding="utf-8").partition(" ")[0]
            trouble.unlink()
            if kind == "die":
                os._exit(9)
            self._answer(500, {"error": "planted"})
            return
        answer = self._answer_to(route, payload)
        self._answer(500 if answer is None else 200, answer)

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""

    def _answer_to(self, route: str, payload: dict[str, Any]) -> dict[str, Any] | None:
        path, tags = urlsplit(route).path, set(parse_qs(urlsplit(route).query).get("tags", []))
        if path == "/sleep":
            ASLEEP.update({"weights", "kv_cache"})
            return {} if "--enable-sleep-mode" in sys.argv else None
        if path == "/wake_up":
            ASLEEP.difference_update(tags)
            return {"status": "sleeping" if ASLEEP else "awake"}
        if path == "/inference/v1/generate":
            content = [{"logprob": -1.5}] * 2
            span = {"version": SERVED["version"]}
            choice = {"finish_reason": "length", "token_ids": [3, 4], "logprobs": {"content": content}}
            return None if ASLEEP else {"choices": [choice | {"weight_versions": [span]}]}
        if path == "/update_weight_version":
            SERVED["version"] = payload["new_version"]
        if path in ("receive_weights", "weight_checksums") and "weights" in ASLEEP:
            return None
        return {"success": True, "results": [{"tensors": 20, "sums": {}, "by_columns": False}]}

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Routes).serve_forever()
