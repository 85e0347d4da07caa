"""Trained reward model: one or several members that share frozen weights, and the scales of their rewards."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.errors import DataError, ModelError
from rlcore.hardware.precision import no_autocast
from rlcore.hardware.sharded import gather_full, ranks_of
from rlcore.models.heads import ScalarHeadModel, load_scalar_model, save_head, score_rewards
from rlcore.models.policy import hidden_states, score_batches
from rlcore.models.saving import HEAD_FILE, save_tensors
from rlcore.text.packing import PackedBatch, TokenSequence

if TYPE_CHECKING:
    from jaxtyping import Float


SCALE_FILE = "reward_scale.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScale:
    """Reward scale of one member: mean 0 and std 1 over a reference set.

    ``reward = (score - length_slope · ln(length) - shift) / scale``, length in completion tokens; ``length_slope`` is 0
    without length debiasing.
    """

    shift: float
    scale: float
    length_slope: float = 0.0

    def debias(
        self, scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"]
    ) -> Float[Tensor, "sequences"]:
        """Remove the effect of lengths [N] in tokens from raw scores [N]."""
        return scores - self.length_slope * lengths.to(scores.dtype).log() if self.length_slope else scores

    def centered(
        self, scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"]
    ) -> Float[Tensor, "sequences"]:
        """Return scores [N] with mean 0 over the reference set, in the model's own log-odds."""
        return self.debias(scores, lengths) - self.shift


def measure_scale(
    scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"], *, length_slope: float = 0.0
) -> RewardScale:
    """Return the scale of raw scores [S] of a reference set of completions with lengths [S] in tokens."""
    free = RewardScale(shift=0.0, scale=1.0, length_slope=length_slope).debias(scores, lengths)
    std = float(free.std(unbiased=False))
    return RewardScale(shift=float(free.mean()), scale=std if std > 1e-6 else 1.0, length_slope=length_slope)


def fit_length_slope(margins: Float[Tensor, "pairs"], log_ratios: Float[Tensor, "pairs"]) -> float:
    """Return the increase of a margin r_chosen - r_rejected [P] per ln(length chosen / length rejected) [P].

    It is the least-squares slope of ``margin = quality + slope · log_ratio``. Without the intercept, a real preference
    for better and longer answers would count as length bias.

    Raises:
        DataError: All pairs have the same ratio of lengths.
    """
    x, y = (one.double() - one.double().mean() for one in (log_ratios, margins))
    if float(x.abs().max()) < 1e-9:
        raise DataError(
            "length bias cannot be measured: all pairs have the same ratio of lengths",
            where="reward_model.loss.length_debias",
            fix="set length_debias = false, or add preferences with answers of different lengths",
        )
    return float((x @ y) / (x @ x))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScales:
    """Scales of an ensemble's members, and the ``temperature`` that calibrates mean margins to log-odds."""

    members: tuple[RewardScale, ...]
    temperature: float = 1.0

    def save(self, folder: Path) -> None:
        """Write the scales next to the checkpoint."""
        (folder / SCALE_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RewardScales:
        """Read the scales of a checkpoint.

        Raises:
            ModelError: The file is missing or damaged.
        """
        path = folder / SCALE_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            members = tuple(RewardScale(**member) for member in values["members"])
            return cls(members=members, temperature=float(values["temperature"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"the scale of the reward model cannot be read: {error}",
                where=str(path),
                fix="run the reward_model stage again",
            ) from error


def lengths_of(completions: Sequence[Sequence[int]]) -> Float[Tensor, "sequences"]:
    """Return the number of tokens of each completion, float32 [N]."""
    return torch.tensor([float(len(one)) for one in completions])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardModel:
    """M members of an ensemble. Members with a frozen backbone share it and its forward pass."""

    members: tuple[ScalarHeadModel, ...]
    scales: RewardScales

    def rewards(
        self, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int, calibrated: bool = False
    ) -> Float[Tensor, "members sequences"]:
        """Return centered rewards, float32 [M, S], without gradient.

        In standard deviations of the reference set, or, if ``calibrated``, in log-odds: σ of a difference of the
        members' mean is the probability that one completion is preferred to the other.
        """
        raw = raw_scores(self.members, sequences, tokens_per_microbatch=tokens_per_microbatch)
        lengths = lengths_of([sequence.completion_ids for sequence in sequences])
        units = [self.scales.temperature if calibrated else scale.scale for scale in self.scales.members]
        rows = zip(self.scales.members, raw, units, strict=True)
        return torch.stack([scale.centered(scores, lengths) / unit for scale, scores, unit in rows])


def raw_scores(
    members: Sequence[ScalarHeadModel], sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int
) -> Float[Tensor, "members sequences"]:
    """Return the heads' raw scores, float32 [M, S] on the CPU, without gradient."""
    if len({id(member.backbone) for member in members}) == len(members):
        return torch.stack(
            [score_rewards(each, sequences, tokens_per_microbatch=tokens_per_microbatch) for each in members]
        )
    states = last_states(members[0].backbone, sequences, tokens_per_microbatch=tokens_per_microbatch)
    heads = torch.cat([gather_full(member.head.weight.detach()) for member in members]).cpu().float()
    with no_autocast(states):
        return (states @ heads.T).T.contiguous()


def last_states(
    backbone: PreTrainedModel, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int
) -> Float[Tensor, "sequences hidden"]:
    """Return the backbone's state at the last token of each sequence: float32 [S, H] on the CPU."""
    states = torch.empty(len(sequences), backbone.config.hidden_size)

    def score(batch: PackedBatch) -> tuple[Tensor]:
        return (hidden_states(backbone, batch).flatten(0, 1)[batch.last_positions],)

    for batch, (found,) in score_batches(backbone, sequences, score, tokens_per_microbatch=tokens_per_microbatch):
        states[batch.sequences] = found
    return states


def share_frozen(model: ScalarHeadModel) -> ScalarHeadModel:
    """Copy the trained weights of a model; frozen tensors, or a whole frozen backbone, are shared."""
    if not any(parameter.requires_grad for parameter in model.backbone.parameters()):
        return ScalarHeadModel(model.backbone, copy.deepcopy(model.head))
    frozen = {id(tensor): tensor for tensor in model.parameters() if not tensor.requires_grad}
    return copy.deepcopy(model, frozen)


def keep_layers(backbone: PreTrainedModel, count: int) -> None:
    """Truncate the backbone after its first ``count`` layers (0 keeps all).

    Raises:
        ModelError: The backbone has no list of layers, or fewer layers.
    """
    if count == 0:
        return
    layers = getattr(backbone.base_model, "layers", None)
    if layers is None or count > len(layers):
        has = "no list of layers" if layers is None else f"{len(layers)} layers"
        raise ModelError(
            f"{type(backbone).__name__} has {has}", where="reward_model.backbone.layers", fix="set layers = 0"
        )
    backbone.base_model.layers = layers[:count]
    backbone.config.num_hidden_layers = count
    if getattr(backbone.config, "layer_types", None):
        backbone.config.layer_types = backbone.config.layer_types[:count]


def save_members(members: Sequence[ScalarHeadModel], folder: Path) -> None:
    """Write the first member's head next to its saved backbone, and the trained weights of each other member.

    Collective over all ranks that share the members.
    """
    save_head(members[0], folder)
    for number, member in enumerate(members[1:], start=1):
        own = {
            name: gather_full(parameter.detach()).cpu().contiguous()
            for name, parameter in member.named_parameters()
            if parameter.requires_grad
        }
        ranks_of(member).broadcast_object(partial(save_tensors, own, folder / _member_file(number)))


def load_reward_model(backbone: PreTrainedModel, folder: Path) -> RewardModel:
    """Load the frozen reward model in ``folder``, whose backbone was loaded from there.

    Raises:
        ModelError: A file is missing or belongs to another model.
    """
    scales = RewardScales.load(folder)
    first = load_scalar_model(backbone, folder).requires_grad_(False)
    others = [_load_member(first, folder / _member_file(number)) for number in range(1, len(scales.members))]
    return RewardModel(members=(first, *others), scales=scales)


def _load_member(first: ScalarHeadModel, path: Path) -> ScalarHeadModel:
    if not path.is_file():
        raise ModelError("a member of the ensemble is missing", where=str(path), fix="run the reward_model stage again")
    tensors = load_file(path)
    first.requires_grad_(False)
    named = dict(first.named_parameters())
    unknown = sorted(tensors.keys() - named.keys())
    if unknown:
        raise ModelError(
            f"the backbone has no weight {unknown[0]!r}", where=str(path), fix=f"use the {HEAD_FILE} of the same model"
        )
    for name in tensors:
        named[name].requires_grad_(True)  # trained weights are not shared
    member = share_frozen(first)
    with torch.no_grad():
        for name, tensor in tensors.items():
            member.get_parameter(name).copy_(tensor)
    first.requires_grad_(False)
    return member.requires_grad_(False)


def _member_file(number: int) -> str:
    return f"member-{number}.safetensors"
