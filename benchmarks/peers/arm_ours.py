"""One step of rlcore: the native engine's decoding, experience, one update by the learner, and the weight sync."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial

from transformers import LlamaForCausalLM

from benchmarks.peers import work
from benchmarks.peers.forced import decode_forced
from rlcore.algorithms.table import ALGORITHMS
from rlcore.algorithms.weighting import token_mean
from rlcore.config import KlConfig, OptimConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.training.experience import build_experience
from rlcore.training.learner import Learner
from rlcore.training.scoring_models import ScoringModels
from rlcore.types import Prompt, Rollout, Score, ScoredRollout

TOKENS_PER_MICROBATCH = 2048


def sample(engine: LlamaForCausalLM) -> list[list[ScoredRollout]]:
    """Return groups of scored completions of the forced lengths."""
    prompts, lengths = work.prompts(), work.completion_lengths()
    repeated = [prompt for prompt in prompts for _ in range(work.GROUP_SIZE)]
    made = decode_forced(engine, repeated, lengths)
    rollouts = [
        ScoredRollout(
            rollout=Rollout(
                prompt=Prompt(prompt_id=str(number), messages=(), token_ids=prompt, reference="", task="work"),
                completion_ids=tuple(made.tokens[number, :length].tolist()),
                sampler_logprobs=tuple(made.logprobs[number, :length].tolist()),
                loss_mask=(True,) * length,
                policy_version=0,
                finish_reason="stop",
                text="",
            ),
            score=Score(value=float(number % 2), terms={}),
        )
        for number, (prompt, length) in enumerate(zip(repeated, made.lengths.tolist(), strict=True))
    ]
    return [rollouts[start : start + work.GROUP_SIZE] for start in range(0, len(rollouts), work.GROUP_SIZE)]


def main(name: str) -> None:
    model = work.make_model(name)
    engine = copy.deepcopy(model).requires_grad_(False).eval()
    engine.set_attn_implementation(GROUPED_ATTENTION)
    model.set_attn_implementation(TREE_ATTENTION)  # as in load_policy
    algorithm = replace(ALGORITHMS["grpo"], weighting=token_mean)
    config = RlConfig(
        algorithm="grpo",
        num_iterations=1,
        prompts_per_iteration=work.NUM_PROMPTS,
        group_size=work.GROUP_SIZE,
        learning_rate=work.LEARNING_RATE,
        rewards=(),
        sampling=SamplingConfig(max_new_tokens=work.MAX_NEW_TOKENS),
        update=UpdateConfig(tokens_per_microbatch=TOKENS_PER_MICROBATCH, optim=OptimConfig(beta2=0.999)),
    )
    learner = Learner(model, None, algorithm=algorithm, config=config)
    judges = partial(
        ScoringModels, reference=None, critic=None, temperature=1.0, tokens_per_microbatch=TOKENS_PER_MICROBATCH
    )
    clock = work.Clock()
    with clock.generation():
        groups = sample(engine)
    experience = build_experience(
        groups,
        algorithm,
        judges(policy=model),
        kl=KlConfig(),
        kl_coefficient=0.0,
        truncated="score",
        need_old_logprobs=learner.needs_old_logprobs,
    )
    learner.update(experience.samples, seed=0)
    engine.load_state_dict(model.state_dict())
    clock.report("ours", sum(len(sample.completion_ids) for sample in experience.samples))


if __name__ == "__main__":
    main(sys.argv[1])
