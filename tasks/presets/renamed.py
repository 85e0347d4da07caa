"""Renamed preset keys and values: one table for the error message and for records of earlier versions.

A pattern has the current names of the tables around a key: ``*`` is any name or number, ``<rl>`` a table of that
``kind``, ``**`` at the front any tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEYS: Mapping[str, str] = {
    "hardware.recompute_layers": "gradient_checkpointing",
    "placement": "distributed",
    "distributed.narrow": "gather_in_compute_dtype",
    "distributed.offload": "cpu_offload",
    "distributed.deadline_minutes": "timeout_minutes",
    "distributed.ray.samplers": "num_rollout_workers",
    "distributed.ray.scorers": "num_reward_workers",
    "distributed.ray.scorer_gpus": "reward_worker_gpus",
    "**.engine.deadlines": "timeouts",
    "**.engine.timeouts.start_seconds": "startup_seconds",
    "**.engine.gpus.memory_fraction": "gpu_memory_utilization",
    "**.engine.eager": "enforce_eager",
    "**.engine.exchange": "weight_dir",
    "**.engine.transfer": "weight_transfer",
    "model.template_arguments": "chat_template_kwargs",
    "model.licence": "license",
    "model.system": "system_prompt",
    "data.*.system": "system_prompt",
    "data.*.shared_words": "ngram_overlap",
    "data.*.shared_run": "ngram_size",
    "stages.<sft>.start": "init_from",
    "stages.<dpo>.start": "init_from",
    "stages.<reward_model>.start": "init_from",
    "stages.<rl>.start": "init_from",
    "stages.<rejection>.start": "policy",
    "stages.<difficulty>.start": "policy",
    "stages.<win_rate>.start": "policy",
    "stages.<benchmark>.start": "policy",
    "stages.<win_rate>.reference": "baseline",
    "stages.<rl>.reference": "ref_policy",
    "stages.<rl>.draw": "curriculum",
    "stages.<rl>.curriculum.difficulty": "pass_rates",
    "stages.<rl>.curriculum.low": "min_pass_rate",
    "stages.<rl>.curriculum.high": "max_pass_rate",
    "stages.<rl>.curriculum.weight": "weighting",
    "stages.*.sampling.revisit": "zero_signal_keep_prob",
    "stages.*.sampling.max_replacements": "dynamic_sampling_rounds",
    "stages.*.sampling.episodes.max_output_tokens": "max_tool_output_tokens",
    "stages.*.sampling.episodes.corpus": "search_corpus",
    "stages.*.sampling.episodes.num_passages": "search_top_k",
    "stages.<rl>.update.epochs": "num_epochs",
    "stages.<rl>.update.minibatches": "num_minibatches",
    "stages.<rl>.update.max_kl": "early_stop_kl",
    "stages.<rl>.update.max_ref_kl": "early_stop_ref_kl",
    "stages.<rl>.update.truncated": "truncated_completions",
    "stages.<rl>.update.mismatch": "rollout_correction",
    "stages.<rl>.update.adapter": "lora",
    "stages.<rl>.kl.placement": "apply_to",
    "stages.<rl>.critic.initialise_from": "init_from",
    "stages.<rl>.critic.placement": "architecture",
    "stages.<rl>.checkpoints.minutes": "every_minutes",
    "stages.<rl>.checkpoints.iterations": "every_iterations",
    "stages.<dpo>.adapter": "lora",
    "stages.<reward_model>.trunk": "backbone",
    "stages.<reward_model>.backbone.adapter": "lora",
    "stages.<reward_model>.anchors": "gold_pairs",
    "stages.<sft>.min_mates": "min_rare_word_match",
    "stages.<sft>.min_pairing": "min_shuffle_gap",
    "stages.*.rewards.*.deadline_minutes": "timeout_minutes",
    "stages.*.rewards.<judge>.options.enforce_form": "structured_output",
    "stages.*.rewards.<judge>.options.key_variable": "api_key_env",
    "stages.*.judge.deadline_minutes": "timeout_minutes",
    "stages.*.<judge>.options.enforce_form": "structured_output",
    "stages.*.<judge>.options.key_variable": "api_key_env",
    "promotion.max_kl": "max_ref_kl",
    "health.gaming": "reward_hacking",
    "health.audit.share": "max_time_fraction",
    "health.audit.false_alarms": "false_alarm_rate",
    "retrain.drift.chance": "false_alarm_rate",
}
"""The new name of each renamed key."""

_APPROVERS = "in promotion.toml of the state directory, as approvers and days"
MOVED: Mapping[str, str] = {
    f"promotion.{key}": _APPROVERS for key in ("approval", "approvers", "approval_days", "four_eyes")
}
"""The place of each key that is no longer in a preset."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "data.*.near_duplicates": {"apart": "exclude"},
    "stages.<rl>.curriculum.weighting": {"learnable": "learnability"},
    "stages.<rl>.critic.architecture": {"trunk": "separate", "head": "shared", "adapter": "lora"},
}
"""The new form of each renamed value, by its key's new name."""

LISTS = ("requires", "without")
"""Keys of a preset whose values are lists of keys."""


def new_path(path: Sequence[str], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Return a key's path with current names. ``kinds`` comes from :func:`kinds_in`."""
    found: tuple[str, ...] = ()
    for name in path:
        found = (*found, _lookup(KEYS, (*found, name), kinds) or name)
    return found


def new_value(path: Sequence[str], value: object, kinds: Mapping[str, str]) -> object:
    """Return a value in its current form. ``path``: that of its key, with current names."""
    if len(path) == 2 and path[0] in LISTS and isinstance(value, str):
        return ".".join(new_path(value.split("."), kinds))
    forms = _lookup(VALUES, tuple(path), kinds)
    return forms.get(value, value) if forms and isinstance(value, str) else value


def kinds_in(*documents: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``kind`` of each table that has one, by the table's path; a later document's counts."""
    return {path: kind for document in documents for path, kind in _kinds(document, "")}


def translated(node: Any, kinds: Mapping[str, str], path: tuple[str, ...] = ()) -> Any:
    """Return a document, or its part at ``path``, with current keys and values."""
    if isinstance(node, Mapping):
        return {
            new_path((*path, key), kinds)[-1]: translated(value, kinds, (*path, key)) for key, value in node.items()
        }
    if isinstance(node, list):
        return [translated(item, kinds, (*path, str(index))) for index, item in enumerate(node)]
    return new_value(new_path(path, kinds), node, kinds)


def old_names(node: Any, kinds: Mapping[str, str], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a sentence for each old key and value of a document."""
    now = new_path(path, kinds)
    if path and now[-1] != path[-1]:
        yield f"{'.'.join(path)} is now {'.'.join(now)}"
    if place := MOVED.get(".".join(path)):
        yield f"{'.'.join(path)} is now {place}"
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from old_names(value, kinds, (*path, str(key)))
    elif isinstance(node, str) and (form := new_value(now, node, kinds)) != node:
        yield f"{'.'.join(now)} = {node!r} is now {form!r}"


def _kinds(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping) and isinstance(node.get("kind"), str):
        yield path, node["kind"]
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _kinds(value, f"{path}.{key}" if path else str(key))


def _lookup(table: Mapping[str, Any], path: tuple[str, ...], kinds: Mapping[str, str]) -> Any:
    return next((new for pattern, new in table.items() if _matches(pattern.split("."), path, kinds)), None)


def _matches(pattern: list[str], path: tuple[str, ...], kinds: Mapping[str, str]) -> bool:
    if pattern[0] == "**":
        pattern = [*"*" * (len(path) - len(pattern) + 1), *pattern[1:]]
    return len(pattern) == len(path) and all(
        part in ("*", path[place]) or part == f"<{kinds.get('.'.join(path[: place + 1]))}>"
        for place, part in enumerate(pattern)
    )
