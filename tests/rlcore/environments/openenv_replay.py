"""A server that says what OpenEnv's own server has said: ``openenv_replay.py action|tools PORT``.

The answers are in ``openenv_exchange.json``, by what was asked. A test holds the file against OpenEnv's server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

EXCHANGE: dict[str, Any] = json.loads(Path(__file__).with_name("openenv_exchange.json").read_text(encoding="utf-8"))


def replay(kind: str) -> FastAPI:
    """The server of a kind of environment."""
    app = FastAPI()
    answers = {json.dumps(asked, sort_keys=True): said for asked, said in EXCHANGE[kind]["said"]}

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        found: dict[str, Any] = EXCHANGE[kind]["schema"]
        return found

    @app.websocket("/ws")
    async def session(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                asked = json.loads(await socket.receive_text())
                await socket.send_json(answers[json.dumps(asked, sort_keys=True)])
        except WebSocketDisconnect:
            pass

    return app


if __name__ == "__main__":
    uvicorn.run(replay(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
