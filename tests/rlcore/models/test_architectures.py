"""Every supported architecture: training, sampling, saving and adapters are right, or it is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GenerationConfig, PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.errors import ModelError, TrainingError
from rlcore.hardware.precision import compute_dtype, set_compute_dtype
from rlcore.models import architectures, lora, policy
from rlcore.models.architectures import choose_kernels, pack_for, positions_of, supports_prompt_sharing
from rlcore.models.loading import load_policy
from rlcore.models.logprob_check import check_model
from rlcore.models.lora import MergedState, add_lora
from rlcore.models.model_validation import read_config, require_weights
from rlcore.models.policy import completion_logprobs
from rlcore.models.preview import model_size
from rlcore.models.runtime import enable_gradient_checkpointing
from rlcore.models.scratch import make_tokenizer
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.sampling.base import SamplingParams, weight_mismatches
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm import weights as weight_files
from rlcore.sampling.vllm.weights import checkpoint_shapes, stored_tensors, to_checkpoint_names
from rlcore.text.packing import TokenSequence
from rlcore.types import Prompt, Rollout
from tests import strategies
from tests.rlcore.models.zoo import ARCHITECTURES, BY_TYPE, COMMON, VOCABULARY, Architecture, make, table

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
EOS = 2
RIGHT = [each for each in ARCHITECTURES if not each.refused]
MIXTURE = BY_TYPE["qwen3_moe"]
REFUSED = [each for each in ARCHITECTURES if each.refused]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # GPT-BigCode's


def each_of(architectures: list[Architecture]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("architecture", architectures, ids=[each.model_type for each in architectures])


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    architectures._log_slow.cache_clear()
    yield


def tokens(count: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def sequences() -> list[TokenSequence]:
    """Two prompts with two completions each; some rows are padded."""
    generator = torch.Generator().manual_seed(3)
    prompts = tokens(6, generator), tokens(3, generator)
    return [
        TokenSequence(prompt_ids=prompt, completion_ids=tokens(length, generator))
        for prompt, lengths in zip(prompts, ((9, 5), (4, 12)), strict=True)
        for length in lengths
    ]


def one_by_one(model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
    count = len(sequence.completion_ids)
    logits = model(ids, use_cache=False).logits[0, -count - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, ids[0, -count:, None])[:, 0]


def eager(model: PreTrainedModel) -> PreTrainedModel:
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    return model


def gradient(logprobs: list[torch.Tensor], model: PreTrainedModel) -> torch.Tensor:
    loss = sum((torch.linspace(0.3, 1.0, len(each)) * each).sum() for each in logprobs)
    assert isinstance(loss, torch.Tensor)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(parts, parameters, strict=True)]
    )


def packed(model: PreTrainedModel) -> list[torch.Tensor]:
    results: dict[int, torch.Tensor] = {}
    for batch in pack_for(model, sequences(), tokens_per_microbatch=64):
        logprobs, _ = completion_logprobs(model, batch)
        results |= {number: logprobs[batch.sequence_index == number] for number in batch.sequences.tolist()}
    return [results[number] for number in sorted(results)]


#: of log-probabilities in nats, and of gradients as a share of their norm. The weights are float64 to leave rounding
#: out, but transformers takes norms and rotations in float32: 3e-6 is the largest measured. In float32 it is rounding:
#: 1.1e-5 nats (Nemotron) and 2.7e-5 of the norm (Granite, whose own gradient is as far from float64).
BOUNDS = {torch.float64: (1e-5, 1e-5), torch.float32: (2e-5, 5e-5)}


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning")  # float64
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@each_of(RIGHT)
def test_packed_logprobs_and_gradients_equal_single_passes(architecture: Architecture, dtype: torch.dtype) -> None:
    model = make(architecture)
    choose_kernels(model)
    assert supports_prompt_sharing(model) == architecture.shares
    check_model(model)
    if architecture.model_type == "xglm":
        dtype = torch.float32  # the library's mask of XGLM cannot be made in float64
    model.to(dtype)
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped product of experts has no float64
    ours = packed(model)
    our_gradient = gradient(ours, model)
    theirs = [one_by_one(eager(model), sequence) for sequence in sequences()]
    their_gradient = gradient(theirs, model)
    of_logprobs, of_gradients = BOUNDS[dtype]
    differences = (float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=True))
    assert max(differences) < of_logprobs
    assert float((our_gradient - their_gradient).norm() / their_gradient.norm()) < of_gradients
    choose_kernels(model)
    again = gradient(packed(enable_gradient_checkpointing(model)), model)  # layers that are computed again
    torch.testing.assert_close(again, our_gradient, rtol=1e-5, atol=1e-5)


class Tokenizer:
    eos_ids = (EOS,)

    def decode(self, ids: list[int]) -> str:
        return ""


@each_of(RIGHT)
def test_native_sampling_equals_transformers(architecture: Architecture) -> None:
    model = make(architecture)
    choose_kernels(model)
    generator = torch.Generator().manual_seed(3)
    ids = [tokens(count, generator) for count in (6, 3, 3)]
    prompts = [
        Prompt(prompt_id=str(place), messages=(), token_ids=each, reference="", task="")
        for place, each in enumerate(ids)
    ]
    sampler = NativeSampler(model, Tokenizer())
    eager(model).generation_config = GenerationConfig()
    likeliest = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=1, greedy=True)
    drawn = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=2)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=EOS, pad_token_id=0, use_cache=True)
    for prompt, (rollout,) in zip(ids, sampler.sample(prompts, likeliest, seed=0), strict=True):
        assert isinstance(rollout, Rollout)
        given = torch.tensor([prompt])
        expected = model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
        assert list(rollout.completion_ids) == expected[0, len(prompt) :].tolist()
    for rollout in (each for group in sampler.sample(prompts, drawn, seed=0) for each in group):
        assert isinstance(rollout, Rollout)
        whole = TokenSequence(prompt_ids=rollout.prompt.token_ids, completion_ids=rollout.completion_ids)
        with torch.no_grad():
            exact = one_by_one(model, whole)
        torch.testing.assert_close(
            torch.tensor(rollout.sampler_logprobs), exact, atol=architecture.decoding_bound, rtol=0
        )
        served = sampler.logprobs(whole.prompt_ids, whole.completion_ids, temperature=1.0)
        torch.testing.assert_close(torch.tensor(served), exact, atol=5e-5, rtol=0)


@each_of(RIGHT)
def test_checkpoint_round_trip_with_its_names(architecture: Architecture, tmp_path: Path) -> None:
    model = make(architecture)
    model.save_pretrained(tmp_path)
    require_weights(read_config(tmp_path), tmp_path)
    loaded = load_policy(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    expected, found = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert positions_of(tmp_path) == (sys.maxsize if "mamba" in architecture.model_type else 256)
    state = to_checkpoint_names(loaded.state_dict(), tmp_path)
    assert weight_mismatches(checkpoint_shapes(tmp_path), state) == []
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored_tensors(tmp_path))


@each_of(RIGHT)
def test_adapter_equals_merged_weights(
    architecture: Architecture,
) -> None:
    model = make(architecture)
    choose_kernels(model)
    config = LoraConfig(rank=2, alpha=4)
    if architecture.adapter == "no":
        with pytest.raises(ModelError, match="no linear layer that an adapter can change"):
            add_lora(model, config, "policy", seed=0)
        return
    policy = add_lora(model, config, "policy", seed=0)
    planned = model_size(model.config).adapter_parameters(config)
    assert planned == sum(parameter.numel() for parameter in policy.parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    ours = packed(policy)
    sum(each.sum() for each in ours).backward()  # type: ignore[union-attr]
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []
    merged = make(architecture)
    merged.load_state_dict(dict(MergedState(policy)))
    choose_kernels(merged)
    for one, other in zip(ours, packed(merged), strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=0)


@each_of(REFUSED)
def test_unsupported_architecture_is_refused(architecture: Architecture) -> None:
    model = make(architecture)
    choose_kernels(model)
    with pytest.raises(ModelError, match=architecture.refused):
        check_model(model)


def test_experts_have_no_adapter_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger=lora.__name__):
        policy = add_lora(make(MIXTURE), LoraConfig(rank=2, alpha=4), "policy", seed=0)
    assert "Experts are not changed." in caplog.text
    assert {path.rpartition(".")[0].rpartition(".")[2] for path in policy.adapter_shapes()} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    with pytest.raises(ModelError, match="no linear layer gate_proj that an adapter can change"):
        add_lora(make(MIXTURE), LoraConfig(rank=2, alpha=4, targets=("gate_proj",)), "policy", seed=0)


def test_one_completion_per_row_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    hybrid = BY_TYPE["lfm2"]
    with caplog.at_level("WARNING", logger=architectures.__name__):
        choose_kernels(make(hybrid))
        choose_kernels(make(hybrid))
    assert caplog.text.count("Lfm2ForCausalLM keeps a state from token to token") == 1


def test_documented_table_is_tested_table() -> None:
    assert table() in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("attention", ["sdpa", TREE_ATTENTION])
def test_llama_passes_check(attention: str) -> None:
    model = strategies.tiny_llama()
    model.set_attn_implementation(attention)
    check_model(model)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_check_restores_half_precision(weights: torch.dtype, products: torch.dtype) -> None:
    model = set_compute_dtype(strategies.tiny_llama(dtype=weights, tie_word_embeddings=False), products)
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    check_model(model)
    assert compute_dtype(model) == products
    for name, tensor in model.state_dict().items():
        assert (tensor.dtype, tensor.data_ptr()) == (weights, before[name][1])
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)  # a hundredth of a logit; the check in half precision would not see it
    assert model.model.norm.weight.dtype == weights


def test_check_uses_tokens_of_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return make_tokenizer(max_positions=64)(text)["input_ids"]

    seen: list[torch.Tensor] = []
    model = strategies.tiny_llama(vocab_size=262)
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    check_model(model, Tokenizer())
    text = {*Tokenizer().encode("The train leaves at"), 0}  # and padding
    assert {int(token) for tokens in seen for token in tokens.flatten()} <= text


def test_attention_with_soft_cap_is_eager() -> None:
    config = Gemma2Config(**COMMON, final_logit_softcapping=None, attn_logit_softcapping=1.0)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    choose_kernels(model)
    assert model.config._attn_implementation == "eager"
    check_model(model)


def test_scaled_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(BY_TYPE["granite"])
    check_model(model)
    monkeypatch.setattr(policy, "logit_scale", lambda config: 1.0)
    with pytest.raises(ModelError, match="differ from its own logits"):
        check_model(model)


def test_leaking_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(BY_TYPE["lfm2"])
    check_model(model)
    monkeypatch.setattr(architectures, "supports_prompt_sharing", lambda model: True)
    with pytest.raises(ModelError, match="a row of Lfm2ForCausalLM holds one completion"):
        check_model(model)
    monkeypatch.setattr(policy, "supports_prompt_sharing", lambda model: True)
    with pytest.raises(ModelError, match="differ from its own logits by"):
        check_model(model)


def test_attention_without_mask_is_refused() -> None:
    with pytest.raises(ModelError, match="differ from its own logits"):
        check_model(strategies.tiny_llama(attn_implementation="eager"))


def test_uncallable_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = strategies.tiny_llama()

    def forward(*args: object, **options: object) -> None:
        raise AttributeError("no such cache")

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be called by the trainer: AttributeError: no such"):
        check_model(model)


def test_check_out_of_memory_is_a_training_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = strategies.tiny_llama()

    def forward(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(TrainingError, match="out of memory"):
        check_model(model)


class Watched(dict[str, torch.Tensor]):
    """A state that remembers what was read of it."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(state)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return super().__getitem__(name)


def test_state_without_conversion_is_returned(tmp_path: Path) -> None:
    model = strategies.tiny_llama()
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    assert to_checkpoint_names(state, tmp_path) is state


def test_experts_are_converted_lazily(tmp_path: Path) -> None:
    model = make(MIXTURE)
    model.save_pretrained(tmp_path)
    watched = Watched(model.state_dict())
    state = to_checkpoint_names(watched, tmp_path)
    assert set(state) == set(checkpoint_shapes(tmp_path))
    assert len(state) == len(checkpoint_shapes(tmp_path))
    assert watched.read == []
    layer = model.model.layers[1].mlp.experts
    assert torch.equal(state["model.layers.1.mlp.experts.2.down_proj.weight"], layer.down_proj[2])
    gate, up = layer.gate_up_proj[3].chunk(2)
    assert torch.equal(state["model.layers.1.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(state["model.layers.1.mlp.experts.3.up_proj.weight"], up)
    assert watched.read == [f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]


def test_conversion_of_several_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(MIXTURE).save_pretrained(tmp_path)
    exact = weight_files.revert_weight_conversion

    def half(model: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return exact(model, state) if len(state) > 1 else {}

    monkeypatch.setattr(weight_files, "revert_weight_conversion", half)
    with pytest.raises(ModelError, match="cannot be converted to checkpoint names"):
        to_checkpoint_names({}, tmp_path)
