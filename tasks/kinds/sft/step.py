"""Supervised fine-tuning on demonstrations: the cold start of RL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from rlcore.checks.causes import unchanged
from rlcore.config import SftConfig
from rlcore.models.integrity import verify_model, write_model_digest
from rlcore.models.logprob_check import check_model
from rlcore.models.runtime import Runtime
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.ranks import open_supervised, step_reporter
from rlcore.tasks.steps.rows import read_demonstrations
from rlcore.tasks.steps.runtime import open_runtime, peak_memory_gib
from rlcore.tasks.store.storage import write_json
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.audit.shuffle_gap import match_rare_words, require_rare_word_matches, require_shuffle_gap
from rlcore.training.audit.supervised_data import require_demonstrations
from rlcore.training.sft import SftLearner, run_sft_steps


def run_sft(context: StageContext, *, start: str, data: tuple[str, ...]) -> StageResult:
    """Train the checkpoint of the stage ``start`` on the demonstrations of the stages ``data``."""
    config: SftConfig = context.config.stage.settings
    checkpoint, folders = context.inputs[start] / MODEL, [context.inputs[stage] for stage in data]
    tokenizer = verify_model(context.inputs[start], stage=start, model=checkpoint)
    train, held_out = (
        [
            demonstration
            for folder in folders
            for demonstration in _read(folder / f"{split}.parquet", tokenizer, min_mates=config.min_rare_word_match)
        ]
        for split in ("train", "eval")
    )
    history: list[Mapping[str, float]] = []
    report = step_reporter(context, history, "sft", num_steps=config.num_steps)
    with (
        open_runtime(context.config.hardware, seed=context.seed) as runtime,
        open_supervised(
            context, checkpoint, runtime, here=lambda: SftLearner(_checked(runtime, checkpoint, tokenizer), config)
        ) as learner,
    ):
        run_sft_steps(learner, train, held_out, config, seed=context.seed, report=report)
        learner.save_model(checkpoint, context.folder / MODEL, like_start=runtime.like_start)
        shuffle_gap = learner.shuffle_gap(held_out, seed=context.seed)
        context.log(str(shuffle_gap))
        require_shuffle_gap(shuffle_gap, config.min_shuffle_gap)
        memory = peak_memory_gib(runtime.device)
    if write_model_digest(context.folder, stage=context.stage, model=context.folder / MODEL, start=checkpoint):
        context.log(unchanged(config.learning_rate))
    write_json(history, context.folder / "history.json")
    result = {name: history[-1][name] for name in ("sft/loss", "sft/eval_loss")}
    return StageResult(metrics=result | {"sft/shuffle_gap": shuffle_gap.gap, "memory/peak_gib": memory})


def _read(path: Path, tokenizer: ChatTokenizer, *, min_mates: float) -> list[Demonstration]:
    """Read a split; each assistant turn is trained on, including its end-of-turn token."""
    texts = [(row.messages, row.completion) for row in read_demonstrations(path)]
    made = [render_conversation(tokenizer, messages, completion) for messages, completion in texts]
    require_demonstrations(texts, made, tokenizer)
    require_rare_word_matches(match_rare_words(texts), min_mates)
    return made


def _checked(runtime: Runtime, checkpoint: Path, tokenizer: ChatTokenizer) -> PreTrainedModel:
    model = runtime.load_trainable(checkpoint)
    check_model(model, tokenizer)
    return model
