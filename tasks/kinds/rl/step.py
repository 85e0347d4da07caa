"""Online RL as a stage: components from the preset, the library's loop, and the files of the artifact."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

from rlcore.checks.causes import unchanged
from rlcore.config import RlConfig
from rlcore.errors import RewardError
from rlcore.loop import Components, TrainResult, finish, iterate, open_run
from rlcore.loop.update import SKIPPED
from rlcore.models.integrity import verify_model, write_model_digest
from rlcore.models.runtime import Runtime
from rlcore.seeding import derive_seed
from rlcore.tasks.kinds.rl.components import open_components, start_from
from rlcore.tasks.kinds.rl.placed import START
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.rl_recorder import StageRecorder
from rlcore.tasks.steps.runtime import open_runtime, peak_memory_gib
from rlcore.tasks.store.storage import write_json


def run_online_rl(context: StageContext, *, stage: str, start: str, reference: str, earlier: int = 0) -> StageResult:
    """Train the policy of the stage ``start``, or resume from the run's newest checkpoint.

    ``stage``: the name under which progress is shown. ``reference``: the stage whose policy KL is measured to.
    ``earlier``: the number of RL stages before it, so that stages that build on each other draw prompts in different
    orders.

    The artifact is the trained policy.
    """
    context = replace(context, seed=seed_after(context.seed, earlier))
    for name in dict.fromkeys((start, reference)):
        verify_model(context.inputs[name], stage=name, model=context.inputs[name] / MODEL)
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        return _run(start_from(context, start, reference), stage, runtime)


def seed_after(seed: int, earlier: int) -> int:
    """Return the seed of an RL stage that builds on ``earlier`` others; the first one's is the run's own."""
    return derive_seed(seed, "rl stage", earlier) if earlier else seed


def _run(context: StageContext, stage: str, runtime: Runtime) -> StageResult:
    rl: RlConfig = context.config.stage.settings
    recorder = StageRecorder(context, rl.num_iterations)
    try:
        with open_components(context, runtime) as components, open_run(components, recorder) as run:
            context.report_progress(f"{stage} iterations", run.iterations_done, rl.num_iterations)
            while not run.is_over:
                context.run_task("iteration", run.iterations_done + 1, partial(iterate, run))
                context.report_progress(f"{stage} iterations", run.iterations_done, rl.num_iterations, run.history[-1])
            outcome = finish(run)
            recorder.flush()
            recorder.keeper.require_intact()
            return _artifact(context, components, outcome, runtime)
    except RewardError as error:
        raise type(error)(error.what, where=error.where or str(recorder.keeper.folder), fix=error.fix) from error
    finally:
        recorder.keeper.write()  # also after a failure: rollouts may show its cause


def _artifact(context: StageContext, components: Components, outcome: TrainResult, runtime: Runtime) -> StageResult:
    """Write policy, rollouts, history, findings of the health rules, and batches of skipped steps."""
    folder = context.folder
    components.learner.save_model(context.inputs[START] / MODEL, folder / MODEL, like_start=runtime.like_start)
    if write_model_digest(folder, stage=context.stage, model=folder / MODEL, start=context.inputs[START] / MODEL):
        context.log(unchanged(context.config.stage.settings.learning_rate, took_steps=outcome.took_steps))
    shutil.copytree(context.work / "rollouts", folder / "rollouts")
    if (skipped := context.work / "checkpoints" / SKIPPED).is_dir():
        shutil.copytree(skipped, folder / SKIPPED)
    (folder / "history.json").write_text(json.dumps(outcome.history, indent=1), encoding="utf-8")
    write_json({"findings": outcome.findings, "stopped": _stopped(outcome)}, folder / "health.json")
    context.tracker.log_artifact(folder / "rollouts", "rollouts")
    last = {name: value for name, value in outcome.history[-1].items() if name != "iteration"}
    memory = {"memory/peak_gib": peak_memory_gib(runtime.device)}
    return StageResult(metrics=last | memory, rows=len(outcome.history))


def _stopped(outcome: TrainResult) -> dict[str, Any] | None:
    """Describe a stop by a health rule, for ``health.json``."""
    stop = outcome.stop
    if stop is None:
        return None
    return {
        "text": str(stop),
        "iteration": stop.iteration,
        "rule": stop.finding.rule,
        "result_iteration": stop.restored_iteration,
        "dropped": outcome.rolled_back_history,
    }
