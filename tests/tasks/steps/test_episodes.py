"""Episodes and agents of a preset, and their code in the keys of stages."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path

import pytest

from rlcore.config import AgentConfig, EpisodeConfig, ModelConfig, RewardTerm, ShapeConfig
from rlcore.environments.episodes import EpisodeSampler
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.loop.rollouts import episode_metrics
from rlcore.models.importing import import_model
from rlcore.rewards import other_interpreter
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.kinds.rl.kind import RlStage, errors
from rlcore.tasks.preflight.sizes import position_errors
from rlcore.tasks.steps import external
from rlcore.tasks.steps.external import (
    agent_digests,
    agent_errors,
    environment_errors,
    episodes_digests,
    evaluation_sections,
    terms_digests,
)
from rlcore.tasks.steps.rl_recorder import rollout_rows
from rlcore.tasks.steps.rollout_engine import open_player
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout, Score, ScoredRollout
from tests.architecture.source_files import ROOT
from tests.rlcore.sandbox.conftest import require_bubblewrap

CALCULATOR = EpisodeConfig(tools=("calculator",), max_turns=2, max_turn_tokens=40)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=320, num_samples=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("episodes") / "model"
    shape = ShapeConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8)
    import_model(ModelConfig(source="scratch", shape=shape), folder, seed=0)
    return ChatTokenizer.load(folder)


def play(tokenizer: ChatTokenizer, config: EpisodeConfig, *turns: str) -> Rollout:
    texts = {"q" if place == 0 else f"q/0/{place}": [turn] for place, turn in enumerate(turns)}
    prompt = Prompt(
        prompt_id="q", messages=(Message(role="user", content="3+4"),), token_ids=(1,), reference="7", task="t"
    )
    with open_player(ScriptedSampler.from_texts(texts, tokenizer), tokenizer, config) as sampler:
        ((made,),) = sampler.sample([prompt], PARAMS, seed=0)
    assert isinstance(made, Rollout)
    return made


def test_without_tools_the_engine_plays_alone(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedSampler({}, tokenizer)
    with open_player(engine, tokenizer, EpisodeConfig()) as sampler:
        assert sampler is engine
    with open_player(engine, tokenizer, CALCULATOR) as sampler:
        assert isinstance(sampler, EpisodeSampler)


def test_a_table_shows_every_turn_and_tool_output(tokenizer: ChatTokenizer) -> None:
    rollout = play(tokenizer, CALCULATOR, "<tool:calculator>3+4</tool>", "#### 7")
    (row,) = rollout_rows(1, [[ScoredRollout(rollout=rollout, score=Score(value=1.0, terms={}))]])
    assert row["text"] == "<tool:calculator>3+4</tool>\n[calculator] 7\n#### 7"
    assert sum(row["loss_mask"]) == 32  # 28 of the call, 4 of the answer; see the episodes' own test


def test_the_figures_of_episodes_are_those_worked_by_hand(tokenizer: ChatTokenizer) -> None:
    called = play(tokenizer, CALCULATOR, "<tool:calculator>3/0</tool>", "#### 7")
    direct = play(tokenizer, CALCULATOR, "#### 7")
    # 28 + 4 tokens of the policy, 23 ("error: division by zero") + 12 of the template; and 4 in one turn.
    assert episode_metrics([called, direct]) == pytest.approx(
        {
            "episode/turns": 1.5,
            "episode/with_calls": 0.5,
            "episode/parsed": 0.5,
            "episode/tool_calls": 0.5,
            "episode/tool_errors": 1.0,
            "episode/tool_tokens": 35 / 71,
        }
    )
    assert set(episode_metrics([]).values()) == {0.0}


def test_the_corpus_of_a_search_is_read_and_enters_the_key_by_content(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"passage_id": "p7", "text": "three and four make seven"}\n', encoding="utf-8")
    config = EpisodeConfig(tools=("search",), search_corpus=str(path), max_turns=2, max_turn_tokens=40)
    rollout = play(tokenizer, config, "<tool:search>four</tool>", "#### 7")
    assert rollout.tool_calls[0].output == "[p7] three and four make seven"
    before = episodes_digests(config)
    path.write_text('{"passage_id": "p7", "text": "changed"}\n', encoding="utf-8")
    assert episodes_digests(config) != before
    path.write_text('{"passage_id": "p7"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="search_corpus/v1"):
        play(tokenizer, config, "x")
    with pytest.raises(DataError, match="cannot read a file that the preset names"):
        episodes_digests(dataclasses.replace(config, search_corpus=str(tmp_path / "absent.jsonl")))
    assert episodes_digests(CALCULATOR) == []


def test_checkpoints_are_evaluated_in_the_episodes_that_their_runs_train_on() -> None:
    agentic, tiny = open_preset("agentic"), open_preset("tiny")
    assert evaluation_sections(agentic).episodes == agentic.stage("grpo", RlStage).settings.sampling.episodes
    assert evaluation_sections(agentic).episodes.tools == ("calculator",)
    assert evaluation_sections(tiny).episodes.tools == ()
    alone = open_preset("agentic", ['without=["stages.grpo"]'])
    assert evaluation_sections(alone).episodes == EpisodeConfig()
    plain = dataclasses.replace(tiny.stages["ppo"], init_from="sft")
    plain = dataclasses.replace(plain, settings=dataclasses.replace(plain.settings, rewards=(RewardTerm(kind="math"),)))
    both = dataclasses.replace(agentic, stages={**agentic.stages, "ppo": plain})
    assert any(re.match(r"stages\.ppo\.sampling\.episodes differs", given) for given in both.errors)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.grpo.sampling.episodes.tools=['calculater']", "must be one of 'calculator'"),
        ("stages.grpo.sampling.episodes.tools=['calculator', 'calculator']", "tools has a tool twice"),
        ("stages.grpo.sampling.episodes.tools=['search']", "needs search_corpus"),
        ("stages.grpo.sampling.episodes.max_turn_tokens=97", "must not exceed max_new_tokens"),
        ("stages.grpo.sampling.episodes.environment='guess'", "is not written as module:Class"),
        ("stages.grpo.sampling.episodes.files=['a']", "options and files need environment"),
        ("stages.grpo.sampling.episodes.max_tool_output_tokens=15", "must be at least 16"),
    ],
)
def test_episodes_that_cannot_be_are_refused_with_their_path(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_preset("agentic", [override])
    assert "grpo.sampling" in caught.value.what


GAME = re.compile(r'```python title="game.py"\n(.*?)```', re.DOTALL)


def test_the_game_of_the_tutorial_is_played_from_its_setting_and_its_code_is_in_the_key(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/tutorials/own-environment.md").read_text(encoding="utf-8")
    (code,) = GAME.findall(page)
    (tmp_path / "game.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "game", types.ModuleType("game"))  # so that the end puts back what is there now
    monkeypatch.delitem(sys.modules, "game")
    config = EpisodeConfig(environment="game:Guess", max_turns=4, max_turn_tokens=30)
    rollout = play(tokenizer, config, "<tool:guess>5</tool>", "<tool:guess>10</tool>", "<tool:guess>7</tool>", "Yes.")
    words = [(call.output, call.is_error) for call in rollout.tool_calls]
    assert words == [("higher", False), ("error: a guess is from 1 to 9", True), ("right", False)]
    assert (rollout.text, rollout.environment_reward) == ("Yes.", 0.5)
    assert rollout.prompt.messages[-1].content == "3+4\n\nGuess my number, from 1 to 9."
    before = episodes_digests(config)
    (tmp_path / "game.py").write_text(code.replace("1 / self.tries", "1.0"), encoding="utf-8")
    assert episodes_digests(config) != before
    (tmp_path / "game.py").write_text(code.replace("from 1 to 9", "from 1 to 8"), encoding="utf-8")
    monkeypatch.delitem(sys.modules, "game")
    assert episodes_digests(config) != before  # what the policy reads of a tool stands in its docstring
    (tmp_path / "words.txt").write_text("one")
    with_file = dataclasses.replace(config, files=("words.txt",))
    names = [name for name, _ in episodes_digests(with_file)]
    assert {"game.py", "tool descriptions of game:Guess", "words.txt"} <= {*names}
    assert environment_errors(with_file, "e") == []
    wrong = dataclasses.replace(config, environment="game:Absent", files=("absent.txt",))
    first, second = environment_errors(wrong, "stages.grpo.sampling.episodes")
    assert first == "stages.grpo.sampling.episodes.files.0 = 'absent.txt': no such file"
    assert second.startswith("stages.grpo.sampling.episodes.environment: cannot import the environment 'game:Absent'")


AGENT = "stages.grpo.sampling.agent"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with agents in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.sh").write_text("#!/bin/sh\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "sub" / "run").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"command": ("sh", "play.sh"), "files": ("play.sh",)}, ""),
        ({"command": ("sh", "-c", "exec sh ./play.sh --of=./play.sh"), "files": ("play.sh",)}, ""),
        ({"command": ("sh", "play.sh", "--of=./play.sh"), "files": ("play.sh",)}, ""),
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
        ({"command": ("sh", "play.sh"), "files": ("play.sh",), "sandbox": True}, ""),
        ({"command": ("sh",), "sandbox": True, "sandbox_read": ("gone",)}, "a.sandbox_read.0 = 'gone': no such file"),
    ],
)
def test_an_error_of_an_agent_is_named_with_its_full_key(here: Path, settings: dict[str, object], given: str) -> None:
    if settings.setdefault("sandbox", False):
        require_bubblewrap()
    found = list(agent_errors(AgentConfig(**settings), "a"))  # type: ignore[arg-type]
    assert [each[: len(given)] for each in found] == ([given] if given else [])


def test_a_sandbox_needs_bubblewrap(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    agent = AgentConfig(command=(sys.executable,))
    (error,) = agent_errors(agent, "a")
    assert error.startswith("a.sandbox: bubblewrap is not installed") and "or sandbox = false" in error


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ("{command=[]}", "command has no word; give one, such as ['python', 'agent.py']"),
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
def test_settings_that_cannot_be_are_refused_with_their_path(settings: str, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset("r1_zero", [f"{AGENT}={settings}"])
    assert given in caught.value.what
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


@pytest.mark.parametrize(("branches", "count"), [("train", 1), ("main", 0), ("refuse", 0)])
def test_an_algorithm_with_a_critic_does_not_train_on_branches(branches: str, count: int) -> None:
    settings = [f"stages.{name}.sampling.agent={{command=['sh'],branches='{branches}'}}" for name in ("grpo", "ppo")]
    config = open_preset("tiny", settings)
    assert list(errors("stages.grpo", config.stage("grpo", RlStage))) == []
    found = list(errors("stages.ppo", config.stage("ppo", RlStage)))
    assert [each[:44] for each in found] == ["stages.ppo.sampling.agent.branches = 'train'"] * count


@pytest.mark.parametrize(
    ("room", "positions", "given"),
    [
        (63, None, "max_prompt_tokens = 63: a prompt of the data may have max_tokens = 64; raise it"),
        (64, None, ""),
        (200, 300, "max_prompt_tokens = 200: with 160 new tokens that is 360, and the model reads 300; lower it"),
    ],
)
def test_a_prompt_limit_must_fit_data_and_model(room: int, positions: int | None, given: str) -> None:
    changes = ["data.prompts.max_tokens=64", "stages.grpo.sampling.max_new_tokens=160", "evaluation.max_new_tokens=9"]
    config = open_preset("r1_zero", [*changes, f"{AGENT}={{command=['sh'],max_prompt_tokens={room}}}"])
    found = list(position_errors(config, positions, ["grpo"], ["prompts"], is_evaluated=True))
    assert found == ([f"{AGENT}.{given}"] if given else [])


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


@pytest.fixture
def term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardTerm:
    (tmp_path / "their_rewards.py").write_text("def f(completions): return [1.0 for _ in completions]")
    monkeypatch.syspath_prepend(tmp_path)
    return RewardTerm(kind="their_rewards:f", python=sys.executable)


def test_a_function_counts_with_its_file_and_packages(term: RewardTerm, monkeypatch: pytest.MonkeyPatch) -> None:
    first = terms_digests([term, term])
    assert [name for name, _ in first] == ["their_rewards.py", f"packages of {sys.executable}"]
    assert terms_digests([term]) == first
    newer = {**other_interpreter.packages(sys.executable, ""), "verifiers": "0.5.0"}
    monkeypatch.setattr(external, "packages", lambda *_: newer)
    changed = terms_digests([term])
    assert [name for (name, old), (_, new) in zip(first, changed, strict=True) if old != new] == [first[1][0]]


def test_a_function_that_only_the_other_interpreter_has_counts_with_its_packages(term: RewardTerm) -> None:
    absent = RewardTerm(kind="only_there:f", python=term.python)
    assert [name for name, _ in terms_digests([absent])] == [f"packages of {sys.executable}"]
    with pytest.raises(StorageError, match="only_there"):
        terms_digests([RewardTerm(kind="only_there:f")])


def test_an_interpreter_that_is_gone_is_named(term: RewardTerm) -> None:
    with pytest.raises(ConfigError, match="no such program"):
        terms_digests([RewardTerm(kind=term.kind, python="no-such-python")])
