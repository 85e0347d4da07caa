"""One PPO iteration of ours: ``python -m benchmarks.peers.ppo_ours full|trunk|adapters tiny|smollm2``.

``full``: a critic with a trunk of its own; ``trunk``: the critic is a head on the policy's trunk; ``adapters``: policy,
critic and reward model are adapters of rank 8 on one base, which is the reference too.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.peers import ppo_work, work
from benchmarks.peers.arena import Meter, peak_mib
from benchmarks.peers.forced import decode_forced
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import AdapterConfig, CriticConfig, KlConfig, OptimConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.models.heads import ScalarModel, score_rewards
from rlcore.models.lora import AdaptedModel, add_adapter
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.packing import TokenSequence
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.training.experience import build_experience
from rlcore.training.judges import Judges
from rlcore.training.learner import Learner
from rlcore.training.local import merged_state
from rlcore.types import Prompt, Rollout, Score, ScoredRollout

NAMES = {"full": "ours, full", "trunk": "ours, shared trunk", "adapters": "ours, adapters"}
ADAPTER = AdapterConfig(rank=ppo_work.RANK, alpha=2 * ppo_work.RANK)


@dataclass(frozen=True, kw_only=True)
class Models:
    """What one run holds; the engine has weights of its own."""

    engine: LlamaForCausalLM
    policy: PreTrainedModel
    reference: PreTrainedModel
    critic: ScalarModel
    reward_model: ScalarModel


def make_models(kind: str, size: str) -> Models:
    """The five models of PPO, as many of them on one trunk as the kind says."""
    base = work.make_model(size)
    engine = copy.deepcopy(base).requires_grad_(False).eval()
    engine.set_attn_implementation(GROUPED_ATTENTION)
    base.set_attn_implementation(TREE_ATTENTION)
    if kind == "adapters":
        policy, critic, judge = (add_adapter(base, ADAPTER, name, seed=0) for name in ("policy", "critic", "judge"))
        models = Models(
            engine=engine,
            policy=policy,
            reference=AdaptedModel(base, ""),
            critic=ScalarModel.on_trunk(critic),
            reward_model=ScalarModel.on_trunk(judge).requires_grad_(False),
        )
    else:
        models = Models(
            engine=engine,
            policy=base,
            reference=copy.deepcopy(base).requires_grad_(False),
            critic=ScalarModel.on_trunk(base if kind == "trunk" else copy.deepcopy(base)),
            reward_model=ScalarModel.on_trunk(copy.deepcopy(base)).requires_grad_(False),
        )
    torch.nn.init.normal_(models.reward_model.head.weight, std=0.02, generator=torch.Generator().manual_seed(2))
    return models


def make_config(kind: str, task: ppo_work.Work) -> RlConfig:
    """The work's settings."""
    placement = {"full": "trunk", "trunk": "head", "adapters": "adapter"}[kind]
    return RlConfig(
        algorithm="ppo",
        num_iterations=1,
        prompts_per_iteration=len(task.prompts),
        group_size=task.group_size,
        learning_rate=ppo_work.LEARNING_RATE,
        rewards=(),
        sampling=SamplingConfig(max_new_tokens=int(task.lengths.max())),
        update=UpdateConfig(
            epochs=ppo_work.NUM_EPOCHS,
            tokens_per_microbatch=task.tokens_per_microbatch,
            optim=OptimConfig(beta2=0.999),
            adapter=ADAPTER if kind == "adapters" else AdapterConfig(),
        ),
        kl=KlConfig(coefficient=ppo_work.KL, placement="reward"),
        critic=CriticConfig(placement=placement, learning_rate=ppo_work.LEARNING_RATE, coefficient=0.1),
    )


def sample(models: Models, task: ppo_work.Work) -> list[Rollout]:
    """Completions of the forced lengths."""
    made = decode_forced(models.engine, task.repeated, task.lengths)
    rows = zip(task.repeated, made.tokens.tolist(), made.logprobs.tolist(), task.lengths.tolist(), strict=True)
    return [
        Rollout(
            prompt=Prompt(prompt_id=str(number), messages=(), token_ids=prompt, reference="", task="work"),
            completion_ids=tuple(tokens[:length]),
            sampler_logprobs=tuple(logprobs[:length]),
            loss_mask=(True,) * length,
            policy_version=0,
            finish_reason="stop",
            text="",
        )
        for number, (prompt, tokens, logprobs, length) in enumerate(rows)
    ]


def score(models: Models, task: ppo_work.Work, rollouts: list[Rollout]) -> list[list[ScoredRollout]]:
    """The reward model's scores, group by group."""
    sequences = [TokenSequence(prompt_ids=one.prompt.token_ids, completion_ids=one.completion_ids) for one in rollouts]
    scores = score_rewards(models.reward_model, sequences, tokens_per_microbatch=task.tokens_per_microbatch).tolist()
    scored = [
        ScoredRollout(rollout=one, score=Score(value=value, parts={}))
        for one, value in zip(rollouts, scores, strict=True)
    ]
    return [scored[start : start + task.group_size] for start in range(0, len(scored), task.group_size)]


def main(kind: str, size: str) -> None:
    bare = peak_mib()
    task = ppo_work.make_work(size)
    models, config, algorithm = make_models(kind, size), make_config(kind, task), ALGORITHMS["ppo"]
    learner = Learner(models.policy, models.critic, algorithm=algorithm, config=config)
    judges = Judges(
        policy=models.policy,
        reference=models.reference,
        critic=models.critic,
        temperature=1.0,
        tokens_per_microbatch=task.tokens_per_microbatch,
    )
    meter = Meter(bare_mib=bare)
    start = time.process_time()
    rollouts = sample(models, task)
    meter.add("generation", time.process_time() - start)
    experience = build_experience(
        score(models, task, rollouts),
        algorithm,
        judges,
        kl=config.kl,
        kl_coefficient=ppo_work.KL,
        truncated="score",
        need_old_logprobs=learner.needs_old_logprobs,
    )
    learner.update(experience.samples, seed=0)
    with torch.no_grad():
        state = merged_state(models.policy)
        for name, tensor in models.engine.state_dict().items():
            tensor.copy_(state[name])
    tokens = sum(len(one.completion_ids) for one in experience.samples)
    parameters = sum(parameter.numel() for parameter in models.engine.parameters())
    meter.report(NAMES[kind], completion_tokens=tokens, num_parameters=parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
