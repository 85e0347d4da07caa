"""Test material: a tiny random Llama, rollouts and samples from a seed, and hypothesis strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from rlcore.algorithms.advantages import AdvantageInputs
from rlcore.config import RlConfig, SamplingConfig
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.types import FinishReason, Prompt, Rollout, Score, ScoredRollout, TrainingSample

torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way

VOCABULARY = 29

finite_floats = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16)


@contextmanager
def double_precision() -> Iterator[None]:
    """New tensors are float64, weights included: for laws that hold to 1e-9."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def one_each(mask: torch.Tensor) -> torch.Tensor:
    """Numbers of episodes of one sample each, for the rows of a padded mask."""
    return torch.arange(len(mask))


@st.composite
def masks(draw: st.DrawFn, max_sequences: int = 6, max_tokens: int = 9) -> torch.Tensor:
    """Padded loss masks, bool [S, T]; any pattern, rows without a single True included."""
    shape = draw(st.integers(1, max_sequences)), draw(st.integers(1, max_tokens))
    flat = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return torch.tensor(flat).reshape(shape)


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: object) -> LlamaForCausalLM:
    """A random Llama of some 9,000 parameters, with weights large enough for distributions far from uniform."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.4,
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(shape | settings))).to(dtype)
    if dtype == torch.float64:
        _norms_in_float64(model)
    return model


def _norms_in_float64(model: LlamaForCausalLM) -> None:
    """transformers computes its norms in float32 whatever the model is; exactness to 1e-9 needs them in float64."""
    names = [name for name, module in model.named_modules() if type(module).__name__ == "LlamaRMSNorm"]
    for name in names:
        old = model.get_submodule(name)
        model.set_submodule(name, torch.nn.RMSNorm(old.weight.shape, eps=old.variance_epsilon, dtype=torch.float64))


def random_tokens(count: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCABULARY, (count,), generator=generator).tolist())


def random_sequences(
    seed: int, *, num_prompts: int = 3, group_size: int = 3, max_tokens: int = 7
) -> list[TokenSequence]:
    """Groups of completions of 1 to ``max_tokens`` tokens, for prompts of 1 to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for number in range(num_prompts):
        prompt = (number + 1, *random_tokens(int(torch.randint(0, 5, (1,), generator=generator)), generator))
        for _ in range(group_size):
            length = int(torch.randint(1, max_tokens + 1, (1,), generator=generator))
            sequences.append(TokenSequence(prompt_ids=prompt, completion_ids=random_tokens(length, generator)))
    return sequences


def random_samples(seed: int, *, dtype: torch.dtype = torch.float64, **shape: int) -> list[TrainingSample]:
    """Training samples with every field drawn: log-probabilities, advantages, values, a masked token here and there."""
    generator = torch.Generator().manual_seed(seed + 1000)

    def draw(count: int, scale: float, shift: float = 0.0) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=dtype) * scale + shift

    samples = []
    for sequence in random_sequences(seed, **shape):
        length = len(sequence.completion_ids)
        mask = torch.rand(length, generator=generator) > 0.2
        mask[-1] = True
        samples.append(
            TrainingSample(
                episode=len(samples),
                group=sequence.prompt_ids[0],  # a prompt begins with its own number
                prompt_ids=sequence.prompt_ids,
                completion_ids=sequence.completion_ids,
                loss_mask=mask,
                sampler_logprobs=draw(length, 0.3, -3.3),
                old_logprobs=draw(length, 0.3, -3.3),
                ref_logprobs=draw(length, 0.3, -3.3),
                advantages=draw(1, 1.0).expand(length).clone(),
                values=draw(length, 0.2),
                returns=draw(length, 1.0),
            )
        )
    return samples


def rl_config(algorithm: str = "grpo", **settings: object) -> RlConfig:
    required: Mapping[str, object] = {
        "algorithm": algorithm,
        "num_iterations": 4,
        "prompts_per_iteration": 3,
        "group_size": 3,
        "learning_rate": 1e-2,
        "rewards": (),
        "sampling": SamplingConfig(max_new_tokens=8),
    }
    return RlConfig(**(required | settings))


def scored_rollout(
    value: float | None,
    *,
    prompt_ids: tuple[int, ...] = (1, 2),
    completion_ids: tuple[int, ...] = (3, 4, 5),
    loss_mask: tuple[bool, ...] | None = None,
    sampler_logprobs: tuple[float, ...] | None = None,
    finish_reason: FinishReason = "stop",
) -> ScoredRollout:
    length = len(completion_ids)
    prompt = Prompt(prompt_id=str(prompt_ids), messages=(), token_ids=prompt_ids, reference="", task="test")
    rollout = Rollout(
        prompt=prompt,
        completion_ids=completion_ids,
        sampler_logprobs=sampler_logprobs or (-1.0,) * length,
        loss_mask=loss_mask or (True,) * length,
        policy_version=0,
        finish_reason=finish_reason,
        text="",
    )
    error = "" if value is not None else "the grader died"
    return ScoredRollout(rollout=rollout, score=Score(value=value, terms={}, error=error))


def forked(item: ScoredRollout, *branches: ScoredRollout) -> ScoredRollout:
    """The episode of ``item`` with the rollouts of others as its branches, which keep nothing but their tokens."""
    own = item.rollout
    parts = tuple(
        replace(
            each.rollout, prompt=replace(own.prompt, token_ids=each.rollout.prompt.token_ids), fork="another history"
        )
        for each in branches
    )
    count = sum(sum(each.loss_mask) for each in (own, *parts))
    return replace(item, rollout=replace(own, branches=parts, num_sampled=count))


def random_groups(model: LlamaForCausalLM, seed: int, **shape: int) -> list[list[ScoredRollout]]:
    """Scored groups of random completions; the engine's log-probabilities are the model's own."""
    generator = torch.Generator().manual_seed(seed)
    sequences = random_sequences(seed, **shape)
    logprobs = score_sequences(model, sequences, tokens_per_microbatch=256)
    groups: dict[tuple[int, ...], list[ScoredRollout]] = {}
    for sequence, logprob in zip(sequences, logprobs, strict=True):
        rollout = scored_rollout(
            float(torch.rand(1, generator=generator)),
            prompt_ids=sequence.prompt_ids,
            completion_ids=sequence.completion_ids,
            sampler_logprobs=tuple(logprob.tolist()),
        )
        groups.setdefault(sequence.prompt_ids, []).append(rollout)
    return list(groups.values())


def episodes(
    rewards: Sequence[float],
    *,
    group: Sequence[int] | None = None,
    mask: torch.Tensor | None = None,
    token_rewards: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
) -> AdvantageInputs:
    """Episodes of one token each (or of ``mask``), all in one group unless said otherwise; nothing beyond the end."""
    mask = torch.ones(len(rewards), 1, dtype=torch.bool) if mask is None else mask
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor([0] * len(rewards) if group is None else group),
        token_rewards=torch.zeros(mask.shape, dtype=torch.float64) if token_rewards is None else token_rewards,
        values=torch.zeros(mask.shape) if values is None else values,
        mask=mask,
        next_values=torch.zeros(len(rewards)) if next_values is None else next_values,
    )
