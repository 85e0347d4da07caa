from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
from prefect import flow

from rlcore.errors import ServiceError, TrainingError
from rlcore.tasks.run.prefect_bridge import (
    call_flow,
    current_flow_run,
    report_markdown,
    report_progress,
    report_table,
    stage_logger,
    task,
)
from rlcore.tasks.store.settings import Home


@task(name="iteration", run_name="iteration {number}")
def iterate(done: list[int], number: int, rate: float = 0.5) -> float:
    done.append(number)
    return rate * number


@task(name="burn")
def burn() -> None:
    raise TrainingError("the machine burns", where="here")


@flow(name="toy-inline", persist_result=False)
def toy_flow(fail: bool = False) -> dict[str, Any]:
    done: list[int] = []
    total = iterate(done, 1) + iterate(done, number=2)
    report_progress("iterations", 2, 2)
    report_table("answers", [{"problem": "3 + 4"}])
    report_markdown("summary", "# Done")
    if fail:
        burn()
    return {"done": done, "total": total, "run": current_flow_run()}


def test_inline_a_task_is_its_function_and_a_flow_too(home: Home) -> None:
    assert call_flow(toy_flow) == {"done": [1, 2], "total": 1.5, "run": None}


def test_a_task_keeps_its_name_and_documentation() -> None:
    assert (iterate.__name__, iterate.__wrapped__([], 4)) == ("iterate", 2.0)  # type: ignore[attr-defined]


def test_inline_an_error_is_the_error_itself(home: Home) -> None:
    with pytest.raises(TrainingError, match="the machine burns"):
        call_flow(toy_flow, fail=True)


def test_a_sentence_from_another_thread_is_said_where_the_stage_is() -> None:
    """Prefect puts a line on the page of the flow run that the thread's context has."""
    run: ContextVar[str] = ContextVar("run", default="")
    said = list[tuple[str, str]]()

    class Page(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((run.get(), record.getMessage()))

    logger = logging.Logger("pages")
    logger.addHandler(Page())
    run.set("mine")
    say = stage_logger(logger, "grpo")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(say, map(str, range(20))))
    assert sorted(said) == sorted(("mine", f"grpo: {number}") for number in range(20))


def test_tasks_run_without_importing_prefect(home: Home) -> None:
    code = """
import sys
from rlcore.tasks.run.prefect_bridge import report_progress, report_table, stage_logger, task
@task(name="t", run_name="t {x}")
def t(x): return x + 1
report_progress("p", 1, 2); report_table("t", [])
assert t(1) == 2
print("prefect" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", "nonsense"])
def test_a_server_that_does_not_answer_is_one_error_with_its_address(
    url: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setenv("RLCORE_ENGINE", "prefect")
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ServiceError) as caught:
        call_flow(toy_flow)
    assert caught.value.where == f"PREFECT_API_URL={url}"
    assert "make services" in caught.value.fix
