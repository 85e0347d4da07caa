"""Online RL as a stage: components from the preset, the library's loop, and the files of the artifact."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlcore.checks.causes import unchanged
from rlcore.checks.settings import check_context
from rlcore.choices import choices
from rlcore.config import RlConfig, SamplingConfig
from rlcore.errors import RewardError
from rlcore.loop import Components, HeldOut, TrainResult, finish, iterate, open_run
from rlcore.loop.update import SKIPPED
from rlcore.models.architectures import max_positions
from rlcore.models.integrity import verify_model, write_model_digest
from rlcore.models.runtime import Runtime
from rlcore.seeding import derive_seed
from rlcore.tasks.kinds.rl.curriculum import curriculum_prompts
from rlcore.tasks.kinds.rl.placed import PLACES, REFERENCE, START
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.rewards import verifier
from rlcore.tasks.steps.rl_recorder import StageRecorder
from rlcore.tasks.steps.rollout_engine import longest, open_player, sampling_engine
from rlcore.tasks.steps.rows import read_prompt_sets
from rlcore.tasks.steps.runtime import engine_dtype, open_runtime, peak_memory_gib
from rlcore.tasks.store.storage import write_json
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner_protocol import LearnerProtocol
from rlcore.types import Prompt

if TYPE_CHECKING:
    from rlcore.tasks.kinds.rl.kind import RlStage


def run_online_rl(context: StageContext, *, stage: str, start: str, reference: str, earlier: int = 0) -> StageResult:
    """Train the policy of the stage ``start``, or resume from the run's newest checkpoint.

    ``stage``: the name under which progress is shown. ``reference``: the stage whose policy KL is measured to.
    ``earlier``: the number of RL stages before it, so that stages that build on each other draw prompts in different
    orders.
    """
    context = replace(context, seed=seed_after(context.seed, earlier))
    for name in dict.fromkeys((start, reference)):
        verify_model(context.inputs[name], stage=name, model=context.inputs[name] / MODEL)
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        named = {START: context.inputs[start], REFERENCE: context.inputs[reference]}
        return _run(replace(context, inputs={**context.inputs, **named}), stage, runtime)


def seed_after(seed: int, earlier: int) -> int:
    """Return the seed of an RL stage that builds on ``earlier`` others."""
    return derive_seed(seed, "rl stage", earlier) if earlier else seed


def _run(context: StageContext, stage: str, runtime: Runtime) -> StageResult:
    rl: RlConfig = context.config.stage.settings
    recorder = StageRecorder(context, rl.num_iterations)
    try:
        with _open_components(context, runtime) as components, open_run(components, recorder) as run:
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


@contextmanager
def _open_components(context: StageContext, runtime: Runtime) -> Iterator[Components]:
    stage: RlStage = context.config.stage
    evaluation: EvaluationConfig = context.config.evaluation
    tokenizer = ChatTokenizer.load(context.inputs[START] / MODEL)
    monitored = _monitored(context, evaluation, tokenizer)
    rl = stage.settings if monitored else replace(stage.settings, eval_every=0)
    prompts = read_prompt_sets(context, tuple(stage.prompts), "train", tokenizer)
    if stage.curriculum:
        prompts = DRAWS["by_pass_rate"](context, stage.curriculum, prompts)
    held_out = read_prompt_sets(context, evaluation.data, "eval", tokenizer)
    with ExitStack() as stack:
        placed = stack.enter_context(PLACES[context.config.distributed.backend](context, rl, runtime, tokenizer))
        max_tokens = _longest_text(context, placed.learner, [*prompts, *held_out])
        engine = stack.enter_context(placed.open_engine(max_tokens))
        sampler = stack.enter_context(open_player(engine, tokenizer, rl.sampling.episodes, rl.sampling.agent))
        grader = stack.enter_context(verifier(context, runtime, prefill=tokenizer.prefill))
        yield Components(
            seed=context.seed,
            learner=placed.learner,
            engine=engine,
            sampler=sampler,
            engine_dtype=engine_dtype(sampling_engine(rl.sampling), runtime, rl.update.lora),
            tokenizer=tokenizer,
            reward=placed.reward,
            prompts=prompts,
            folder=context.work / "checkpoints",
            identity={"stage": context.checkpoint_key},
            held_out=HeldOut(
                prompts=monitored,
                verifier=grader,
                confidence=evaluation.confidence,
                correct_from=evaluation.limits(evaluation.data),
            ),
            health=context.config.health,
            mixture_weights=stage.prompts,
        )


def _monitored(context: StageContext, config: EvaluationConfig, tokenizer: ChatTokenizer) -> list[Prompt]:
    asked = read_prompt_sets(context, config.data, "eval", tokenizer, limit=config.num_monitor_problems)
    found = [prompt for prompt in asked if config.grades(prompt.dataset, has_reference=prompt.has_reference)]
    if asked and not found:
        context.log("no held-out prompt has a reference: no accuracy is measured while the run trains")
    return found


def _longest_text(context: StageContext, learner: LearnerProtocol, prompts: Sequence[Prompt]) -> int:
    sampling: SamplingConfig = context.config.stage.settings.sampling
    max_new_tokens = sampling.max_new_tokens
    positions = max_positions(learner.facts.config) or sys.maxsize
    check_context(positions, prompts, max_new_tokens, key=f"stages.{context.stage}.sampling.max_new_tokens")
    return longest(prompts, max_new_tokens, sampling.agent)


DRAWS = choices("draw", {"by_pass_rate": curriculum_prompts})
