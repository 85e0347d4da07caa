"""Workloads of the comparisons, the same for both sides: shapes, prompts, completions, rewards, initial weights.

Every token is decided here: each side samples and then takes the given token, so that both compute on the same ids.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

PAD, EOS = 0, 1
SUPERVISED = ("sft", "rm", "dpo")
_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NAMES += ("num_key_value_heads", "max_position_embeddings")


def _shape(kind: str, *sizes: int, **others: Any) -> dict[str, Any]:
    return dict(zip(_NAMES, sizes, strict=True)) | {"model_type": kind, "tie_word_embeddings": True} | others


SHAPES: dict[str, dict[str, Any]] = {
    "micro": _shape("llama", 64, 32, 64, 2, 4, 2, 256, bos_token_id=None),
    "tiny": _shape("llama", 1024, 256, 688, 6, 8, 4, 512, bos_token_id=None),
    "smollm2": _shape("llama", 49152, 576, 1536, 30, 9, 3, 8192, bos_token_id=None),
    "qwen3-0.6b": _shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, head_dim=128),
}
_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}"
    "{% if not loop.last %} {% endif %}{% endfor %}"
)
Group = tuple[tuple[int, ...], list[tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One comparison: a number of optimizer steps, each on all prompts with all their completions.

    Attributes:
        task: ``grpo`` samples and trains, ``update`` trains on given completions; ``sft``; ``rm`` and ``dpo`` on pairs.
        completion_tokens: Shortest and longest, with EOS.
    """

    task: str
    shape: str = "tiny"
    dtype: str = "float32"
    num_prompts: int = 8
    group_size: int = 8
    prompt_tokens: Sequence[int] = (66, 128)
    completion_tokens: Sequence[int] = (8, 96)
    steps: int = 1
    device: str = "cpu"

    @cached_property
    def groups(self) -> list[Group]:
        """Return each prompt with its completions, as token ids. Of two neighbours one begins with an odd token."""
        generator = torch.Generator().manual_seed(1)

        def draw(length: int) -> list[int]:
            return torch.randint(2, SHAPES[self.shape]["vocab_size"], (length,), generator=generator).tolist()

        def completion(number: int, length: int) -> tuple[int, ...]:
            first, *others = draw(length)
            return (first // 2 * 2 + number % 2, *others[:-1], EOS)

        return [
            (tuple(draw(prompt)), [completion(number, length) for number, length in enumerate(lengths.tolist())])
            for prompt, lengths in zip(self.prompt_lengths.tolist(), self.completion_lengths, strict=True)
        ]

    @property
    def prompt_lengths(self) -> torch.Tensor:
        return torch.linspace(*self.prompt_tokens, self.num_prompts).round().long()

    @property
    def completion_lengths(self) -> torch.Tensor:
        """Return the number of tokens of each completion, int64 [P, G]: evenly spread, in a random order."""
        count = self.num_prompts * self.group_size
        lengths = torch.linspace(*self.completion_tokens, count).round().long()
        order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
        return lengths[order].view(self.num_prompts, self.group_size)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the precision of the products; trained weights are float32."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def learning_rate(self) -> float:
        """Return the constant learning rate of AdamW (0.9, 0.999, no decay, gradients clipped at norm 1)."""
        return 1e-4 if self.task in SUPERVISED else 1e-6

    @property
    def max_new_tokens(self) -> int:
        return int(max(self.completion_tokens))

    def make_model(self) -> Any:
        """Make the policy, the same float32 weights on both sides."""
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(self._config(), attn_implementation="sdpa").to(self.device)

    def make_classifier(self) -> Any:
        """Make transformers' reward model on the backbone of :meth:`make_model`."""
        config = self._config()
        config.num_labels = 1
        torch.manual_seed(1)
        made = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
        made.model.load_state_dict(self.make_model().model.state_dict())
        return made

    def _config(self) -> Any:
        return AutoConfig.for_model(**copy.deepcopy(SHAPES[self.shape]), eos_token_id=EOS, pad_token_id=PAD)

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """Make a tokenizer of words ``t17``. No word is a part of another one: an EOS ``t1`` matched in ``t133``."""
        words = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(2, SHAPES[self.shape]["vocab_size"])}
        tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
        made.chat_template = _TEMPLATE
        return made


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text of tokens."""
    return " ".join("<eos>" if token == EOS else f"t{token}" for token in token_ids)


def parity(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Reward a completion whose first token is odd: half of each group."""
    return [float(ids[0] % 2) for ids in completion_ids]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantages of a group: centred, divided by the sample standard deviation."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist()
