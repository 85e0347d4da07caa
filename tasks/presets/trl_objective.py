"""The algorithm, its constants and the rewards of a TRL GRPO run, as keys of an RL stage."""

from __future__ import annotations

from typing import Any

from rlcore.tasks.presets.trl_settings import TrlSettings

_WEIGHTINGS = {"grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "constant"}
_SCALES = {"group": "group_sample", "batch": "batch_sample", "none": "none", True: "group_sample", False: "none"}
_CORRECTIONS = {f"{level}_{mode}": (level, mode) for level in ("token", "sequence") for mode in ("truncate", "mask")}
_OVERLONG = {"limit": 1280, "buffer": 256}  # of TRL's command
_THINK = {"style": "regex", "pattern": "(?s)<think>.*</think>.*", "example": "<think>3 + 4 = 7</think>7"}
_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "math"},
    "reasoning_accuracy_reward": {"kind": "math"},
    "think_format_reward": {"kind": "format", "options": _THINK},
    "get_soft_overlong_punishment": {"kind": "length", "options": _OVERLONG},
}


def objective_of(trl: TrlSettings, errors: list[str]) -> dict[str, Any]:
    """Return the keys of the stage that make its loss TRL's; add values without counterpart to ``errors``."""
    loss, level, scale = trl.get("loss_type"), trl.get("importance_sampling_level"), trl.get("scale_rewards")
    if scale not in _SCALES:
        errors.append(f"scale_rewards = {scale!r}: must be group, batch or none")
    constants: dict[str, Any] = {"scale": _SCALES.get(scale)}
    low, high = trl.get("epsilon"), trl.get("epsilon_high")
    if loss in _WEIGHTINGS and level in ("token", "sequence"):
        named = loss if loss == "dapo" else "grpo"
        algorithm = named if level == "token" else "gspo"
        constants |= {"clip_low": low, "clip_high": low if high is None else high, "weighting": _WEIGHTINGS[loss]}
    elif loss == "cispo" and level == "token":
        algorithm = "cispo"
        constants |= {"clip_high": (low if high is None else high) - 1.0}
    elif loss == "sapo" and level == "token":
        algorithm = "sapo"
        names = {"gate_positive": "sapo_temperature_pos", "gate_negative": "sapo_temperature_neg"}
        constants |= {ours: trl.get(theirs) for ours, theirs in names.items()}
    else:
        algorithm = ""
        known = ", ".join((*_WEIGHTINGS, "cispo", "sapo"))
        errors.append(
            f"loss_type = {loss!r} with importance_sampling_level = {level!r}: a preset has no counterpart, "
            f"only {known}, and sequence for the first four"
        )
    return {
        "algorithm": algorithm,
        **{f"update.objective.{name}": value for name, value in constants.items()},
        **({"update.truncated_completions": "mask"} if trl.get("mask_truncated_completions") else {}),
        **({"kl.estimator": "k3_plain"} if trl.get("beta") and trl.get("use_bias_correction_kl") is False else {}),
        **(_correction(trl, errors) if trl.get("use_vllm") else {}),
    }


def _correction(trl: TrlSettings, errors: list[str]) -> dict[str, Any]:
    """Return the rollout correction of a run with vLLM; TRL makes none of its own engine."""
    if not trl.get("vllm_importance_sampling_correction"):
        return {"update.rollout_correction.mode": "off"}
    named = trl.get("vllm_importance_sampling_mode") or "sequence_mask"
    if named not in _CORRECTIONS:
        errors.append(f"vllm_importance_sampling_mode = {named!r}: must be one of {', '.join(_CORRECTIONS)}")
        return {}
    level, mode = _CORRECTIONS[named]
    found = {"mode": mode, "level": level, "low": 0.0, "high": trl.get("vllm_importance_sampling_clip_max")}
    return {f"update.rollout_correction.{key}": value for key, value in found.items()}


def rewards_of(trl: TrlSettings, errors: list[str]) -> list[dict[str, Any]]:
    """Return the reward terms; a function ``my_rewards.brief`` is ``my_rewards:brief``."""
    named = trl.get("reward_funcs") or []
    named = [named] if isinstance(named, str) else named
    weights = trl.get("reward_weights") or [1.0] * len(named)
    if len(weights) != len(named):
        errors.append(f"reward_weights: {len(weights)} weights for {len(named)} reward_funcs")
    terms = []
    for name, weight in zip(map(str, named), weights, strict=False):
        module, _, function = name.rpartition(".")
        if name not in _REWARDS and not module:
            errors.append(f"reward_funcs = {name!r}: neither one of {', '.join(_REWARDS)} nor module.function")
        term = _REWARDS.get(name) or {"kind": f"{module}:{function}"}
        terms.append(term | ({"weight": float(weight)} if weight != 1.0 else {}))
    if not terms and trl.get("reward_model_name_or_path") is None:
        errors.append("reward_funcs: required; TRL's command takes none from elsewhere")
    return terms
