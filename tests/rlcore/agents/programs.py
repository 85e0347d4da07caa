"""Agents of tests: small Python programs, and the processes that they leave."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.agents.program import Agents, Ended, Program
from rlcore.agents.sampler import Episode
from rlcore.config import AgentConfig
from rlcore.types import Message, Prompt
from tests.waiting import LONG

Play = Callable[..., Episode]
PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="hi"),), token_ids=(1,), reference="7", task="t")
URL = "http://127.0.0.1:1/v1"
CLIENT = """
import json, os, signal, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from pathlib import Path

TASK, URL, KEY = json.loads(os.environ["RLCORE_TASK"]), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
USER = TASK["messages"]

def post(path, data, key=KEY, timeout=600):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{URL}/{path}", data, headers), timeout=timeout) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]

def call(messages=USER, key=KEY, timeout=600, **more):
    status, body = post("chat/completions", json.dumps({"messages": messages, **more}).encode(), key, timeout)
    print(status, flush=True)
    return body["choices"][0]["message"] if status == 200 else body

def reward(value):
    return post("reward", json.dumps({"reward": value}).encode())

def say(*texts):
    return [{"role": "user", "content": text} for text in texts]
"""
"""Client of tests that needs no package; programs of agents follow it."""
DAEMON = """
import os, sys, time
if os.fork():
    os.wait()  # the daemon's parent; it is an orphan now
    print("daemon", open("pid").read(), flush=True)
    {then}
else:
    os.setsid()
    if os.fork():
        open("pid", "w").write("")
        while not open("pid").read():
            time.sleep(0.001)
        os._exit(0)
    open("pid", "w").write(str(os.getpid()))
    os.closerange(0, 3)
    os.environ.clear()
    time.sleep(600)
"""


def marked(mark: str) -> list[int]:
    found = set[int]()
    for path in (path for name in ("cmdline", "environ") for path in Path("/proc").glob(f"[0-9]*/{name}")):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return sorted(found)


def agent(code: str, **settings: Any) -> AgentConfig:
    """A Python program with ``CLIENT`` as an agent, which has the rights of the test unless a setting says more."""
    settings.setdefault("sandbox", False)
    return AgentConfig(command=("python", "-c", CLIENT + textwrap.dedent(code)), **settings)


def program(room: Path, code: str) -> Program:
    return Program(config=AgentConfig(command=("python", "-c", textwrap.dedent(code)), sandbox=False), room=room)


def run(
    made: Program,
    prompt: Prompt = PROMPT,
    *,
    key: str = "secret",
    url: str = URL,
    seconds: float = LONG,
    agents: Agents | None = None,
) -> Ended:
    with made.folder(prompt) as folder:
        environment = made.environment(key, folder, url)
        return (agents or Agents()).run(made.command(folder), environment, folder, seconds=seconds)


def play(room: Path, code: str, **settings: Any) -> Ended:
    return run(program(room, code), **settings)
