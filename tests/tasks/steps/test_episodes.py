from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path

import pytest

from rlcore.config import EpisodeConfig, ModelConfig, RewardTerm, ShapeConfig
from rlcore.environments.episodes import EpisodeSampler
from rlcore.errors import ConfigError, DataError
from rlcore.flows.presets import open_preset
from rlcore.loop.rollouts import episode_metrics
from rlcore.models.importing import import_model
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.steps.episodes import (
    environment_errors,
    episodes_digests,
    episodes_of,
    evaluation_sections,
)
from rlcore.tasks.steps.play import open_player
from rlcore.tasks.steps.rl_recorder import rollout_rows
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout, Score, ScoredRollout
from tests.architecture.source_files import ROOT

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


def test_a_table_shows_every_turn_and_what_the_tool_said(tokenizer: ChatTokenizer) -> None:
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
    assert episodes_of(agentic) == agentic.stage("grpo", RlStage).settings.sampling.episodes
    assert evaluation_sections(agentic).episodes.tools == ("calculator",)
    assert evaluation_sections(tiny).episodes.tools == ()
    assert episodes_of(open_preset("agentic", ['without=["stages.grpo"]'])) == EpisodeConfig()
    plain = dataclasses.replace(tiny.stages["ppo"], init_from="sft")
    plain = dataclasses.replace(plain, settings=dataclasses.replace(plain.settings, rewards=(RewardTerm(kind="math"),)))
    both = dataclasses.replace(agentic, stages={**agentic.stages, "ppo": plain})
    assert any(re.match(r"stages\.ppo\.sampling\.episodes differs", fault) for fault in both.errors)


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
    said = [(call.output, call.is_error) for call in rollout.tool_calls]
    assert said == [("higher", False), ("error: a guess is from 1 to 9", True), ("right", False)]
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
