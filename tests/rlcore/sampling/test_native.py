"""The native engine and the scripted one: rollouts, seeds, limits and new weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.errors import SamplingError
from rlcore.hardware import memory
from rlcore.models.loading import load_policy
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.sampling import native
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.decoding import decode
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedCompletion, ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=12, num_samples=3)


def rollouts_of(
    sampler: Sampler, prompts: list[Prompt], params: SamplingParams = PARAMS, seed: int = 5
) -> list[Rollout]:
    groups = sampler.sample(prompts, params, seed=seed)
    assert [len(group) for group in groups] == [params.num_samples] * len(prompts)
    flat = [rollout for group in groups for rollout in group]
    assert all(isinstance(rollout, Rollout) for rollout in flat)
    return [rollout for rollout in flat if isinstance(rollout, Rollout)]


def tokens_of(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.completion_ids for rollout in rollouts]


def plain_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], completion: tuple[int, ...], t: float
) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs: list[float] = (logits / t).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()
    return logprobs


def test_rollouts_carry_the_log_probabilities_of_the_tempered_policy(
    model: PreTrainedModel, stopping: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sampler = NativeSampler(model, stopping, policy_version=4)
    rollouts = rollouts_of(sampler, prompts)
    assert [rollout.prompt for rollout in rollouts] == [prompt for prompt in prompts for _ in range(3)]
    for rollout in rollouts:
        expected = plain_logprobs(model, rollout.prompt.token_ids, rollout.completion_ids, 0.8)
        assert rollout.sampler_logprobs == pytest.approx(expected, abs=1e-4)
        probed = sampler.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=0.8)
        assert probed == pytest.approx(expected, abs=1e-4)
        assert rollout.loss_mask == (True,) * len(rollout.completion_ids)
        assert rollout.text == stopping.decode(rollout.completion_ids)
        assert rollout.policy_version == 4


def test_the_eos_is_the_last_token_and_is_scored_also_where_it_pads(
    model: PreTrainedModel, stopping: ChatTokenizer, prompts: list[Prompt]
) -> None:
    assert stopping.hf_tokenizer.pad_token_id in stopping.eos_ids
    rollouts = rollouts_of(NativeSampler(model, stopping), prompts)
    stopped = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    cut = [rollout for rollout in rollouts if rollout.finish_reason == "length"]
    assert stopped
    assert cut
    for rollout in stopped:
        assert rollout.completion_ids[-1] in stopping.eos_ids
        assert not set(rollout.completion_ids[:-1]) & set(stopping.eos_ids)
        assert len(rollout.sampler_logprobs) == len(rollout.completion_ids)
    for rollout in cut:
        assert len(rollout.completion_ids) == 12
        assert not set(rollout.completion_ids) & set(stopping.eos_ids)


def test_a_seed_decides_the_rollouts(model: PreTrainedModel, stopping: ChatTokenizer, prompts: list[Prompt]) -> None:
    sampler = NativeSampler(model, stopping)
    first = rollouts_of(sampler, prompts)
    assert rollouts_of(sampler, prompts) == first
    assert tokens_of(rollouts_of(sampler, prompts, seed=6)) != tokens_of(first)
    assert len(set(tokens_of(first[:3]))) == 3  # samples of one prompt differ
    assert len(set(tokens_of(rollouts_of(sampler, [prompts[0], prompts[0]])))) == 6  # also if it is repeated


@pytest.mark.parametrize("max_concurrent", [1, 5, 7])
def test_draws_do_not_depend_on_what_else_is_decoded(
    model: PreTrainedModel, stopping: ChatTokenizer, prompts: list[Prompt], max_concurrent: int
) -> None:
    together = tokens_of(rollouts_of(NativeSampler(model, stopping), prompts))
    apart = NativeSampler(model, stopping, max_concurrent=max_concurrent)
    assert tokens_of(rollouts_of(apart, prompts)) == together
    assert tokens_of(rollouts_of(apart, prompts[:2])) == together[:6]


def test_where_memory_runs_out_fewer_are_decoded_together_and_the_rollouts_are_the_same(
    model: PreTrainedModel,
    stopping: ChatTokenizer,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[int] = []

    def with_room_for_two(
        model: PreTrainedModel, prompt_ids: list[tuple[int, ...]], *rest: Any, **settings: Any
    ) -> Any:
        tried.append(len(prompt_ids))
        if len(prompt_ids) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(model, prompt_ids, *rest, **settings)

    expected = tokens_of(rollouts_of(NativeSampler(model, stopping), prompts))
    sampler, room = NativeSampler(model, stopping), 2
    monkeypatch.setattr(native, "decode", with_room_for_two)
    assert tokens_of(rollouts_of(sampler, prompts)) == expected
    assert tried[0] > 2 and max(tried[-len(expected) // 2 :]) <= 2
    assert "set max_concurrent to it" in caplog.text
    before = len(tried)
    rollouts_of(sampler, prompts)
    assert max(tried[before:]) <= 2  # it is remembered
    room = 0
    with pytest.raises(SamplingError, match="a single sequence"):
        sampler.sample(prompts, PARAMS, seed=5)


def test_no_more_sequences_than_allowed_are_decoded_together(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, __, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True)
    rollouts_of(NativeSampler(model, tokenizer, max_concurrent=5), prompts)
    assert max(sizes) == 5


def test_the_prefill_of_a_block_is_bounded(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, __, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True)
    expected = tokens_of(rollouts_of(NativeSampler(model, tokenizer), prompts))
    sizes.clear()
    monkeypatch.setattr(native, "MAX_PREFILL_TOKENS", 30)
    assert tokens_of(rollouts_of(NativeSampler(model, tokenizer), prompts)) == expected
    assert max(sizes) <= 30


def test_greedy_rollouts_take_the_likeliest_tokens(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    params = SamplingParams(temperature=0.8, max_new_tokens=6, num_samples=1, greedy=True)
    for rollout in rollouts_of(NativeSampler(model, tokenizer), prompts, params):
        ids = torch.tensor([rollout.prompt.token_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert rollout.completion_ids == tuple(whole[0, ids.shape[1] :].tolist())
        expected = plain_logprobs(model, rollout.prompt.token_ids, rollout.completion_ids, 1.0)
        assert rollout.sampler_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_prompt_without_room_fails_and_the_others_go_on(
    model: PreTrainedModel, tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    # 128 positions, 12 to be sampled: 116 for the prompt, of which the template takes 8
    fitting, too_long, short = make_prompts("1" * 108, "1" * 109, "1")
    assert len(fitting.token_ids) == 116
    groups = NativeSampler(model, tokenizer).sample([fitting, too_long, short], PARAMS, seed=0)
    kinds = [[type(rollout) for rollout in group] for group in groups]
    assert kinds == [[Rollout] * 3, [FailedRollout] * 3, [Rollout] * 3]
    failed = groups[1][0]
    assert isinstance(failed, FailedRollout)
    assert failed.reason == "prompt and completion need 129 positions, the model has 128"
    assert failed.prompt is too_long


def test_nothing_to_sample_is_no_error(model: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
    assert NativeSampler(model, tokenizer).sample([], PARAMS, seed=0) == []


def test_the_engine_has_weights_of_its_own(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sampler = NativeSampler(model, tokenizer)
    before = rollouts_of(sampler, prompts)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3.0)
    assert rollouts_of(sampler, prompts) == before
    assert model.config._attn_implementation == TREE_ATTENTION  # as it was loaded
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_new_weights_are_served_under_their_version(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sampler, learner = NativeSampler(model, tokenizer), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in learner.parameters():  # the head is tied to the embedding, and moves with it
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    sent = copy.deepcopy(learner)
    sampler.load_weights(sent.state_dict(), policy_version=7)
    with torch.no_grad():
        sent.model.norm.weight.zero_()  # what the learner does next must not reach the engine
    assert sampler.policy_version == 7
    for rollout in rollouts_of(sampler, prompts):
        assert rollout.policy_version == 7
        expected = plain_logprobs(learner, rollout.prompt.token_ids, rollout.completion_ids, 0.8)
        assert rollout.sampler_logprobs == pytest.approx(expected, abs=1e-4)


def test_packed_weights_are_those_that_were_loaded_last(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LEAST_WEIGHTS", 0)
    sampler = NativeSampler(model, tokenizer)
    for version in (1, 2):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(3.0)
        sampler.load_weights(model.state_dict(), policy_version=version)
        for rollout in rollouts_of(sampler, prompts):
            expected = plain_logprobs(model, rollout.prompt.token_ids, rollout.completion_ids, 0.8)
            assert rollout.sampler_logprobs == pytest.approx(expected, abs=1e-4)


def test_float32_weights_reach_an_engine_in_bfloat16(checkpoint: Path, model: PreTrainedModel) -> None:
    tokenizer = ChatTokenizer.load(checkpoint)
    half = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16)
    sampler = NativeSampler(half, tokenizer)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    sampler.load_weights(model.state_dict(), policy_version=1)
    probe = ((3, 4, 5), (6, 7))
    expected = plain_logprobs(model, *probe, 1.0)
    assert sampler.logprobs(*probe, temperature=1.0) == pytest.approx(expected, abs=0.05)


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop(NORM), "model.norm.weight is missing"),
        (lambda state: state.update({"model.lora.weight": torch.zeros(1)}), "model.lora.weight is unknown"),
        (lambda state: state.update({NORM: torch.ones(1)}), "norm.weight has a different shape"),  # would broadcast
        (lambda state: state.update({HEAD: state[HEAD] + 1.0}), "lm_head.weight is unknown, or tied in the engine"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    model: PreTrainedModel,
    tokenizer: ChatTokenizer,
    change: Callable[[dict[str, torch.Tensor]], object],
    complaint: str,
) -> None:
    sampler = NativeSampler(model, tokenizer, policy_version=2)
    before = sampler.logprobs((3, 4), (5, 6), temperature=1.0)
    state = {name: tensor * 2.0 for name, tensor in model.state_dict().items()}
    change(state)
    with pytest.raises(SamplingError, match=complaint):
        sampler.load_weights(state, policy_version=3)
    assert sampler.policy_version == 2
    assert sampler.logprobs((3, 4), (5, 6), temperature=1.0) == before


def test_a_model_that_computes_nan_stops_the_run(
    model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(SamplingError, match="NaN or infinity"):
        NativeSampler(model, tokenizer).sample(prompts, PARAMS, seed=0)


def is_packed(layer: torch.nn.Module) -> bool:
    return "forward" in vars(layer)


def layers_of(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 384), torch.nn.Linear(384, 512, bias=False)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("shape", [(64, 1), (1, 1), (3, 7)], ids=str)
def test_products_are_those_of_the_layers(dtype: torch.dtype, tolerance: float, shape: tuple[int, int]) -> None:
    layers, inputs = layers_of(dtype), torch.randn(*shape, 256).to(dtype)
    with torch.inference_mode():
        expected = layers(inputs)
        with native._packed_weights(layers):
            torch.testing.assert_close(layers(inputs), expected, atol=tolerance, rtol=0)
        assert torch.equal(layers(inputs), expected)


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="this build of torch has no oneDNN")
def test_small_layers_and_other_kinds_of_linear_layers_stay_as_they_are() -> None:
    class Other(torch.nn.Linear):
        pass

    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), Other(256, 256), torch.nn.Linear(256, 256))
    with torch.inference_mode(), native._packed_weights(layers):
        assert list(map(is_packed, layers)) == [False, False, True]


def test_an_error_ends_the_packing_too() -> None:
    layers = layers_of(torch.float32)
    with pytest.raises(ZeroDivisionError), torch.inference_mode(), native._packed_weights(layers):
        1 / 0  # noqa: B018
    assert not any(map(is_packed, layers))


PARAMS_OF_SCRIPTED = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=3)


def test_texts_are_replayed_in_turn_with_the_end_of_their_turn(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    sampler: Sampler = ScriptedSampler.from_texts({"3+4": ["#### 7", "no"]}, tokenizer, policy_version=2)
    (group,) = sampler.sample(prompts[:1], PARAMS_OF_SCRIPTED, seed=0)
    rollouts = [rollout for rollout in group if isinstance(rollout, Rollout)]
    assert [rollout.text for rollout in rollouts] == ["#### 7", "no", "#### 7"]
    assert [rollout.finish_reason for rollout in rollouts] == ["stop"] * 3
    assert rollouts[0].completion_ids == tokenizer.render_demonstration(prompts[0].messages, "#### 7")[1]
    assert rollouts[0].sampler_logprobs == pytest.approx((-math.log(262),) * 4)
    assert rollouts[0].loss_mask == (True,) * 4
    assert rollouts[0].policy_version == 2


def test_token_ids_are_replayed_with_their_log_probabilities(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    completion = ScriptedCompletion(completion_ids=(9, 8, 1), sampler_logprobs=(-0.5, -1.5, -0.25))
    sampler = ScriptedSampler({"1": [completion]}, tokenizer)
    ((rollout, *_),) = sampler.sample([prompts[2]], PARAMS_OF_SCRIPTED, seed=0)
    assert isinstance(rollout, Rollout)
    assert (rollout.completion_ids, rollout.sampler_logprobs) == ((9, 8, 1), (-0.5, -1.5, -0.25))
    assert sampler.logprobs(prompts[2].token_ids, (9, 8, 1), temperature=1.0) == [-0.5, -1.5, -0.25]
    with pytest.raises(SamplingError, match="is not in the script"):
        sampler.logprobs(prompts[2].token_ids, (9, 8), temperature=1.0)


def test_a_script_is_cut_by_length_greedy_replays_the_first_alone_and_other_prompts_fail(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sampler = ScriptedSampler.from_texts({"1": ["123456789", "b"]}, tokenizer)
    greedy = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=2, greedy=True)
    other, group = sampler.sample([prompts[0], prompts[2]], greedy, seed=0)
    found = [(each.text, each.finish_reason) for each in group if isinstance(each, Rollout)]
    assert found == [("12345678", "length")] * 2
    assert [type(each) for each in other] == [FailedRollout] * 2


def test_a_script_with_unequal_lengths_is_refused() -> None:
    with pytest.raises(SamplingError, match="3 tokens and 2 log-probabilities"):
        ScriptedCompletion(completion_ids=(1, 2, 3), sampler_logprobs=(-1.0, -1.0))


def test_with_a_scorer_the_tokens_are_the_scripts_and_the_log_probabilities_the_models(
    tokenizer: ChatTokenizer, prompts: list[Prompt], model: PreTrainedModel
) -> None:
    scorer = NativeSampler(model, tokenizer)
    sampler = ScriptedSampler.from_texts({"3+4": ["7", "no"]}, tokenizer, scorer=scorer)
    (group,) = sampler.sample(prompts[:1], SamplingParams(temperature=0.7, max_new_tokens=8, num_samples=2), seed=0)
    for rollout, text in zip(group, ("7", "no"), strict=True):
        assert isinstance(rollout, Rollout) and rollout.text == text
        expected = scorer.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=0.7)
        assert list(rollout.sampler_logprobs) == expected
    state = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    assert sampler.differing_parts(state)
    sampler.load_weights(state, policy_version=1)
    assert (sampler.differing_parts(state), sampler.policy_version, scorer.policy_version) == ([], 1, 1)
