"""Token weights of the loss, and the table of algorithms: a row of pure functions each, with the constants of a run.

Weights are computed once for the whole optimizer step, and the loss is a plain weighted sum. Packing, micro-batches and
data parallelism therefore cannot change it. An episode counts once, however many samples it has. The audit has a row
for each algorithm too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.algorithms.advantages import (
    AdvantageFn,
    batch_normalized,
    group_centered,
    group_normalized,
    group_over_mean,
    leave_one_out,
    per_token_reward,
    policy_gae,
    value_gae,
)
from rlcore.algorithms.kl import PenaltyController
from rlcore.algorithms.surrogates import (
    RatioFn,
    Surrogate,
    SurrogateFn,
    cispo,
    completion_ratio,
    dppo_tv,
    ppo_clip,
    reinforce,
    sapo,
    sequence_ratio,
    token_ratio,
    unclipped,
)
from rlcore.config import ObjectiveConfig, RlConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


#: (padded loss_mask of all samples of the step, bool [S, T]; number of each sample's episode, int64 [S]) -> weights
#: [S, T] in torch's default dtype
WeightingFn = Callable[[Tensor, Tensor], Tensor]


def token_mean(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"]
) -> Float[Tensor, "samples time"]:
    """Weight all tokens equally: ``1 / (number of tokens of the step)`` (DAPO, Yu et al. 2025, eq. 8)."""
    mask = loss_mask.to(torch.get_default_dtype())
    return mask / mask.sum().clamp(min=1.0)


def sequence_mean(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"]
) -> Float[Tensor, "samples time"]:
    """Weight all episodes equally: ``1 / (E * tokens of the episode)`` (GRPO, Shao et al. 2024, eq. 3).

    E is the number of episodes with at least one trained token.
    """
    mask = loss_mask.to(torch.get_default_dtype())
    lengths, num_episodes = _episodes(mask, episode)
    return mask / lengths.clamp(min=1.0) / num_episodes


def sequence_sum(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"]
) -> Float[Tensor, "samples time"]:
    """Weight every token ``1 / E``, which sums log-probabilities per episode (RLOO, Ahmadian et al. 2024)."""
    return constant(loss_mask, episode, constant_length=1)


def constant(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"], *, constant_length: int
) -> Float[Tensor, "samples time"]:
    """Weight every token ``1 / (E * constant_length)``: no bias to long episodes (Dr. GRPO, Liu et al. 2025)."""
    mask = loss_mask.to(torch.get_default_dtype())
    _, num_episodes = _episodes(mask, episode)
    return mask / (num_episodes * float(constant_length))


def _episodes(mask: Tensor, episode: Tensor) -> tuple[Tensor, Tensor]:
    places = {number: place for place, number in enumerate(dict.fromkeys(episode.tolist()))}
    index = torch.tensor([places[number] for number in episode.tolist()], device=mask.device)
    lengths = mask.new_zeros(len(places)).index_add(0, index, mask.sum(1))
    return lengths[index][:, None], (lengths > 0).sum().clamp(min=1)


#: Weightings by configuration name; ``constant`` needs its ``constant_length`` bound first.
WEIGHTINGS: Mapping[str, Callable[..., Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Four pure functions of the policy loss (:mod:`rlcore.algorithms.objective`), and the critic's advantage if any.

    A run sets constants by the keyword names of these functions (:func:`resolve_algorithm`).
    With a critic, the advantages are whitened, and ``value_advantage`` defines the critic's returns.

    With a ``penalty``, a token's loss has the term beta * KL(old || policy), and the learner adapts beta from its start
    in the row (Schulman et al. 2017, eq. 8). The paper's exact KL is replaced by its estimate k3 at the sampled token.
    """

    advantage: AdvantageFn
    ratio: RatioFn
    surrogate: SurrogateFn
    weighting: WeightingFn
    value_advantage: AdvantageFn | None = None
    penalty: PenaltyController | None = None

    @property
    def uses_critic(self) -> bool:
        return self.value_advantage is not None


def _clip(low: float, high: float, surrogate: Callable[..., Surrogate] = ppo_clip) -> SurrogateFn:
    return partial(surrogate, clip_low=low, clip_high=high)


_GAE = partial(policy_gae, gamma=1.0, lam=0.95)
_CRITIC_GAE = partial(value_gae, gamma=1.0, lam=0.95)
_PER_LENGTH = partial(constant, constant_length=1024)
_SOFT_GATE = partial(sapo, gate_positive=1.0, gate_negative=1.05)

# fmt: off
_ROWS: dict[str, tuple[AdvantageFn, RatioFn, SurrogateFn, WeightingFn]] = {
    # name          advantage         ratio             surrogate                   weighting
    "ppo":         (_GAE,             token_ratio,      _clip(0.2, 0.2),            token_mean),
    "ppo_penalty": (_GAE,             token_ratio,      unclipped,                  token_mean),
    "grpo":        (group_normalized, token_ratio,      _clip(0.2, 0.2),            sequence_mean),
    "dr_grpo":     (group_centered,    token_ratio,      _clip(0.2, 0.2),            _PER_LENGTH),
    "dapo":        (group_normalized, token_ratio,      _clip(0.2, 0.28),           token_mean),
    "gspo":        (group_normalized, sequence_ratio,   _clip(3e-4, 4e-4),          sequence_mean),
    "cispo":       (group_normalized, token_ratio,      _clip(1.0, 0.28, cispo),    token_mean),
    "rloo":        (leave_one_out,    completion_ratio, _clip(0.2, 0.2, reinforce), sequence_sum),
    "reinforce++": (batch_normalized, token_ratio,      _clip(0.2, 0.2),            token_mean),
    "sapo":        (group_normalized, token_ratio,      _SOFT_GATE,                 sequence_mean),
    "dppo_tv":     (group_normalized, token_ratio,      _clip(0.15, 0.15, dppo_tv), token_mean),
    "maxrl":       (group_over_mean,  token_ratio,      _clip(0.2, 0.2),            token_mean),
    "distil":      (per_token_reward, token_ratio,      _clip(0.2, 0.2),            token_mean),
}
# fmt: on
# rows with a critic: its value_advantage; rows with a penalty: its start
_CRITICS: dict[str, AdvantageFn] = {"ppo": _CRITIC_GAE, "ppo_penalty": _CRITIC_GAE}
_PENALTIES = {"ppo_penalty": PenaltyController(coefficient=1.0, target=0.01)}
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {name: Algorithm(*row, _CRITICS.get(name), _PENALTIES.get(name)) for name, row in _ROWS.items()}
)


_SLOTS = ("advantage", "value_advantage", "ratio", "surrogate", "weighting")
_PENALTY = {"penalty_coefficient": "coefficient", "penalty_target": "target"}  # constants of a row's penalty


def resolve_algorithm(rl: RlConfig) -> Algorithm:
    """Return the configured row of the table, with the run's constants.

    Raises:
        ConfigError: The row does not exist, or does not use one of the constants.
    """
    if rl.algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {rl.algorithm!r}", fix=f"choose one of {', '.join(ALGORITHMS)}")
    _refuse_signal_of_groups(rl)
    _refuse_penalty_of_one_step(rl)
    if ALGORITHMS[rl.algorithm].advantage is per_token_reward and not (
        rl.kl.coefficient and rl.kl.apply_to == "reward"
    ):
        raise ConfigError(
            f"{rl.algorithm} trains on per-token rewards, but the KL to the reference policy is not in the reward",
            where="kl.apply_to",
            fix="set kl.apply_to = 'reward' and kl.coefficient = 1.0",
        )
    critic = rl.critic
    run = {"gamma": critic.gamma, "lam": critic.lam, "constant_length": rl.sampling.max_new_tokens}
    return with_objective(
        ALGORITHMS[rl.algorithm], rl.update.objective, name=rl.algorithm, run=run | asdict(critic.gae)
    )


def _refuse_signal_of_groups(rl: RlConfig) -> None:
    row, sampling = ALGORITHMS[rl.algorithm], rl.sampling
    if not row.uses_critic and row.advantage is not per_token_reward:
        return
    why = "a critic" if row.uses_critic else "per-token rewards"
    for name, is_set, off in (
        ("dynamic_sampling_rounds", sampling.dynamic_sampling_rounds > 0, 0),
        ("zero_signal_keep_prob", sampling.zero_signal_keep_prob < 1.0, 1),
    ):
        if is_set:
            raise ConfigError(
                f"{rl.algorithm} does not use {name}: with {why}, groups of equal rewards have a signal",
                where=f"sampling.{name}",
                fix=f"set it to {off}, or choose an algorithm whose advantages compare a group's rewards",
            )


def _refuse_penalty_of_one_step(rl: RlConfig) -> None:
    if ALGORITHMS[rl.algorithm].penalty and rl.steps_per_iteration == 1:
        raise ConfigError(
            f"{rl.algorithm} needs several optimizer steps per iteration: in the first, the policy is the old policy, "
            "and the penalty has no gradient",
            where="update.num_minibatches",
            fix="set update.num_epochs to 2, or update.num_minibatches to 2 with 2 prompts per iteration, or more",
        )


def with_objective(
    row: Algorithm, objective: ObjectiveConfig, *, name: str, run: Mapping[str, Any] = MappingProxyType({})
) -> Algorithm:
    """Return the row ``name`` with all constants that ``objective`` sets, and those of ``run`` that the row uses.

    Raises:
        ConfigError: The row does not use a setting of ``objective``.
    """
    chosen = {setting: value for setting, value in asdict(objective).items() if value is not None}
    if "weighting" in chosen:
        row = replace(row, weighting=WEIGHTINGS[chosen.pop("weighting")])
    known = [setting for setting in asdict(objective) if setting in constants_of(row)]
    for setting in chosen:
        if setting not in known:
            raise ConfigError(
                f"{name} does not use {setting}",
                where=f"update.objective.{setting}",
                fix=f"it uses: {', '.join(known) or 'no constant'}",
            )
    return with_constants(row, {**run, **chosen})


def with_constants(row: Algorithm, constants: Mapping[str, Any]) -> Algorithm:
    """Bind the constants to each function of the row that has a keyword of that name, and set those of its penalty."""
    changed: dict[str, Any] = {}
    for slot in _SLOTS:
        function = getattr(row, slot)
        used = {name: value for name, value in constants.items() if name in _keywords(function)}
        if used:
            changed[slot] = partial(function, **used)
    penalty = {field: constants[name] for name, field in _PENALTY.items() if name in constants}
    if row.penalty and penalty:
        changed["penalty"] = replace(row.penalty, **penalty)
    return replace(row, **changed)


def constants_of(row: Algorithm) -> set[str]:
    """Return the names of a row's constants: the keyword-only parameters of its functions, and those of its penalty."""
    return {name for slot in _SLOTS for name in _keywords(getattr(row, slot))} | set(_PENALTY if row.penalty else ())


def _keywords(function: Any) -> set[str]:
    if function is None:  # a row without a critic has no value_advantage
        return set()
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
