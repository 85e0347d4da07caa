"""Random models of two shapes, the same weights in every arm: ``tiny`` for time, ``smollm2`` (135 M) for memory."""

from __future__ import annotations

import copy

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

PAD, EOS, VOCABULARY = 0, 1, 1024  # prompts are of the first 1,024 tokens, without padding and EOS
SHAPES = {
    "tiny": {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    | {"num_attention_heads": 8, "num_key_value_heads": 4},
    "smollm2": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
}


def make_model(shape: str) -> LlamaForCausalLM:
    """A policy, float32, with SDPA."""
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_scalar_model(policy: LlamaForCausalLM, *, seed: int) -> LlamaForSequenceClassification:
    """A critic or a reward model on a copy of the policy's trunk, as transformers has it; its head is drawn by seed."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    torch.manual_seed(seed)
    made = LlamaForSequenceClassification(config)
    made.model.load_state_dict(policy.model.state_dict())
    return made


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word per token (``t17``); its padding is not its EOS."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0")
