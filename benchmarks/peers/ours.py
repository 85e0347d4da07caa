"""rlcore's side of the comparisons: the user's own training functions, on given tokens."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.peers.record import Record
from benchmarks.peers.work import EOS, Work, advantages, parity, text_of
from rlcore import config
from rlcore.algorithms.table import resolve_algorithm
from rlcore.components import Components
from rlcore.hardware.precision import set_compute_dtype
from rlcore.loop import iteration
from rlcore.loop.native import chat_prompts
from rlcore.loop.recorder import LogRecorder
from rlcore.models.architectures import choose_kernels
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.runtime import enable_gradient_checkpointing
from rlcore.rewards.user_function import function_reward
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.decoding import Decoded, decode, sample_tokens
from rlcore.sampling.native import NativeSampler
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training import reward_model
from rlcore.training.dpo import DpoLearner, run_dpo_steps
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_model import RewardLearner
from rlcore.training.sft import SftLearner, run_sft_steps
from rlcore.types import TrainingSample

OPTIM = config.OptimConfig(beta2=0.999)


def _silent(step: int, metrics: Any) -> None:
    """Report nothing: TRL logs nothing either."""


def _settings(work: Work, microbatch: int, batch_size: int) -> dict[str, Any]:
    sizes = {"batch_size": batch_size, "tokens_per_microbatch": microbatch}
    return {**sizes, "learning_rate": work.learning_rate, "optim": OPTIM}


class ForcedSampler(NativeSampler):
    """Built-in engine that samples from the model as always, and then takes the given token."""

    def __init__(self, model: Any, tokenizer: ChatTokenizer, work: Work) -> None:
        super().__init__(model, tokenizer)
        self._given = dict(work.groups)

    def _decode(self, block: Sequence[Any], params: SamplingParams, watch: Any, *, seed: int) -> Decoded:
        prompts = [request.prompt.token_ids for request in block]
        wanted = torch.full((len(block), params.max_new_tokens), float(EOS))
        for row, request in zip(wanted, block, strict=True):
            ids = self._given[request.prompt.token_ids][request.sample_index][: params.max_new_tokens]
            row[: len(ids)] = torch.tensor(ids)
        return decode(self._model, prompts, wanted, choose=_forced, eos_ids=self._eos_ids, watch=watch.step)


def _forced(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sample_tokens(logits, torch.full_like(wanted, 0.5), temperature=1.0)
    tokens = wanted.long()
    wide = logits.float()
    return tokens, wide.gather(-1, tokens[:, None])[:, 0] - wide.logsumexp(-1)


def _policy(work: Work, record: Record, option: str) -> Any:
    """Make the policy as a checkpoint is loaded, with observed products."""
    model = set_compute_dtype(work.make_model(), work.compute_dtype)
    choose_kernels(model)
    record.watch(model)
    return enable_gradient_checkpointing(model) if option == "checkpointing" else model


def _make_learner(work: Work, model: Any, microbatch: int) -> Learner:
    default = config.RolloutCorrectionConfig()
    settings = config.RlConfig(
        algorithm="grpo",
        num_iterations=work.steps,
        prompts_per_iteration=work.num_prompts,
        group_size=work.group_size,
        learning_rate=work.learning_rate,
        sampling=config.SamplingConfig(max_new_tokens=work.max_new_tokens),
        update=config.UpdateConfig(
            tokens_per_microbatch=microbatch,
            optim=OPTIM,
            # as in TRL's default loss: tokens count equally, and the standard deviation is that of a sample
            objective=config.ObjectiveConfig(scale="group_sample", weighting="token_mean"),
            # given completions have no log-probabilities of a sampler
            rollout_correction=config.RolloutCorrectionConfig(mode="off" if work.task == "update" else default.mode),
        ),
    )
    return Learner(model, None, algorithm=resolve_algorithm(settings), config=settings)


def _see_samples(record: Record, samples: Sequence[TrainingSample]) -> None:
    for each in samples:
        trained, value = int(each.loss_mask.sum()), float(each.advantages.mean())
        record.see((*each.prompt_ids, *each.completion_ids), trained=trained, value=value)


def grpo(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Run :func:`rlcore.train` with canaries and audit, but no checkpoints: TRL writes none either."""
    learner = LocalLearner(_make_learner(work, _policy(work, record, option), microbatch))
    tokenizer = ChatTokenizer.of(work.make_tokenizer(), (EOS,))
    weights = learner.learner.policy
    if work.compute_dtype != torch.float32:
        weights = copy.deepcopy(weights).to(work.compute_dtype)
    engine = ForcedSampler(weights, tokenizer, work)
    del weights
    record.watch(engine._model)
    prompts = chat_prompts(tokenizer, {text_of(ids): "" for ids, _ in work.groups})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        components = Components(
            seed=0,
            learner=learner,
            engine=engine,
            sampler=engine,
            engine_dtype=work.compute_dtype,
            tokenizer=tokenizer,
            reward=function_reward(lambda rollouts: parity([], [each.completion_ids for each in rollouts])),
            prompts=prompts,
            folder=Path(folder),
            identity={},
            # given tokens are no draws from the policy, which the audit notices; with "stop" it would end the run
            health=config.HealthConfig(audit=config.AuditConfig(action="warn")),
        )
        run = stack.enter_context(iteration.open_run(components, LogRecorder(work.steps)))
        stack.enter_context(patch.object(run.checkpoints, "is_due", lambda _: False))
        update = learner.update

        def seen(samples: Sequence[TrainingSample], **kwargs: Any) -> Any:
            _see_samples(record, samples)
            return update(samples, **kwargs)

        stack.enter_context(patch.object(learner, "update", seen))
        for owner, name, part in (
            (iteration, "collect_groups", "generation"),
            (iteration, "sync_when_idle", "sync and canaries"),
            (run.audit, "check_before_update", "audit"),
            (run.audit, "check_after_update", "audit"),
        ):
            _time(owner, name, record, part, stack)
        record.start()
        for _ in range(work.steps):
            iteration.iterate(run)
        print(record.report())


def _time(owner: Any, name: str, record: Record, part: str, stack: ExitStack) -> None:
    """Time the calls of a function as a part of the work."""
    whole = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with record.part(part):
            return whole(*args, **kwargs)

    stack.enter_context(patch.object(owner, name, call))


def update(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Take steps of the learner on given completions."""
    learner, samples = _make_learner(work, _policy(work, record, option), microbatch), _samples(work)
    record.start()
    for step in range(work.steps):
        _see_samples(record, samples)
        learner.update(samples, seed=step)
    print(record.report())


def _samples(work: Work) -> list[TrainingSample]:
    samples = []
    for group, (prompt, completions) in enumerate(work.groups):
        values = advantages(parity(completions, completions))
        for ids, advantage in zip(completions, values, strict=True):
            zeros = torch.zeros(len(ids))
            same = dict.fromkeys(("sampler_logprobs", "old_logprobs", "ref_logprobs", "values", "returns"), zeros)
            own = {"loss_mask": torch.ones(len(ids), dtype=torch.bool), "advantages": zeros + advantage}
            place = {"episode": len(samples), "group": group}
            samples.append(TrainingSample(**place, prompt_ids=prompt, completion_ids=ids, **own, **same))
    return samples


def sft(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train on the first completion of each prompt; evaluate the loss on one of them."""
    rows = [
        Demonstration(sequence=TokenSequence(prompt_ids=prompt, completion_ids=ids), loss_mask=(True,) * len(ids))
        for prompt, (ids, *_) in work.groups
    ]
    settings = config.SftConfig(num_steps=work.steps, **_settings(work, microbatch, len(rows)))
    model = _policy(work, record, option)
    record.start()
    for row in rows * work.steps:
        ids = (*row.sequence.prompt_ids, *row.sequence.completion_ids)
        record.see(ids, trained=sum(row.loss_mask), value=1.0)
    run_sft_steps(SftLearner(model, settings), rows, rows[:1], settings, seed=0, report=_silent)
    print(record.report())


def _pairs(work: Work, record: Record, *, marks: bool) -> list[TokenPair]:
    pairs = [
        TokenPair(set_id=str(number), prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected)
        for number, (prompt, (chosen, rejected)) in enumerate(work.groups)
    ]
    for pair in pairs * work.steps:
        for ids, value in ((pair.chosen_ids, 1.0), (pair.rejected_ids, -1.0)):
            record.see((*pair.prompt_ids, *ids), trained=len(ids) if marks else 0, value=value)
    return pairs


def rm(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Audit the labels of pairs and train a reward model, from the weights of transformers' classifier."""
    common = _settings(work, microbatch, work.num_prompts)
    settings = config.RewardModelConfig(num_epochs=work.steps, head_learning_rate=work.learning_rate, **common)
    model = ScalarHeadModel.on_backbone(_policy(work, record, option))
    with torch.no_grad():
        model.head.weight.copy_(work.make_classifier().score.weight)
    learner, pairs = RewardLearner((model,), settings), _pairs(work, record, marks=False)
    with ExitStack() as stack:
        _time(learner, "features", record, "audit", stack)
        _time(reward_model, "audit_labels", record, "audit", stack)
        record.start()
        reward_model.fit_reward_model(learner, pairs, settings, seed=0, report=_silent)
        print(record.report())


def dpo(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train the policy on pairs; its log-probabilities before the first step are the reference."""
    settings = config.DpoConfig(num_epochs=work.steps, **_settings(work, microbatch, work.num_prompts))
    learner = DpoLearner(_policy(work, record, option), settings)
    record.start()
    pairs = _pairs(work, record, marks=True)
    run_dpo_steps(learner, pairs, pairs[:1], settings, seed=0, report=_silent)
    print(record.report())
