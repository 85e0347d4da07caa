"""Functions of a user: with TRL's parameters, and in another interpreter, with every way in which they fail."""

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
from rlcore.distributed.serialization import decode, encode
from rlcore.errors import CallTimeoutError, ConfigError, RewardError
from rlcore.rewards import interpreter_worker, other_interpreter
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward, import_function
from rlcore.types import Message, Rollout, ToolCall
from tests.rlcore.rewards.conftest import make_rollout
from tests.waiting import given_time, until, until_ended

MODULE = """
SEEN = []

def solved(completions, solution, **columns):
    SEEN.append((completions, solution, columns))
    return [float(text == right) for text, right in zip(completions, solution)]

async def level(prompts, completions, difficulty=None, scale=1.0):
    return [None if each is None else scale * each for each in difficulty]

def graded(completions, completion_ids, reference):
    texts = [turns[-1]["content"] for turns in completions]
    return [len(ids) + (text == right) for text, ids, right in zip(texts, completion_ids, reference)]

def of_trainer(completions, trainer_state): ...
def by_place(completions, *rest): ...
def with_log(completions, log_extra=None, **columns): return [0.0 for _ in completions]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "trl_style.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "trl_style", raising=False)
    return __import__("trl_style")


def reward(name: str, **options: Any) -> FunctionReward:
    return import_function(RewardTerm(kind=f"trl_style:{name}", options=options), "rewards.0")


@pytest.fixture
def rollouts() -> list[Rollout]:
    made = [make_rollout(text, "7") for text in ("7", "8")]
    rows: tuple[dict[str, Any], ...] = ({"solution": "7", "difficulty": 2}, {"solution": "7", "tag": "x"})
    asked = (Message(role="system", content="Be kind."), Message(role="user", content="3 + 4?"))
    return [
        replace(one, prompt=replace(one.prompt, columns=json.dumps(row), form="text", messages=asked))
        for one, row in zip(made, rows, strict=True)
    ]


def test_texts_and_columns_are_passed_by_name(rollouts: list[Rollout], module: Any) -> None:
    assert [score.value for score in reward("solved")(rollouts)] == [1.0, 0.0]
    assert module.SEEN == [
        (
            ["7", "8"],
            ["7", "7"],
            {"prompts": ["3 + 4?"] * 2, "completion_ids": [[3], [3]], "difficulty": [2, None], "tag": [None, "x"]},
        )
    ]


def test_conversations_are_passed_as_such_with_their_tool_calls(rollouts: list[Rollout], module: Any) -> None:
    call = ToolCall(text="calc", tool="calculator", output="7", is_error=False)
    talk = [replace(one, prompt=replace(one.prompt, form="messages"), tool_calls=(call,)) for one in rollouts]
    reward("solved")(talk)
    ((completions, _, columns),) = module.SEEN
    assert columns["prompts"][0] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "3 + 4?"}]
    assert [turn["role"] for turn in completions[1]] == ["assistant", "tool", "assistant"]
    assert completions[1][-1] == {"role": "assistant", "content": "8"}
    assert [score.value for score in reward("graded")(talk)] == [2.0, 1.0]


def test_none_means_that_the_reward_does_not_apply(rollouts: list[Rollout]) -> None:
    first, second = reward("level", scale=0.5)(rollouts)
    assert (first.value, second.skipped) == (1.0, ("level",))
    both = WeightedReward([WeightedTerm(reward("level"), 1.0, gate=0.5), WeightedTerm(reward("solved"), 2.0)])
    scores = both(rollouts)
    assert [score.value for score in scores] == [4.0, 0.0]
    assert (scores[1].terms, scores[1].skipped) == ({"solved": 0.0}, ("level",))


def test_an_option_of_the_preset_is_not_replaced_by_a_column_of_its_name(rollouts: list[Rollout]) -> None:
    rows = [replace(one, prompt=replace(one.prompt, columns='{"difficulty": 2, "scale": 9}')) for one in rollouts]
    assert [score.value for score in reward("level", scale=0.5)(rows)] == [1.0, 1.0]


def test_an_option_that_the_function_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="'trl_style:level' has no option 'scal'") as refused:
        reward("level", scal=0.5)
    assert refused.value.where == "rewards.0.options"
    assert refused.value.fix == "its signature is level(prompts, completions, difficulty=None, scale=1.0)"


def test_a_column_that_the_rows_lack_is_named(rollouts: list[Rollout]) -> None:
    bare = [replace(one, prompt=replace(one.prompt, columns='{"answer": 7}')) for one in rollouts]
    with pytest.raises(RewardError, match="no column 'solution', which solved needs; their columns are answer"):
        reward("solved")(bare)


@pytest.mark.parametrize(
    ("name", "what"),
    [("of_trainer", "needs 'trainer_state' of TRL's trainer"), ("by_place", "takes 'rest' by position")],
)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        reward(name)


def test_what_the_trainer_adds_keeps_its_default(rollouts: list[Rollout]) -> None:
    assert [score.value for score in reward("with_log")(rollouts)] == [0.0, 0.0]


def test_a_row_is_the_same_in_another_process_and_its_changes_stay_with_the_reader(rollouts: list[Rollout]) -> None:
    (first, _) = decode(encode(rollouts))
    assert first == rollouts[0]
    assert first.row == {"solution": "7", "difficulty": 2}
    first.row["difficulty"] = 5
    assert first.row["difficulty"] == 2


ROOT = Path(__file__).parents[3]
BARE = str(Path(sys.executable).resolve())  # without the packages of this environment, so it starts sooner

THEIRS = """
import asyncio, ctypes, os, subprocess, sys, time

class Array:
    def tolist(self): return [0.5, 1]

def solved(completions, solution, scale=1.0):
    print("a line of the function")
    return [scale * (text == right) for text, right in zip(completions, solution)]

def by_prompt(prompts, completions, prompt_id, **columns):
    return [None if text == "skip" else len(columns) + (name == "p") for text, name in zip(completions, prompt_id)]

async def runs(completions, lock=[]):  # the first completion
    lock = lock or lock.append(asyncio.Lock()) or lock
    async with lock[0]: return eval(completions[0])

def picky(completions):
    return [1.0 / len(text) for text in completions]

def dies():
    print("the last line", file=sys.stderr, flush=True)
    os._exit(3)
def floods():
    for _ in range(4000): print("x" * 10_000)
    os.write(1, b"y" * 1_000_000)
    return [1.0, 1.0]
def hangs(completions):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open("pids", "w").write(f"{os.getpid()} {left.pid}")
    while True: pass
def of_rollouts(rollouts): return [1.0 for _ in rollouts]
"""

Make = Callable[..., FunctionReward]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the user's modules; what a process of one test wrote there is not read by another."""
    folder = tmp_path_factory.mktemp("user")
    files = {"theirs": THEIRS, "broken": "raise ValueError('not here')", "leaves": "import os; os._exit(4)"}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("SECRET_TOKEN", "x")
        yield folder


@pytest.fixture(scope="module")
def made(here: Path) -> Iterator[Make]:
    rewards = list[FunctionReward]()

    def make(name: str, **settings: Any) -> FunctionReward:
        term = RewardTerm(kind=f"theirs:{name}", python=BARE, **settings)
        rewards.append(import_function(term, "rewards.0"))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


@pytest.fixture(scope="module")
def runs(made: Make) -> FunctionReward:
    """A reward that runs the first completion; its process serves every row that leaves it alive."""
    return made("runs")


def asked(*texts: str) -> list[Rollout]:
    """Rollouts of texts, whose row has a column ``solution``."""
    messages, row = (Message(role="user", content="3 + 4?"),), '{"solution": "7"}'
    made = [make_rollout(text) for text in texts]
    return [replace(one, prompt=replace(one.prompt, messages=messages, columns=row, form="text")) for one in made]


TWO = asked("7", "skip")


def values(reward: FunctionReward, rollouts: list[Rollout]) -> list[float | None]:
    return [score.value for score in reward(rollouts)]


def test_a_function_gets_texts_columns_and_options_by_name(made: Make) -> None:
    solved = made("solved", options={"scale": 0.5})
    assert values(solved, TWO) == [0.5, 0.0]
    assert solved.name == "solved"
    first, second = made("by_prompt")(TWO)  # the columns solution and completion_ids are left over
    assert first.value == 3.0
    assert second.skipped == ("by_prompt",)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_one_process_answers_all_calls_until_the_reward_is_closed(made: Make) -> None:
    before = children()
    reward = made("runs")
    until(lambda: children() <= before, "the end of the processes that read the signature")
    with WeightedReward([WeightedTerm(reward, 1.0)]) as mix:
        assert [score.value for _ in range(2) for score in mix(asked("[1.0]"))] == [1.0] * 2
        started = children() - before
        assert len(started) == 2  # the guard and the worker
    until_ended(each.pid for each in started)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("Array()", [0.5, 1.0]),
        ("[len(text) for text in completions]", [35.0, 4.0]),
        ("floods()", [1.0, 1.0]),  # neither blocks nor fills a disk
        ("[float('SECRET_TOKEN' in os.environ)] * 2", [0.0, 0.0]),
    ],
)
def test_values_of_a_process_are_those_of_its_function(runs: FunctionReward, code: str, expected: list[float]) -> None:
    assert values(runs, asked(code, "skip")) == expected


def test_surrogates_and_long_texts_arrive(runs: FunctionReward) -> None:
    texts = ["[len(text) for text in completions]", "\ud83d\n\0", "é" * 3_000_000]
    assert values(runs, asked(*texts))[1:] == [3.0, 3_000_000.0]


def test_a_nan_leaves_the_rollout_unscored_and_an_infinite_value_stops_the_run(runs: FunctionReward) -> None:
    mix = WeightedReward([WeightedTerm(runs, 1.0)])
    (score,) = mix(asked("[float('nan')]"))
    assert score.value is None and "not a number" in score.error
    with pytest.raises(RewardError, match="infinite"):
        mix(asked("[float('inf')]"))


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("['good', 'good']", r"runs returned \"'good'\""),
        ("[1.0]", "runs returned 1 values for 2 rollouts"),
        ("sys.exit('done')", "runs raised SystemExit: done"),
        ("dies()", r"(?s)ended \(status 3\); it printed last: .*the last line"),
        ("ctypes.string_at(0)", "status 245"),
    ],
)
def test_other_results_than_a_number_each_and_the_end_of_the_process_are_errors(
    runs: FunctionReward, code: str, what: str
) -> None:
    with pytest.raises(RewardError, match=what):
        runs(asked(code, "skip"))


def test_an_exception_names_its_line_and_the_rollout(made: Make, here: Path) -> None:
    line = THEIRS.splitlines().index("    return [1.0 / len(text) for text in completions]") + 1
    with pytest.raises(RewardError) as caught:
        made("picky")([TWO[0], replace(TWO[1], text="")])
    assert caught.value.what == "the reward function picky raised ZeroDivisionError: float division by zero"
    assert caught.value.where == f"{here}/theirs.py:{line}, rollout of prompt 'p': ''"


def test_a_call_that_hangs_times_out_and_leaves_no_process(made: Make, here: Path) -> None:
    (here / "pids").unlink(missing_ok=True)

    def started(seconds: float) -> list[int]:
        with pytest.raises(CallTimeoutError, match=f"hangs timed out after {seconds:g} s"):
            made("hangs", timeout_minutes=seconds / 60.0)(TWO)
        return numbers(here / "pids")

    pids = given_time(started, bool, seconds=0.5)
    assert pids
    until_ended(pids)


def numbers(path: Path) -> list[int]:
    return [int(number) for number in path.read_text().split()] if path.exists() else []


def test_a_killed_run_leaves_no_process(here: Path) -> None:
    (here / "pids").unlink(missing_ok=True)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rlcore.rewards.other_interpreter import OtherFunction\n"
        "OtherFunction('theirs:hangs', sys.argv[2], 'rewards.0')(completions=['7'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(ROOT), BARE]) as run:
        pids = until(lambda: numbers(here / "pids"), "the function")
        run.kill()
    until_ended(pids)


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"python": "no-such-python"}, "python", "'no-such-python': no such program"),
        ({"python": "/bin/false"}, "python", "'/bin/false' does not start"),
        ({"kind": "theirs:none"}, "kind", "has no attribute 'none'"),
        ({"kind": "broken:f"}, "kind", r"ValueError: not here \(.*broken.py:1\)"),
        ({"kind": "leaves:f"}, "kind", "ended .status 4."),
        ({"kind": "theirs:of_rollouts"}, "kind", "has no parameter completions"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(
    settings: dict[str, Any], where: str, what: str, here: Path
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        import_function(RewardTerm(**{"kind": "theirs:solved", "python": BARE} | settings), "rewards.0")
    assert caught.value.where == f"rewards.0.{where}"


def test_a_module_that_is_never_imported_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(other_interpreter, "_START_SECONDS", 0.6)
    with pytest.raises(ConfigError, match="not imported within 1 s"):
        import_function(RewardTerm(kind="slow:f", python=BARE), "rewards.0")


def test_only_custom_functions_have_an_interpreter() -> None:
    with pytest.raises(ConfigError, match="python is only valid for a custom function"):
        RewardTerm(kind="math", python=sys.executable)


def test_the_packages_are_named_with_the_code_of_those_that_are_installed_as_sources(tmp_path: Path) -> None:
    folder, site = tmp_path / "source", tmp_path / "site"
    info = site / "My_Env-1.0.dist-info"
    for each in (folder / "my_env", folder / ".git", folder / ".venv", info):
        each.mkdir(parents=True)
    (info / "METADATA").write_text("Name: My_Env\nVersion: 1.0\n")
    assert other_interpreter.packages(sys.executable, "rewards.0")["psutil"] == psutil.__version__
    (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
    (folder / "my_env" / "__init__.py").write_text("a = 1")
    (folder / ".venv" / "pyvenv.cfg").write_text("")

    def seen() -> dict[str, str]:
        program = f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv[1:] = ['packages']; import runpy"
        program += f"; runpy.run_path({interpreter_worker.__file__!r}, None, '__main__')"
        done = subprocess.run([BARE, "-I", "-c", program], capture_output=True, check=True)
        return dict(json.loads(done.stdout))

    first = seen()
    assert first["python"] == sys.version.split()[0]
    assert first["my-env"].startswith("1.0 ")
    (folder / ".git" / "index").write_text("x")
    assert seen() == first
    (folder / "my_env" / "__init__.py").write_text("a = 2")
    changed = seen()
    assert [name for name in first if first[name] != changed[name]] == ["my-env"]
