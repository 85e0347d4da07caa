"""Agents in presets: faults before a run with their full keys, and what of an agent is in a stage's key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlcore.config import AgentConfig
from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.kinds.rl.kind import RlStage, errors
from rlcore.tasks.preflight.sizes import position_errors
from rlcore.tasks.steps.agents import agent_digests, agent_errors
from tests.rlcore.sandbox.conftest import require_bubblewrap

AGENT = "stages.grpo.sampling.agent"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an agent as a program and as a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "play.sh").write_text("#!/bin/sh\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "sub" / "run").chmod(0o755)
    (tmp_path / "my_helper.py").write_text("NUMBER = 1\n")
    (tmp_path / "my_agent.py").write_text("import my_helper\n\ndef play(task): ...\n\nWORD = 'x'\n")
    yield_modules = {name: sys.modules.pop(name, None) for name in ("my_agent", "my_helper")}
    assert set(yield_modules.values()) == {None}
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"command": ("sh", "play.sh"), "files": ("play.sh",)}, ""),
        ({"command": ("sh", "-c", "exec sh ./play.sh --of=./play.sh"), "files": ("play.sh",)}, ""),
        ({"command": ("sh", "play.sh", "--of=./play.sh"), "files": ("play.sh",)}, ""),
        ({"function": "my_agent:play"}, ""),
        ({"command": ("no-such",)}, "a.command = 'no-such': no such program; install it, or add its file to files"),
        ({"command": ("./play.sh",), "files": ("play.sh",)}, "a.command = './play.sh': play.sh is not executable"),
        ({"command": ("./play.sh",)}, "a.command = './play.sh': no such program"),
        ({"command": ("sh", "play.sh")}, "a.command: 'play.sh' is a file here, and agents run in a folder of their"),
        (
            {"command": ("sh", "sub/play.sh"), "files": ("play.sh",)},
            "a.command: 'sub/play.sh' is copied to the agent's",
        ),
        ({"command": ("sh",), "files": ("gone.sh",)}, "a.files.0 = 'gone.sh': no such file"),
        ({"command": ("sub/run",), "files": ("sub",)}, ""),
        ({"command": ("sh", "sub/run"), "files": ("sub",)}, ""),
        ({"command": ("sh", "sub/run")}, "a.command: 'sub/run' is a file here, and agents run in a folder of their"),
        ({"command": ("./sub/run",), "files": ("play.sh",)}, "a.command = './sub/run': no such program"),
        ({"function": "my_agnt:play"}, "a.function = 'my_agnt:play': cannot be imported: No module named 'my_agnt'"),
        ({"function": "my_agent:plan"}, "a.function = 'my_agent:plan': cannot be imported: module 'my_agent' has no"),
        ({"function": "my_agent:WORD"}, "a.function = 'my_agent:WORD': is not a function"),
        ({"function": "my_agent:play", "sandbox": True}, ""),
        ({"command": ("sh",), "sandbox": True, "sandbox_read": ("gone",)}, "a.sandbox_read.0 = 'gone': no such file"),
    ],
)
def test_a_fault_of_an_agent_is_named_with_its_full_key(here: Path, settings: dict[str, object], fault: str) -> None:
    if settings.setdefault("sandbox", False):
        require_bubblewrap()
    found = list(agent_errors(AgentConfig(**settings), "a"))  # type: ignore[arg-type]
    assert [each[: len(fault)] for each in found] == ([fault] if fault else [])
    sys.modules.pop("my_agent", None)
    sys.modules.pop("my_helper", None)


def test_a_sandbox_needs_bubblewrap(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    agent = AgentConfig(command=(sys.executable,))
    (error,) = agent_errors(agent, "a")
    assert error.startswith("a.sandbox: bubblewrap is not installed") and "or sandbox = false" in error


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("{}", "give either command, such as ['python', 'agent.py'], or function = 'module:function'"),
        ("{command=['sh'],function='a:b'}", "give either command"),
        ("{function='a'}", "function = 'a' is not written as module:function"),
        ("{command=['sh'],env={HOME='/root'}}", "env.HOME is set by rlcore for each episode"),
        ("{command=['sh'],files=['a/x','b/x']}", "files has two files of one name"),
        ("{command=['sh'],branches='all'}", "branches = 'all': must be one of 'train', 'main', 'refuse'"),
        ("{command=['sh'],max_calls=0}", "max_calls = 0: must be at least 1"),
        ("{command=['sh'],timeout_seconds=1e9}", "timeout_seconds = 1000000000.0: must be between 0.1 and 604800"),
        ("{command=['sh'],reward_range=[1,0]}", "reward_range = [1.0, 0.0]: must be two numbers from -1e+06 to 1e+06"),
        ("{command=['sh'],reward_range=[0,1,2]}", "reward_range = [0.0, 1.0, 2.0]: must be two numbers"),
        ("{command=['sh'],reward_range=[0,1e7]}", "reward_range = [0.0, 10000000.0]: must be two numbers"),
        ("{command=['sh'],sandbox=false,sandbox_read=['x']}", "sandbox_read has no effect with sandbox = false"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_path(settings: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset("r1_zero", [f"{AGENT}={settings}"])
    assert fault in caught.value.what
    assert AGENT in caught.value.what


def test_agents_exclude_tools_and_other_kinds_of_stages_and_differ_in_no_stage() -> None:
    agent = "sampling.agent={command=['sh']}"
    with pytest.raises(ConfigError, match="agent plays the episodes with tools of its own: leave out episodes"):
        open_preset("agentic", [f"stages.grpo.{agent}"])
    with pytest.raises(ConfigError, match=r"stages\.win_rate\.sampling\.agent: agents play in online RL"):
        open_preset("win_rate", [f"stages.{name}.{agent}" for name in ("grpo", "win_rate")])
    with pytest.raises(ConfigError, match=r"stages\.ppo\.sampling\.agent differs from stages\.grpo\.sampling\.agent"):
        open_preset("tiny", [f"stages.grpo.{agent}"])
    with pytest.raises(
        ConfigError, match=r"a pair has two answers and no tool calls, and stages\.grpo\.sampling names"
    ):
        sampled = ("data.preferences.adapter=policy", "data.preferences.policy=sft")
        open_preset("tiny", [*sampled, *(f"stages.{name}.{agent}" for name in ("grpo", "ppo"))])


def test_files_are_those_next_to_the_preset(here: Path) -> None:
    (here / "presets").mkdir()
    path = here / "presets" / "mine.toml"
    path.write_text(f'extends = "r1_zero"\n[{AGENT}]\ncommand = ["sh", "play.sh"]\nfiles = ["../play.sh", "~/x"]\n')
    agent = open_preset(str(path)).stage("grpo", RlStage).settings.sampling.agent
    assert agent is not None
    assert agent.files == ("play.sh", str(Path.home() / "x"))
    with pytest.raises(ConfigError, match=r"files\.1 = 7"):
        open_preset(str(path), [f"{AGENT}.files=['play.sh',7]"])


def test_the_reward_environment_may_be_the_agents_own() -> None:
    own = "stages.grpo.rewards=[{kind='environment'}]"
    assert open_preset("r1_zero", [own, f"{AGENT}={{command=['sh']}}"])
    with pytest.raises(ConfigError, match=r"needs an environment in sampling\.episodes, or sampling\.agent"):
        open_preset("r1_zero", [own])


@pytest.mark.parametrize(("branches", "count"), [("train", 1), ("main", 0), ("refuse", 0)])
def test_an_algorithm_with_a_critic_does_not_train_on_branches(branches: str, count: int) -> None:
    settings = [f"stages.{name}.sampling.agent={{command=['sh'],branches='{branches}'}}" for name in ("grpo", "ppo")]
    config = open_preset("tiny", settings)
    assert list(errors("stages.grpo", config.stage("grpo", RlStage))) == []
    found = list(errors("stages.ppo", config.stage("ppo", RlStage)))
    assert [each[:44] for each in found] == ["stages.ppo.sampling.agent.branches = 'train'"] * count


@pytest.mark.parametrize(
    ("room", "positions", "fault"),
    [
        (63, None, "max_prompt_tokens = 63: a prompt of the data may have max_tokens = 64; raise it"),
        (64, None, ""),
        (200, 300, "max_prompt_tokens = 200: with 160 new tokens that is 360, and the model reads 300; lower it"),
    ],
)
def test_the_limit_of_an_agents_prompts_fits_the_data_and_the_model(
    room: int, positions: int | None, fault: str
) -> None:
    changes = ["data.prompts.max_tokens=64", "stages.grpo.sampling.max_new_tokens=160", "evaluation.max_new_tokens=9"]
    config = open_preset("r1_zero", [*changes, f"{AGENT}={{command=['sh'],max_prompt_tokens={room}}}"])
    found = list(position_errors(config, positions, ["grpo"], ["prompts"], is_evaluated=True))
    assert found == ([f"{AGENT}.{fault}"] if fault else [])


def counted(*overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages(open_preset("r1_zero", overrides))}


def test_what_an_agent_is_enters_the_keys_of_rl_and_its_evaluations(here: Path) -> None:
    settings = f"{AGENT}={{command=['sh','play.sh'],files=['{here}/play.sh']}}"
    config = open_preset("r1_zero", [settings])
    for name in ("grpo", "evaluate_grpo", "evaluate_base"):
        sections = counted(settings)[name].sections(config)
        assert sections.for_key()["agent" if "_" in name else "stage"] != {}
        assert "play.sh" in str(sections.for_key())
        assert str(here) not in str(sections.for_key())  # its folder may differ
        assert "episodes" in counted(settings)[name].chosen(sections)
        before = counted(settings)[name].source_digest(sections)
        (here / "play.sh").write_text(f"# {name}\n")
        assert counted(settings)[name].source_digest(sections) != before
    assert "agent" not in counted()["evaluate_grpo"].sections(open_preset("r1_zero")).for_key()


def test_a_function_is_counted_with_the_modules_that_it_imports(here: Path) -> None:
    agent = AgentConfig(function="my_agent:play")
    before = dict(agent_digests(agent))
    assert before.keys() == {"my_agent.py", "my_helper.py"}
    (here / "my_helper.py").write_text("NUMBER = 2\n")
    after = dict(agent_digests(agent))
    assert (after["my_agent.py"], after["my_helper.py"] != before["my_helper.py"]) == (before["my_agent.py"], True)


def test_of_a_folder_every_file_and_link_is_counted(here: Path) -> None:
    agent = AgentConfig(command=("sh",), files=("sub",))
    (here / "sub" / "deep").mkdir()
    (here / "sub" / "link").symlink_to("run")
    found = [dict(agent_digests(agent))]
    for change in (
        lambda: (here / "sub" / "deep" / "new").write_text("x"),
        lambda: (here / "sub" / "run").write_text("# other"),
        lambda: ((here / "sub" / "link").unlink(), (here / "sub" / "link").symlink_to("deep")),
        lambda: (here / "sub" / "run").rename(here / "sub" / "go"),
    ):
        change()
        found.append(dict(agent_digests(agent)))
    assert found[0].keys() == {"sub/run", "sub/link"}
    assert all(found[i] != found[j] for i in range(5) for j in range(i))


def test_a_program_that_the_command_names_by_its_path_is_counted(here: Path) -> None:
    agent = AgentConfig(command=("sh", str(here / "play.sh"), "--fast"))
    assert [name for name, _ in agent_digests(agent)] == ["play.sh"]
    assert agent_digests(None) == []
