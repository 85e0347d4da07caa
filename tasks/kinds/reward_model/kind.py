"""Stage kind ``reward_model``: training of reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlcore.config.training import RewardModelConfig
from rlcore.hardware.memory_plan import reward_model_footprint
from rlcore.strict_config import INLINE
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, from_the_start, own_sections, stage_of_start, stages_of_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import supervised_need
from rlcore.tasks.store.storage import read_json


@dataclass(frozen=True, kw_only=True)
class RewardModelStage:
    """Reward-model training."""

    produces: ClassVar[Product] = "reward_model"
    consumes: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["reward_model"]  # this kind of stage
    init_from: str  # `base`, or the stage whose checkpoint is the backbone
    data: tuple[str, ...]  # datasets of preference pairs
    # datasets of pairs with known labels, which are not trained on and must be ranked correctly
    gold_pairs: tuple[str, ...] = ()
    # train on the pairs of one half of the prompts; a judge of a policy needs the half that its reward model does not
    # use
    half: Literal["all", "first", "second"] = "all"
    settings: RewardModelConfig = field(metadata=INLINE)


def reward_model_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that trains a reward model on preference pairs."""
    own = config.stage(name, RewardModelStage)
    start, pairs = stage_of_start(name, own), (*own.data, *own.gold_pairs)
    return Stage(
        name=name,
        artifact="reward_model",
        registered_as=name,
        render_page=reward_page,
        run=partial(Lazy("rlcore.tasks.kinds.reward_model.step:run_reward_model"), start=start),
        inputs=(start, *stages_of_data(config, pairs)),
        trains_on=tuple(set(stages_of_data(config, own.data)) - set(stages_of_data(config, own.gold_pairs))),
        sections=own_sections(name, "confidence", "hardware", "distributed", data=pairs),
        observers=("stage.eval_every", "confidence"),
        continuation=from_the_start("num_epochs"),
    )


def reward_page(result: Result, folder: Path) -> str:
    """Write ``reward_model.md`` and ``loss.png``."""
    from rlcore.tasks.drawing import plots  # brings matplotlib

    metrics, rows = (read_json(result.data / file) for file in ("metrics.json", "reliability.json"))
    page = render(metrics, rows, confidence=result.confidence)
    (folder / "reward_model.md").write_text(page, encoding="utf-8")
    plots.loss_curve(read_json(result.data / "history.json"), "rm/loss", folder / "loss.png", title="Reward model")
    return page


def render(metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]], *, confidence: float) -> str:
    """Render the page as Markdown: held-out metrics with their intervals, and the calibration table."""

    def bounds(name: str) -> str:
        return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"

    figures = {
        "accuracy": "rm/eval_accuracy",
        "accuracy less that of the longer answer": "rm/gain_over_length",
        "calibration error": "rm/ece",
        "correlation of reward and ln length": "rm/length_correlation_overall",
        "the same within a prompt": "rm/length_correlation_within",
    }
    lengths = ("longer", "shorter", "equal")
    figures |= {f"accuracy if the chosen answer is {name}": f"rm/accuracy_when_{name}" for name in lengths}
    lines = [
        f"held-out pair accuracy {bounds('rm/eval_accuracy')} on {metrics['rm/eval_pairs']:.0f} pairs; the longer "
        f"answer: {metrics['rm/length_accuracy']:.3f}; calibration error {bounds('rm/ece')}",
        "",
        f"| held-out pairs | figure, {format_level(confidence)} interval |",
        "|---|---|",
        *(f"| {label} | {bounds(name)} |" for label, name in figures.items() if name in metrics),
        "",
        "| certainty | pairs | stated | hit rate |",
        "|---|---|---|---|",
        *(
            f"| {row['low']:.2f} to {row['high']:.2f} | {row['num_pairs']} | {row['confidence']:.3f} "
            f"| {row['accuracy']['mean']:.3f} [{row['accuracy']['low']:.3f}, {row['accuracy']['high']:.3f}] |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


KIND = StageKind(
    stage=reward_model_stage,
    memory=partial(supervised_need, footprint=reward_model_footprint, adapter="backbone.lora.rank"),
)
