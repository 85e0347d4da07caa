"""What an RL run tells its stage: figures and rollouts to MLflow and files, sentences to people."""

from __future__ import annotations

from collections.abc import Mapping

from rlcore.algorithms.dynamic_sampling import Drawn
from rlcore.loop import Stop, summary_line
from rlcore.metrics import check_names
from rlcore.types import ScoredRollout
from tasks.steps.base import StageContext
from tasks.steps.rl.tables import RolloutKeeper


class StageRecorder:
    """Records an iteration as the stage's MLflow run, its rollout tables and a line; see :class:`rlcore.Recorder`."""

    def __init__(self, context: StageContext, num_iterations: int) -> None:
        self._context, self._num_iterations = context, num_iterations
        self.keeper = RolloutKeeper(context.work, context.tracker)

    def note(self, text: str) -> None:
        """Show it as a line of the stage."""
        self._context.progress(text)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log them, and show a line.

        Raises:
            TrainingError: a name that the glossary does not know.
        """
        check_names(metrics)
        self._context.tracker.log_metrics(metrics, step=iteration)
        self.note(summary_line(iteration, self._num_iterations, metrics))

    def rollouts(self, iteration: int, drawn: Drawn[list[ScoredRollout]]) -> None:
        """Keep them for the tables."""
        self.keeper.keep(iteration, drawn)

    def stopped(self, stop: Stop) -> None:
        """Tag the MLflow run, and say it."""
        where = f"stopped by {stop.finding.rule} after iteration {stop.iteration}"
        self._context.tracker.set_tags({"health": where})
        self.note(str(stop))

    def flush(self) -> None:
        """Write the tables, and wait until MLflow has everything.

        Raises:
            ContractError: a rollout breaks its contract.
        """
        self.keeper.write()
        self._context.tracker.flush()
