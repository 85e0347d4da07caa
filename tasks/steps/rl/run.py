"""The live objects of one online-RL run: learner, sampler, judges, rewards, prompts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from rlcore.algorithms.settings import with_objective
from rlcore.algorithms.table import ALGORITHMS, Algorithm, algorithms
from rlcore.canaries import Baseline
from rlcore.config import RejectionConfig, RlConfig
from rlcore.errors import ConfigError
from rlcore.models.architectures import max_positions
from rlcore.models.check import check_model
from rlcore.models.heads import ScalarModel
from rlcore.models.lora import AdaptedModel, add_adapter, load_adapter
from rlcore.rewards.mix import MixedReward
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import Sampler
from rlcore.seeding import shuffled
from rlcore.tokenization import ChatTokenizer
from rlcore.training.experience import Judges
from rlcore.training.learner import Learner
from rlcore.types import Prompt
from tasks.home.code_hash import closure_digest
from tasks.preset.sections import Sections
from tasks.steps.base import MODEL, StageContext
from tasks.steps.episodes import corpus_digest, with_tools
from tasks.steps.rewards import open_reward_model, reward_resources, verifier
from tasks.steps.rl.ahead import RolloutsAhead
from tasks.steps.rl.checkpoints import Checkpoints
from tasks.steps.rl.tables import RolloutKeeper
from tasks.steps.rollout_engine import Workload, longest, open_engine, sampling_engine
from tasks.steps.rows import read_prompts
from tasks.steps.runtime import Runtime, open_runtime
from tasks.steps.tokens import check_context, tokenize_prompts

START = "start"  # the input that a run starts from, whichever stage made it


class RlRun:
    """Everything that an iteration works on. Not a dataclass: Prefect would walk through a dataclass's tensors."""

    def __init__(self, context: StageContext, rl: RlConfig, runtime: Runtime, tokenizer: ChatTokenizer) -> None:
        self.context, self.rl, self.runtime, self.tokenizer = context, rl, runtime, tokenizer
        self.seed = context.seed
        self.algorithm: Algorithm = resolve_algorithm(rl)
        policy = _policy(context, rl, runtime)
        critic = _critic(context, rl, runtime, policy) if self.algorithm.uses_critic else None
        self.learner = Learner(policy, critic, algorithm=self.algorithm, config=rl)
        self.judges = Judges(
            policy=policy,
            reference=_reference(context, runtime, policy) if rl.kl.coefficient > 0.0 else None,
            critic=critic,
            temperature=rl.sampling.temperature,
            tokens_per_microbatch=rl.update.tokens_per_microbatch,
            bootstrap_truncated=rl.critic.gae.bootstrap_truncated,
        )
        self.engine_config = sampling_engine(rl.sampling)
        self.engine: Sampler  # what the sampler works on; without tools they are one
        self.sampler: Sampler
        self.ahead: RolloutsAhead
        self.reward_model = open_reward_model(context, rl, runtime, policy)
        self.baselines: list[Baseline]  # of each engine, before any update
        self.reward: MixedReward
        self.verifier: MixedReward
        prompts = context.inputs["prepare_prompts"]
        self.prompts = tokenize_prompts(read_prompts(prompts / "train.parquet"), tokenizer)
        held_out = tokenize_prompts(read_prompts(prompts / "eval.parquet"), tokenizer)
        self.monitor_prompts = held_out[: context.config.evaluation.num_monitor_problems]
        self._max_tokens = longest([*self.prompts, *held_out], rl.sampling.max_new_tokens)
        positions = max_positions(policy.config) or sys.maxsize
        check_context(positions, [*self.prompts, *held_out], rl.sampling.max_new_tokens)
        self.rollouts = RolloutKeeper(context.work, context.tracker)
        self.checkpoints = Checkpoints(context.work / "checkpoints", rl, stage_key=context.stage_key)
        self.history: list[dict[str, float]] = []
        self.findings: list[dict[str, Any]] = []  # of the health rules, as they came up
        self.stopped: dict[str, Any] | None = None  # where a health rule stopped the run

    def workload(self) -> Workload:
        """What the run asks of its engine."""
        sampling = self.rl.sampling
        return Workload(
            max_concurrent=sampling.max_concurrent,
            max_tokens=self._max_tokens,
            learns=True,
            learns_meanwhile=sampling.staleness > 0,
            adapter=self.rl.update.adapter,
        )

    def prompts_of(self, iteration: int) -> list[Prompt]:
        """The prompts of one iteration (from 1): consecutive pieces of freshly shuffled epochs."""
        count = self.rl.prompts_per_iteration
        return window(self.prompts, (iteration - 1) * count, count, seed=self.seed)


def start_from(context: StageContext, stage: str) -> StageContext:
    """The context in which the artifact of ``stage`` is the input ``START``."""
    return replace(context, inputs={**context.inputs, START: context.inputs[stage]})


@contextmanager
def open_run(context: StageContext, section: str) -> Iterator[RlRun]:
    """Load the models and the rewards of one run; workers of the rewards are ended on the way out."""
    rl: RlConfig = getattr(context.config, section)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(context.config.hardware, seed=context.seed))
        tokenizer = ChatTokenizer.load(context.inputs[START] / MODEL)
        run = RlRun(context, rl, runtime, tokenizer)
        stack.callback(run.rollouts.write)  # also of a run that fails: they may say why
        stack.enter_context(closing(run.checkpoints))
        resources = replace(reward_resources(rl, run.reward_model), prefill=tokenizer.prefill)
        start = context.inputs[START] / MODEL
        engine = stack.enter_context(
            open_engine(
                start,
                tokenizer,
                config=run.engine_config,
                work=run.workload(),
                runtime=runtime,
                progress=context.progress,
            )
        )
        run.engine = engine
        run.sampler = stack.enter_context(with_tools(engine, tokenizer, rl.sampling.episodes))
        run.ahead = stack.enter_context(closing(RolloutsAhead()))
        run.reward = stack.enter_context(build_rewards(rl.rewards, resources=resources))
        run.verifier = stack.enter_context(verifier(context.config.evaluation, prefill=tokenizer.prefill))
        yield run


def resolve_algorithm(rl: RlConfig) -> Algorithm:
    """The row of the table that the configuration names, with its constants.

    Raises:
        ConfigError: no such row, or a constant that means nothing for it.
    """
    if rl.algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {rl.algorithm!r}", fix=f"choose one of {', '.join(ALGORITHMS)}")
    if ALGORITHMS[rl.algorithm].uses_critic and rl.sampling.max_replacements:
        raise ConfigError(
            f"max_replacements means nothing for {rl.algorithm}: with a critic, groups of equal rewards teach too",
            where="sampling.max_replacements",
            fix="set it to 0, or choose an algorithm without a critic",
        )
    critic, limit = rl.critic, rl.sampling.max_new_tokens
    constants = {"gamma": critic.gamma, "lam": critic.lam, "lam_alpha": critic.gae.lam_alpha}
    row = algorithms(**constants, lam_value=critic.gae.lam_value, max_new_tokens=limit)[rl.algorithm]
    return with_objective(row, rl.update.objective, name=rl.algorithm, max_new_tokens=limit)


def uses_reward_model(rl: RlConfig) -> bool:
    """Whether a run needs the reward model: as a reward, or to start the critic from.

    Raises:
        ConfigError: as :func:`resolve_algorithm`; a flow asks before any work.
    """
    in_reward = any(term.kind == "reward_model" for term in rl.rewards)
    in_critic = resolve_algorithm(rl).uses_critic and rl.critic.initialise_from == "reward_model"
    return in_reward or in_critic


def outside(config: Sections, *, section: str) -> str:
    """Digest of what a run depends on outside of this code: the user's own rewards, the search tool's corpus."""
    settings: RlConfig | RejectionConfig = getattr(config, section)
    modules = sorted({term.kind.partition(":")[0] for term in settings.rewards if ":" in term.kind})
    digests = [*(closure_digest(module) for module in modules), corpus_digest(settings.sampling.episodes)]
    return " ".join(filter(None, digests))


def _policy(context: StageContext, rl: RlConfig, runtime: Runtime) -> PreTrainedModel | AdaptedModel:
    """All of the SFT checkpoint's weights, or an adapter on it, frozen."""
    start, adapter = context.inputs[START] / MODEL, rl.update.adapter
    model = runtime.load_base(start) if adapter.rank else runtime.load_trainable(start)
    check_model(model, ChatTokenizer.load(start))
    return add_adapter(model, adapter, "policy", seed=context.seed) if adapter.rank else model


def _reference(
    context: StageContext, runtime: Runtime, policy: PreTrainedModel | AdaptedModel
) -> PreTrainedModel | AdaptedModel:
    """The SFT checkpoint: the policy's base with every adapter off, where it has one."""
    is_adapted = isinstance(policy, AdaptedModel)
    return AdaptedModel(policy.base, "") if is_adapted else runtime.load_reference(context.inputs[START] / MODEL)


def _critic(
    context: StageContext, rl: RlConfig, runtime: Runtime, policy: PreTrainedModel | AdaptedModel
) -> ScalarModel:
    """The critic where the configuration places it.

    Raises:
        ModelError: an adapter is to start from a reward model that is no adapter of the same base.
    """
    placement, source = rl.critic.placement, rl.critic.initialise_from
    if placement == "head":
        return ScalarModel.on_trunk(policy)
    start = context.inputs["reward_model" if source == "reward_model" else START] / MODEL
    if placement == "trunk":
        return ScalarModel.on_trunk(runtime.load_trainable(start))
    if source == "reward_model":
        return ScalarModel.on_trunk(load_adapter(policy, start, "critic"))
    return ScalarModel.on_trunk(add_adapter(policy, rl.update.adapter, "critic", seed=context.seed))


def window(prompts: Sequence[Prompt], start: int, count: int, *, seed: int) -> list[Prompt]:
    """``count`` prompts from place ``start`` of an endless row of epochs, each in an order of its own."""
    places = (divmod(place, len(prompts)) for place in range(start, start + count))
    return [prompts[_order(len(prompts), seed, epoch)[offset]] for epoch, offset in places]


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return shuffled(count, seed, "prompts", epoch)
