"""The reward model: trained on preference pairs, judged on held-out pairs beside the length heuristic, centred."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from rlcore.errors import TrainingError
from rlcore.evaluation import Interval, accuracy, expected_calibration_error
from rlcore.models.heads import ScalarModel, save_head
from rlcore.models.loading import save_model
from rlcore.seeding import generator
from rlcore.tokenization import ChatTokenizer
from rlcore.training.preferences import TokenPair, preference_sets
from rlcore.training.reward_model import centre, score_pairs, train_reward_model
from tasks import plots
from tasks.data import read_pairs
from tasks.rl_run import MODEL
from tasks.runtime import open_runtime, peak_memory_gib
from tasks.stages import StageContext, StageResult
from tasks.tokens import tokenize_pairs


def run_reward_model(context: StageContext) -> StageResult:
    """Bradley-Terry training from the SFT checkpoint; fails below the preset's held-out accuracy."""
    start, data = context.inputs["sft"] / MODEL, context.inputs["prepare_preferences"]
    config, budget = context.config.reward_model, context.config.reward_model.tokens_per_microbatch
    tokenizer = ChatTokenizer.load(start)
    max_tokens = context.config.preferences.max_tokens
    train = tokenize_pairs(read_pairs(data / "train.parquet"), tokenizer, max_tokens=max_tokens)
    held_out = tokenize_pairs(read_pairs(data / "eval.parquet"), tokenizer, max_tokens=max_tokens)
    history: list[Mapping[str, float]] = []
    num_steps = config.num_epochs * -(-len(preference_sets(train)) // config.batch_size)

    def report(step: int, metrics: Mapping[str, float]) -> None:
        history.append({"iteration": step, **metrics})
        context.tracker.log_metrics(metrics, step=step)
        if step % max(1, num_steps // 10) == 0 or step == num_steps:
            context.progress(
                f"step {step}/{num_steps}: loss {metrics['rm/loss']:.3f}, accuracy {metrics['rm/accuracy']:.3f}"
            )

    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        draw = generator(context.seed, "reward_head")
        model = ScalarModel.with_random_head(runtime.load_trainable(start), draw).to(runtime.device)
        train_reward_model(model, train, config, seed=context.seed, report=report)
        chosen, rejected = score_pairs(model, held_out, tokens_per_microbatch=budget)
        centring = centre(torch.cat([chosen, rejected]))
        save_model(model.backbone, start, context.folder / MODEL)
        save_head(model, context.folder / MODEL)
        memory = peak_memory_gib(runtime.device)
    values = {"shift": centring.shift, "scale": centring.scale}
    (context.folder / MODEL / "centring.json").write_text(json.dumps(values), encoding="utf-8")
    metrics, interval = held_out_figures(held_out, chosen, rejected, confidence=context.config.evaluation.confidence)
    (context.folder / "metrics.json").write_text(json.dumps(metrics, indent=1), encoding="utf-8")
    context.tracker.log_metrics(metrics, step=len(history))
    plots.loss_curve(history, "rm/loss", context.folder / "loss.png", title="Reward model")
    context.tracker.log_artifact(context.folder / "loss.png", "plots")
    context.progress(describe(interval, metrics))
    if interval.mean < config.min_accuracy:
        raise TrainingError(
            f"held-out pair accuracy is {interval.mean:.3f}, the preset asks for {config.min_accuracy:.3f}",
            where="reward_model.min_accuracy",
            fix="train longer, look at the pairs in the preference snapshot, or lower the bound",
        )
    return StageResult(metrics=metrics | {"memory/peak_gib": memory}, model_name=f"{context.config.name}-reward-model")


def held_out_figures(
    pairs: Sequence[TokenPair], chosen: torch.Tensor, rejected: torch.Tensor, *, confidence: float
) -> tuple[dict[str, float], Interval]:
    """Accuracy with its interval, what "the longer one wins" scores on the same pairs, and the calibration error."""
    interval = accuracy((chosen > rejected).tolist(), confidence=confidence)
    by_length = [_length_verdict(pair) for pair in pairs]
    margins = (chosen - rejected).double().numpy()
    metrics = {
        "rm/eval_accuracy": interval.mean,
        "rm/eval_accuracy_low": interval.low,
        "rm/eval_accuracy_high": interval.high,
        "rm/length_accuracy": sum(by_length) / len(by_length),
        "rm/ece": expected_calibration_error(margins),
        "rm/eval_pairs": float(len(pairs)),
    }
    return metrics, interval


def _length_verdict(pair: TokenPair) -> float:
    difference = len(pair.chosen_ids) - len(pair.rejected_ids)
    return 0.5 if difference == 0 else float(difference > 0)


def describe(interval: Interval, metrics: Mapping[str, float]) -> str:
    """One line for people."""
    return (
        f"held-out pair accuracy {interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}] on {interval.n} pairs; "
        f"the longer answer: {metrics['rm/length_accuracy']:.3f}; calibration error {metrics['rm/ece']:.3f}"
    )
