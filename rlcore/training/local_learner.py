"""Learner in this process, as a ``LearnerProtocol``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.hardware.memory import Footprint, release_freed
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.hardware.precision import compute_dtype
from rlcore.hardware.sharded import is_single_process
from rlcore.models.lora import AdaptedModel, merged_state
from rlcore.models.memory_meter import measure_peak, num_parameters, optimizer_bytes
from rlcore.models.runtime import save_trained
from rlcore.models.saving import LazyTensors
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.optimizer_check import OptimizerChecker
from rlcore.training.audit.slow_path import SlowPathResult, run_slow_path
from rlcore.training.checkpoint import CheckpointWriter, load_newest
from rlcore.training.learner import Learner
from rlcore.training.learner_protocol import PolicyFacts
from rlcore.training.scoring_models import ForwardScores, ScoringModels, token_scores
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Rollout, TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float


class LocalLearner:
    """``LearnerProtocol`` on a learner of this process.

    Args:
        reference: Frozen start that a KL penalty is measured to; None without a penalty.
        other_models: Other models in the same memory, which measurements include.
    """

    def __init__(
        self,
        learner: Learner,
        reference: PreTrainedModel | AdaptedModel | None = None,
        *,
        other_models: Iterable[nn.Module] = (),
    ) -> None:
        self.learner, self.reference = learner, reference
        self.config, self.algorithm = learner.config, learner.algorithm
        self._other_models, self._writer = tuple(other_models), CheckpointWriter()
        self._optimizer_checker = OptimizerChecker(learner)
        policy = learner.policy
        self.facts = PolicyFacts(
            config=policy.config, num_parameters=num_parameters(policy), compute_dtype=compute_dtype(policy)
        )

    @property
    def policy_version(self) -> int:
        return self.learner.policy_version

    @property
    def kl_coefficient(self) -> float:
        return self.learner.kl.coefficient

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> ForwardScores:
        models = ScoringModels(
            policy=self.learner.policy,
            reference=self.reference,
            critic=self.learner.critic,
            temperature=self.config.sampling.temperature,
            tokens_per_microbatch=self.learner.tokens_per_microbatch,  # a budget that fits the update fits these passes
            bootstrap_truncated=self.config.critic.gae.bootstrap_truncated,
        )
        return models.passes(sequences, needs_policy=needs_policy, cut=cut)

    def scores(self, rollouts: Sequence[Rollout]) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
        temperature, budget = self.config.sampling.temperature, self.learner.tokens_per_microbatch
        return token_scores(self.learner.policy, rollouts, temperature=temperature, tokens_per_microbatch=budget)

    def update(
        self, samples: Sequence[TrainingSample], *, seed: int, measure_memory: bool = False
    ) -> tuple[UpdateStats, Footprint | None]:
        learner = self.learner
        if not measure_memory or not is_single_process(learner.policy):  # gathered shards are temporary
            return learner.update(samples, seed=seed), None
        models = [learner.policy, self.reference, learner.critic, *self._other_models]
        with measure_peak(models, learner.optimizers) as meter:
            stats = learner.update(samples, seed=seed)
        return stats, Footprint(
            weights=meter.weights,
            gradients=meter.gradients,
            optimizer=optimizer_bytes(learner.optimizers),
            activations=meter.activations,
            kv_cache=0,
        )

    def run_slow_path(
        self, samples: Sequence[TrainingSample], rollouts: Sequence[Rollout], *, eos_ids: Sequence[int], seed: int
    ) -> SlowPathResult | None:
        try:
            return run_slow_path(self.learner, self.reference, samples, rollouts, eos_ids=eos_ids, seed=seed)
        except torch.OutOfMemoryError:
            if not is_single_process(self.learner.policy):  # other ranks wait for this one
                raise
        finally:
            release_freed()  # before the update, which needs the most
        empty_cache()  # here the error no longer holds the memory
        return None

    def step_errors(self) -> list[str]:
        return self._optimizer_checker.pop_errors()

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        self.learner.observe_kl(mean_kl, num_samples)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return merged_state(self.learner.policy)

    def copy_weights(self) -> Mapping[str, torch.Tensor]:
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights().items()}
        device = self.learner.policy.device
        return LazyTensors(tensors, lambda name: tensors[name].to(device))

    def save(self, root: Path, step: int, *, run_state: Mapping[str, Any], protected: Collection[int] = ()) -> None:
        self._writer.save(root, step, self.learner, run_state=run_state, protected=protected)

    def load(self, root: Path, *, identity: Mapping[str, str], up_to: int | None = None) -> dict[str, Any] | None:
        self._writer.wait()
        self._optimizer_checker.forget()
        return load_newest(root, self.learner, identity=identity, up_to=up_to)

    def wait(self) -> None:
        self._writer.wait()

    def save_model(self, start: Path | str, folder: Path | str, *, like_start: bool = False) -> None:
        save_trained(self.learner.policy, Path(start), Path(folder), like_start=like_start)

    def close(self) -> None:
        self._writer.close()
