"""Curriculum: prompts are repeated by their measured pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.errors import DataError
from rlcore.sampling.rejection import PassCount, sample_by_difficulty
from rlcore.tasks.steps.base import StageContext
from rlcore.tasks.steps.rows import id_in_dataset
from rlcore.tasks.store.storage import read_table
from rlcore.types import Prompt

if TYPE_CHECKING:
    from rlcore.tasks.kinds.rl.kind import DrawConfig, RlStage


def curriculum_prompts(context: StageContext, draw: DrawConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of each dataset within the band, repeated by their number of occurrences in an epoch.

    A resumed run draws the same prompts.
    Raises:
        DataError: no prompt of a dataset is in the band.
    """
    stage: RlStage = context.config.stage
    table = read_table(context.inputs[draw.pass_rates] / "difficulty.parquet")
    columns = (table[name].tolist() for name in ("dataset", "prompt_id", "passed", "answers"))
    known = {
        (dataset, prompt_id): PassCount(passed=passed, answers=answers)
        for dataset, prompt_id, passed, answers in zip(*columns, strict=True)
    }
    found: list[Prompt] = []
    for name in stage.prompts:
        own = [prompt for prompt in prompts if prompt.dataset == name]
        tried = [known.get((name, id_in_dataset(each, is_one_of_several=len(stage.prompts) > 1))) for each in own]
        some = sample_by_difficulty(
            own, tried, band=(draw.min_pass_rate, draw.max_pass_rate), weight=draw.weighting, seed=context.seed
        )
        if not some:
            raise _none_left(context.stage, name, draw, tried)
        found += some
    kept = len({prompt.prompt_id for prompt in found})
    context.log(f"curriculum prompts={kept}/{len(prompts)} pass_rates={draw.pass_rates}")
    context.tracker.log_metrics(
        {"curriculum/prompts": float(kept), "curriculum/prompt_fraction": kept / len(prompts)}, step=0
    )
    return found


def _none_left(stage: str, dataset: str, draw: DrawConfig, tried: Sequence[PassCount | None]) -> DataError:
    rates = [each.pass_rate for each in tried if each is not None]
    measured = f"from {min(rates):.3f} to {max(rates):.3f}" if rates else "not measured"
    return DataError(
        f"no prompt of {dataset!r} has a pass rate from {draw.min_pass_rate} to {draw.max_pass_rate}: those of "
        f"{len(rates)} prompts are "
        f"{measured}",
        where=f"stages.{stage}.curriculum",
        fix="lower min_pass_rate or raise max_pass_rate; or measure more prompts, or a policy that solves some",
    )
