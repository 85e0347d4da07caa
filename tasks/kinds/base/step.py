"""Import of a checkpoint: from a hub, a folder, a GGUF file, an MLflow registry, or made from scratch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.importing import import_model
from rlcore.models.integrity import write_model_digest
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.tracking.registry import download_model
from rlcore.text.tokenization import ChatTokenizer


def run_import_sft(context: StageContext) -> StageResult:
    """Import the base as verified safetensors with tokenizer, chat template and EOS ids."""
    config: ModelConfig = context.config.model
    if config.source == "registry":
        config = _downloaded(config, context.work)
    card = import_model(config, context.folder / MODEL, seed=context.seed)
    write_model_digest(context.folder, stage=context.stage, model=context.folder / MODEL)
    context.tracker.log_params({f"card.{key}": value for key, value in dataclasses.asdict(card).items()})
    eos_ids = ",".join(map(str, card.eos_ids))
    context.log(f"model parameters={card.num_parameters / 1e6:.2f}M dtype={card.dtype} eos_ids=[{eos_ids}]")
    return StageResult(metrics={"model/parameters": float(card.num_parameters)})


def run_start(context: StageContext, *, model: str) -> StageResult:
    """Import the registered model ``model`` as a starting point or reference policy of the run.

    Raises:
        ModelError: its tokenizer differs from that of the base, by which the datasets are truncated.
    """
    done = import_registered(context, model)
    base, own = (ChatTokenizer.load(each / MODEL) for each in (context.inputs["import_sft"], context.folder))
    if not own.is_same_as(base):
        raise ModelError(
            f"the model {model!r} has another tokenizer than the base",
            where="stages.{1}.{0}".format(*context.stage.split("_", 1)),
            fix="take a model of the same family, or make it the base: model.source = 'registry'",
        )
    return done


def import_registered(context: StageContext, model: str) -> StageResult:
    """Import a registered model, verified like every external checkpoint."""
    folder = download_model(model, context.work / "registry")
    card = import_model(ModelConfig(source="folder", path=str(folder)), context.folder / MODEL, seed=context.seed)
    write_model_digest(context.folder, stage=context.stage, model=context.folder / MODEL)
    return StageResult(metrics={"model/parameters": float(card.num_parameters)})


def _downloaded(config: ModelConfig, work: Path) -> ModelConfig:
    if not config.path.startswith("models:/"):
        raise ModelError(
            f"{config.path!r} is not an MLflow model URI", where="model.path", fix="use models:/<name>/<version>"
        )
    folder = download_model(config.path, work / "registry")
    return dataclasses.replace(config, source="folder", path=str(folder))
