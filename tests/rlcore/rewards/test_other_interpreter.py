"""Functions in another interpreter: their values, every way in which they fail, and what is left running.

The other interpreter is this one. ``tests/flows/test_verifiers.py`` has one with packages of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.config import RewardTerm
from rlcore.errors import CallTimeoutError, ConfigError, RewardError
from rlcore.rewards import interpreter_worker, other_interpreter
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward, import_function
from rlcore.types import Message, Rollout
from tests.waiting import given_time, until, until_ended

ROOT = Path(__file__).parents[3]
MODULE = """
import asyncio, ctypes, os, subprocess, sys, time

CHILDREN = []

class Array:
    def tolist(self): return [0.5, 1]

def solved(completions, solution, scale=1.0):
    print("a line of the function")
    return [scale * (text == right) for text, right in zip(completions, solution)]

def by_prompt(prompts, completions, prompt_id, **columns):
    return [None if text == "skip" else len(columns) + (name == "p") for text, name in zip(completions, prompt_id)]

async def kept_loop(completions, lock=[]):
    lock = lock or lock.append(asyncio.Lock()) or lock
    async with lock[0]: return [1.0 for _ in completions]

def picky(completions):
    return [1.0 / len(text) for text in completions]

def array(completions): return Array()
def endless(completions): return [float("nan"), float("inf")][: len(completions)]
def words(completions): return ["good" for _ in completions]
def few(completions): return [1.0]
def exits(completions): sys.exit("done")
def dies(completions):
    print("the last line", file=sys.stderr, flush=True)
    os._exit(3)
def crashes(completions): ctypes.string_at(0)
def floods(completions):
    for _ in range(4000): print("x" * 10_000)
    os.write(1, b"y" * 1_000_000)
    return [1.0 for _ in completions]
def hangs(completions):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open("pids", "w").write(f"{os.getpid()} {left.pid}")
    while True: pass
def secrets(completions): return [float("SECRET_TOKEN" in os.environ) for _ in completions]
def of_rollouts(rollouts): return [1.0 for _ in rollouts]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "theirs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    other_interpreter._signature.cache_clear()
    return tmp_path


@pytest.fixture
def made() -> Iterator[Callable[..., FunctionReward]]:
    rewards = list[FunctionReward]()

    def make(name: str, **settings: Any) -> FunctionReward:
        term = RewardTerm(kind=f"theirs:{name}", python=sys.executable, **settings)
        rewards.append(import_function(term, "rewards.0"))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


@pytest.fixture
def rollouts(make_rollout: Callable[..., Rollout]) -> list[Rollout]:
    made = [make_rollout(text) for text in ("7", "skip")]
    asked, row = (Message(role="user", content="3 + 4?"),), '{"solution": "7"}'
    return [replace(one, prompt=replace(one.prompt, messages=asked, columns=row, form="text")) for one in made]


def values(reward: FunctionReward, rollouts: list[Rollout]) -> list[float | None]:
    return [score.value for score in reward(rollouts)]


def test_a_function_gets_texts_columns_and_options_by_name(
    made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    solved = made("solved", options={"scale": 0.5})
    assert values(solved, rollouts) == [0.5, 0.0]
    assert solved.name == "solved"
    first, second = made("by_prompt")(rollouts)  # the columns solution and completion_ids are left over
    assert first.value == 3.0
    assert second.skipped == ("by_prompt",)


def test_one_process_answers_all_calls_until_the_reward_is_closed(
    made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    reward = made("kept_loop")
    assert set(psutil.Process().children(recursive=True)) <= before  # the signature was read, nothing waits
    with WeightedReward([WeightedTerm(reward, 1.0)]) as mix:
        assert [score.value for score in (*mix(rollouts), *mix(rollouts))] == [1.0] * 4
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 2  # the guard and the worker
    until_ended(each.pid for each in started)


def test_arrays_are_numbers(made: Callable[..., FunctionReward], rollouts: list[Rollout]) -> None:
    assert values(made("array"), rollouts) == [0.5, 1.0]


def test_surrogates_and_long_texts_arrive(made: Callable[..., FunctionReward], rollouts: list[Rollout]) -> None:
    odd = [replace(rollouts[0], text="\ud83d\n\0"), replace(rollouts[1], text="é" * 3_000_000)]
    assert values(made("picky"), odd) == [pytest.approx(1 / 3), pytest.approx(1 / 3_000_000)]


def test_a_nan_leaves_the_rollout_unscored_and_an_infinite_value_stops_the_run(
    made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    mix = WeightedReward([WeightedTerm(made("endless"), 1.0)])
    (score,) = mix(rollouts[:1])
    assert score.value is None and "not a number" in score.error
    with pytest.raises(RewardError, match="infinite"):
        mix(rollouts)


@pytest.mark.parametrize(
    ("name", "what"), [("words", r"words returned \"'good'\""), ("few", "few returned 1 values for 2 rollouts")]
)
def test_other_results_than_a_number_each_are_refused(
    name: str, what: str, made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    with pytest.raises(RewardError, match=what):
        made(name)(rollouts)


def test_an_exception_names_its_line_and_the_rollout(
    made: Callable[..., FunctionReward], rollouts: list[Rollout], here: Path
) -> None:
    line = MODULE.splitlines().index("    return [1.0 / len(text) for text in completions]") + 1
    with pytest.raises(RewardError) as caught:
        made("picky")([rollouts[0], replace(rollouts[1], text="")])
    assert caught.value.what == "the reward function picky raised ZeroDivisionError: float division by zero"
    assert caught.value.where == f"{here}/theirs.py:{line}, rollout of prompt 'p': ''"


def test_an_exit_of_the_function_is_an_error_of_it(
    made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    with pytest.raises(RewardError, match="exits raised SystemExit: done"):
        made("exits")(rollouts)


@pytest.mark.parametrize(
    ("name", "what"), [("dies", r"ended \(status 3\); it printed last: the last line"), ("crashes", r"status 245")]
)
def test_the_end_of_the_process_is_an_error_with_its_last_lines(
    name: str, what: str, made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    reward = made(name)
    for _ in range(2):  # the second call begins another process
        with pytest.raises(RewardError, match=what):
            reward(rollouts)


def test_a_flood_of_output_neither_blocks_nor_fills_a_disk(
    made: Callable[..., FunctionReward], rollouts: list[Rollout]
) -> None:
    assert values(made("floods"), rollouts) == [1.0, 1.0]


def test_a_call_that_hangs_times_out_and_leaves_no_process(
    made: Callable[..., FunctionReward], rollouts: list[Rollout], here: Path
) -> None:
    def started(seconds: float) -> list[int]:
        with pytest.raises(CallTimeoutError, match=f"hangs timed out after {seconds:g} s"):
            made("hangs", timeout_minutes=seconds / 60.0)(rollouts)
        return numbers(here / "pids")

    pids = given_time(started, bool, seconds=3.0)
    assert pids
    until_ended(pids)


def numbers(path: Path) -> list[int]:
    """Those in a file, none before it is written."""
    return [int(number) for number in path.read_text().split()] if path.exists() else []


def test_a_killed_run_leaves_no_process(here: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rlcore.rewards.other_interpreter import OtherFunction\n"
        "OtherFunction('theirs:hangs', sys.executable, 'rewards.0')(completions=['7'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(ROOT)]) as run:
        pids = until(lambda: numbers(here / "pids"), "the function")
        run.kill()
    until_ended(pids)


def test_the_function_sees_no_secret(
    made: Callable[..., FunctionReward], rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert values(made("secrets"), rollouts) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"python": "no-such-python"}, "python", "'no-such-python': no such program"),
        ({"python": "/bin/false"}, "python", "'/bin/false' does not start"),
        ({"kind": "theirs:none"}, "kind", "has no attribute 'none'"),
        ({"kind": "absent:f"}, "kind", "No module named 'absent'"),
        ({"kind": "broken:f"}, "kind", r"ValueError: not here \(.*broken.py:1\)"),
        ({"kind": "leaves:f"}, "kind", "ended .status 4."),
        ({"kind": "theirs:of_rollouts"}, "kind", "has no parameter completions"),
        ({"options": {"scal": 1}}, "options", "'theirs:solved' has no option 'scal'"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(
    settings: dict[str, Any], where: str, what: str, here: Path
) -> None:
    (here / "broken.py").write_text("raise ValueError('not here')")
    (here / "leaves.py").write_text("import os; os._exit(4)")
    with pytest.raises(ConfigError, match=what) as caught:
        import_function(RewardTerm(**{"kind": "theirs:solved", "python": sys.executable} | settings), "rewards.0")
    assert caught.value.where == f"rewards.0.{where}"


def test_a_module_that_is_never_imported_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(other_interpreter, "_START_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="not imported within 1 s"):
        import_function(RewardTerm(kind="slow:f", python=sys.executable), "rewards.0")


def test_only_custom_functions_have_an_interpreter() -> None:
    with pytest.raises(ConfigError, match="python is only valid for a custom function"):
        RewardTerm(kind="math", python=sys.executable)


def test_the_packages_are_named_with_the_code_of_those_that_are_installed_as_sources(tmp_path: Path) -> None:
    folder, site = tmp_path / "source", tmp_path / "site"
    info = site / "My_Env-1.0.dist-info"
    for each in (folder / "my_env", folder / ".git", folder / ".venv", info):
        each.mkdir(parents=True)
    (info / "METADATA").write_text("Name: My_Env\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
    (folder / "my_env" / "__init__.py").write_text("a = 1")
    (folder / ".venv" / "pyvenv.cfg").write_text("")

    def seen() -> dict[str, str]:
        program = f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv[1:] = ['packages']; import runpy"
        command = [
            sys.executable,
            "-I",
            "-c",
            f"{program}; runpy.run_path({interpreter_worker.__file__!r}, None, '__main__')",
        ]
        return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))

    first = seen()
    assert first["python"] == sys.version.split()[0] and first["psutil"] == psutil.__version__
    assert first["my-env"].startswith("1.0 ")
    (folder / ".git" / "index").write_text("x")
    assert seen() == first
    (folder / "my_env" / "__init__.py").write_text("a = 2")
    changed = seen()
    assert [name for name in first if first[name] != changed[name]] == ["my-env"]
