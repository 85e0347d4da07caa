"""A model is refused before a run where what is computed differs from its own logits."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
)

from rlcore.errors import ModelError, TrainingError
from rlcore.hardware.precision import compute_dtype, set_compute_dtype
from rlcore.models import batching, policy
from rlcore.models.batching import choose_kernels
from rlcore.models.logprob_check import check_model
from rlcore.models.scratch import make_tokenizer
from rlcore.models.tree_attention import TREE_ATTENTION
from tests import strategies

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}


def gemma2(**settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, **settings)).eval()


@pytest.mark.parametrize("attention", ["sdpa", TREE_ATTENTION])
@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}], ids=str)
def test_a_plain_llama_passes(settings: dict[str, object], attention: str) -> None:
    model = strategies.tiny_llama(**settings)
    model.set_attn_implementation(attention)
    check_model(model)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_half_precision_hides_nothing_and_is_there_again_afterwards(
    weights: torch.dtype, products: torch.dtype
) -> None:
    model = set_compute_dtype(strategies.tiny_llama(dtype=weights, tie_word_embeddings=False), products)
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    check_model(model)
    assert compute_dtype(model) == products
    for name, tensor in model.state_dict().items():
        assert (tensor.dtype, tensor.data_ptr()) == (weights, before[name][1])
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)  # a hundredth of a logit; the check in half precision would not see it
    assert model.model.norm.weight.dtype == weights


def test_tokens_of_a_sentence_are_used_where_there_is_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return make_tokenizer(max_positions=64)(text)["input_ids"]

    seen: list[torch.Tensor] = []
    model = strategies.tiny_llama(vocab_size=262)
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    check_model(model, Tokenizer())
    text = {*Tokenizer().encode("The train leaves at"), 0}  # and padding
    assert {int(token) for tokens in seen for token in tokens.flatten()} <= text


def test_a_bias_on_the_logits_is_refused() -> None:
    model = strategies.tiny_llama(tie_word_embeddings=False)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=True)
    model.set_output_embeddings(head)
    with pytest.raises(ModelError, match="adds a bias to its logits"):
        check_model(model)


def test_capped_logits_are_refused() -> None:
    with pytest.raises(ModelError, match="caps its logits"):
        check_model(gemma2(final_logit_softcapping=2.0))


def test_attention_with_soft_caps_is_the_librarys() -> None:
    model = gemma2(final_logit_softcapping=None, attn_logit_softcapping=1.0)
    choose_kernels(model)
    assert model.config._attn_implementation == "eager"
    check_model(model)


def test_scaled_logits_are_computed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)).eval()
    check_model(model)
    monkeypatch.setattr(policy, "logit_scale", lambda config: 1.0)
    with pytest.raises(ModelError, match="differ from its own logits"):
        check_model(model)


def test_a_state_that_leaks_into_the_next_completion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shape = SHAPE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    model = Lfm2ForCausalLM(Lfm2Config(**shape)).eval()
    check_model(model)
    monkeypatch.setattr(batching, "supports_prompt_sharing", lambda model: True)
    with pytest.raises(ModelError, match="a row of Lfm2ForCausalLM holds one completion"):
        check_model(model)
    monkeypatch.setattr(policy, "supports_prompt_sharing", lambda model: True)
    with pytest.raises(ModelError, match="differ from its own logits by"):
        check_model(model)


def test_an_attention_that_ignores_the_boolean_mask_is_refused() -> None:
    with pytest.raises(ModelError, match="differ from its own logits"):
        check_model(strategies.tiny_llama(attn_implementation="eager"))


def test_code_that_cannot_be_called_so_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = strategies.tiny_llama()

    def forward(*args: object, **options: object) -> None:
        raise AttributeError("no such cache")

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be called by the trainer: AttributeError: no such"):
        check_model(model)


def test_running_out_of_memory_is_not_called_a_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = strategies.tiny_llama()

    def forward(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(TrainingError, match="out of memory"):
        check_model(model)
