"""What a run asks of the side that learns, whatever it is made of: this process, or a group of ranks behind a handle.

Models, reference, optimizers and checkpoints stay on that side. What crosses over are token ids, numbers per token,
figures, and the weights that an engine takes.
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
from rlcore.checks.audit.slow_path import SlowPathResult
from rlcore.config import RlConfig
from rlcore.hardware.memory import Footprint
from rlcore.training.scoring_models import ScoresCompletions
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Rollout, TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts:
    """What does not change about a policy: its architecture, the number of its parameters without any adapter, and the
    precision that its products are computed in."""

    config: PreTrainedConfig
    num_parameters: int
    compute_dtype: torch.dtype


class LearnerProtocol(ScoresCompletions, Protocol):
    """A learner as the loop sees it. ``policy_version`` counts the updates; ``kl_coefficient`` may adapt."""

    @property
    def config(self) -> RlConfig:
        """The run's configuration."""
        ...

    @property
    def algorithm(self) -> Algorithm:
        """The row of the table that the configuration names."""
        ...

    @property
    def facts(self) -> PolicyFacts:
        """What is fixed about the policy."""
        ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether an update takes several steps: for one, its own forward pass is the old policy."""
        ...

    @property
    def policy_version(self) -> int:
        """How many updates the policy has seen."""
        ...

    @property
    def kl_coefficient(self) -> float:
        """What the KL to the reference counts now."""
        ...

    def scores(self, rollouts: Sequence[Rollout]) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
        """The policy's log-probability and entropy of every completion token, one after another, float32 [T] each.

        At the run's temperature, in nats.
        """
        ...

    def update(
        self, samples: Sequence[TrainingSample], *, seed: int, measured: bool = False
    ) -> tuple[UpdateStats, Footprint | None]:
        """Train on the samples of one iteration; ``measured``, and give what that held in memory on this side.

        Raises:
            NonFiniteError: NaN or infinity in a sample, a loss or a gradient; the step that met it was not taken.
            TrainingError: one sequence, or the optimizer's state, does not fit into memory.
        """
        ...

    def examine(
        self, samples: Sequence[TrainingSample], rollouts: Sequence[Rollout], *, eos_ids: Sequence[int], seed: int
    ) -> SlowPathResult | None:
        """What plain forward passes say of ``samples`` before an update, and of the tokens of ``rollouts``.

        None where memory does not hold them.
        """
        ...

    def step_errors(self) -> list[str]:
        """What was wrong with the optimizer's steps since the last call, a sentence each."""
        ...

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        """Let the adaptive coefficient see the KL of an iteration (nats per completion)."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The policy's weights as an engine takes them, in the base's names; valid until the next update."""
        ...

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """What :meth:`weights` gives now, valid as long as it is kept."""
        ...

    def save(self, root: Path, step: int, *, run_state: Mapping[str, Any], protected: Collection[int] = ()) -> None:
        """Begin to write the checkpoint of ``step``, after the one before is on the disk.

        Raises:
            StorageError: this or the one before could not be written; earlier checkpoints are untouched.
        """
        ...

    def load(self, root: Path, *, identity: Mapping[str, str], up_to: int | None = None) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint (of ``up_to`` or before); its run state, None where there is none.

        Raises:
            CheckpointError: it was made with another ``identity``, or every checkpoint is damaged.
        """
        ...

    def wait(self) -> None:
        """Return when the newest checkpoint is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        ...

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        """Write the policy as a checkpoint with the tokenizer of ``start``, which it came from.

        ``like_start``: weights that are in half precision there are rounded to it.

        Raises:
            StorageError: ``folder`` exists, or the disk refuses.
        """
        ...

    def close(self) -> None:
        """Finish what is being written, and end what this side started."""
        ...
