"""Protocol of a learner for the training loop, in this process or distributed over ranks.

Models, reference policy, optimizers and checkpoints stay inside the learner. Callers exchange token ids, numbers per
token, metrics, and the weights for the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlcore.algorithms.table import Algorithm
from rlcore.config import RlConfig
from rlcore.hardware.memory import Footprint
from rlcore.training.audit.slow_path import SlowPathResult
from rlcore.training.scoring_models import ScoresCompletions
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Rollout, TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts:
    """Constants of a policy: architecture, number of parameters without adapters, precision of the products."""

    config: PreTrainedConfig
    num_parameters: int
    compute_dtype: torch.dtype


class LearnerProtocol(ScoresCompletions, Protocol):
    """Learner as the training loop uses it.

    Attributes:
        config: Configuration of the run.
        algorithm: Row of the algorithm table.
        facts: Constants of the policy.
    """

    config: RlConfig
    algorithm: Algorithm
    facts: PolicyFacts

    @property
    def policy_version(self) -> int:
        """Number of updates of the policy."""
        ...

    @property
    def kl_coefficient(self) -> float:
        """Current coefficient of the KL to the reference policy."""
        ...

    def scores(self, rollouts: Sequence[Rollout]) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
        """Return log-probability and entropy of all completion tokens, concatenated, float32 [T] each.

        At the run's temperature, in nats.
        """
        ...

    def update(
        self, samples: Sequence[TrainingSample], *, seed: int, measure_memory: bool = False
    ) -> tuple[UpdateStats, Footprint | None]:
        """Train on the samples of one iteration; with ``measure_memory``, also return the learner's memory footprint.

        Raises:
            NonFiniteError: NaN or infinity in a sample, a loss or a gradient; that step was not taken.
            TrainingError: One sequence, or the optimizer's state, does not fit into memory.
        """
        ...

    def run_slow_path(
        self, samples: Sequence[TrainingSample], rollouts: Sequence[Rollout], *, eos_ids: Sequence[int], seed: int
    ) -> SlowPathResult | None:
        """Recompute ``samples`` and the tokens of ``rollouts`` by plain forward passes before an update.

        Returns None if memory does not suffice.
        """
        ...

    def step_errors(self) -> list[str]:
        """Return and clear the errors of the optimizer's steps since the last call, one sentence each."""
        ...

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        """Update the adaptive KL coefficient with the mean KL of an iteration (nats per completion)."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the policy's weights for an engine, in the base's names; valid until the next update."""
        ...

    def copy_weights(self) -> Mapping[str, torch.Tensor]:
        """Return a copy of :meth:`weights` that later updates do not change."""
        ...

    def save(self, root: Path, step: int, *, run_state: Mapping[str, Any], protected: Collection[int] = ()) -> None:
        """Start writing the checkpoint of ``step``, after the previous one is on disk.

        Raises:
            StorageError: This or the previous checkpoint could not be written; earlier ones are unchanged.
        """
        ...

    def load(self, root: Path, *, identity: Mapping[str, str], up_to: int | None = None) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint up to ``up_to``; return its run state, or None without a checkpoint.

        Raises:
            CheckpointError: The checkpoint has another ``identity``, or all checkpoints are damaged.
        """
        ...

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk.

        Raises:
            StorageError: It could not be written.
        """
        ...

    def save_model(self, start: Path | str, folder: Path | str, *, like_start: bool = False) -> None:
        """Write the policy as a checkpoint with the tokenizer of ``start``, its initial checkpoint.

        ``like_start``: round weights to half precision if they are in half precision in ``start``.

        Raises:
            StorageError: ``folder`` exists or cannot be written.
        """
        ...

    def close(self) -> None:
        """Finish writing, and end all threads and processes of the learner."""
        ...
