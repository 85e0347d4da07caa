"""Events: new snapshots, stopped runs, drift, and each act on a champion; and the outbox of messages for the team.

A new snapshot goes to the Prefect server, where ``infra/automations.yaml`` starts a retraining. The others reach the
team through the outbox, as do failed, crashed and missed runs (:mod:`rlcore.tasks.run.reconciliation`). Without a
server an event is a line in the log, and an act is the line of its command.

The outbox has a file for each message in the state directory until it is delivered, in order and once. Any process of
the state directory puts messages; :func:`deliver`, beside the worker, sends them. Only a kill between a channel's
answer and its note sends one again, with its ``id``.
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
from uuid import uuid4

from rlcore.errors import ConfigError
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.run.prefect_bridge import current_flow_run, emit_event
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.audit_log import AuditEntry
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.store.storage import read_json, write_json

SNAPSHOT = "rlcore.snapshot.made"
STOPPED, DRIFT = "rlcore.health.stopped", "rlcore.drift"
AWAITS, PROMOTED = "rlcore.promotion.awaits", "rlcore.promotion.promoted"
REFUSED, ROLLED_BACK = "rlcore.promotion.refused", "rlcore.promotion.rolled_back"
_KEPT = timedelta(days=30)  # after which a message is forgotten, delivered or not
_SECONDS = 10.0  # to wait for a channel's answer
_MAX_TEXT = 4000  # characters
_WEB, _MAIL = ("http://", "https://"), ("mailto://", "mailtos://")
_DONE = "done"  # channels that a waiting message was sent to

Send = Callable[[str, Mapping[str, str]], None]


def emit_snapshot(config: RunConfig, stage: str, ref: ArtifactRef) -> None:
    """Emit an event for a dataset snapshot that is new to this state directory."""
    labels = {
        "rlcore.contract": ref.contract.partition("/")[0],
        "rlcore.retrain": "yes" if config.retrain else "no",
    }  # true if the preset can be retrained
    emit_event(
        SNAPSHOT,
        {"prefect.resource.id": f"rlcore.dataset.{ref.sha256}", **_named(config.name, stage), **labels},
        f"{ref.rows:,} rows for training and held out ({ref.contract})",
    )


def emit_findings(preset: str, stage: str, folder: Path) -> None:
    """Emit the events of a finished artifact: a stop by a health rule, columns whose drift is a warning."""
    health, drift = folder / "health.json", folder / "drift.json"
    stopped = read_json(health)["stopped"] if health.is_file() else None
    if stopped is not None:
        _emit(STOPPED, preset, stage, stopped["text"])
    found = read_json(drift) if drift.is_file() else []
    moved = [f"{each['name']}: {one['column']}" for each in found for one in each["columns"] if one["level"] != "calm"]
    if moved:
        _emit(DRIFT, preset, stage, f"accepted, but these columns have moved: {', '.join(moved)}")


def tell_act(home: Home, event: str, entry: AuditEntry, text: str) -> None:
    """Tell the team of an act on a registered version, once however often its command is repeated."""
    _tell(home, event, entry.subject, text, key=f"{entry.number}-{entry.digest[:12]}", time=entry.time)


def _emit(event: str, preset: str, stage: str, text: str) -> None:
    labels = {"prefect.resource.id": f"rlcore.stage.{preset}.{stage}", **_named(preset, stage)}
    emit_event(event, labels, text)
    time = datetime.now(UTC).isoformat()
    _tell(find_home(), event, labels["prefect.resource.name"], text, key=uuid4().hex[:12], time=time)


def _tell(home: Home, event: str, about: str, text: str, *, key: str, time: str) -> None:
    if os.environ.get("PREFECT_API_URL"):
        run = current_flow_run()
        name, url = (run.name, run.url) if run else ("", "")
        put(home, key=key, event=event, about=about, text=text, run=name, url=url, time=time)


def _named(preset: str, stage: str) -> dict[str, str]:
    return {"prefect.resource.name": f"{stage} of {preset}", "rlcore.preset": preset, "rlcore.stage": stage}


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

    Messages without an address are dropped.
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
