"""Errors in a preset's evaluation, promotion and retraining."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlcore.tasks.presets.evaluation import EXACT
from rlcore.tasks.presets.graph import checkpoints, evaluated_data, prompt_data, rl_stages
from rlcore.tasks.presets.stages import reward_models_of, rl_of

if TYPE_CHECKING:
    from rlcore.tasks.presets.run import RunConfig


def listed(names: Sequence[str]) -> str:
    """Join names for a message."""
    return ", ".join(names) or "none"


def evaluation_errors(config: RunConfig) -> Iterator[str]:
    """Yield datasets that cannot be evaluated on, and datasets not graded by exactly one verifier."""
    known = prompt_data(config)
    named = config.evaluation.data
    yield from (f"evaluation.data: names {name!r} twice" for name in dict.fromkeys(named) if named.count(name) > 1)
    for name in named:
        if name not in known:
            yield f"evaluation.data = {name!r}: no dataset of prompts; choose among {listed(known)}"
    if not known:
        yield "data: no dataset has prompts, so nothing can be evaluated; add one with contract = 'prompts'"
    yield from _verifier_errors(config, known)
    for name in evaluated_data(config):
        deciding = [each for each in config.evaluation.verifiers if not each.data or name in each.data]
        if len(deciding) != 1:
            yield f"evaluation.verifiers: {len(deciding)} decide on the dataset {name!r}; give each dataset one"


def _verifier_errors(config: RunConfig, known: Sequence[str]) -> Iterator[str]:
    """Yield verifiers of unknown datasets and reward models, and those that cannot grade sampled pairs."""
    models = [name for name, stage in config.stages.items() if stage.kind == "reward_model"]
    sampled = [name for name, data in config.data.items() if data.is_sampled]
    for place, verifier in enumerate(config.evaluation.verifiers):
        at = f"evaluation.verifiers.{place}"
        for name in verifier.data:
            if name not in known:
                yield f"{at}.data = {name!r}: no dataset of prompts; choose among {listed(known)}"
        if verifier.kind == "reward_model" and verifier.stage not in models:
            yield f"{at}.stage = {verifier.stage!r}: no stage of the kind reward_model; choose among {listed(models)}"
        if sampled and not verifier.is_exact:
            yield (
                f"{at}.kind = {verifier.kind!r}: the pairs of data.{sampled[0]} are sampled as a right and a wrong "
                f"answer, and it gives scores; choose among {listed(EXACT)}, or name a file of pairs"
            )


def promotion_errors(config: RunConfig) -> Iterator[str]:
    """Yield unknown challengers, and limits on metrics that no stage measures."""
    promotion = config.promotion
    made = [name for name, stage in checkpoints(config).items() if stage is not None]
    if promotion and promotion.challenger not in made:
        named = promotion.challenger
        yield f"promotion.challenger = {named!r}: no checkpoint of this preset; choose one of {listed(made)}"
    elif promotion and promotion.own.max_ref_kl is not None:
        yield from _max_kl(config, promotion.challenger)
    judges = [name for name, stage in config.stages.items() if stage.kind == "win_rate"]
    if promotion and (judging := promotion.win_rate) and judging not in judges:
        yield f"promotion.win_rate = {judging!r}: no stage of the kind win_rate; choose one of {listed(judges)}"
    asking = [name for name, stage in config.stages.items() if stage.kind == "benchmark"]
    for name in promotion.benchmarks if promotion else ():
        if name not in asking:
            yield f"promotion.benchmarks names {name!r}: no stage of the kind benchmark; choose among {listed(asking)}"
    if not config.retrain:
        return
    challenger = config.stages.get(promotion.challenger) if promotion else None
    if challenger is None or not rl_of(challenger):
        yield f"retrain: needs [promotion] with a challenger among the RL stages {listed(list(rl_stages(config)))}"
    elif len(reward_models_of(challenger)) > 1:
        yield "retrain: gates one reward model, and the challenger uses several; leave all but one out"


def _max_kl(config: RunConfig, challenger: str) -> Iterator[str]:
    rl = rl_stages(config).get(challenger)
    if rl is None:
        yield f"promotion.max_ref_kl: the challenger {challenger!r} has no KL to a reference, it is not from RL"
    elif not rl.kl.coefficient:
        yield (
            f"promotion.max_ref_kl: stages.{challenger}.kl.coefficient is 0, so no KL to a reference is measured; set "
            "it above 0, or leave max_ref_kl out"
        )
