"""Episodes in runs: tools, environments of a user and of an MCP server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from rlcore.tasks.steps.rows import read_demonstrations
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, arguments, environment, ran, states_of
from tests.flows.homes import folder, kill_when, weights
from tests.flows.warm import run_warm
from tests.http_servers import free_port, until_it_listens

# Measured over precisions and seeds: 9 to 14 of 16 episodes call the calculator.
SETTINGS = (
    "hardware.dtype=float32",
    "model.shape.hidden_size=64",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=2",
    "model.shape.intermediate_size=128",
    "data.prompts.num_train=64",
    "data.prompts.num_eval=16",
    "data.demonstrations.num_train=400",
    "data.demonstrations.num_eval=10",
    "data.demonstrations.options.direct_share=0.25",
    "stages.sft.num_steps=80",
    "stages.sft.learning_rate=5e-3",
    "stages.grpo.num_iterations=2",
    "stages.grpo.prompts_per_iteration=4",
    "stages.grpo.group_size=4",
    "stages.grpo.eval_every=2",
    "stages.grpo.checkpoints.every_iterations=1",
    "evaluation.num_problems=16",
    "evaluation.num_samples=2",
    "evaluation.num_sampled_problems=4",
    "evaluation.num_monitor_problems=4",
)

CLASS = '''
class Sums:
    def reset(self, prompt):
        self.has_asked = False

    def calculator(self, expression: str) -> int:
        """Multiplies two numbers.

        Args:
            expression: such as 47*86
        """
        first, _, second = expression.partition("*")
        if not (first.isdigit() and second.isdigit()):
            from rlcore.environments.base import CallError

            raise CallError("write two numbers, such as 47*86")
        self.has_asked = True
        return int(first) * int(second)

    def get_reward(self) -> float:
        return float(self.has_asked)
'''
OWN = (
    "stages.grpo.sampling.episodes.tools=[]",
    "stages.grpo.sampling.episodes.environment=sums:Sums",
    "stages.grpo.rewards=[{kind='environment'}]",
)


@pytest.fixture(scope="module")
def agentic_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("agentic")
    ran(home, "agentic", *SETTINGS)
    return home


def history_of(home: Path) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((folder(home, "grpo") / "history.json").read_text())
    return rows


def masks(home: Path, tool: str, iteration: int) -> tuple[list[list[bool]], list[list[bool]]]:
    """The loss masks of an iteration's rollouts that called a tool and of the others.

    The output of a tool is not trained on, and engine and trainer, who read it, agree on the policy's tokens.
    """
    table = read_table(folder(home, "grpo") / "rollouts" / f"iteration-{iteration:05d}.parquet")
    called = table[table["text"].str.contains(f"[{tool}] ", regex=False)]
    assert len(called) > 0
    for row in called.itertuples():
        mask = list(row.loss_mask)
        assert mask[0] and not all(mask)
        assert all(logprob == 0.0 for logprob, own in zip(row.sampler_logprobs, mask, strict=True) if not own)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in history_of(home))
    found, direct = ([list(mask) for mask in each["loss_mask"]] for each in (called, table.drop(called.index)))
    return found, direct


def test_demonstrations_hold_calls_and_their_answers(agentic_home: Path) -> None:
    rows = read_demonstrations(folder(agentic_home, "prepare_demonstrations") / "train.parquet")
    roles = {tuple(message.role for message in row.messages) for row in rows}
    assert roles == {("user",), ("user", "assistant", "tool")}


def test_rollouts_call_the_calculator_are_measured_and_not_trained_on_what_it_says(agentic_home: Path) -> None:
    called, direct = masks(agentic_home, "calculator", 2)
    assert all(mask[-1] for mask in called) and all(map(all, direct))
    history = history_of(agentic_home)
    assert all(0.0 < row["episode/with_calls"] <= 1.0 < row["episode/turns"] <= 2.0 for row in history)
    assert all(0.0 < row["episode/tool_tokens"] < 1.0 for row in history)


def test_evaluation_plays_the_same_episodes_greedy_and_sampled(agentic_home: Path) -> None:
    assert not (agentic_home / "cache" / "reward_model").exists()  # nothing asks for one
    answers = read_table(folder(agentic_home, "evaluate_sft") / "answers.parquet")
    called = answers[answers["completion"].str.contains("[calculator] ", regex=False)]
    assert {"greedy", "sampled"} >= set(called["mode"])
    assert len(called) > 0


@pytest.mark.slow
def test_groups_of_episodes_without_signal_give_way_to_fresh_prompts(agentic_home: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(agentic_home, home)
    shutil.rmtree(home / "cache" / "grpo")  # all before it is cached
    ran(home, "agentic", *SETTINGS, "stages.grpo.sampling.dynamic_sampling_rounds=2")
    history, before = history_of(home), history_of(agentic_home)
    assert sum(row["groups/replaced"] for row in history) > 0
    assert history[0]["groups/zero_signal"] <= before[0]["groups/zero_signal"]
    table = read_table(folder(home, "grpo") / "rollouts" / "iteration-00001.parquet")
    assert set(table.groupby("prompt_id").size()) == {4}  # whole groups, episodes of other prompts


def test_a_users_environment_is_played_paid_evaluated_and_in_the_keys(agentic_home: Path, tmp_path: Path) -> None:
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    (project / "sums.py").write_text(CLASS, encoding="utf-8")
    shutil.copytree(agentic_home, home)
    shutil.rmtree(home / "cache" / "grpo")  # SFT is the same
    ran(home, "agentic", *SETTINGS, *OWN, cwd=project)
    history = history_of(home)
    assert all(0.0 < row["episode/parsed"] <= 1.0 for row in history)
    assert any(row["reward/mean"] > 0.0 for row in history)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in history)

    def planned() -> list[str]:
        done = run_warm(arguments("plan", "agentic", *SETTINGS, *OWN), environment(home), project)
        states = states_of(done.stdout)
        return [states[name] for name in ("sft", "grpo", "evaluate_sft", "evaluate_grpo")]

    assert planned() == ["cached", "cached", "cached", "cached"]
    (project / "sums.py").write_text(CLASS.replace("float(self.has_asked)", "0.5"), encoding="utf-8")
    assert planned() == ["cached", "run", "run", "run"]


TOOLS = {"stock": "query", "towns": "search"}
ITERATIONS = 3
WORLD = (
    "data.prompts.num_train=64",
    f"stages.grpo.num_iterations={ITERATIONS}",
    "stages.grpo.eval_every=3",
    # Right answers are rare so early; a group in which all are paid the same would move no weight.
    "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",
)


@pytest.fixture(scope="module", params=TOOLS)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    preset = str(request.param)
    home = tmp_path_factory.mktemp(preset)
    ran(home, preset, *SETTINGS, *WORLD)
    return preset, home


@pytest.mark.slow
def test_episodes_and_evaluations_call_the_environment_and_are_not_trained_on_what_it_says(
    played: tuple[str, Path],
) -> None:
    preset, home = played
    masks(home, TOOLS[preset], 1)
    history = history_of(home)
    assert all(0.0 < row["episode/with_calls"] <= 1.0 and row["reward/errors"] == 0.0 for row in history)
    answers = read_table(folder(home, "evaluate_sft") / "answers.parquet")
    assert answers["completion"].str.contains(f"[{TOOLS[preset]}] ", regex=False).any()


@pytest.mark.slow
def test_a_kill_in_the_middle_of_the_rl_stage_changes_no_bit(played: tuple[str, Path], tmp_path: Path) -> None:
    preset, undisturbed = played
    code = f"from rlcore.flows.run import run_targets; run_targets({preset!r}, {(*SETTINGS, *WORLD)!r}, ['grpo'])"
    command = [sys.executable, "-c", code]
    home = tmp_path / "home"
    kill_when(home, "work/*/checkpoints/step-000001", command)
    assert not list((home / "cache" / "grpo").glob("*.json"))
    done = subprocess.run(command, env=environment(home), cwd=ROOT, capture_output=True, text=True, check=False)
    assert "resume: after iteration" in done.stderr, done.stderr
    assert weights(home, "grpo") == weights(undisturbed, "grpo") != weights(home, "sft")
    for number in range(1, ITERATIONS + 1):
        name = f"rollouts/iteration-{number:05d}.parquet"
        again, before = (read_table(folder(each, "grpo") / name) for each in (home, undisturbed))
        pd.testing.assert_frame_equal(again, before)


SERVER = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def calculator(expression: str) -> str:
    """Multiplies two numbers, such as 47*86."""
    first, _, second = expression.partition("*")
    if not (first.isdigit() and second.isdigit()):
        raise ValueError("write two numbers, such as 47*86")
    return str(int(first) * int(second))

server.run("streamable-http", port=int(sys.argv[1]))
'''


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    program = tmp_path / "server.py"
    program.write_text(SERVER, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(program), str(port)], stderr=subprocess.DEVNULL) as process:
        until_it_listens(port)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def of_a_server(url: str) -> tuple[str, ...]:
    return (
        *SETTINGS,
        "stages.grpo.sampling.episodes.tools=[]",
        "stages.grpo.sampling.episodes.environment=rlcore.environments.mcp_server:McpServer",
        f"stages.grpo.sampling.episodes.options={{url='{url}'}}",
        "stages.grpo.sampling.episodes.timeout_seconds=600.0",
        "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",
    )


def test_a_server_that_does_not_answer_is_named_before_anything_runs(tmp_path: Path) -> None:
    given = arguments("run", "agentic", *of_a_server("http://127.0.0.1:9/mcp"))
    done = run_warm(given, environment(tmp_path / "home"), ROOT)
    assert done.returncode == 2, done.stderr
    output = "stages.grpo.sampling.episodes.environment: the MCP server does not answer at 'http://127.0.0.1:9/mcp'"
    assert output in " ".join(done.stderr.split())
    assert not (tmp_path / "home" / "artifacts" / "checkpoint").exists()


@pytest.mark.slow
def test_episodes_call_the_server_and_read_its_answer(url: str, tmp_path: Path) -> None:
    ran(tmp_path, "agentic", *of_a_server(url))
    masks(tmp_path, "calculator", 1)
    assert all(0.0 < row["episode/parsed"] <= 1.0 for row in history_of(tmp_path))
