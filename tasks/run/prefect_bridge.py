"""Bridge to Prefect: tasks and flows run under Prefect, or inline as plain functions.

A task is a Prefect task exactly if it is called within a Prefect flow run. Elsewhere (inline engine, test, notebook) it
is the function itself. The inline engine thus imports no Prefect.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from uuid import UUID

from rlcore.errors import RlcoreError, shown
from rlcore.progress import Progress, show
from rlcore.tasks.run.interrupts import interruptible, is_interrupted, start_prefect_server
from rlcore.tasks.run.leases import end_orphaned_servers, mark_launcher
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import engine_name, find_home, leave_errors_to_command

if TYPE_CHECKING:
    from prefect import Flow, Task
    from prefect.client.schemas.objects import FlowRun as PrefectRun

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

_PROGRESS_SECONDS = 5.0  # an update costs 15 to 300 ms, too much for each turn of a fast loop


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """Running Prefect flow run. ``attempt`` counts from 1; ``url`` is empty without a user interface."""

    flow_run_id: str
    name: str
    attempt: int
    url: str


def call_flow(flow: Flow[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a flow with the engine that ``RLCORE_ENGINE`` names; inline calls its function.

    Raises:
        Interruption: Ctrl-C or SIGTERM.
    """
    with interruptible():
        if engine_name() == "inline":
            return flow.fn(*args, **kwargs)
        for line in end_orphaned_servers(find_home()):  # before a second server opens the same database
            logger.warning("%s", line)
        mark_launcher()
        start_prefect_server()
        leave_errors_to_command()
        return flow.with_options(on_crashed=[_cancel_if_interrupted])(*args, **kwargs)


def _cancel_if_interrupted(flow: object, flow_run: PrefectRun, state: object) -> None:
    """Show an interrupted flow run as cancelled: to Prefect an interruption is a crash."""
    if not is_interrupted():
        return
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    with _as_far_as_the_server_answers(), get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Cancelled(message="Interrupted; the same command resumes."), force=True)


def task(*, name: str, run_name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a task. ``run_name`` is a template over its arguments: ``"iteration {iteration}"``.

    Prefect does not store, hash, copy or search arguments and results, so they may be live objects or large batches.
    There are no retries, because a failed attempt may have changed its arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _in_flow_run():
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            label = run_name.format(**given.arguments) or name
            work = _Call(functools.partial(function, *args, **kwargs), label)
            return cast(R, _prefect_task(name)(work, wait_for=_references(given.arguments.values())))

        return call

    return decorate


def run_as_task(name: str, number: int, work: Callable[[], R]) -> R:
    """Do ``work`` as the task ``<name> <number>`` of a flow run; outside of one, call it directly."""
    if not _in_flow_run():
        return work()
    return cast(R, _prefect_task(name)(_Call(work, f"{name} {number}")))


def current_flow_run() -> FlowRun | None:
    """Return the current flow run, or None under the inline engine."""
    if not _in_flow_run():
        return None
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None:
        return None
    return FlowRun(flow_run_id=str(run.id), name=run.name, attempt=run.run_count, url=run_page(run.id))


def run_page(run: UUID) -> str:
    """Return the address of a flow run's page; empty without a user interface."""
    from prefect.settings import get_current_settings

    base = get_current_settings().ui_url or ""
    return f"{base}/runs/flow-run/{run}" if base else ""


def report_progress(label: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
    """Show a loop's progress in the live view, and on the flow run's page every five seconds and at the end."""
    show(Progress(scope="loop", label=label, done=done, total=total, metrics=metrics or {}))
    if not _in_flow_run():
        return
    from prefect import artifacts

    percent = 100.0 * done / max(total, 1)
    owner = (cast(FlowRun, current_flow_run()).flow_run_id, label)
    known = _shown.get(owner)
    if known is None or done >= total or time.monotonic() - known[1] >= _PROGRESS_SECONDS:
        with _as_far_as_the_server_answers():
            shown_as = known[0] if known else None
            if shown_as is None:
                shown_as = cast(UUID, artifacts.create_progress_artifact(percent, key=_key(label), description=label))
            else:
                artifacts.update_progress_artifact(shown_as, percent)
            _shown[owner] = (shown_as, time.monotonic())
    if done >= total:
        _shown.pop(owner, None)


def stage_logger(logger: logging.Logger, stage: str) -> Callable[[str], None]:
    """Return a function that logs lines of a stage from any thread.

    Only the calling thread knows the flow run, whose page shows them too.
    """
    here = copy_context()

    def say(text: str) -> None:
        here.copy().run(logger.info, "%s: %s", stage, text)  # a copy: two threads cannot share a context

    return say


def report_markdown(label: str, text: str) -> None:
    """Show a text on the flow run's page."""
    _report("markdown", label, text, description=label)


def report_link(label: str, url: str) -> None:
    """Show a link on the flow run's page."""
    _report("link", label, url, link_text=label)


def _report(kind: str, label: str, content: str, **more: str) -> None:
    if _in_flow_run():
        from prefect import artifacts

        with _as_far_as_the_server_answers():
            getattr(artifacts, f"create_{kind}_artifact")(content, key=_key(label), **more)


def emit_event(event: str, resource: Mapping[str, str], text: str) -> None:
    """Emit an event for automations; ``resource`` has labels, ``prefect.resource.id`` among them.

    Prefect adds flow run, flow, deployment and tags. Without a flow run it is a line in the log.
    """
    run = current_flow_run()
    if run is None:
        logger.info("%s: %s %s", resource["prefect.resource.name"], event, shown(text))
        return
    from prefect import events

    events.emit_event(event=event, resource=dict(resource), payload={"text": text, "run": run.name, "url": run.url})


@contextmanager
def _as_far_as_the_server_answers() -> Iterator[None]:
    """Ignore a Prefect server that is down: a missing page entry must not end hours of work."""
    from httpx import HTTPError

    try:
        yield
    except HTTPError as error:
        logger.warning("the Prefect server does not answer (%s): the run's page lacks this entry", error)


_shown: dict[tuple[str, str], tuple[UUID, float]] = {}  # (flow run, label) to (artifact, time of its last update)


class _Call:
    """Call whose arguments Prefect does not search for futures in dataclasses and lists."""

    __slots__ = ("label", "work")

    def __init__(self, work: Callable[[], Any], label: str) -> None:
        self.work, self.label = work, label

    def __str__(self) -> str:
        return self.label


def _run(call: _Call) -> Any:
    return call.work()


@functools.cache
def _prefect_task(name: str) -> Task[..., Any]:
    from prefect import task as prefect_task
    from prefect.cache_policies import NO_CACHE

    made = prefect_task(name=name, task_run_name="{call}", cache_policy=NO_CACHE, persist_result=False)(_run)
    return cast("Task[..., Any]", made)


def _references(values: Iterable[Any]) -> list[ArtifactRef]:
    """Return the artifact references among arguments: Prefect draws an arrow from the task that returned each."""
    found: list[ArtifactRef] = []
    for value in values:
        if isinstance(value, ArtifactRef):
            found.append(value)
        elif isinstance(value, Mapping):
            found += [item for item in value.values() if isinstance(item, ArtifactRef)]
    return found


def _in_flow_run() -> bool:
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def _key(label: str) -> str:
    key = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    if not key:
        raise RlcoreError(f"{label!r} has no letter or digit to name an artifact with")
    return key
