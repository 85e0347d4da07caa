"""Canary of an evaluation's engine: it serves the model of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlcore.algorithms.agreement import agreement, check_agreement
from rlcore.checks.canaries.sync import PROBE_TOKENS, sample_probes
from rlcore.errors import CanaryError, StorageError
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import Sampler, SamplingParams, replicas_of
from rlcore.sampling.vllm.worker.checksums import part_of
from rlcore.training.scoring_models import token_scores
from rlcore.types import Prompt

_HEAD, _TEMPERATURE = "lm_head.weight", 1.0
_TOKENS_PER_MICROBATCH = 2048


def verify_served_weights(
    engine: Sampler, model: Path, prompts: Sequence[Prompt], runtime: Runtime, *, seed: int
) -> None:
    """Verify that every engine serves the weights in ``model``, in its own precision.

    An engine may store some modules in a form that cannot be compared. If all others agree, log-probabilities decide:
    those that it reports for completions of the first ``prompts`` must be the model's, up to rounding.

    Raises:
        StorageError: Names the modules that differ.
    """
    state = _stored(model)
    for member in replicas_of(engine):
        differing = differing_parts(member, state)
        if not differing:
            continue
        try:
            if differing >= {part_of(name) for name, tensor in state.items() if tensor.ndim > 1}:
                raise CanaryError("no module is equal")
            _compare(member, model, prompts, runtime, seed=seed)
        except CanaryError as error:
            raise StorageError(
                f"the engine serves other weights than the model's in {', '.join(sorted(differing)[:4])}: {error.what}",
                where=str(model),
                fix="nothing was evaluated; see the engine's log",
            ) from error


def differing_parts(engine: Sampler, state: Mapping[str, Tensor]) -> set[str]:
    """Return the modules of the engine whose weights may differ from ``state``, the weights of a model's files.

    A tied head is in no file; engines store it as a matrix of its own, or as their embedding.
    """
    found = set(engine.differing_parts(_with_head(state)) or ())
    if found == {"head"} and _HEAD not in state:
        found &= set(engine.differing_parts(state) or ())
    return found


def _stored(model: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            state |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    return state


def _with_head(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    embeddings = [tensor for name, tensor in state.items() if "embed" in name or "wte" in name]
    return state if _HEAD in state or not embeddings else {**state, _HEAD: embeddings[0]}


def _compare(engine: Sampler, model: Path, prompts: Sequence[Prompt], runtime: Runtime, *, seed: int) -> None:
    params = SamplingParams(temperature=_TEMPERATURE, max_new_tokens=PROBE_TOKENS, num_samples=1)
    probes = sample_probes(engine, prompts, params, seed=seed)
    reported = torch.tensor([value for probe in probes for value in probe.sampler_logprobs])
    held = runtime.load_frozen(model)
    scores = token_scores(held, probes, temperature=_TEMPERATURE, tokens_per_microbatch=_TOKENS_PER_MICROBATCH)
    found = agreement(reported, *scores, temperature=_TEMPERATURE)
    check_agreement(found, noise=None, dtype=runtime.compute_dtype)
