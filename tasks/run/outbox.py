"""Outbox: messages for the team, a file each in the state directory until they are delivered, in order and once.

Any process of the state directory puts messages; :func:`deliver`, beside the worker, sends them. While a channel does
not answer, its messages wait. Only a kill between a channel's answer and its note sends one again, with its ``id``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_json

_KEPT = timedelta(days=30)  # after which a message is forgotten, delivered or not
_SECONDS = 10.0  # to wait for a channel's answer
_MAX_TEXT = 4000  # characters
_WEB, _MAIL = ("http://", "https://"), ("mailto://", "mailtos://")
_DONE = "done"  # channels that a waiting message was sent to

Send = Callable[[str, Mapping[str, str]], None]


def put(home: Home, *, key: str, event: str, about: str, text: str, run: str = "", url: str = "", time: str) -> None:
    """Put a message into the outbox; with a known ``key`` and ISO ``time`` it is there, or was delivered, already."""
    moment = datetime.fromisoformat(time).astimezone(UTC)
    name = f"{moment:%Y%m%dT%H%M%S.%f}-{key}.json"
    waiting, sent = (folder / name for folder in _folders(home))
    if waiting.exists() or sent.exists() or datetime.now(UTC) - moment > _KEPT:
        return
    waiting.parent.mkdir(exist_ok=True)
    message = {"id": key, "event": event, "text": f"{about}: {text}"[:_MAX_TEXT], "run": run, "url": url}
    write_json(message, waiting)


def deliver(home: Home) -> Iterator[str]:
    """Send what waits to each channel that has an address; yield a line for each channel that does not take it.

    Without an address messages are not kept for later.
    """
    channels = {name: partial(_CHANNELS[name].send, address) for name, address in addresses().items()}
    waiting, sent = _folders(home)
    with file_lock(home.root / "outbox.lock", wait=False) as alone:
        if not alone or not waiting.is_dir():
            return
        sent.mkdir(exist_ok=True)
        for path in sorted(waiting.glob("*.json")):
            message, done = read_json(path), dict.fromkeys(read_json(path).get(_DONE, ()))
            for name in [each for each in channels if each not in done]:
                try:
                    channels[name]({key: value for key, value in message.items() if key != _DONE})
                except Exception as error:  # noqa: BLE001 - whatever a channel has, others and later passes go on
                    del channels[name]  # later messages of this channel wait too
                    is_own = type(error) is ConnectionError  # the text of others may have the address
                    text = str(error) if is_own else type(error).__name__
                    yield f"{name} did not take a message, which waits: {text}"
                else:
                    done[name] = None
                    write_json(message | {_DONE: [*done]}, path)
            if addresses().keys() <= done.keys():
                path.replace(sent / path.name)
        _forget(waiting, sent)


def addresses() -> dict[str, str]:
    """Return the addresses of the environment, by channel.

    Raises:
        ConfigError: one is of another kind than its channel takes.
    """
    found = {name: os.environ.get(each.variable, "") for name, each in _CHANNELS.items()}
    for name, address in found.items():
        schemes = _CHANNELS[name].schemes
        if address and not address.startswith(schemes):
            what = f"the address does not begin with {' or '.join(schemes)}"
            raise ConfigError(what, where=_CHANNELS[name].variable, fix="correct it, or unset it")
    return {name: address for name, address in found.items() if address}


def _folders(home: Home) -> tuple[Path, Path]:
    return home.root / "outbox", home.root / "outbox" / "sent"


def _forget(*folders: Path) -> None:
    for path in (path for folder in folders for path in folder.glob("*.json")):
        with suppress(ValueError):
            if datetime.now(UTC) - datetime.strptime(path.name[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC) > _KEPT:
                path.unlink()


def _post(address: str, content: Mapping[str, Any]) -> None:
    import httpx

    answer = httpx.post(address, json=dict(content), timeout=_SECONDS)
    if not answer.is_success:
        raise ConnectionError(f"it answers {answer.status_code}")


def _slack(address: str, message: Mapping[str, str]) -> None:
    _post(address, {"text": f"{message['text']} {message['url']}".rstrip()})


def _mail(address: str, message: Mapping[str, str]) -> None:
    import apprise

    mail = apprise.Apprise()
    title, body = f"rlcore: {message['event']}", f"{message['text']}\n\n{message['run']} {message['url']}"
    if not (mail.add(address) and mail.notify(body=body, title=title)):
        raise ConnectionError("the mail server did not take it")


@dataclass(frozen=True, kw_only=True)
class _Channel:
    variable: str
    schemes: tuple[str, ...]
    send: Send


_CHANNELS: Mapping[str, _Channel] = {
    "webhook": _Channel(variable="RLCORE_WEBHOOK_URL", schemes=_WEB, send=_post),
    "slack": _Channel(variable="RLCORE_SLACK_URL", schemes=_WEB, send=_slack),
    "mail": _Channel(variable="RLCORE_MAIL_URL", schemes=_MAIL, send=_mail),
}
