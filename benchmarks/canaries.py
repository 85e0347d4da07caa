"""Rates of the sync canary: stops of correct syncs, and detected faults, by learning rate, precision and engine.

A small model learns arithmetic, then takes optimizer steps at each learning rate and precision. After each, the native
engine gets the weights and the canary checks it, healthy or with an injected fault. Steps that change nothing in the
engine's precision are not counted.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.report import table
from rlcore.checks.canaries.sync import EngineCalibration, ExpectedWeights, calibrate_engine, sample_probes, sync_canary
from rlcore.config import LoraConfig, ModelConfig, ShapeConfig
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.evaluation.intervals import accuracy
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.models.lora import AdaptedModel, MergedState, add_lora, merged_state
from rlcore.models.policy import completion_logprobs
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.packing import TokenSequence, pack
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.scoring_models import token_scores
from rlcore.types import FailedRollout, Message, Prompt, Rollout

LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=32, num_samples=1)
SHAPE = ShapeConfig(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_positions=128
)
SFT_STEPS, BATCH, RANK = 300, 32, 4
FIRST_VERSION = 10_000  # seeds draws different from those that set the bounds


@dataclass
class Cell:
    """Syncs of one kind, those that the canary stopped, and its readings of the correct ones.

    ``by_logprobs``: stopped if no weight could be compared.
    """

    syncs: int = 0
    stopped: int = 0
    by_logprobs: int = 0
    log_odds: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)


Cells = dict[tuple[str, str, str, float], Cell]  # by engine, precision, fault ("" for none) and learning rate


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=100, help="sound ones of each kind")
    parser.add_argument("--trials", type=int, default=10, help="of each fault, for each of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells, started = Cells(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, model, prompts = make_work(Path(folder) / "start")

    def session(name: str, kind: type[NativeSampler], *, rank: int, version: int) -> Session:
        engine = native(model, tokenizer, DTYPES[name], kind)
        engine.policy_version = version
        return Session(model, engine, prompts, DTYPES[name], rank=rank, params=PARAMS)

    for name, rate in ((name, rate) for name in DTYPES for rate in LEARNING_RATES):
        for engine, rank, count in (("native", 0, options.syncs), ("native, adapter", RANK, options.syncs // 2)):
            healthy = session(name, NativeSampler, rank=rank, version=FIRST_VERSION)
            sound(healthy, cells.setdefault((engine, name, "", rate), Cell()), rate, syncs=count)
        for fault, kind in FAULTS.items():
            rank = RANK if "adapter" in fault else 0
            cell = cells.setdefault(("native, adapter" if rank else "native", name, fault, rate), Cell())
            for trial in range(options.trials):  # different draws in each
                whole, broken = (session(name, each, rank=rank, version=trial) for each in (NativeSampler, kind))
                detect(whole, broken.engine, cell, rate)
    print(_alarms(cells))
    print(_faults(cells))
    print(f"\n{time.process_time() - started:.0f} s of processor time")


def make_work(folder: Path) -> tuple[ChatTokenizer, torch.nn.Module, list[Prompt]]:
    """Train a model with a tied head for a minute at most: sure of some tokens, not of others."""
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    tokenizer = ChatTokenizer.load(folder)
    model = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)
    draws, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(SFT_STEPS):
        texts = [_worked(tokenizer, draws.randint(0, 99), draws.randint(0, 99)) for _ in range(BATCH)]
        (batch,) = pack(texts, tokens_per_microbatch=65_536)
        loss = -completion_logprobs(model, batch)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prompts = [_prompt(tokenizer, f"{draws.randint(0, 99)}+{draws.randint(0, 99)}") for _ in range(8)]
    return tokenizer, model, prompts


def _worked(tokenizer: ChatTokenizer, left: int, right: int) -> TokenSequence:
    answer = tokenizer.encode(f"{left}+{right}={left + right}") + tokenizer.end_of_turn
    return TokenSequence(prompt_ids=_prompt(tokenizer, f"{left}+{right}").token_ids, completion_ids=tuple(answer))


def _prompt(tokenizer: ChatTokenizer, text: str) -> Prompt:
    turns = (Message(role="user", content=text),)
    token_ids = tokenizer.render_prompt(turns)
    return Prompt(prompt_id=text, messages=turns, token_ids=token_ids, reference="", task="sum")


def sound(session: Session, cell: Cell, learning_rate: float, *, syncs: int) -> None:
    """Take a number of steps with their syncs, and run the canary before the first."""
    session.begin()
    for _ in range(syncs):
        cell.syncs += 1
        try:
            figures = session.step(learning_rate)
        except (CanaryError, StaleSamplerError) as error:
            cell.stopped += 1
            print(f"stopped: {error.what}", flush=True)
            continue
        cell.log_odds.append(figures["sync/log_odds_mean_diff"])
        cell.temperatures.append(figures["sync/temperature_ratio"])


def detect(session: Session, broken: Any, cell: Cell, learning_rate: float) -> None:
    """Break a healthy session's engine, and step until it serves other weights; count if the canary stops that sync."""
    whole: Any = session.engine
    session.begin()
    session.engine = broken
    while True:
        session.learn(learning_rate)
        session.push()
        whole.load_weights(session.truth.state, policy_version=session.version)
        pairs = zip(whole._model.state_dict().values(), broken._model.state_dict().values(), strict=True)
        if isinstance(broken, Warmer) or not all(torch.equal(one, other) for one, other in pairs):
            break
    cell.syncs += 1
    cell.stopped += _stops(session.prove)
    hidden = frozenset(broken.differing_parts(session.truth.state) or ())
    session.baseline = replace(session.baseline, unverified=hidden)
    cell.by_logprobs += _stops(session.prove)


def _stops(prove: Callable[[], object]) -> bool:
    try:
        prove()
    except (CanaryError, StaleSamplerError):
        return True
    return False


def _alarms(cells: Cells) -> str:
    rows, every = [], list[bool]()
    for engine, name in dict.fromkeys(key[:2] for key in cells):
        found = [cell for key, cell in cells.items() if key[:3] == (engine, name, "")]
        syncs, stopped = sum(cell.syncs for cell in found), sum(cell.stopped for cell in found)
        every += [True] * stopped + [False] * (syncs - stopped)
        odds = [value for cell in found for value in cell.log_odds]
        warm = [value for cell in found for value in cell.temperatures]
        if odds:
            readings = (f"{sum(odds) / len(odds):.2g} ({max(odds):.2g})", f"{min(warm):.4f} to {max(warm):.4f}")
            rows.append((engine, name, str(syncs), str(stopped), *readings))
    head = ("engine", "precision", "syncs", "stopped", "log-odds, mean (largest)", "temperature, range")
    most = accuracy(every, confidence=0.95).high
    return f"Sound syncs\n\n{table(head, rows)}\n\n{sum(every)} of {len(every)} were stopped: at most {most:.2%}\n"


def _faults(cells: Cells) -> str:
    rows = []
    for key in dict.fromkeys(key[:3] for key in cells if key[2]):
        row = [cells[(*key, rate)] for rate in LEARNING_RATES]
        rows.append((*key, *(f"{cell.stopped} of {cell.syncs} ({cell.by_logprobs})" for cell in row)))
    head = ("engine", "precision", "fault", *(f"{rate:g}" for rate in LEARNING_RATES))
    return f"Faults found, of those that were there (by log-probabilities alone)\n\n{table(head, rows)}"


class Stale(NativeSampler):
    """Engine that takes the version and keeps its weights."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self.policy_version = policy_version


class LosesALayer(NativeSampler):
    """Engine that keeps the old weights of layer 1."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        kept = {name: tensor.clone() for name, tensor in self._model.state_dict().items() if "layers.1." in name}
        super().load_weights({**state, **kept}, policy_version=policy_version)


class LosesTheHead(NativeSampler):
    """Engine that multiplies by a copy of the tied head that no sync updates, as vLLM does on a CPU."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        head = self._model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        head = {"lm_head.weight": self._model.get_output_embeddings().weight.detach().clone()}
        super().load_weights({**state, **head}, policy_version=policy_version)


class ServesTheBase(NativeSampler):
    """Engine that never applies the LoRA."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        whole = MergedState(AdaptedModel(state.adapted.base, "")) if isinstance(state, MergedState) else state
        super().load_weights(whole, policy_version=policy_version)


class Warmer(NativeSampler):
    """Engine that samples at a temperature that is 0.1 too high."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        return super().sample(prompts, replace(params, temperature=params.temperature + 0.1), seed=seed, places=places)


FAULTS: Mapping[str, type[NativeSampler]] = {
    "stale": Stale,
    "layer missing": LosesALayer,
    "adapter never applied": ServesTheBase,
    "tied head not repacked": LosesTheHead,
    "temperature + 0.1": Warmer,
}


def native(
    model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, kind: Callable[..., NativeSampler] = NativeSampler
) -> NativeSampler:
    """Open an engine of that kind on its own copy of ``model`` in ``dtype``."""
    return kind(copy.deepcopy(model).to(dtype), tokenizer)


class Session:
    """Learner of ``model``'s weights in ``dtype`` with an engine that serves them.

    ``rank``: of a LoRA on a frozen base; 0: none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Sampler,
        prompts: Sequence[Prompt],
        dtype: torch.dtype,
        *,
        rank: int = 0,
        params: SamplingParams,
    ) -> None:
        self.engine, self.prompts, self.dtype, self.params = engine, prompts, dtype, params
        self.policy: Any = set_compute_dtype(copy.deepcopy(model), dtype)
        if rank:
            frozen = copy.deepcopy(model).to(dtype)
            self.policy = add_lora(frozen, LoraConfig(rank=rank, alpha=4 * rank), "policy", seed=0)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=0.0, weight_decay=0.0)
        self.version = engine.policy_version
        self.baseline: EngineCalibration

    @property
    def truth(self) -> ExpectedWeights:
        """Return the weights that the engine must serve now."""
        temperature = self.params.temperature
        return ExpectedWeights(
            state=merged_state(self.policy),
            policy_version=self.version,
            score=partial(token_scores, self.policy, temperature=temperature, tokens_per_microbatch=4096),
            temperature=temperature,
            dtype=self.dtype,
        )

    def probes(self) -> list[Rollout]:
        """Sample completions from the engine."""
        return sample_probes(self.engine, self.prompts, self.params, seed=self.version)

    def begin(self) -> EngineCalibration:
        self.baseline = calibrate_engine(self.engine, self.probes(), self.truth)
        return self.baseline

    def learn(self, learning_rate: float) -> None:
        """Take a policy-gradient step on completions of the policy, with random advantages."""
        draws = torch.Generator().manual_seed(self.version)
        texts = [TokenSequence(prompt_ids=each.token_ids, completion_ids=_text(each, draws)) for each in self.prompts]
        (batch,) = pack(texts, tokens_per_microbatch=65_536)
        logprobs, _ = completion_logprobs(self.policy, batch)
        advantages = torch.randn(len(logprobs), generator=draws)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1

    def push(self) -> None:
        self.engine.load_weights(merged_state(self.policy), policy_version=self.version)

    def prove(self) -> dict[str, float]:
        return sync_canary(self.engine, self.probes(), self.truth, self.baseline)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Train a step, sync, and check."""
        self.learn(learning_rate)
        self.push()
        return self.prove()


def _text(prompt: Prompt, draws: torch.Generator) -> tuple[int, ...]:
    order = torch.randperm(len(prompt.token_ids), generator=draws).tolist()
    return tuple(prompt.token_ids[place] for place in order)


if __name__ == "__main__":
    main()
