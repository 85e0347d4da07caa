"""Which parts of a vLLM engine's weights are not the trainer's: sums of bits, its workers' against ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcore.models.lora import AdaptedModel, MergedState, merged_state
from rlcore.sampling.weight_sums import adapter_part, add, bit_sum, state_sums


def differing_parts(
    answers: Sequence[Mapping[str, Any]],
    state: Mapping[str, torch.Tensor],
    *,
    is_adapter: bool,
    dtype: torch.dtype,
    seed: int,
) -> list[str]:
    """The parts whose sums differ; ``answers``: each worker's :func:`rlcore.sampling.weight_sums.engine_sums`.

    ``is_adapter``: the engine has the base's weights, and the adapter of ``state`` by itself.
    """
    found: dict[str, int] = {}
    for answer in answers:
        for part, value in answer["sums"].items():
            add(found, part, value)
    adapted = state.adapted if is_adapter and isinstance(state, MergedState) else None
    whole = merged_state(AdaptedModel(adapted.base, "")) if adapted else state
    expected = state_sums(whole.items(), dtype=dtype, seed=seed, by_columns=answers[0]["by_columns"])
    if adapted:
        expected |= adapter_sums(adapted, dtype)
    return sorted(part for part in {*found, *expected} if found.get(part, 0) != expected.get(part, 0))


def adapter_sums(adapted: AdaptedModel, dtype: torch.dtype) -> dict[str, int]:
    """The sums of an adapter as vLLM keeps it: in ``dtype``, B times alpha / rank."""
    config = adapted.base.peft_config[adapted.name]
    scale = config.lora_alpha / config.r
    sums: dict[str, int] = {}
    for path, parameter in adapted.named_parameters():
        name = path.replace("/", ".")
        kept = parameter.detach().to(dtype)
        add(sums, adapter_part(name), bit_sum(kept * scale if ".lora_B." in name else kept))
    return sums
