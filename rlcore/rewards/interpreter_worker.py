"""Worker of a function that needs another interpreter's packages; only the standard library of Python 3.8 is used.

    python -I interpreter_worker.py call MODULE FUNCTION     standard output is a socket: requests in, replies out
    python -I interpreter_worker.py packages                 prints the identity of what the interpreter can import

Messages are JSON. The first reply has the function's parameters. What the function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_MAX_ERROR = 500


def main(arguments: list[str]) -> None:
    """Serve a function until the socket closes, or print the packages."""
    if arguments[0] == "packages":
        sys.stdout.write(json.dumps(packages()))
        return
    channel = Connection(os.dup(1))
    os.dup2(2, 1)
    sys.path.insert(0, str(Path.cwd()))
    _, module, name = arguments
    try:
        function = getattr(importlib.import_module(module), name)
        _send(channel, {"parameters": _parameters(function)})
    except BaseException as error:  # noqa: BLE001 - a module may exit
        _send(channel, {"error": _text(error), "where": _place(error, None)})
        return
    loop = asyncio.new_event_loop()  # one for all calls: clients that a module keeps belong to a loop
    asyncio.set_event_loop(loop)
    while True:
        try:
            request = json.loads(channel.recv_bytes().decode())
        except EOFError:
            return
        _send(channel, _reply(function, request, loop))


def packages() -> dict[str, str]:
    """Return versions of Python and of the installed packages, and digests of those that are installed as sources."""
    found = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for each in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
        folder = _source_folder(each)
        found[name] = each.version + (" " + _digest(folder) if folder else "")
    return found


def _source_folder(found: metadata.Distribution) -> Path | None:
    """Return the folder of an editable installation, whose version stays the same when its code changes."""
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return Path(unquote(urlsplit(origin["url"]).path)) if is_editable else None


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for base, folders, files in os.walk(str(folder)):
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".")
            and each != "__pycache__"
            and not each.endswith(".egg-info")
            and not Path(base, each, "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            path = Path(base, name)
            total.update(f"{path.relative_to(folder)}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _parameters(function: Callable[..., Any]) -> list[list[Any]]:
    found = inspect.signature(function).parameters.values()
    return [[each.name, each.kind.name, each.default is not each.empty] for each in found]


def _reply(function: Callable[..., Any], arguments: dict[str, Any], loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    try:
        values = function(**arguments)
        if inspect.isawaitable(values):
            values = loop.run_until_complete(values)
        return {"values": _plain(values)}
    except BaseException as error:  # noqa: BLE001 - reported, with its line; a function may exit
        return {"error": _text(error), "where": _place(error, function)}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float)) else repr(value)[:_MAX_ERROR]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR]


def _place(error: BaseException, function: Callable[..., Any] | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = [each for each in frames if each.filename == own][-1:] + frames[-1:]
    return ", ".join(dict.fromkeys(f"{each.filename}:{each.lineno}" for each in lines))


def _send(channel: Connection, message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
