"""Check of an agent: a few episodes with the model that its RL stage starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlcore.agents.sampler import AgentSampler, Episode, rollout_of
from rlcore.agents.tree import advice, episode_lines
from rlcore.config import AgentConfig
from rlcore.errors import ConfigError
from rlcore.rewards.base import RewardFn
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import SamplingParams
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.presets.graph import sampling_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL, prepare_stage_name
from rlcore.tasks.steps.rewards import open_reward_models, reward_resources
from rlcore.tasks.steps.rollout_engine import longest, open_engine
from rlcore.tasks.steps.rows import read_prompts, tokenize_prompts
from rlcore.tasks.steps.runtime import Workload, open_runtime
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class AgentCheck:
    """Result of a check: its text, and whether every episode has a score."""

    lines: tuple[str, ...]
    passed: bool


def agent_stage(config: RunConfig, stage: str) -> str:
    """Return the stage to check: ``stage``, or the first RL stage with an agent.

    Raises:
        ConfigError: it has no agent.
    """
    known = [name for name, each in config.stages.items() if (own := sampling_of(each)) and own.agent]
    if not known or stage not in ("", *known):
        raise ConfigError(
            f"stages.{stage} of the preset {config.name} has no agent"
            if stage
            else f"no stage of the preset {config.name} has an agent",
            fix=f"name one of {', '.join(known)}" if known else "add a table stages.<name>.sampling.agent",
        )
    return stage or known[0]


def check_agent(
    config: RunConfig, stage: str, inputs: Mapping[str, Path], *, start: str, count: int, log: Callable[[str], None]
) -> AgentCheck:
    """Play an episode for each of the first ``count`` training prompts of an RL stage, and score them.

    ``inputs``: folders of its artifacts by stage; ``start``: that of the starting checkpoint.

    Raises:
        RlcoreError: the model, the engine, the rewards or the sandbox cannot be used.
    """
    own = config.stage(stage, RlStage)
    rl, folder = own.settings, inputs[start] / MODEL
    sampling, agent = rl.sampling, rl.sampling.agent
    assert agent is not None
    tokenizer = ChatTokenizer.load(folder)
    prompts = _first_prompts(own, inputs, tokenizer, count)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(config.hardware, seed=config.seed))
        models, budget = open_reward_models(inputs, rl.rewards, runtime), rl.update.tokens_per_microbatch
        resources = reward_resources(models, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
        reward = stack.enter_context(build_rewards(rl.rewards, resources=resources))
        tokens = longest(prompts, sampling.max_new_tokens, agent)
        work = Workload(max_concurrent=sampling.max_concurrent, max_tokens=tokens)
        used = config.engine_of(sampling)
        engine = stack.enter_context(
            open_engine(folder, tokenizer, config=used, work=work, runtime=runtime, progress=log)
        )
        params = SamplingParams(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1)
        groups = AgentSampler(engine, tokenizer, agent).play(prompts, params, seed=config.seed)
        return _checked([episode for group in groups for episode in group], agent, reward)


def _first_prompts(stage: RlStage, inputs: Mapping[str, Path], tokenizer: ChatTokenizer, count: int) -> list[Prompt]:
    found: list[Prompt] = []
    for name in stage.prompts:
        rows = read_prompts(inputs[prepare_stage_name(name)] / "train.parquet")[: count - len(found)]
        found += tokenize_prompts(rows, tokenizer, dataset=name, is_one_of_several=len(stage.prompts) > 1)
    return found


def _checked(episodes: Sequence[Episode], agent: AgentConfig, reward: RewardFn) -> AgentCheck:
    made = [rollout_of(episode, agent) for episode in episodes]
    scores = iter(reward([each for each in made if isinstance(each, Rollout)]))
    lines, failed = list[str](), 0
    for episode, rollout in zip(episodes, made, strict=True):
        score = next(scores) if isinstance(rollout, Rollout) else None
        value = score.value if score else None
        failed += value is None or bool(episode.failure)
        why = score.error if score else getattr(rollout, "reason", "")
        lines += episode_lines(episode, result=f"no score: {why}" if value is None else f"reward {value:.3f}")
    lines += [f"warning: {text}" for text in advice(episodes, is_boxed=agent.sandbox)]
    lines.append(f"{len(episodes) - failed} of {len(episodes)} episodes are sound")
    return AgentCheck(lines=tuple(lines), passed=not failed)
