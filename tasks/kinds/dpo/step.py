"""Direct preference optimization: training on preference pairs without a reward model or sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlcore.checks.causes import unchanged
from rlcore.config import DpoConfig
from rlcore.evaluation.intervals import pair_accuracy, with_bounds
from rlcore.models.integrity import verify_model, write_model_digest
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.pair_data import numbered, read_pair_data
from rlcore.tasks.steps.ranks import open_supervised, step_reporter
from rlcore.tasks.steps.runtime import open_runtime, peak_memory_gib
from rlcore.tasks.store.storage import write_json
from rlcore.training.dpo import DpoLearner, dpo_policy, run_dpo_steps
from rlcore.training.preferences import TokenPair, preference_sets


def run_dpo(context: StageContext, *, start: str) -> StageResult:
    """Train the checkpoint of the stage ``start``, which is also the reference policy, on preference pairs."""
    config: DpoConfig = context.config.stage.settings
    checkpoint = context.inputs[start] / MODEL
    tokenizer = verify_model(context.inputs[start], stage=start, model=checkpoint)
    data = read_pair_data(context, tokenizer)
    num_steps = config.num_epochs * -(-len(preference_sets(data.train)) // config.batch_size)
    history: list[Mapping[str, float]] = []
    report = step_reporter(context, history, "dpo", num_steps=num_steps)
    with (
        open_runtime(context.config.hardware, seed=context.seed) as runtime,
        open_supervised(
            context,
            checkpoint,
            runtime,
            here=lambda: DpoLearner(dpo_policy(checkpoint, config, runtime, seed=context.seed), config),
        ) as learner,
    ):
        margins = run_dpo_steps(learner, data.train, data.held_out, config, seed=context.seed, report=report)
        learner.save_model(checkpoint, context.folder / MODEL, like_start=runtime.like_start)
        memory = peak_memory_gib(runtime.device)
    if write_model_digest(context.folder, stage=context.stage, model=context.folder / MODEL, start=checkpoint):
        context.log(unchanged(config.learning_rate))
    write_json(history, context.folder / "history.json")
    figures = _figures(margins, data.held_out, history[-1], confidence=context.config.confidence)
    context.tracker.log_metrics({name: figures[name] for name in figures.keys() - history[-1]}, step=len(history))
    accuracy, pairs = figures["dpo/eval_accuracy"], figures["dpo/eval_pairs"]
    context.log(f"eval_accuracy={accuracy:.3f} n={pairs:.0f}")
    return StageResult(metrics=figures | {"memory/peak_gib": memory})


def _figures(
    margins: torch.Tensor, pairs: Sequence[TokenPair], last: Mapping[str, float], *, confidence: float
) -> dict[str, float]:
    prompts = numbered([pair.prompt_ids for pair in pairs])
    accuracy = pair_accuracy(margins.numpy(), prompts=prompts, confidence=confidence)
    kept = ("dpo/loss", "dpo/chosen", "dpo/rejected", "dpo/eval_loss", "dpo/eval_margin")
    return {
        **{name: last[name] for name in kept},
        **with_bounds("dpo/eval_accuracy", accuracy),
        "dpo/eval_pairs": float(len(pairs)),
    }
