"""Distributed learners: several processes behind the interface of a local learner.

The process of the loop sends each rank the same request, and uses the first one's answer. It has neither weights nor a
process group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from rlcore.algorithms.table import resolve_algorithm
from rlcore.config.distributed import DistributedConfig
from rlcore.distributed.build import LearnerPlan
from rlcore.distributed.build_supervised import SupervisedPlan
from rlcore.distributed.local_ranks import child_ranks
from rlcore.distributed.rank_pool import RankPool
from rlcore.errors import TrainingError
from rlcore.hardware.memory import Footprint
from rlcore.models.runtime import Runtime
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.slow_path import SlowPathResult
from rlcore.training.learner_protocol import PolicyFacts
from rlcore.training.scoring_models import ForwardScores
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Rollout, TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float


class DistributedLearner:
    """A :class:`~rlcore.training.learner_protocol.LearnerProtocol` on ranks; the protocol documents the methods.

    After a loss of ranks only :meth:`load` starts new ones, with the newest checkpoint or the first weights.
    """

    def __init__(
        self,
        plan: LearnerPlan,
        distributed: DistributedConfig,
        runtime: Runtime,
        *,
        log: Callable[[str], None],
        ranks: RankPool | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            ranks: Processes of the ranks; None: children of this process.

        Raises:
            ConfigError: There are fewer GPUs than ranks.
            ModelError: A checkpoint cannot be trained.
        """
        self.config, self.algorithm = plan.config, resolve_algorithm(plan.config)
        self._plan, self._distributed, self._runtime, self._log = plan, distributed, runtime, log
        self.ranks = ranks or child_ranks(distributed, runtime.device)
        self._starts, self._tokens = 0, 0  # 0 tokens: the configured number
        self._budget = plan.config.update.tokens_per_microbatch
        self.policy_version, self.kl_coefficient = 0, plan.config.kl.coefficient
        self._exported: tuple[int, Mapping[str, torch.Tensor]] | None = None
        try:
            facts = self._start()
        except BaseException:
            self.ranks.close()
            raise
        self.facts = PolicyFacts(
            config=AutoConfig.from_pretrained(plan.start, local_files_only=True),
            num_parameters=facts["num_parameters"],
            compute_dtype=facts["compute_dtype"],
        )

    @property
    def size(self) -> int:
        return self._distributed.learner_ranks

    @property
    def has_reference(self) -> bool:
        return self.config.kl.coefficient > 0.0

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> ForwardScores:
        found: ForwardScores = self._call("passes", sequences, needs_policy=needs_policy, cut=cut)
        return found

    def scores(self, rollouts: Sequence[Rollout]) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
        found: tuple[torch.Tensor, torch.Tensor] = self._call("scores", rollouts)
        return found

    def update(
        self, samples: Sequence[TrainingSample], *, seed: int, measure_memory: bool = False
    ) -> tuple[UpdateStats, Footprint | None]:
        found: tuple[UpdateStats, Footprint | None] = self._call(
            "update", samples, seed=seed, measure_memory=measure_memory
        )
        return found

    def run_slow_path(
        self, samples: Sequence[TrainingSample], rollouts: Sequence[Rollout], *, eos_ids: Sequence[int], seed: int
    ) -> SlowPathResult | None:
        found: SlowPathResult | None = self._call("run_slow_path", samples, rollouts, eos_ids=tuple(eos_ids), seed=seed)
        return found

    def step_errors(self) -> list[str]:
        return list(self._call("step_errors"))

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        self._call("observe_kl", mean_kl, num_samples)

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self._exported is None or self._exported[0] != self.policy_version:
            self._call("export")
            self._exported = self.policy_version, self.ranks.transport.exported()
        return self._exported[1]

    def copy_weights(self) -> Mapping[str, torch.Tensor]:
        return self.weights()  # later exports do not change an export in use

    def save(self, root: Path, step: int, *, run_state: Mapping[str, Any], protected: Collection[int] = ()) -> None:
        self._call("save", root, step, run_state=run_state, protected=tuple(protected))

    def load(self, root: Path, *, identity: Mapping[str, str], up_to: int | None = None) -> dict[str, Any] | None:
        if not self.ranks.is_running:
            self._restart()
        self._exported = None
        found: dict[str, Any] | None = self._call("load", root, identity=identity, up_to=up_to)
        return found

    def wait(self) -> None:
        if self.ranks.is_running:
            self._call("wait")

    def save_model(self, start: Path | str, folder: Path | str, *, like_start: bool = False) -> None:
        self._call("save_model", Path(start), Path(folder), like_start=like_start)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.ranks.close()

    def _restart(self) -> None:
        restarts = self._distributed.max_restarts
        if self._starts > restarts:
            raise TrainingError(
                f"ranks were lost {self._starts} times",
                where="distributed.max_restarts",
                fix="the log has the reasons; the same command resumes from the newest checkpoint",
            )
        if self.ranks.ran_out:
            self._tokens = max(1, self._budget // 2)
        self._log(f"restart ranks={self.size} attempt={self._starts}/{restarts}")
        self._start()

    def _start(self) -> dict[str, Any]:
        self._starts += 1
        setups = _setups(self._plan, self._distributed, self._runtime, tokens=self._tokens)
        return self._update_state(self.ranks.start(setups))

    def _call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return self._update_state(self.ranks.ask(method, *arguments, **settings))["result"]

    def _update_state(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.policy_version, self.kl_coefficient = answer["policy_version"], answer["kl_coefficient"]
        self._budget = answer["tokens"]
        return answer


class DistributedSupervised:
    """A learner of SFT, DPO or a reward model on ranks, with the methods of its plan; a lost rank ends the stage."""

    def __init__(self, plan: SupervisedPlan, distributed: DistributedConfig, runtime: Runtime, ranks: RankPool) -> None:
        """Start the ranks.

        Raises:
            ModelError: The checkpoint cannot be trained.
            LearnerLostError: A rank did not start.
        """
        self._ranks = ranks
        for method in plan.methods:
            setattr(self, method, partial(self._ask, method))
        try:
            ranks.start(_setups(plan, distributed, runtime))
        except BaseException:
            ranks.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _ask(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return self._ranks.ask(method, *arguments, **settings)["result"]


def _setups(
    plan: LearnerPlan | SupervisedPlan, distributed: DistributedConfig, runtime: Runtime, **settings: Any
) -> list[dict[str, Any]]:
    """Return the setup of each rank, to which the transport adds device and store."""
    common = {"plan": plan, "distributed": distributed, "runtime": runtime, **settings}
    return [{**common, "rank": rank} for rank in range(distributed.learner_ranks)]
