"""The parts of an RL run as a preset describes them: models, engine, rewards and prompts, all of them finished."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RlConfig
from rlcore.distributed.build import LearnerPlan, make_learner, make_policy
from rlcore.distributed.cluster.ray_cluster import Cluster, open_cluster
from rlcore.distributed.cluster.remote_ranks import cluster_ranks
from rlcore.distributed.cluster.samplers import open_samplers
from rlcore.distributed.cluster.scorers import open_scorers
from rlcore.distributed.distributed_learner import LearnerGroup
from rlcore.distributed.local_ranks import child_ranks
from rlcore.hardware.runtime import Runtime
from rlcore.loop import HeldOut, Parts
from rlcore.models.architectures import max_positions
from rlcore.models.reward_ensemble import RewardModel
from rlcore.rewards.mix import MixedReward
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import Sampler
from rlcore.tasks.kinds.rl.drawn_prompts import drawn_prompts
from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.stages import sampling_of, terms_of
from rlcore.tasks.steps.base import MODEL, StageContext
from rlcore.tasks.steps.episodes import episodes_digest, with_tools
from rlcore.tasks.steps.rewards import (
    file_digest,
    files_of,
    open_reward_models,
    reward_model_folders,
    reward_resources,
    verifier,
)
from rlcore.tasks.steps.rollout_engine import Workload, engine_dtype, longest, open_engine, sampling_engine
from rlcore.tasks.steps.tokens import check_context, read_prompt_sets
from rlcore.tasks.store.code_hash import closure_digest
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner_protocol import LearnerHandle
from rlcore.training.local_learner import LocalLearner
from rlcore.types import Prompt

START, REFERENCE = "start", "reference"  # the inputs that a run starts from and measures KL to, whoever made them


def start_from(context: StageContext, stage: str, reference: str) -> StageContext:
    """The context in which the artifact of ``stage`` is the input ``START``, and that of ``reference`` REFERENCE."""
    named = {START: context.inputs[stage], REFERENCE: context.inputs[reference]}
    return replace(context, inputs={**context.inputs, **named})


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
    evaluation, tokenizer = context.config.evaluation, ChatTokenizer.load(context.inputs[START] / MODEL)
    monitored = _monitored(context, evaluated, tokenizer)
    rl = stage.settings if monitored else replace(stage.settings, eval_every=0)
    prompts = read_prompt_sets(context, tuple(stage.prompts), "train", tokenizer)
    if stage.draw:
        prompts = drawn_prompts(context, stage.draw, prompts)
    held_out = read_prompt_sets(context, evaluated, "eval", tokenizer)
    with ExitStack() as stack:
        cluster = stack.enter_context(_cluster(context, runtime))
        learner, reward = _learner_and_reward(stack, context, rl, runtime, tokenizer, cluster)
        max_tokens = _longest_text(context, learner, [*prompts, *held_out])
        engine = stack.enter_context(_engine(context, rl, runtime, tokenizer, max_tokens, cluster))
        sampler = stack.enter_context(with_tools(engine, tokenizer, rl.sampling.episodes))
        judge = stack.enter_context(verifier(evaluation, prefill=tokenizer.prefill))
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


def _cluster(context: StageContext, runtime: Runtime) -> AbstractContextManager[Cluster | None]:
    """The Ray cluster of a run that is placed on one."""
    placement = context.config.placement
    if placement.backend != "ray":
        return nullcontext()
    return open_cluster(placement, gpus=runtime.device.type == "cuda", note=context.progress)


def _learner_and_reward(
    stack: ExitStack,
    context: StageContext,
    rl: RlConfig,
    runtime: Runtime,
    tokenizer: ChatTokenizer,
    cluster: Cluster | None,
) -> tuple[LocalLearner | LearnerGroup, MixedReward]:
    """What learns and what scores: in this process on one base, or where the placement has them."""
    plan, placement = _plan(context, rl), context.config.placement
    policy = make_policy(plan, runtime) if placement.backend == "local" else None
    budget, models = rl.update.tokens_per_microbatch, dict[str, RewardModel]()
    if not rl.rewards:  # the KL to a teacher is all that is paid
        reward = MixedReward(())
    elif cluster is not None and placement.ray.scorers:
        folders = reward_model_folders(context, rl.rewards)
        reward = stack.enter_context(
            open_scorers(cluster, rl.rewards, folders, runtime, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
        )
    else:
        models = open_reward_models(context, rl.rewards, runtime, policy)
        resources = reward_resources(models, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
        reward = stack.enter_context(build_rewards(rl.rewards, resources=resources))
    learner: LocalLearner | LearnerGroup
    if policy is not None:
        beside = [member for model in models.values() for member in model.members]
        learner = make_learner(plan, policy, runtime, beside=beside)
    else:
        ranks = cluster_ranks(cluster, runtime.device) if cluster else child_ranks(placement, runtime.device)
        learner = LearnerGroup(plan, placement, runtime, note=context.progress, ranks=ranks)
    return stack.enter_context(closing(learner)), reward


def _monitored(context: StageContext, names: tuple[str, ...], tokenizer: ChatTokenizer) -> list[Prompt]:
    """The held-out problems that are asked while a run trains: those that have a reference to be held against."""
    asked = read_prompt_sets(context, names, "eval", tokenizer, limit=context.config.evaluation.num_monitor_problems)
    found = [prompt for prompt in asked if prompt.has_reference]
    if asked and not found:
        context.progress("no held-out prompt has a reference: no accuracy is measured while the run trains")
    return found


def _longest_text(context: StageContext, learner: LearnerHandle, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt and its completion.

    Raises:
        ConfigError: the model does not read as many.
    """
    max_new_tokens = context.config.stage.settings.sampling.max_new_tokens
    positions = max_positions(learner.facts.config) or sys.maxsize
    check_context(positions, prompts, max_new_tokens, key=f"stages.{context.stage}.sampling.max_new_tokens")
    return longest(prompts, max_new_tokens)


def needed_reward_models(rl: RlConfig) -> tuple[str, ...]:
    """The stages whose reward models a run needs: as rewards, or to start its critic from.

    Raises:
        ConfigError: as :func:`resolve_algorithm`; a flow asks before any work.
    """
    in_rewards = [term.stage for term in rl.rewards if term.kind == "reward_model"]
    in_critic = resolve_algorithm(rl).uses_critic and rl.critic.initialise_from != "policy"
    return tuple(dict.fromkeys([*in_rewards, *([rl.critic.initialise_from] if in_critic else [])]))


def outside(config: Sections) -> str:
    """Digest of what a stage that samples and scores depends on outside of this code.

    The user's own rewards with all that is the user's own of what they import, the files that they and judges read, the
    search tool's corpus, and the environment of the episodes likewise.

    Raises:
        DataError: a file cannot be read.
    """
    terms, sampling = tuple(terms_of(config.stage).values()), sampling_of(config.stage)
    assert sampling is not None
    modules = sorted({term.module for term in terms if term.module})
    files = [file_digest(path) for term in terms for path in files_of(term)]
    digests = [*(closure_digest(module) for module in modules), *files, episodes_digest(sampling.episodes)]
    return " ".join(filter(None, digests))


def _engine(
    context: StageContext,
    rl: RlConfig,
    runtime: Runtime,
    tokenizer: ChatTokenizer,
    max_tokens: int,
    cluster: Cluster | None,
) -> AbstractContextManager[Sampler]:
    """The engine, sized for the run; ``max_tokens``: of the longest prompt and its completion."""
    start = context.inputs[START] / MODEL
    if cluster is not None and context.config.placement.ray.samplers:
        count = rl.sampling.max_concurrent
        return nullcontext(open_samplers(cluster, start, runtime, max_concurrent=count))
    work = Workload(
        max_concurrent=rl.sampling.max_concurrent,
        max_tokens=max_tokens,
        learns=True,
        learns_meanwhile=rl.sampling.staleness > 0,
        adapter=rl.update.adapter,
    )
    config = sampling_engine(rl.sampling)
    return open_engine(start, tokenizer, config=config, work=work, runtime=runtime, progress=context.progress)


def _plan(context: StageContext, rl: RlConfig) -> LearnerPlan:
    """What learns: the policy from the stage's start, the critic from it too, or from a reward model."""
    source = rl.critic.initialise_from
    critic = START if source == "policy" else source
    start, critic_start, reference = (context.inputs[name] / MODEL for name in (START, critic, REFERENCE))
    return LearnerPlan(start=start, critic_start=critic_start, reference=reference, config=rl, seed=context.seed)
