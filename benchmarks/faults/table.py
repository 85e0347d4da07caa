"""Faults in runs: of each scene the names of its faults, and how each is injected."""

# ruff: noqa: F403, F405 - rows are written in the words of injectors.py

from __future__ import annotations

import math
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from benchmarks.faults.injectors import *
from benchmarks.faults.lab import AGENT, CALCULATOR, EVALUATED, NUM_ITERATIONS, SUMS, TWO_RANKS, UNTIED, start
from rlcore.algorithms.kl import KL_LOSSES
from rlcore.algorithms.surrogates import completion_ratio
from rlcore.types import Rollout, Score

NATIVE, LEARNER = "sampling.native:NativeSampler", "training.learner:Learner"
LOCAL, STATS = "training.local_learner:LocalLearner", "training.update_stats:StatAccumulator"
SCORED, SIGNAL = "loop.rollouts:score_groups", "loop.rollouts:group_has_signal"
MATH = "rewards.math_answer:MathReward.__call__"
DECODE, UNIFORMS, TOKENS = (f"sampling.native:{name}" for name in ("decode", "_uniforms", "sample_tokens"))
SPLIT, OPTIMIZER, SCHEDULE = (
    f"training.learner:{name}" for name in ("split_by_group", "make_optimizer", "set_schedule_step")
)
STATES, CRITIC = "training.losses:completion_states", "training.losses:critic_loss"
VALUES, WIRE = "training.scoring_models:score_values", "distributed.rank_pool:encode"


def _without_end(one: Rollout) -> Rollout:
    if one.finish_reason != "stop" or len(one.completion_ids) < 2:
        return one
    cut = {name: getattr(one, name)[:-1] for name in ("completion_ids", "sampler_logprobs", "loss_mask")}
    return replace(one, finish_reason="length", **cut)


def _another_template(stack: ExitStack) -> None:
    start()  # which also renders when it is made
    later = since(len(SUMS) + 11, lambda ids: (*ids[1:], ids[-1]))
    out("text.tokenization:ChatTokenizer.render_prompt", later)(stack)


def _weighted_wrongly(old: Any, self: Any, row: Any) -> Score:
    made: Score = old(self, row)
    total = sum(part.weight * made.terms.get(part.reward.name, 0.0) * 1.5 for part in self.terms)
    return replace(made, value=total)


def _merged_twice(old: Any, policy: Any) -> dict[str, torch.Tensor]:
    own, layers = old(policy), dict(policy.base.named_modules())
    bases = {name: getattr(layers.get(name.removesuffix(".weight")), "base_layer", None) for name in own}
    return {name: own[name] if base is None else 2.0 * own[name] - base.weight for name, base in bases.items()}


def _forgets_at_checkpoints(old: Any, self: Any, *given: Any, **more: Any) -> None:
    old(self, *given, **more)
    self.wait()
    self.learner.optimizer.state.clear()


ENGINE: dict[str, Inject] = {
    "the engine draws at half the temperature it reports": drawing(times(2.0)),
    "the engine draws at 0.8 of the temperature it reports": drawing(lambda logits: logits / 0.8),
    "the engine draws at 0.9 of the temperature it reports": drawing(lambda logits: logits / 0.9),
    "the engine draws at 1.1 times the temperature it reports": drawing(lambda logits: logits / 1.1),
    "the engine draws at 1.3 times the temperature it reports": drawing(lambda logits: logits / 1.3),
    "the engine draws greedily, and reports as if it drew": drawing(times(50.0)),
    "the engine draws of the 2 likeliest tokens": drawing(top_k(2)),
    "the engine draws of the 10 likeliest tokens": drawing(top_k(10)),
    "the engine draws of the likeliest 0.8": drawing(top_p(0.8)),
    "the engine draws of the likeliest 0.95": drawing(top_p(0.95)),
    "the engine draws of the likeliest 0.99": drawing(top_p(0.99)),
    "the engine drops tokens below 0.05 of the likeliest": drawing(
        lambda logits: logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(0.05), -torch.inf)
    ),
    "the engine draws all tokens alike": drawing(torch.zeros_like),
    "the engine never draws an end": drawing(likelier("", -torch.inf)),
    "the engine draws ends 1.6 times as often": drawing(likelier("", 0.5)),
    "the engine draws a digit half as often": drawing(likelier("1", -0.7)),
    "the engine lowers tokens that came before": fresh(penalised),
    "the engine draws each first token greedily": arg(DECODE, choose=greedy_at_first),
    "the engine reports log-probabilities of a flatter model": drawing(times(1.0), lambda it, heat: 0.97 * it / heat),
    "later: the engine draws and reports at 0.98 of the temperature": arg(TOKENS, temperature=times(0.98)),
    "the engine draws from streams of another seed": arg(UNIFORMS, seed=lambda seed: seed + 1),
    "every iteration has the same random numbers": arg(UNIFORMS, seed=always(7)),
    "a group's completions have the same random numbers": same_draws(1000),
    "two completions of a group have the same random numbers each": same_draws(2),
    "the engine takes the version, and no weights": at(
        f"{NATIVE}.load_weights", lambda _, self, state, policy_version: setattr(self, "policy_version", policy_version)
    ),
    "the engine takes the weights of a part": fresh(lambda: without("layers.1")),
    "the engine takes weights times 1.01": loading(lambda it: {name: 1.01 * value for name, value in it.items()}),
    "the engine's norms are not loaded": fresh(lambda: without("norm")),
    "the engine's weights are one update behind": fresh(lambda: loading(one_behind())),
    "the engine completes each prompt's neighbour": arg(DECODE, prompts=lambda them: [*them[4:], *them[:4]]),
    "later: the engine sees a prompt's first token twice": arg(
        DECODE, prompts=lambda them: [(ids[0], *ids) for ids in them]
    ),
    "later: completions end at half of the limit": arg(
        f"{NATIVE}.sample", params=fields(max_new_tokens=lambda count: count // 2)
    ),
    "groups are mixed over prompts, by the engine": engine_groups(
        lambda them: list(map(list, zip(*them, strict=True)))
    ),
    "groups are half as large": engine_groups(lambda them: [group[: len(group) // 2] for group in them]),
    "texts belong to other tokens": rollouts(
        lambda them: [replace(a, text=b.text) for a, b in zip(them, moved_on(them), strict=True)]
    ),
    "the engine masks the first token": rollouts(each(loss_mask=lambda mask: (False, *mask[1:]))),
    "the engine masks the end": rollouts(each(loss_mask=lambda mask: (*mask[:-1], False))),
    "the end is dropped, and the completion called cut": rollouts(lambda them: list(map(_without_end, them))),
    "a cut completion is called ended": rollouts(each(finish_reason=always("stop"))),
    "another chat template than the prompts', after a while": _another_template,
}
REWARDS: dict[str, Inject] = {
    "the reward's sign is swapped": scores(whole(times(-1.0))),
    "the total's sign is swapped, the parts are right": scores(valued(times(-1.0))),
    "1 - reward": scores(whole(lambda value: 1.0 - value)),
    "random rewards": scores(whole(lambda _: random.random())),
    "rewards moved on by one rollout": scores(moved_on),
    "one score in eight is that of the rollout before": scores(
        lambda them: [them[place - 1] if place % 8 == 3 else one for place, one in enumerate(them)]
    ),
    "scores are those of the first iteration": fresh(repeated),
    "rewards shuffled": scores(shuffled),
    "rewards shuffled from the tenth iteration on": fresh(lambda: scores(since(10, shuffled))),
    "a constant reward": scores(whole(always(0.5))),
    "rewards are halved": scores(valued(times(0.5))),
    "later: rewards above 0.5 count 0.5": scores(valued(lambda value: min(value, 0.5))),
    "the mix forgets weights": at("rewards.mix:WeightedReward._total", _weighted_wrongly),
    "the verifier calls right wrong, from the start": out(MATH, whole(lambda value: 1.0 - value)),
    "the verifier calls right wrong, later": fresh(lambda: out(MATH, since(30, whole(lambda value: 1.0 - value)))),
    "the verifier says 0 to all, later": fresh(lambda: out(MATH, since(30, whole(always(0.0))))),
    "the verifier says 1 to all, later": fresh(lambda: out(MATH, since(30, whole(always(1.0))))),
    "the verifier accepts answers that contain the reference": at(MATH, contains),
    "later: the verifier remembers texts, and not prompts": fresh(remembered_by_text),
    "a term gives its scores in another order": out("rewards.text_rewards:TextReward.__call__", moved_on),
    "completions keep the reference that they were graded with, another prompt's": at(
        "rewards.mix:WeightedReward.__call__", graded_with_others
    ),
}
PROMPTS: dict[str, Inject] = {
    "the same prompts for ever": turns(lambda prompts, number, right: list(prompts[: len(right)])),
    "half of the prompts never come": turns(
        lambda prompts, number, right: [prompts[(4 * number + place) % (len(prompts) // 2)] for place in range(4)]
    ),
    "prompts come in the order of the file": turns(
        lambda prompts, number, right: [prompts[(4 * (number - 1) + place) % len(prompts)] for place in range(4)]
    ),
    "one prompt stands in the place of another": turns(lambda prompts, number, right: [*right[:-1], right[0]]),
    "references are those of the next prompt": turns(
        lambda prompts, number, right: [
            replace(a, reference=b.reference) for a, b in zip(right, [*right[1:], right[0]], strict=True)
        ]
    ),
    "every iteration has the seed of the first": at(
        "loop.rollouts:derive_seed", lambda old, seed, *of: old(seed, *(of[:1] if of[0] == "rollouts" else of))
    ),
    "groups are mixed over prompts, when they are scored": out(
        SCORED, lambda them: list(map(list, zip(*them, strict=True)))
    ),
    "one completion of each group stands in the next": out(
        SCORED, lambda them: [[*a[:-1], b[-1]] for a, b in zip(them, moved_on(them), strict=True)]
    ),
    "groups are numbered one completion late": arg("training.experience:lay_out_episodes", group=moved_on),
    "a group is lost after it was scored": out(SCORED, lambda them: them[:-1]),
    "a group has its first completion twice": out(SCORED, lambda them: [[group[0], *group[:-1]] for group in them]),
}
SAMPLES: dict[str, Inject] = {
    "advantages negated": samples(each(advantages=torch.neg)),
    "advantages moved on by one": samples(before("advantages")),
    "advantages all zero": samples(each(advantages=torch.zeros_like)),
    "advantages ten times as large": samples(each(advantages=times(10.0))),
    "advantages not divided by the spread": samples(each(advantages=times(0.4))),
    "the engine's log-probabilities moved by one token": samples(each(sampler_logprobs=lambda it: it.roll(1))),
    "half of the samples are dropped": samples(lambda them: them[::2]),
    "samples stand twice": samples(lambda them: [*them, *them]),
    "the end is masked out of the loss": samples(each(loss_mask=mask_at(-1))),
    "the first token is masked out of the loss": samples(each(loss_mask=mask_at(0))),
    "a token in the middle is masked out of the loss": samples(each(loss_mask=mask_at(1))),
    "tokens are moved by one in the samples": samples(each(completion_ids=lambda ids: (*ids[1:], ids[-1]))),
    "prompts are another sample's": samples(
        lambda them: [replace(one, prompt_ids=them[place - 4].prompt_ids) for place, one in enumerate(them)]
    ),
    "the mean length is 1": out("training.experience:_metrics", lambda made: made | {"completion/length": 1.0}),
    "the learner gets advantages moved on by one sample": learner_gets(before("advantages")),
    "the learner gets masks without the last token": learner_gets(each(loss_mask=mask_at(-1))),
    "the learner gets half of the samples": learner_gets(lambda them: them[::2]),
    "the learner gets the samples of the update before": fresh(lambda: learner_gets(one_behind())),
    "an update begins with tokens of another sample": update_gets(tokens_of_the_one_before),
    "an update begins with advantages of the other sign": update_gets(each(advantages=torch.neg)),
}
LOSSES: dict[str, Inject] = {
    "the loss climbs": terms(lambda loss, _: -loss),
    "the loss is halved": terms(lambda loss, _: 0.5 * loss),
    "the loss forgets advantages": inputs(advantages=torch.ones_like),
    "advantages negated within the loss": inputs(advantages=torch.neg),
    "later: advantages within 1 alone": inputs(advantages=lambda value: value.clamp(-1.0, 1.0)),
    "advantages of the sequences before, within the loss": at(
        "training.minibatches:Columns.get",
        lambda old, self, name: old(self, name).roll(1) if name == "advantages" else old(self, name),
    ),
    "the loss has a bonus for entropy that nobody asked for": coefficients(entropy=0.05),
    "tokens weigh twice as much": weights_of_tokens(times(2.0)),
    "all tokens weigh the same, not all sequences": weights_of_tokens(lambda them: torch.where(them > 0, 0.01, 0.0)),
    "later: tokens after the eighth count nothing": weights_of_tokens(
        lambda them: torch.cat([them[:8], torch.zeros_like(them[8:])])
    ),
    "completions in a row see each other": both(
        *(
            arg(f"models.{name}:layout_of", segment=lambda it: it.masked_fill(it > 0, 1))
            for name in ("policy", "tree_attention")
        )
    ),
    "later: the loss reads the state of the token after": arg(
        STATES, batch=fields(predictors=lambda places: places + 1)
    ),
    "states are dropped out while the policy learns": out(
        STATES, lambda states: torch.nn.functional.dropout(states, 0.1)
    ),
}
STEPS: dict[str, Inject] = {
    "the gradient is negated": gradients(lambda them: [one.grad.neg_() for one in them]),
    "the gradient is zero": gradients(lambda them: [one.grad.zero_() for one in them]),
    "the first half of the weights gets no gradient": gradients(
        lambda them: [one.grad.zero_() for one in them[: len(them) // 2]]
    ),
    "the gradient of one tensor is halved": gradients(lambda them: them[0].grad.mul_(0.5)),
    "the gradient is not clipped": arg("training.learner:clip_gradient", max_grad_norm=always(1e9)),
    "a gradient is added to the next": fresh(gradient_kept),
    "the optimizer climbs": stepping(groups(maximize=True)),
    "the learning rate is ten times as high": stepping(groups(lr=1e-2)),
    "the learning rate is zero": stepping(groups(lr=0.0)),
    "weights decay": stepping(groups(weight_decay=5.0)),
    "the optimizer forgets its moments": stepping(lambda optimizer: optimizer.state.clear()),
    "the moments of one tensor are forgotten": stepping(
        lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][1], None)
    ),
    "weights are disturbed after each step": around("_take_steps", lambda now, _: now.add_(1e-3)),
    "only the last layer learns": at(OPTIMIZER, last_layer_alone),
    "second moments forget too fast": arg(OPTIMIZER, config=lambda config: replace(config, beta2=config.beta1)),
    "each update is done twice": at(
        f"{LEARNER}.update", lambda old, *given, **more: (old(*given, **more), old(*given, **more))[1]
    ),
    "updates are counted and not done": at(f"{LEARNER}._step", lambda old, self, samples, totals: totals),
    "the norms stand still": slower("norm", 0.0),
    "the last norm alone stands still": slower("model.norm", 0.0),
    "one matrix of the first layer stands still": slower("layers.0.mlp.up_proj", 0.0),
    "the first layer moves by half": slower("layers.0", 0.5),
    "weights live in bfloat16": around("_take_steps", lambda now, _: now.copy_(now.bfloat16().float())),
    "one matrix shrinks beside each step": around(
        "_take_steps", lambda now, _: now.mul_(0.99), "layers.0.self_attn.q_proj"
    ),
}
UNTIED_HEAD: dict[str, Inject] = {
    "the engine's embeddings are not loaded": fresh(lambda: without("embed_tokens")),
    "the engine's head is not loaded": fresh(lambda: without("lm_head")),
    "the embeddings stand still": slower("embed_tokens", 0.0),
    "the head stands still": slower("lm_head", 0.0),
    "the embeddings move by a tenth": slower("embed_tokens", 0.1),
    "later: the gradient ends before the backbone": out(STATES, lambda states: states.detach().requires_grad_()),
}
TWO_EPOCHS: dict[str, Inject] = {
    "old log-probabilities moved by one token": samples(each(old_logprobs=lambda value: value.roll(1))),
    "an update begins with old log-probabilities of zero": update_gets(each(old_logprobs=torch.zeros_like)),
    "the schedule stands further on": arg(SCHEDULE, step=lambda step: step + 40),
    "the schedule stands still": at(SCHEDULE, always(None)),
    "the schedule moves once an update": arg(SCHEDULE, step=lambda step: step - step % 4),
    "the last group of a minibatch is lost": out(SPLIT, lambda made: [batch[:-4] or batch for batch in made]),
    "the first minibatch is learned twice": out(SPLIT, lambda made: [made[0], *made[:-1]]),
    "a minibatch has advantages of its neighbours": out(SPLIT, lambda made: list(map(before("advantages"), made))),
    "every epoch has the minibatches of the first": arg(SPLIT, epoch=always(0)),
    "minibatches are shuffled without the seed": arg(SPLIT, seed=always(0)),
    "an epoch has one minibatch": arg(SPLIT, count=always(1)),
    "an update has one epoch": at(f"{STATS}.exceeded_kl", always(True)),
    "the rate is doubled after the first step": fresh(
        lambda: later_steps(lambda it: [group.update(lr=2.0 * group["lr"]) for group in it.param_groups])
    ),
    "nothing moves after the first step": fresh(lambda: later_steps(groups(lr=0.0))),
    "later: gradients of the step before are kept": at("training.learner:zero_grad", always(None)),
}
KL_IN_THE_LOSS: dict[str, Inject] = {
    "the reference's log-probabilities are zero": samples(each(ref_logprobs=torch.zeros_like)),
    "an update begins with references of zero": update_gets(each(ref_logprobs=torch.zeros_like)),
    "the KL is left out of the loss": coefficients(kl=0.0),
    "the KL is ten times as strong": coefficients(kl=1.0),
    "the KL's sign is turned": kl_losses(lambda name, right: lambda d, r: -right(d, r)),
    "the KL's gradient is that of the other direction": kl_losses(
        lambda name, right: KL_LOSSES["k3_plain"] if name == "k3_ratio" else right
    ),
    "the reference learns along": at(
        "distributed.build:_critic_and_reference",
        lambda old, plan, policy, runtime: (old(plan, policy, runtime)[0], policy),
    ),
    "later: the reference is the policy of the update before": arg(
        f"{LOCAL}.update", self=lambda it: it.reference.load_state_dict(it.learner.policy.state_dict()) and it
    ),
}
PPO: dict[str, Inject] = {
    "rewards off by a tenth": scores(valued(lambda value: value + 0.1)),
    "advantages of ppo negated": samples(each(advantages=torch.neg)),
    "advantages of ppo not whitened": samples(each(advantages=lambda value: value + 0.5)),
    "returns of the critic moved on by one": samples(before("returns")),
    "returns of the critic are its values": samples(copied(returns="values")),
    "values all zero": samples(each(values=torch.zeros_like)),
    "the reference's log-probabilities are the policy's": samples(copied(ref_logprobs="old_logprobs")),
    "an update begins with returns that are values": update_gets(copied(returns="values")),
    "the critic learns nothing": out(CRITIC, times(0.0)),
    "the critic learns another token's values": arg(CRITIC, predicted=lambda it: it.roll(1)),
    "the critic's values are those of the token before": out(VALUES, lambda them: [one.roll(1) for one in them]),
    "later: values are halved": out(VALUES, lambda them: [0.5 * one for one in them]),
    "the critic's values are not clipped": arg("training.losses:value_loss", clip_range=always(0.0)),
    "the critic's backbone stands still": arg("models.heads:ScalarHeadModel.state_values", states=torch.detach),
}
BRIEF: dict[str, Inject] = {
    "later: every second step is left out": fresh(every_second_step),
    "later: samples with a negative advantage are left out": at(
        "training.losses:StepLosses.has_gradient",
        lambda old, self, one: old(self, one) and float(one.advantages.sum()) >= 0.0,
    ),
    "later: weights are averaged after each update": around("update", lambda now, first: now.lerp_(first, 0.5)),
    "later: a hundredth of noise in every gradient": gradients(
        lambda them: [one.grad.mul_(1.0 + 0.01 * torch.randn_like(one)) for one in them]
    ),
    "later: checkpoints empty the optimizer": at(f"{LOCAL}.save", _forgets_at_checkpoints),
    "later: a group's baseline is its first completion": arg(
        "algorithms.advantages:_by_group",
        normalize=lambda right: lambda rewards: right(rewards) + (rewards.mean() - rewards[0]),
    ),
    "later: rewards have a hundredth of noise": scores(valued(lambda value: value + 0.01 * float(torch.randn(())))),
    "later: Adam's epsilon is 0.001": stepping(groups(eps=1e-3)),
    "later: the loss has a penalty on log-probabilities": terms(lambda loss, logprobs: loss + 1e-3 * logprobs.sum()),
    "later: first moments have momentum 0.95": stepping(groups(betas=(0.95, 0.95))),
}
RUNS: dict[str, dict[str, Inject]] = {
    "grpo": ENGINE | REWARDS | PROMPTS | SAMPLES | LOSSES | STEPS,
    UNTIED: UNTIED_HEAD,
    "grpo, 2 epochs": TWO_EPOCHS,
    "grpo, KL in the loss": KL_IN_THE_LOSS,
    "ppo": PPO,
    "grpo, which learns to be brief": BRIEF,
    "grpo, small micro-batches": {
        "micro-batches after the first are lost": out("training.learner:pack_for", lambda them: them[:1]),
        "a gradient is divided by the number of micro-batches": fresh(divided),
        "a gradient is clipped before it is whole": fresh(clipped_too_early),
    },
    "grpo, temperature 0.7": {
        "the engine reports log-probabilities at temperature 1": drawing(times(1.0), lambda logits, _: logits),
        "the trainer scores at temperature 1": both(
            arg("models.policy:state_logprobs", temperature=always(1.0)),
            arg("models.policy:state_scores", temperature=always(1.0)),
        ),
    },
    "grpo, one iteration ahead": {
        "rollouts are an update older than is set": arg(
            "loop.prefetch:RolloutPrefetcher.get", until=lambda until: min(until + 1, NUM_ITERATIONS)
        ),
        "the correction of the engine is turned round": arg(
            "algorithms.objective:mismatch_correction",
            inputs=lambda it: replace(it, old_logprobs=it.sampler_logprobs, sampler_logprobs=it.old_logprobs),
        ),
    },
    "dapo, cut answers masked": {
        "cut completions are trained on all the same": samples(lambda them: [*them, *them[:1]]),
    },
    "rloo": {"advantages are their signs": samples(each(advantages=torch.sign))},
    CALCULATOR: {"the loss forgets the mask": inputs(loss_mask=torch.ones_like)},
    "grpo, longer": {"the engine draws one token twice as often": drawing(likelier("1", 0.7))},
    "grpo, weights decay": {
        "vectors decay as matrices do": at(
            OPTIMIZER,
            lambda old, pairs, config: (made := old(pairs, config), groups(weight_decay=config.weight_decay)(made))[0],
        ),
    },
    "grpo, entropy in the loss": {"the bonus for entropy has the wrong sign": inputs(entropy=torch.neg)},
    "grpo, the KL adapts": {
        "the coefficient of the KL does not adapt": at(f"{LOCAL}.observe_kl", always(None)),
        "the KL coefficient follows the KL per token": at(
            "loop.update:mean_kl", lambda old, made, metrics: metrics.get("kl/ref", 0.0)
        ),
        "the KL of the loss is summed twice": kl_sums("kl/ref", 2.0),
    },
    "grpo, the KL in the reward adapts": {
        "the KL coefficient follows the KL in the reward per token": out(
            "loop.update:build_experience",
            lambda it: replace(
                it, mean_kl=it.mean_kl * it.num_episodes / sum(int(one.loss_mask.sum()) for one in it.samples)
            ),
        ),
    },
    "ppo_penalty": {
        "the penalty follows the KL per completion": out("training.losses:StepLosses.kl_from_old", times(12.0)),
        "the penalty follows the KL before the update": at("training.losses:StepLosses.kl_from_old", always(0.0)),
        "the penalty is halved and never doubled": at(
            "algorithms.kl:PenaltyController.updated", lambda old, self, kl: old(self, min(kl, self.target))
        ),
    },
    "dapo, which stops early": {
        "an update stops after its first epoch": at(f"{STATS}.exceeded_kl", always(True)),
        "an update never stops early": at(f"{STATS}.exceeded_kl", always(False)),
        "an update stops by the KL since its first epoch": at(
            f"{STATS}.epoch_mean", lambda old, self, name: self.means().get(name, 0.0)
        ),
        "an update stops by the KL per completion": kl_sums("kl/old", 12.0),
    },
    "grpo, stops at the reference": {
        "an update stops by the KL to the reference, which is the old policy's": at(
            f"{STATS}.epoch_ref_kl", lambda old, self: self.epoch_mean("kl/old")
        ),
    },
    "dapo, which replaces groups": {
        "groups with a signal are replaced": out(SIGNAL, lambda has: not has),
        "groups without a signal stay": at(SIGNAL, always(True)),
        "groups with a mean below 0.5 are replaced": at(
            SIGNAL,
            lambda old, group, **more: (
                old(group, **more) and sum(one.score.value or 0.0 for one in group) > 0.5 * len(group)
            ),
        ),
        "replacements come in the order of the file": at(
            "loop.rollouts:unused_prompts",
            lambda old, prompts, used, **_: [one for one in prompts if one.prompt_id not in used],
        ),
    },
    EVALUATED: {
        "the accuracy counts the second half as right": arg(
            "loop.rollouts:accuracy",
            values=lambda them: [*them[: len(them) // 2], *[True] * (len(them) - len(them) // 2)],
        ),
        "the accuracy is that of the problems before": out(
            "loop.rollouts:score_each", lambda them: [*them[1:], them[0]]
        ),
        "problems of an evaluation are partly right": at(
            "loop.rollouts:is_correct", lambda old, score, limit: old(score, 0.0)
        ),
        "an evaluation samples": arg(f"{NATIVE}.sample", params=fields(greedy=always(False))),
    },
    AGENT: {
        "an agent's calls are drawn at 0.8 of the temperature": drawing(lambda logits: logits / 0.8),
        "an agent's calls have the same random numbers": at("agents.session:derive_seed", lambda old, *given: old(0)),
    },
    "dapo, 2 epochs": {
        "the ratio is not clipped": surrogate(
            lambda right, ratio, *given: replace(right(ratio, *given), loss=-ratio.exp() * given[1])
        ),
        "the bounds of the ratio are exchanged": surrogate(
            lambda right, *given: right.func(
                *given, clip_low=right.keywords["clip_high"], clip_high=right.keywords["clip_low"]
            )
        ),
        "the ratio is cut for each advantage": surrogate(
            lambda right, ratio, *given: replace(right(ratio, *given), loss=-ratio.exp().clamp(0.8, 1.28) * given[1])
        ),
        "the ratio is turned round": surrogate(
            lambda right, ratio, *given: right(-ratio + 2.0 * (ratio - ratio.detach()), *given)
        ),
        "the ratio is 1 in each step": out(f"{LEARNER}._losses", fields(starts_at_one=always(True))),
        "advantages are halved where the ratio is not 1": surrogate(
            lambda right, ratio, logprobs, advantages: right(
                ratio, logprobs, torch.where(ratio != 0, 0.5, 1.0) * advantages
            )
        ),
    },
    "gspo, 2 epochs": {"a sequence's ratio is the product": algorithm(ratio=always(completion_ratio))},
    "ppo, values beyond the end": {
        "no value beyond the end of what was cut": next_values(lambda found, _: torch.zeros_like(found)),
        "a value beyond the end of each completion": next_values(
            lambda found, lasts: torch.where(found == 0, lasts, found)
        ),
        "the value beyond the end has the wrong sign": next_values(lambda found, _: -found),
        "advantages of ppo negated, with values beyond the end": samples(each(advantages=torch.neg)),
        "returns of ppo are zero, with values beyond the end": samples(each(returns=torch.zeros_like)),
        "lambda is 1, with values beyond the end": arg("algorithms.advantages:gae", lam=always(1.0)),
        "advantages of ppo whitened by completion, with values beyond the end": samples(
            each(advantages=lambda it: (it - it.mean()) / (it.std(unbiased=False) + 1e-6))
        ),
    },
    "grpo, an adapter": {
        "the engine gets the adapter twice": at("training.local_learner:merged_state", _merged_twice),
        "adapters have the scale of rank-stabilised LoRA": out(
            "models.lora:_peft_config", lambda made: setattr(made, "use_rslora", True) or made
        ),
    },
    TWO_RANKS: {
        "ranks get advantages in half precision": at(
            WIRE, encoded(each(advantages=lambda value: value.half().float()))
        ),
        "ranks get masks without the last token": at(WIRE, encoded(each(loss_mask=mask_at(-1)))),
        "the second rank gets other samples": at("distributed.rank_pool:RankPool.ask", second_rank),
    },
}
