"""The starting checkpoint: from a hub, a folder, a GGUF, an MLflow registry, or made from scratch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlcore.config import ModelConfig, RunConfig
from rlcore.errors import ModelError
from rlcore.models.loading import import_model
from tasks import tracking
from tasks.rl_run import MODEL
from tasks.stages import StageContext, StageResult


def run_import_sft(context: StageContext) -> StageResult:
    """Verified safetensors with tokenizer, chat template and end-of-sequence ids; the card says what it is."""
    config = context.config.model
    if config.source == "registry":
        config = _downloaded(config, context.work)
    card = import_model(config, context.folder / MODEL, seed=context.seed)
    context.tracker.log_params({f"model.{key}": value for key, value in dataclasses.asdict(card).items()})
    context.progress(f"{card.num_parameters / 1e6:.2f} M parameters, {card.dtype}, EOS ids {list(card.eos_ids)}")
    return StageResult(
        metrics={"model/parameters": float(card.num_parameters)}, model_name=f"{context.config.name}-base"
    )


def _downloaded(config: ModelConfig, work: Path) -> ModelConfig:
    """A registry URI such as ``models:/tiny-policy/3`` or ``models:/tiny-policy@champion`` as a local folder."""
    if not config.path.startswith("models:/"):
        raise ModelError(
            f"{config.path!r} is not an MLflow model URI", where="model.path", fix="use models:/<name>/<version>"
        )
    folder = tracking.download_model(config.path, work / "registry")
    return dataclasses.replace(config, source="folder", path=str(folder))


def source_files(config: RunConfig) -> str:
    """Digest of the files that the checkpoint is made from; empty where the configuration says it all."""
    from rlcore.models.loading import source_digest

    return source_digest(config.model)
