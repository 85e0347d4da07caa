"""Memory of online RL: recipes x full weights or LoRA x architecture of the critic.

    python -m benchmarks.memory [--shapes tiny smollm2] [--rank 8]

Each row is one iteration (sample, score, reference, update) of a model with random weights, in its own process. By
part: measured weights, gradients and optimizer, activations kept by autograd, keys and values computed from shapes. In
addition the peak of the process's resident memory during the iteration, including temporaries, above its memory before
any model. Prints Markdown tables for docs/benchmarks/cost.md. One thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, KlConfig, LoraConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.hardware.memory import BFLOAT16, FLOAT32, Footprint, MemoryPlan, expected
from rlcore.hardware.memory_meter import kv_cache_bytes, measure_peak, num_parameters, optimizer_bytes
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.models.loading import load_policy
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.models.scratch import make_tokenizer
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.experience import build_experience
from rlcore.training.learner import Learner
from rlcore.training.local_learner import merged_state
from rlcore.training.scoring_models import ScoringModels
from rlcore.types import Prompt, Rollout, Score, ScoredRollout

SHAPES = {  # tiny is that of the preset, smollm2 that of SmolLM2-135M
    "tiny": {"vocab_size": 262, "hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 2}
    | {"num_attention_heads": 6, "num_key_value_heads": 6},
    "smollm2": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
}
NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS, BUDGET = 4, 4, 64, 32, 512


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. ``judge``: placement of a reward model (``""``: the reward is verifiable)."""

    recipe: str
    critic: str = ""  # placement
    rank: int = 0
    judge: str = ""
    reference: bool = True

    @property
    def label(self) -> str:
        """Return the first cells of the table's row."""
        trained = f"LoRA r{self.rank}" if self.rank else "full"
        reference = ("the base" if self.rank else "model") if self.reference else "–"
        return f"{self.recipe} | {trained} | {self.critic or '–'} | {self.judge or '–'} | {reference}"


def rows(rank: int) -> list[Row]:
    """Return the table's rows; runs with a LoRA have their reference policy for free."""
    return [
        Row(recipe="PPO", critic="separate", judge="model"),
        Row(recipe="PPO", critic="shared", judge="model"),
        Row(recipe="PPO", critic="lora", judge="model", rank=rank),
        Row(recipe="PPO", critic="lora", judge="adapter", rank=rank),
        Row(recipe="RLVR-PPO", critic="separate"),
        Row(recipe="RLVR-PPO", critic="lora", rank=rank),
        Row(recipe="GRPO", judge="model"),
        Row(recipe="GRPO", judge="adapter", rank=rank),
        Row(recipe="RLVR-GRPO"),
        Row(recipe="RLVR-GRPO", reference=False),
        Row(recipe="RLVR-GRPO", rank=rank),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "ROW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        folder, row = options.measure
        print(json.dumps(measure(Path(folder), Row(**json.loads(row)))))
        return 0
    print(f"Machine: {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread.")
    with tempfile.TemporaryDirectory() as root:
        for shape in options.shapes:
            folder = Path(root) / shape
            make_checkpoint(shape, folder)
            print("\n" + "\n".join(table(shape, list(measurements(folder, rows(options.rank))))), flush=True)
    return 0


def make_checkpoint(shape: str, folder: Path) -> None:
    """Write random weights of a shape, with the tokenizer of models from scratch."""
    tokenizer = make_tokenizer(max_positions=256)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=256, tie_word_embeddings=True)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    GenerationConfig(**ids).save_pretrained(folder)


def measurements(folder: Path, chosen: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Measure each row in its own process: freed memory of an earlier one would lower a later peak."""
    for row in chosen:
        command = [sys.executable, "-m", "benchmarks.memory", "--measure", str(folder), json.dumps(asdict(row))]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            raise SystemExit(f"{row.label} failed:\n{done.stderr}")
        yield row, json.loads(done.stdout)


def measure(folder: Path, row: Row) -> dict[str, Any]:
    """Run one iteration; return its memory by part, and the process's peak above its size before any model."""
    before = resident_kib("VmRSS")
    run = _Run(folder, row)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here on
    footprint = run.iterate()
    held = {"footprint": asdict(footprint), "peak": (resident_kib("VmHWM") - before) * 1024}
    worked_out = expected(run.plan(), activations=footprint.activations, kv_cache=footprint.kv_cache).total
    sizes = {"num_parameters": num_parameters(run.policy), "half_base": run.in_half_precision(footprint)}
    return held | sizes | {"expected": worked_out}


def resident_kib(name: str) -> int:
    """Return an entry of this process's status: resident memory now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


class _Run:
    """Live objects of one row, as in an online-RL run."""

    def __init__(self, folder: Path, row: Row) -> None:
        self.row = row
        self.adapter = LoraConfig(rank=row.rank, alpha=max(1, 2 * row.rank))
        base = _load(folder)
        self.policy = add_lora(base, self.adapter, "policy", seed=0) if row.rank else base
        self.critic = self._critic(folder) if row.critic else None
        shared = AdaptedModel(base, "") if row.rank else None
        self.reference = (shared or _load(folder).requires_grad_(False)) if row.reference else None
        self.judge = self._judge(folder) if row.judge else None
        self.config = self._config()
        algorithm = ALGORITHMS[self.config.algorithm]
        self.learner = Learner(self.policy, self.critic, algorithm=algorithm, config=self.config)
        self.sampler = NativeSampler(_load(folder), ChatTokenizer.load(folder))

    def _critic(self, folder: Path) -> ScalarHeadModel:
        if self.row.critic == "lora":
            return ScalarHeadModel.on_backbone(add_lora(self.policy, self.adapter, "critic", seed=0))
        return ScalarHeadModel.on_backbone(self.policy if self.row.critic == "shared" else _load(folder))

    def _judge(self, folder: Path) -> ScalarHeadModel:
        on_base = self.row.judge == "adapter"
        backbone = add_lora(self.policy, self.adapter, "reward_model", seed=0) if on_base else _load(folder)
        return ScalarHeadModel.on_backbone(backbone).requires_grad_(False)

    def _config(self) -> RlConfig:
        return RlConfig(
            algorithm="ppo" if self.critic else "grpo",
            num_iterations=1,
            prompts_per_iteration=NUM_PROMPTS,
            group_size=GROUP_SIZE,
            learning_rate=1e-5,
            rewards=(),
            sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
            update=UpdateConfig(tokens_per_microbatch=BUDGET, lora=self.adapter),
            kl=KlConfig(coefficient=0.05 if self.row.reference else 0.0),
            critic=CriticConfig(architecture=self.row.critic or "separate"),
        )

    def iterate(self) -> Footprint:
        """Sample, score, update, sync; return the parts at their peak."""
        groups = self._scored()
        judges = ScoringModels(
            policy=self.policy,
            reference=self.reference,
            critic=self.critic,
            temperature=1.0,
            tokens_per_microbatch=BUDGET,
        )
        experience = build_experience(
            groups,
            self.learner.algorithm,
            judges,
            kl=self.config.kl,
            kl_coefficient=self.config.kl.coefficient,
            truncated="score",
            need_old_logprobs=False,
        )
        models = [self.policy, self.reference, self.critic, self.judge, self.sampler._model]
        with measure_peak(models, self.learner.optimizers) as meter:
            self.learner.update(experience.samples, seed=0)
        self.sampler.load_weights(merged_state(self.policy), policy_version=1)
        return Footprint(
            weights=meter.weights,
            gradients=meter.gradients,
            optimizer=optimizer_bytes(self.learner.optimizers),
            activations=meter.activations,
            kv_cache=kv_cache_bytes(
                self.policy.config,
                num_sequences=NUM_PROMPTS * GROUP_SIZE,
                num_tokens=PROMPT_TOKENS + NEW_TOKENS,
                bytes_per_number=FLOAT32,
            ),
        )

    def _scored(self) -> list[list[ScoredRollout]]:
        prompts = [
            Prompt(
                prompt_id=str(number),
                messages=(),
                token_ids=tuple(2 + (number + 7 * place) % 250 for place in range(PROMPT_TOKENS)),
                reference="",
                task="memory",
            )
            for number in range(NUM_PROMPTS)
        ]
        params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, num_samples=GROUP_SIZE)
        groups = [
            [item for item in group if isinstance(item, Rollout)]
            for group in self.sampler.sample(prompts, params, seed=0)
        ]
        flat = [item for group in groups for item in group]
        scores = iter(self._scores(flat))
        return [
            [ScoredRollout(rollout=item, score=Score(value=next(scores), terms={})) for item in group]
            for group in groups
        ]

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Score even and odd completions differently, so that every group has a signal with random weights."""
        if self.judge is not None:
            sequences = [
                TokenSequence(prompt_ids=item.prompt.token_ids, completion_ids=item.completion_ids) for item in rollouts
            ]
            score_rewards(self.judge, sequences, tokens_per_microbatch=BUDGET)
        return [float(number % 2) for number in range(len(rollouts))]

    def in_half_precision(self, footprint: Footprint) -> int:
        """Compute the bytes without activations and cache if all frozen weights were in bfloat16."""
        learning = sum(p.numel() for o in self.learner.optimizers for g in o.param_groups for p in g["params"])
        frozen = footprint.weights - FLOAT32 * learning
        held = FLOAT32 * learning + footprint.gradients + footprint.optimizer
        return held + frozen * BFLOAT16 // FLOAT32

    def plan(self) -> MemoryPlan:
        """Estimate the same run with :func:`rlcore.hardware.memory.expected`."""
        recipe = {"PPO": "ppo", "RLVR-PPO": "rlvr_ppo", "GRPO": "grpo", "RLVR-GRPO": "rlvr_grpo"}[self.row.recipe]
        adapter = sum(p.numel() for p in self.policy.parameters()) if self.row.rank else 0
        plan = MemoryPlan(recipe=recipe, num_parameters=num_parameters(self.policy), num_adapter=adapter)
        on_base = self.row.judge == "adapter"
        placement = self.row.critic or "separate"
        return replace(
            plan, critic_architecture=placement, reference=self.row.reference, reward_model_is_adapter=on_base
        )


def _load(folder: Path) -> PreTrainedModel:
    return load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)


def table(shape: str, measured: Sequence[tuple[Row, dict[str, Any]]]) -> list[str]:
    """Render the Markdown table of one shape, in multiples of P, a float32 copy of the policy."""
    size = measured[0][1]["num_parameters"]
    one = FLOAT32 * size
    lines = [
        f"Shape `{shape}`: {size:,} parameters, P = {one / 2**20:.1f} MiB in float32.",
        "",
        "| recipe | trained | critic | reward model | reference | weights | gradients | optimizer | activations "
        "| KV cache | parts, total | worked out | resident peak | frozen in bf16, of the bf16 weights |",
        "|---" * 14 + "|",
    ]
    for row, figures in measured:
        footprint = Footprint(**figures["footprint"])
        parts = (footprint.weights, footprint.gradients, footprint.optimizer, footprint.activations, footprint.kv_cache)
        cells = [f"{value / one:.2f}" for value in (*parts, footprint.total, figures["expected"], figures["peak"])]
        half = f"{figures['half_base'] / (BFLOAT16 * size):.2f}"
        lines.append(f"| {row.label} | " + " | ".join([*cells, half]) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
