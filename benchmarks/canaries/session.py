"""Learner and rollout engine, healthy or with an injected fault, with the canary after each sync."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore.checks.canaries.sync import EngineCalibration, ExpectedWeights, calibrate_engine, sample_probes, sync_canary
from rlcore.config import LoraConfig
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.lora import AdaptedModel, MergedState, add_lora
from rlcore.models.policy import completion_logprobs
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.packing import TokenSequence, pack
from rlcore.training.local_learner import merged_state
from rlcore.training.scoring_models import token_scores
from rlcore.types import FailedRollout, Prompt, Rollout


class Stale(NativeSampler):
    """Engine that takes the version and keeps its weights."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self.policy_version = policy_version


class LosesALayer(NativeSampler):
    """Engine that keeps the old weights of layer 1."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        kept = {name: tensor.clone() for name, tensor in self._model.state_dict().items() if "layers.1." in name}
        super().load_weights({**state, **kept}, policy_version=policy_version)


class LosesTheHead(NativeSampler):
    """Engine that multiplies by a copy of the tied head that no sync updates, as vLLM does on a CPU."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        head = self._model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        head = {"lm_head.weight": self._model.get_output_embeddings().weight.detach().clone()}
        super().load_weights({**state, **head}, policy_version=policy_version)


class ServesTheBase(NativeSampler):
    """Engine that never applies the LoRA."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        whole = MergedState(AdaptedModel(state.adapted.base, "")) if isinstance(state, MergedState) else state
        super().load_weights(whole, policy_version=policy_version)


class Warmer(NativeSampler):
    """Engine that samples at a temperature that is 0.1 too high."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        return super().sample(prompts, replace(params, temperature=params.temperature + 0.1), seed=seed, places=places)


FAULTS: Mapping[str, type[NativeSampler]] = {
    "stale": Stale,
    "layer missing": LosesALayer,
    "adapter never applied": ServesTheBase,
    "tied head not repacked": LosesTheHead,
    "temperature + 0.1": Warmer,
}


def native(
    model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, kind: Callable[..., NativeSampler] = NativeSampler
) -> NativeSampler:
    """Open an engine of that kind on its own copy of ``model`` in ``dtype``."""
    return kind(copy.deepcopy(model).to(dtype), tokenizer)


class Session:
    """Learner of ``model``'s weights in ``dtype`` with an engine that serves them.

    ``rank``: of a LoRA on a frozen base in ``dtype``; 0: all weights are trained.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Sampler,
        prompts: Sequence[Prompt],
        dtype: torch.dtype,
        *,
        rank: int = 0,
        params: SamplingParams,
    ) -> None:
        self.engine, self.prompts, self.dtype, self.params = engine, prompts, dtype, params
        self.policy: Any = set_compute_dtype(copy.deepcopy(model), dtype)
        if rank:
            frozen = copy.deepcopy(model).to(dtype)
            self.policy = add_lora(frozen, LoraConfig(rank=rank, alpha=4 * rank), "policy", seed=0)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=0.0, weight_decay=0.0)
        self.version = engine.policy_version
        self.baseline: EngineCalibration

    @property
    def truth(self) -> ExpectedWeights:
        """Return the weights that the engine must serve now."""
        temperature = self.params.temperature
        return ExpectedWeights(
            state=merged_state(self.policy),
            policy_version=self.version,
            score=partial(token_scores, self.policy, temperature=temperature, tokens_per_microbatch=4096),
            temperature=temperature,
            dtype=self.dtype,
        )

    def probes(self) -> list[Rollout]:
        """Sample completions from the engine."""
        return sample_probes(self.engine, self.prompts, self.params, seed=self.version)

    def begin(self) -> EngineCalibration:
        """Run the canary before any update."""
        self.baseline = calibrate_engine(self.engine, self.probes(), self.truth)
        return self.baseline

    def learn(self, learning_rate: float) -> None:
        """Take a policy-gradient step on completions of the policy, with random advantages."""
        draws = torch.Generator().manual_seed(self.version)
        texts = [TokenSequence(prompt_ids=each.token_ids, completion_ids=_text(each, draws)) for each in self.prompts]
        (batch,) = pack(texts, tokens_per_microbatch=65_536)
        logprobs, _ = completion_logprobs(self.policy, batch)
        advantages = torch.randn(len(logprobs), generator=draws)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1

    def push(self) -> None:
        """Send the weights to the engine."""
        self.engine.load_weights(merged_state(self.policy), policy_version=self.version)

    def prove(self) -> dict[str, float]:
        """Run the canary after a sync."""
        return sync_canary(self.engine, self.probes(), self.truth, self.baseline)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Train a step, sync, and check."""
        self.learn(learning_rate)
        self.push()
        return self.prove()


def _text(prompt: Prompt, draws: torch.Generator) -> tuple[int, ...]:
    """Return tokens to train on: those of the prompt in another order, which are in the model's vocabulary."""
    order = torch.randperm(len(prompt.token_ids), generator=draws).tolist()
    return tuple(prompt.token_ids[place] for place in order)
