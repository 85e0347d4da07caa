"""The parts of an RL run as a preset describes them: models, engine, rewards and prompts, all of them finished."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from rlcore.algorithms.settings import resolve_algorithm
from rlcore.config import RejectionConfig, RlConfig, RlStage
from rlcore.loop import HeldOut, Parts
from rlcore.models.architectures import max_positions
from rlcore.models.check import check_model
from rlcore.models.heads import ScalarModel
from rlcore.models.lora import AdaptedModel, add_adapter, load_adapter
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import Sampler
from rlcore.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.training.local import LocalLearner
from tasks.home.code_hash import closure_digest
from tasks.preset.sections import Sections
from tasks.steps.base import MODEL, StageContext
from tasks.steps.episodes import corpus_digest, with_tools
from tasks.steps.rewards import open_reward_models, reward_resources, verifier
from tasks.steps.rollout_engine import Workload, engine_dtype, longest, open_engine, sampling_engine
from tasks.steps.runtime import Runtime
from tasks.steps.tokens import check_context, read_prompt_sets

START = "start"  # the input that a run starts from, whichever stage made it


def start_from(context: StageContext, stage: str) -> StageContext:
    """The context in which the artifact of ``stage`` is the input ``START``."""
    return replace(context, inputs={**context.inputs, START: context.inputs[stage]})


@contextmanager
def open_parts(context: StageContext, evaluated: tuple[str, ...], runtime: Runtime) -> Iterator[Parts]:
    """Everything that a run works with; its engine, and the workers of its rewards, are ended on the way out.

    ``evaluated``: the data sets whose held-out problems are asked while it trains.

    Raises:
        ConfigError: a setting does not fit the model, or the engine's GPUs are not there.
        ModelError: a checkpoint cannot be trained.
        SamplingError: the engine does not start.
    """
    stage: RlStage = context.config.stage
    rl, evaluation = stage.settings, context.config.evaluation
    tokenizer = ChatTokenizer.load(context.inputs[START] / MODEL)
    policy = _policy(context, rl, runtime)
    reward_models = open_reward_models(context, rl.rewards, runtime, policy)
    prompts = read_prompt_sets(context, tuple(stage.prompts), "train", tokenizer)
    held_out = read_prompt_sets(context, evaluated, "eval", tokenizer)
    check_context(max_positions(policy.config) or sys.maxsize, [*prompts, *held_out], rl.sampling.max_new_tokens)
    budget = rl.update.tokens_per_microbatch
    resources = reward_resources(reward_models, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
    with ExitStack() as stack:
        beside = [member for model in reward_models.values() for member in model.members]
        learner = stack.enter_context(closing(_learner(context, rl, runtime, policy, beside=beside)))
        max_tokens = longest([*prompts, *held_out], rl.sampling.max_new_tokens)
        engine = stack.enter_context(_engine(context, rl, runtime, tokenizer, max_tokens))
        sampler = stack.enter_context(with_tools(engine, tokenizer, rl.sampling.episodes))
        reward = stack.enter_context(build_rewards(rl.rewards, resources=resources))
        judge = stack.enter_context(verifier(evaluation, prefill=tokenizer.prefill))
        count = evaluation.num_monitor_problems
        monitored = read_prompt_sets(context, evaluated, "eval", tokenizer, limit=count)
        yield Parts(
            seed=context.seed,
            learner=learner,
            engine=engine,
            sampler=sampler,
            engine_dtype=engine_dtype(sampling_engine(rl.sampling), runtime),
            tokenizer=tokenizer,
            reward=reward,
            prompts=prompts,
            folder=context.work / "checkpoints",
            identity={"stage": context.stage_key},
            held_out=HeldOut(prompts=monitored, verifier=judge, confidence=evaluation.confidence),
            health=context.config.health,
            shares=stage.prompts,
        )


def needed_reward_models(rl: RlConfig) -> tuple[str, ...]:
    """The stages whose reward models a run needs: as rewards, or to start its critic from.

    Raises:
        ConfigError: as :func:`resolve_algorithm`; a flow asks before any work.
    """
    in_rewards = [term.stage for term in rl.rewards if term.kind == "reward_model"]
    in_critic = resolve_algorithm(rl).uses_critic and rl.critic.initialise_from != "policy"
    return tuple(dict.fromkeys([*in_rewards, *([rl.critic.initialise_from] if in_critic else [])]))


def outside(config: Sections) -> str:
    """Digest of what a run depends on outside of this code: the user's own rewards, the search tool's corpus."""
    settings: RlConfig | RejectionConfig = config.stage.settings
    modules = sorted({term.kind.partition(":")[0] for term in settings.rewards if ":" in term.kind})
    digests = [*(closure_digest(module) for module in modules), corpus_digest(settings.sampling.episodes)]
    return " ".join(filter(None, digests))


def _engine(
    context: StageContext, rl: RlConfig, runtime: Runtime, tokenizer: ChatTokenizer, max_tokens: int
) -> AbstractContextManager[Sampler]:
    """The engine, sized for the run; ``max_tokens``: of the longest prompt and its completion."""
    work = Workload(
        max_concurrent=rl.sampling.max_concurrent,
        max_tokens=max_tokens,
        learns=True,
        learns_meanwhile=rl.sampling.staleness > 0,
        adapter=rl.update.adapter,
    )
    start, config = context.inputs[START] / MODEL, sampling_engine(rl.sampling)
    return open_engine(start, tokenizer, config=config, work=work, runtime=runtime, progress=context.progress)


def _learner(
    context: StageContext,
    rl: RlConfig,
    runtime: Runtime,
    policy: PreTrainedModel | AdaptedModel,
    *,
    beside: Iterable[nn.Module],
) -> LocalLearner:
    """What learns, on ``policy``; ``beside``: models that share its memory."""
    algorithm = resolve_algorithm(rl)
    critic = _critic(context, rl, runtime, policy) if algorithm.uses_critic else None
    reference = _reference(context, runtime, policy) if rl.kl.coefficient > 0.0 else None
    return LocalLearner(Learner(policy, critic, algorithm=algorithm, config=rl), reference, beside=beside)


def _policy(context: StageContext, rl: RlConfig, runtime: Runtime) -> PreTrainedModel | AdaptedModel:
    """All of the starting checkpoint's weights, or an adapter on it, frozen."""
    start, adapter = context.inputs[START] / MODEL, rl.update.adapter
    model = runtime.load_base(start) if adapter.rank else runtime.load_trainable(start)
    check_model(model, ChatTokenizer.load(start))
    return add_adapter(model, adapter, "policy", seed=context.seed) if adapter.rank else model


def _reference(
    context: StageContext, runtime: Runtime, policy: PreTrainedModel | AdaptedModel
) -> PreTrainedModel | AdaptedModel:
    """The starting checkpoint: the policy's base with every adapter off, where it has one."""
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
    start = context.inputs[START if source == "policy" else source] / MODEL
    if placement == "trunk":
        return ScalarModel.on_trunk(runtime.load_trainable(start))
    if source != "policy":
        return ScalarModel.on_trunk(load_adapter(policy, start, "critic"))
    return ScalarModel.on_trunk(add_adapter(policy, rl.update.adapter, "critic", seed=context.seed))
