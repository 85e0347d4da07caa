"""Errors in the graph of a preset, its evaluation, promotion and retraining, each with its full key and a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlcore.config import RewardTerm, player_of
from rlcore.tasks.kinds import BASE, PRODUCTS, Rows, StageConfig
from rlcore.tasks.presets.data import POLICY
from rlcore.tasks.presets.graph import (
    REGISTRY,
    checkpoints,
    critic_of,
    curriculum_of,
    cycle_in,
    data_of,
    evaluated_data,
    gold_pairs_of,
    human_pairs_of,
    is_name,
    judge_of,
    kl_of,
    named_start,
    needed_stages,
    prompt_data,
    reference_key,
    reference_of,
    reward_models_of,
    rewards_of,
    rl_of,
    rl_stages,
    sampling_of,
    shares_of,
    stage_order,
    start_key,
    terms_of,
)
from rlcore.tasks.presets.settings import EXACT

if TYPE_CHECKING:
    from rlcore.tasks.presets.run import RunConfig


_PRESET_NAME = re.compile(r"\w[\w .-]{0,99}")
_SMALLEST_SHARE = 0.001  # smallest mixture weight; below it a dataset would never be sampled


def graph_errors(config: RunConfig) -> list[str]:
    """Return all errors of the graph. If names are wrong, return only those: other errors would follow from them."""
    errors = [*_names(config), *_data(config)]
    for name, stage in config.stages.items():
        path = f"stages.{name}"
        errors += [*_start(config, f"{path}.{start_key(stage)}", named_start(stage)), *_reference(config, path, stage)]
        errors += [*_reads(config, path, stage), *_human_pairs(config, path, stage), *_rewards(config, path, stage)]
        errors += [*_shares(path, stage), *_draw(config, path, stage), *_critic(config, path, stage)]
        errors += _turns(config, path, stage)
    if cycle := cycle_in(needed_stages(config)):
        errors.append(
            f"stages.{cycle[0]}: stages depend on each other: {' -> '.join(cycle)}; change init_from, policy or data "
            f"of one"
        )
    return errors or [*_episodes(config), *evaluation_errors(config), *promotion_errors(config)]


def _names(config: RunConfig) -> Iterator[str]:
    if not _PRESET_NAME.fullmatch(config.name):
        rule = "take up to 100 letters, digits, blanks, _ . -, no blank first"
        yield f"name = {config.name!r}: names folders and models; {rule}"
    for section in ("data", "stages"):
        for name in getattr(config, section):
            if not is_name(name):
                rule = "take up to 60 small letters, digits and _, and none that the pipeline uses"
                yield f"{section}.{name}: not a name; {rule}"
    for name in config.data.keys() & config.stages.keys():
        yield f"stages.{name}: a dataset has this name too; rename one of them"


def _data(config: RunConfig) -> Iterator[str]:
    for name, data in config.data.items():
        path = f"data.{name}"
        if data.is_sampled and data.contract != "preference_pairs":
            yield f"{path}.adapter = 'policy': samples preference pairs, and this is {data.contract!r}"
        elif data.is_sampled and not data.policy:
            yield f"{path}.policy: required by the adapter 'policy'; name one of {listed(_policies(config))}"
        elif data.policy and not data.is_sampled:
            yield f"{path}.policy = {data.policy!r}: neither adapter nor fallback is 'policy'; leave it out"
        elif data.is_sampled and (players := _players(config)):
            yield (
                f"{path}.adapter = 'policy': a pair has two answers and no tool calls, and "
                f"stages.{players[0]}.sampling names tools or an agent; name a file of pairs"
            )
        elif data.policy and data.policy not in _policies(config):
            yield f"{path}.policy = {data.policy!r}: no such checkpoint; choose one of {listed(_policies(config))}"


def _start(config: RunConfig, key: str, start: str) -> Iterator[str]:
    if start in config.stages and config.stages[start].produces != "checkpoint":
        made = PRODUCTS[config.stages[start].produces]
        known = listed(_policies(config))
        yield f"{key} = {start!r}: this stage makes {made}, no policy; choose one of {known}"
    elif start.startswith(REGISTRY):
        if not _is_uri(start):
            yield f"{key} = {start!r}: not a registered model; write models:/name@alias or models:/name/version"
    elif start not in _policies(config):
        known = listed(_policies(config))
        yield f"{key} = {start!r}: no such checkpoint; choose one of {known}, or models:/name@alias"


def _reference(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    named = reference_of(stage)
    if not named:
        return
    key = reference_key(stage)
    yield from _start(config, f"{path}.{key}", named)
    if (kl := kl_of(stage)) and kl.coefficient == 0.0:
        yield (
            f"{path}.{key} = {named!r}: kl.coefficient is 0, so nothing is measured to it; set it above 0, or "
            f"leave {key} out"
        )


def _is_taught(stage: StageConfig) -> bool:
    kl = kl_of(stage)
    return kl is not None and bool(reference_of(stage)) and kl.apply_to == "reward"


def _reads(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    key, known = f"{path}.{stage.data_key}", _rows(config, stage.consumes)
    if stage.data_key and not data_of(stage):
        yield f"{key}: names no data; choose among {listed(known)}"
    for name in data_of(stage):
        at = f"{key}.{name}" if name in shares_of(stage) else f"{key} = {name!r}"
        if name not in config.data and name not in config.stages:
            yield f"{at}: no such data; choose among {listed(known)}"
        elif name not in known:
            yield f"{at}: has no {stage.consumes}; choose among {listed(known)}"
    for name in gold_pairs_of(stage):
        at = f"{path}.gold_pairs = {name!r}"
        if name in data_of(stage):
            yield f"{at}: is in {key} too; training pairs test nothing"
        elif name not in known:
            yield f"{at}: has no {stage.consumes}; choose among {listed(known)}"


def _human_pairs(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    known = [name for name in _rows(config, "preference pairs") if not config.data[name].is_sampled]
    for name in human_pairs_of(stage):
        if name not in known:
            yield f"{path}.human_pairs = {name!r}: no dataset of human preference pairs; choose among {listed(known)}"


def _rows(config: RunConfig, wanted: Rows) -> list[str]:
    found = [
        name
        for name, data in config.data.items()
        if (data.has_prompts if wanted == "prompts" else data.contract.replace("_", " ") == wanted)
    ]
    return found + [name for name, stage in config.stages.items() if stage.produces == wanted]


def _rewards(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    terms, models = rewards_of(stage), _reward_models(config)
    if sampling_of(stage) and not any(map(_can_teach, terms)) and not judge_of(stage) and not _is_taught(stage):
        error = "no weight is positive, so nothing is rewarded" if terms else "names no reward"
        yield f"{path}.rewards: {error}; add one, such as {{ kind = 'math' }}"
    for place, term in enumerate(terms):
        at = f"{path}.rewards.{place}"
        for name in term.data:
            if name not in data_of(stage):
                yield f"{at}.data = {name!r}: the stage draws no prompts from it; it has {listed(data_of(stage))}"
    for key, term in terms_of(stage).items():
        if term.kind == "reward_model" and term.stage not in models:
            known = f"choose one of {listed(models)}" if models else "add one under [stages]"
            yield f"{path}.{key}.stage = {term.stage!r}: not a stage of the kind reward_model; {known}"
    if terms:
        for name in data_of(stage):
            if not any(not term.data or name in term.data for term in terms):
                yield f"{path}.rewards: no reward is on the dataset {name!r}; add one, or draw no prompts from it"


def _can_teach(term: RewardTerm) -> bool:
    """Return True if a term rewards something. A user's function may return costs, whose weight is negative."""
    return term.weight > 0.0 or (term.weight < 0.0 and bool(term.module))


def _shares(path: str, stage: StageConfig) -> Iterator[str]:
    shares = shares_of(stage)
    least = _SMALLEST_SHARE * sum(shares.values())
    for name, share in shares.items():
        if share < least:
            yield f"{path}.{stage.data_key}.{name} = {share!r}: below a thousandth of all; raise it, or leave it out"


def _draw(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    draw = curriculum_of(stage)
    if draw is None:
        return
    key, measured = f"{path}.curriculum.pass_rates = {draw.pass_rates!r}", config.stages.get(draw.pass_rates)
    if measured is None or measured.kind != "difficulty":
        known = [name for name, each in config.stages.items() if each.kind == "difficulty"]
        yield f"{key}: no stage of the kind difficulty; choose one of {listed(known)}"
        return
    for name in data_of(stage):
        if name not in data_of(measured):
            yield f"{key}: it samples no prompts of {name!r}; add it to stages.{draw.pass_rates}.data"


def _critic(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    critic = critic_of(stage)
    if critic is None or critic.init_from == POLICY:
        return
    source, known = critic.init_from, _reward_models(config)
    model = config.stages.get(source)
    if model is None or model.produces != "reward_model":
        names = listed([POLICY, *known])
        yield f"{path}.critic.init_from = {source!r}: not a stage of the kind reward_model; choose one of {names}"
    elif critic.architecture == "lora" and not model.settings.backbone.lora.rank:
        yield (
            f"{path}.critic is an adapter that starts from the reward model's: set "
            f"stages.{source}.backbone.lora.rank > 0, so that there is one"
        )


def _turns(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    sampling = sampling_of(stage)
    if sampling and sampling.episodes.environment and stage.produces == "demonstrations":
        yield (
            f"{path}.sampling.episodes.environment: demonstrations lack the environment's first observation; use the "
            "tools of the table, or train online"
        )
    has_own = sampling and (sampling.episodes.environment or sampling.agent)
    if sampling and not has_own and any(t.kind == "environment" for t in rewards_of(stage)):
        yield f"{path}.rewards: kind 'environment' needs an environment in sampling.episodes, or sampling.agent"
    if sampling and sampling.agent and rl_of(stage) is None:
        yield f"{path}.sampling.agent: agents play in online RL and its evaluations, not in this kind; leave it out"


def _episodes(config: RunConfig) -> Iterator[str]:
    """Check that all sampling stages have the same episodes, so that their policies are evaluated alike."""
    found = {name: sampling for name in stage_order(config) if (sampling := sampling_of(config.stages[name]))}
    first = next(iter(rl_stages(config)), next(iter(found), ""))
    for name, sampling in found.items():
        if sampling.agent != found[first].agent:
            yield (
                f"stages.{name}.sampling.agent differs from stages.{first}.sampling.agent: give all stages of a preset "
                "that sample the same agent, so that their evaluations can be compared"
            )
        if sampling.episodes != found[first].episodes:
            yield (
                f"stages.{name}.sampling.episodes differs from stages.{first}.sampling.episodes: give all stages of a "
                "preset that sample the same tools and limits, so that their evaluations can be compared"
            )


def _players(config: RunConfig) -> list[str]:
    found = {name: own for name, stage in config.stages.items() if (own := sampling_of(stage))}
    return [name for name, own in found.items() if player_of(own.episodes, own.agent) != "none"]


def _policies(config: RunConfig) -> list[str]:
    return [BASE, *(name for name, stage in config.stages.items() if stage.produces == "checkpoint")]


def _reward_models(config: RunConfig) -> list[str]:
    return [name for name, stage in config.stages.items() if stage.produces == "reward_model"]


def _is_uri(text: str) -> bool:
    name, separator, which = text.removeprefix(REGISTRY).replace("@", "/", 1).partition("/")
    return bool(name and separator and which)


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
