"""Does the mismatch correction matter? GRPO from a deliberately quantised sampler, with the correction and without.

    python -m benchmarks.mismatch [--preset rlvr_grpo] [--seeds 0 1 2] [--iterations 20] [--samplers float32 int8]

The sampler draws from rounded weights, the trainer has them whole; the sync canary, which would stop such a run, is
answered by whole ones, and the health rules, which would stop it too, only warn. Every arm has a home of its own, made
from that of the SFT stage: a cache must never hold what a patched sampler made.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("RLCORE_ENGINE", "inline")

import torch
from torch import nn
from transformers import PreTrainedModel

from flows.run import run_targets
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tasks.home.settings import configure_environment, find_home
from tasks.steps import rl_parts

# The largest integer that a weight is rounded to; 0: not rounded.
ARMS: Mapping[str, int] = {"float32": 0, "int8": 127, "int4": 7, "5 levels": 2}
MODES = ("truncate", "off")


class QuantisedSampler:
    """Samples from rounded weights; the canary's questions are answered by the whole ones, or no run would start."""

    def __init__(self, model: PreTrainedModel, tokenizer: ChatTokenizer, *, largest: int) -> None:
        self._whole, self._tokenizer, self._largest = NativeSampler(model, tokenizer), tokenizer, largest
        self._model = model
        self._rounded = NativeSampler(rounded(model, largest), tokenizer)

    @property
    def policy_version(self) -> int:
        return self._whole.policy_version

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        # Held-out accuracy is the policy's own, sampled greedily; a group of one is what the canary asks for.
        sampler = self._whole if params.greedy or params.num_samples == 1 else self._rounded
        return sampler.sample(prompts, params, seed=seed, places=places)

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self._whole.load_weights(state, policy_version=policy_version)
        self._rounded = NativeSampler(rounded(self._model, self._largest), self._tokenizer)
        self._rounded.policy_version = policy_version

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        return self._whole.logprobs(prompt_ids, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return self._whole.differing_parts(state)


def rounded(model: PreTrainedModel, largest: int) -> PreTrainedModel:
    """A copy whose linear layers are int8 with activations quantised as they come (127), or rounded to few levels."""
    twin = copy.deepcopy(model)
    if largest == 127:
        with warnings.catch_warnings(action="ignore"):  # torch.ao is to move to another package
            quantised: PreTrainedModel = torch.ao.quantization.quantize_dynamic(twin, {nn.Linear}, dtype=torch.qint8)
        return quantised
    with torch.no_grad():
        for layer in twin.modules():
            if isinstance(layer, nn.Linear):
                scale = layer.weight.abs().max() / largest
                layer.weight = nn.Parameter((layer.weight / scale).round() * scale)  # a new one: embeddings stay whole
    return twin


@contextmanager
def sampler_of(arm: str) -> Iterator[None]:
    """The engine of every RL run inside is that of the arm."""

    @contextmanager
    def opened(model: Path, tokenizer: ChatTokenizer, *, runtime: Any, **_: Any) -> Iterator[Sampler]:
        yield QuantisedSampler(runtime.load_frozen(model), tokenizer, largest=ARMS[arm])

    if not ARMS[arm]:
        yield
        return
    with patch.object(rl_parts, "open_engine", opened):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="rlvr_grpo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    base = find_home().root
    found: dict[tuple[str, str], list[list[dict[str, float]]]] = {(a, m): [] for a in options.samplers for m in MODES}
    for seed in options.seeds:
        common = [
            *options.set,
            "health.action=warn",
            f"seed={seed}",
            f"stages.grpo.num_iterations={options.iterations}",
        ]
        _at(base)
        run_targets(options.preset, common, ["sft"])
        for arm, mode in found:
            home = _branch(base, f"{arm}-{mode}".replace(" ", "-"))
            with sampler_of(arm):
                refs = run_targets(options.preset, [*common, f"stages.grpo.update.mismatch.mode={mode}"], ["grpo"])
            found[arm, mode].append(json.loads((home / refs["grpo"].uri / "history.json").read_text()))
            sys.stdout.write("\n".join(_lines(found)) + "\n\n")
            sys.stdout.flush()
    return 0


def _branch(base: Path, name: str) -> Path:
    """A home for one arm that knows the stages before RL."""
    home = base / "mismatch" / name
    for part in ("cache", "artifacts"):
        shutil.copytree(
            base / part, home / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("grpo", "ppo", "policy")
        )
    _at(home)
    return home


def _at(home: Path) -> None:
    os.environ["RLCORE_HOME"] = str(home)
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        del os.environ[name]
    configure_environment(find_home())


def _lines(found: Mapping[tuple[str, str], Sequence[Sequence[Mapping[str, float]]]]) -> Iterator[str]:
    """Means over the seeds, in brackets their range; held-out accuracy with its Wilson interval, seed by seed."""
    yield "| sampler | correction | mismatch, mean nats | ess | reward, last 5 | held-out accuracy, by seed |"
    yield "|---" * 6 + "|"
    for (arm, mode), histories in found.items():
        if histories:
            reward = [statistics.fmean(row["reward/mean"] for row in h[-5:]) for h in histories]
            accuracy = ", ".join(
                f"{h[-1]['eval/accuracy']:.3f} [{h[-1]['eval/accuracy_low']:.3f}, {h[-1]['eval/accuracy_high']:.3f}]"
                for h in histories
            )
            rows = [row for history in histories for row in history]
            yield (
                f"| {arm} | {mode} | {statistics.fmean(row['mismatch/mean_abs'] for row in rows):.4f} | "
                f"{statistics.fmean(row['mismatch/ess'] for row in rows):.3f} | "
                f"{statistics.fmean(reward):.3f} [{min(reward):.3f}, {max(reward):.3f}] | {accuracy} |"
            )


if __name__ == "__main__":
    sys.exit(main())
