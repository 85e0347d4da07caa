"""Placement of an RL run's components: in this process, on local ranks, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore.choices import choices
from rlcore.config import RlConfig
from rlcore.distributed.build import LearnerPlan, Policy, make_learner, make_policy
from rlcore.distributed.cluster.ray_cluster import open_cluster
from rlcore.distributed.cluster.remote import cluster_ranks, open_samplers, open_scorers
from rlcore.distributed.distributed_learner import DistributedLearner
from rlcore.distributed.local_ranks import child_ranks
from rlcore.models.runtime import Runtime
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import Sampler
from rlcore.tasks.steps.base import MODEL, StageContext
from rlcore.tasks.steps.rewards import open_reward_models, reward_model_folders, reward_resources
from rlcore.tasks.steps.rollout_engine import open_engine, sampling_engine
from rlcore.tasks.steps.runtime import Workload
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner_protocol import LearnerProtocol

if TYPE_CHECKING:
    from rlcore.models.reward_ensemble import RewardModel

START, REFERENCE = "start", "reference"  # inputs with the starting checkpoint and the reference policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Learner and reward; ``open_engine`` opens the sampler for texts of up to a number of tokens."""

    learner: LearnerProtocol
    reward: WeightedReward
    open_engine: Callable[[int], AbstractContextManager[Sampler]]


@contextmanager
def _here(context: StageContext, rl: RlConfig, runtime: Runtime, tokenizer: ChatTokenizer) -> Iterator[Placed]:
    plan = _plan(context, rl)
    policy = make_policy(plan, runtime)
    with ExitStack() as stack:
        reward, models = _reward_here(stack, context, rl, runtime, tokenizer, policy)
        beside = [member for model in models.values() for member in model.members]
        learner = stack.enter_context(closing(make_learner(plan, policy, runtime, beside=beside)))
        yield Placed(learner=learner, reward=reward, open_engine=_engine_here(context, rl, runtime, tokenizer))


@contextmanager
def _with_ranks(context: StageContext, rl: RlConfig, runtime: Runtime, tokenizer: ChatTokenizer) -> Iterator[Placed]:
    placement = context.config.distributed
    with ExitStack() as stack:
        reward, _ = _reward_here(stack, context, rl, runtime, tokenizer, None)
        ranks = child_ranks(placement, runtime.device)
        group = DistributedLearner(_plan(context, rl), placement, runtime, log=context.log, ranks=ranks)
        learner = stack.enter_context(closing(group))
        yield Placed(learner=learner, reward=reward, open_engine=_engine_here(context, rl, runtime, tokenizer))


@contextmanager
def _on_ray(context: StageContext, rl: RlConfig, runtime: Runtime, tokenizer: ChatTokenizer) -> Iterator[Placed]:
    placement, start = context.config.distributed, context.inputs[START] / MODEL
    with ExitStack() as stack:
        has_gpus = runtime.device.type == "cuda"
        cluster = stack.enter_context(open_cluster(placement, gpus=has_gpus, log=context.log))
        if rl.rewards and placement.ray.num_reward_workers:
            folders, budget = reward_model_folders(context.inputs, rl.rewards), rl.update.tokens_per_microbatch
            prefill = tokenizer.prefill
            scorers = open_scorers(cluster, rl.rewards, folders, runtime, tokens_per_microbatch=budget, prefill=prefill)
            reward = stack.enter_context(scorers)
        else:
            reward, _ = _reward_here(stack, context, rl, runtime, tokenizer, None)
        ranks = cluster_ranks(cluster, runtime.device)
        group = DistributedLearner(_plan(context, rl), placement, runtime, log=context.log, ranks=ranks)
        learner = stack.enter_context(closing(group))

        def open_there(max_tokens: int) -> AbstractContextManager[Sampler]:
            count = rl.sampling.max_concurrent
            return nullcontext(
                open_samplers(cluster, start, runtime.of_native_engine(rl.update.lora), max_concurrent=count)
            )

        here = _engine_here(context, rl, runtime, tokenizer)
        yield Placed(
            learner=learner, reward=reward, open_engine=open_there if placement.ray.num_rollout_workers else here
        )


_Open = Callable[[StageContext, RlConfig, Runtime, ChatTokenizer], AbstractContextManager[Placed]]
PLACES: Mapping[str, _Open] = choices("distributed.backend", {"local": _here, "processes": _with_ranks, "ray": _on_ray})


def _reward_here(
    stack: ExitStack,
    context: StageContext,
    rl: RlConfig,
    runtime: Runtime,
    tokenizer: ChatTokenizer,
    policy: Policy | None,
) -> tuple[WeightedReward, Mapping[str, RewardModel]]:
    """Open the reward and its models. Without terms, only the KL to ``ref_policy`` trains."""
    if not rl.rewards:
        return WeightedReward(()), {}
    models, budget = open_reward_models(context.inputs, rl.rewards, runtime, policy), rl.update.tokens_per_microbatch
    resources = reward_resources(models, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
    return stack.enter_context(build_rewards(rl.rewards, resources=resources)), models


def _engine_here(
    context: StageContext, rl: RlConfig, runtime: Runtime, tokenizer: ChatTokenizer
) -> Callable[[int], AbstractContextManager[Sampler]]:
    def opened(max_tokens: int) -> AbstractContextManager[Sampler]:
        work = Workload(
            max_concurrent=rl.sampling.max_concurrent,
            max_tokens=max_tokens,
            learns=True,
            learns_meanwhile=rl.sampling.staleness > 0,
            takes_turns=context.config.distributed.takes_turns(staleness=rl.sampling.staleness),
            adapter=rl.update.lora,
        )
        start, config = context.inputs[START] / MODEL, sampling_engine(rl.sampling)
        return open_engine(start, tokenizer, config=config, work=work, runtime=runtime, progress=context.log)

    return opened


def _plan(context: StageContext, rl: RlConfig) -> LearnerPlan:
    source = rl.critic.init_from
    critic = START if source == "policy" else source
    start, critic_start, reference = (context.inputs[name] / MODEL for name in (START, critic, REFERENCE))
    return LearnerPlan(start=start, critic_start=critic_start, reference=reference, config=rl, seed=context.seed)
