"""Small Llama with seeded weights and a byte-level tokenizer, which needs no download."""

from __future__ import annotations

import math

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlcore.config import ShapeConfig
from rlcore.seeding import generator

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
# Whole-word tokens: the roles of the template, and the tag before a final answer.
WORDS = ("system", "user", "assistant", "####")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(*, max_positions: int) -> PreTrainedTokenizerFast:
    """Return a ChatML tokenizer for any text: 256 bytes, two control tokens and four whole words.

    As in other ChatML models ``<|im_end|>`` is both EOS and padding, so a mask by padding id would lose the EOS.
    """
    symbols = (TURN_START, TURN_END, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(BPE({symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TURN_START, TURN_END])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
    )


def make_config(shape: ShapeConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the configuration of a Llama of ``shape``."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        initializer_range=math.sqrt(2 / (5 * shape.hidden_size)),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(shape: ShapeConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Return a float32 Llama of ``shape`` with tied embeddings; equal seeds give equal weights, bit for bit.

    Matrices are drawn from N(0, 2 / (5 * hidden_size)), the small initialization of Nguyen and Salazar (2019).
    """
    config = make_config(shape, tokenizer)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights from the global generator
        model = LlamaForCausalLM(config)
    draws = generator(seed, "scratch")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the others are norm scales, initialized to 1
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * config.initializer_range)
    return model
