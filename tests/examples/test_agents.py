"""The agents of the example: their episodes are, token for token, those of the class that is the environment."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.agents.sampler import AgentSampler
from rlcore.config import AgentConfig, EpisodeConfig, ModelConfig, ShapeConfig
from rlcore.environments.environment import import_environment
from rlcore.environments.episodes import EpisodeSampler
from rlcore.models.importing import import_model
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout
from tests.architecture.source_files import ROOT
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.sandbox.conftest import require_bubblewrap

QUESTION = "mills in Fasone?"
PASSAGE = "Fasone: wells 22, mills 32, boats 20."
EXAMPLES = ROOT / "examples"
PROGRAMS = {"python": ("python", "towns_agent.py"), "shell": ("./towns_agent.sh",)}
FRAMEWORKS = {"agents": "towns_openai_agents.py", "langgraph": "towns_langgraph.py"}  # by package
SEARCH = "<tool:search>Fasone</tool>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("towns") / "model"
    shape = ShapeConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8)
    import_model(ModelConfig(source="scratch", shape=shape), folder, seed=0)
    return ChatTokenizer.load(folder)


class Policy(Parrot):
    """Policy that searches for ``query``, and then answers; also for one completion at a time, as episodes want it."""

    def __init__(self, tokenizer: ChatTokenizer, query: str) -> None:
        super().__init__(tokenizer, lambda text: "mills 32 #### 32" if "assistant" in text[30:] else query)


def played(sampler: AgentSampler | EpisodeSampler, tokenizer: ChatTokenizer) -> Rollout:
    messages = (Message(role="user", content=QUESTION),)
    ids = tokenizer.render_prompt(messages)
    prompt = Prompt(prompt_id="t", messages=messages, token_ids=ids, reference="32", task="towns")
    ((made,),) = sampler.sample([prompt], SamplingParams(temperature=1.0, max_new_tokens=200, num_samples=1), seed=0)
    assert isinstance(made, Rollout), made
    return made


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_episode_of_the_program_is_one_of_the_class(tokenizer: ChatTokenizer, program: str) -> None:
    command = PROGRAMS[program]
    if program == "shell" and not all(map(shutil.which, ("sh", "curl", "sed", "grep"))):
        pytest.skip("curl is not installed")
    for query in (SEARCH, "#### 31", "<tool:search>Nowhere</tool>"):
        compare(tokenizer, command, query)


@pytest.mark.slow  # imports of frameworks; the programs above need none
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_an_episode_of_a_framework_is_one_of_the_class(tokenizer: ChatTokenizer, package: str) -> None:
    if find_spec(package) is None:  # to import it takes seconds
        pytest.skip(f"{package} is not installed")
    compare(tokenizer, ("python", FRAMEWORKS[package]), SEARCH)


@pytest.mark.slow  # imports of frameworks; the programs above need none
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_an_agent_of_a_framework_that_may_call_no_more_is_truncated(tokenizer: ChatTokenizer, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    agent = agent_of(("python", FRAMEWORKS[package]))
    made = played(AgentSampler(Parrot(tokenizer, lambda _: SEARCH), tokenizer, agent), tokenizer)
    assert (made.finish_reason, made.text, len(made.turns), made.branches) == ("length", SEARCH, 2, ())


def agent_of(command: tuple[str, ...]) -> AgentConfig:
    require_bubblewrap()
    files = tuple(str(EXAMPLES / name) for name in (Path(command[-1]).name, "towns.jsonl"))
    return AgentConfig(command=command, files=files, max_calls=2, env={"OPENAI_AGENTS_DISABLE_TRACING": "1"})


def compare(tokenizer: ChatTokenizer, command: tuple[str, ...], query: str) -> None:
    """Compare an episode of a program with the class that is the environment."""
    ours = played(AgentSampler(Policy(tokenizer, query), tokenizer, agent_of(command)), tokenizer)
    environment = import_environment("rlcore.examples.environments:Towns", {})
    config = EpisodeConfig(environment=environment.name, max_turns=2, max_turn_tokens=60)
    class_form = played(EpisodeSampler(Policy(tokenizer, query), tokenizer, [], config, environment), tokenizer)
    assert ours.completion_ids == class_form.completion_ids
    assert (ours.loss_mask, ours.text, ours.branches) == (class_form.loss_mask, class_form.text, ())
    assert (PASSAGE in tokenizer.decode(ours.completion_ids)) == ("Fasone" in query)
