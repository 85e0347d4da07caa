"""Components of an RL run that a preset describes: models, engine, rewards and prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore.checks.settings import check_context
from rlcore.choices import choices
from rlcore.config import SamplingConfig
from rlcore.loop import Components, HeldOut
from rlcore.models.architectures import max_positions
from rlcore.models.runtime import Runtime
from rlcore.tasks.kinds.rl.curriculum import curriculum_prompts
from rlcore.tasks.kinds.rl.placed import PLACES, REFERENCE, START
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.steps.base import MODEL, StageContext
from rlcore.tasks.steps.play import open_player
from rlcore.tasks.steps.rewards import (
    verifier,
)
from rlcore.tasks.steps.rollout_engine import longest, sampling_engine
from rlcore.tasks.steps.tokens import read_prompt_sets
from rlcore.tasks.steps.workload import engine_dtype
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner_protocol import LearnerProtocol
from rlcore.types import Prompt

if TYPE_CHECKING:
    from rlcore.tasks.kinds.rl.kind import RlStage


def start_from(context: StageContext, stage: str, reference: str) -> StageContext:
    """Return the context with ``stage`` as the input ``START``, and ``reference`` as the input REFERENCE."""
    named = {START: context.inputs[stage], REFERENCE: context.inputs[reference]}
    return replace(context, inputs={**context.inputs, **named})


@contextmanager
def open_components(context: StageContext, runtime: Runtime) -> Iterator[Components]:
    """Open all components of a run. Engine and reward workers end when the context closes.

    Raises:
        ConfigError: a setting does not fit the model, or the engine's GPUs do not exist.
        ModelError: a checkpoint cannot be trained.
        SamplingError: the engine does not start.
    """
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
    """Return the held-out problems that can be graded, for evaluation during training."""
    asked = read_prompt_sets(context, config.data, "eval", tokenizer, limit=config.num_monitor_problems)
    found = [prompt for prompt in asked if config.grades(prompt.dataset, has_reference=prompt.has_reference)]
    if asked and not found:
        context.log("no held-out prompt has a reference: no accuracy is measured while the run trains")
    return found


def _longest_text(context: StageContext, learner: LearnerProtocol, prompts: Sequence[Prompt]) -> int:
    """Return the number of tokens of the longest prompt and its completion.

    Raises:
        ConfigError: it exceeds the model's context.
    """
    sampling: SamplingConfig = context.config.stage.settings.sampling
    max_new_tokens = sampling.max_new_tokens
    positions = max_positions(learner.facts.config) or sys.maxsize
    check_context(positions, prompts, max_new_tokens, key=f"stages.{context.stage}.sampling.max_new_tokens")
    return longest(prompts, max_new_tokens, sampling.agent)


DRAWS = choices("draw", {"by_pass_rate": curriculum_prompts})
