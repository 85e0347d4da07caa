"""The micro agentic preset with a calculator behind OpenEnv's own server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.conftest import ROOT, environment
from tests.flows.test_agentic import SETTINGS
from tests.flows.test_mcp import check_calls
from tests.flows.warm import run_warm
from tests.rlcore.environments.test_openenv import serving


def arguments(url: str) -> list[str]:
    own = (
        "stages.grpo.sampling.episodes.tools=[]",
        "stages.grpo.sampling.episodes.environment=rlcore.environments.openenv:OpenEnv",
        f"stages.grpo.sampling.episodes.options={{url='{url}'}}",
        "stages.grpo.sampling.episodes.timeout_seconds=600.0",
        "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",
    )
    return ["run", "--preset", "agentic", *(part for each in (*SETTINGS, *own) for part in ("--set", each))]


def test_a_server_that_does_not_answer_is_named_before_anything_runs(tmp_path: Path) -> None:
    done = run_warm(arguments("http://127.0.0.1:9"), environment(tmp_path / "home"), ROOT)
    assert done.returncode == 2, done.stderr
    said = "stages.grpo.sampling.episodes.environment: the OpenEnv server does not answer at 'http://127.0.0.1:9'"
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "home" / "artifacts" / "checkpoint").exists()


@pytest.mark.slow
def test_episodes_call_the_server_and_are_told_what_it_says(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving("tools", real=True) as url:
        done = run_warm(arguments(url), environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    check_calls(home)
