"""Tokenizers of every kind and chat templates of every shape that models come with, small and made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import PreTrainedTokenizerFast

from rlcore.text.text_parts import PartEncoder, control_tokens_of
from rlcore.text.tokenization import ChatTokenizer

CORPUS = [
    "What is 12 + 30? The answer is 42. [INST] Be brief. [/INST] <<SYS>> and <</SYS>>",
    "USER: How many apples are left? ASSISTANT: Seven apples are left.",
    "system user assistant model analysis final think header\n\nThe end of the list:\n- one\n- two\n\n1. three",
    "x = 7\n    return (a) [b](c) {d} naïve 漢字 it's we're 2026 November Today Date",
] * 3


def _byte_level() -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return made


def _split_byte_level() -> Tokenizer:
    """As Llama 3 and Qwen: line ends go with what is before them."""
    made = _byte_level()
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return made


def _sentence_piece(
    *, normalizer: normalizers.Normalizer | None = None, words: pre_tokenizers.PreTokenizer | None = None
) -> Tokenizer:
    """BPE over words that begin with ▁, with single bytes for what has no piece."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{number:02X}>" for number in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    made = Tokenizer(
        BPE(
            {piece: number for number, piece in enumerate(dict.fromkeys(pieces))},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if normalizer is not None:
        made.normalizer = normalizer
    if words is not None:
        made.pre_tokenizer = words
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _prepending() -> Tokenizer:
    """As Llama 2's file: a normaliser puts ▁ before each text, also after each control token."""
    return _sentence_piece(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def _never_prepending() -> Tokenizer:
    """As Gemma's: no ▁ of its own."""
    return _sentence_piece(
        normalizer=normalizers.Replace(" ", "▁"), words=pre_tokenizers.Split(" ", "merged_with_previous")
    )


def _metaspace(scheme: str) -> Callable[[], Tokenizer]:
    return lambda: _sentence_piece(words=pre_tokenizers.Metaspace(prepend_scheme=scheme))


def _unigram() -> Tokenizer:
    """Its model knows ``</s>`` as a piece, which letters would find."""
    trained = Tokenizer(Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"])
    trained.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(trained.to_str())["model"]["vocab"]
    vocabulary = [(piece, 0.0) for piece in pieces] + [(piece, score) for piece, score in learnt if piece != "<unk>"]
    made = Tokenizer(Unigram(vocabulary, 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-level with line ends": _split_byte_level,
    "prepending": _prepending,
    "never prepending": _never_prepending,
    "metaspace, always": _metaspace("always"),
    "metaspace, first": _metaspace("first"),
    "unigram": _unigram,
}


@dataclass(frozen=True)
class Shape:
    """A chat template, its control tokens and the one that ends a turn; ``flags``: of the control tokens."""

    template: str
    controls: tuple[str, ...]
    eos: str = "</s>"
    flags: tuple[str, ...] = ()


_SAY = "{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_FOLD = (  # a system message goes into the first turn
    "{% set said = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set said.system = m.content %}{% elif m.role == 'user' %}"
)
SHAPES = {
    "ChatML": Shape(
        "{% for m in messages %}" + _SAY + "{{ m.content ~ '<|im_end|>\\n' }}{% endfor %}" + _OPEN,
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "Mistral v1": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content ~ eos_token }}{% else %}{{ raise_exception('no system') }}"
        "{% endif %}{% endfor %}",
        ("<s>", "</s>"),
    ),
    "Mistral v3": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' ~ (m.content | trim) ~ eos_token }}{% else %}"
        "{{ raise_exception('no system') }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
    ),
    "Llama 2": Shape(
        _FOLD + "{{ bos_token ~ '[INST] ' }}{% if said.system %}{{ '<<SYS>>\\n' ~ said.system ~ '\\n<</SYS>>\\n\\n' }}"
        "{% set said.system = '' %}{% endif %}{{ (m.content | trim) ~ ' [/INST]' }}{% else %}"
        "{{ ' ' ~ (m.content | trim) ~ ' ' ~ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
    ),
    "Zephyr": Shape(
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ eos_token ~ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        ("<s>", "</s>"),
    ),
    "Vicuna": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content ~ ' ' }}"
        "{% elif m.role == 'user' %}{{ 'USER: ' ~ m.content ~ ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        ("<s>", "</s>"),
    ),
    "Llama 3": Shape(
        "{{ bos_token }}{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ '<|head|>system<|/head|>\\n\\nToday Date: ' ~ day ~ '\\n\\n' }}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ (m.content | trim) ~ '<|eot|>' }}{% else %}"
        "{% if loop.first %}{{ '<|eot|>' }}{% endif %}{{ '<|head|>' ~ m.role ~ '<|/head|>\\n\\n' }}"
        "{{ (m.content | trim) ~ '<|eot|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}",
        ("<s>", "<|head|>", "<|/head|>", "<|eot|>"),
        "<|eot|>",
    ),
    "harmony": Shape(
        "{% for m in messages %}{{ '<|start|>' ~ m.role }}"
        "{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
        "{{ '<|message|>' ~ m.content }}{% if m.role == 'assistant' and loop.last %}{{ '<|return|>' }}{% else %}"
        "{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "<|return|>",
    ),
    "Qwen 3": Shape(
        "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}" + _SAY + "{% if m.role == 'assistant' %}{% set words = m.content %}"
        "{% set thought = '' %}{% if '</think>' in words %}"
        "{% set thought = words.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{% set words = words.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% if loop.index0 > ns.asked %}"
        "{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{% endif %}{{ words }}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}" + _OPEN,
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "Gemma": Shape(
        "{{ bos_token }}" + _FOLD + "{{ '<start>user\\n' }}{% if said.system %}{{ said.system ~ '\\n\\n' }}"
        "{% set said.system = '' %}{% endif %}{{ (m.content | trim) ~ '<end>\\n' }}{% else %}"
        "{{ '<start>model\\n' ~ (m.content | trim) ~ '<end>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start>model\\n' }}{% endif %}",
        ("<s>", "<start>", "<end>"),
        "<end>",
    ),
    "Phi 3": Shape(  # the line ends after its control tokens are eaten
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        ("rstrip",),
    ),
    "GLM": Shape(  # the next role's marker ends a turn
        "{{ '<s>' }}{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ '\\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think></think>\\n' ~ (m.content | trim) }}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        ("<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|user|>",
    ),
    "DeepSeek R1": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "{{ '<|User|>' ~ m.content }}{% else %}{{ '<|Assistant|>' ~ m.content.split('</think>')[-1] ~ '</s>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}",
        ("<s>", "</s>", "<|User|>", "<|Assistant|>"),
    ),
}  # fmt: skip


@cache
def _made(kind: str) -> str:
    return str(KINDS[kind]().to_str())


def words_alone() -> PartEncoder:
    """The encoder of a tokenizer that cannot spell a word which it does not know."""
    made = Tokenizer(WordLevel({"<unk>": 0, "six": 1, "seven": 2, "<end>": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>")
    return PartEncoder(backend=backend, controls=control_tokens_of(backend))


def write_tokenizer(folder: Path, kind: str, shape: Shape) -> Path:
    made = Tokenizer.from_str(_made(kind))
    flags = dict.fromkeys(shape.flags, True)
    made.add_special_tokens([AddedToken(each, special=True, normalized=False, **flags) for each in shape.controls])
    backend = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>" if "<s>" in shape.controls else None,
        eos_token=shape.eos,
        unk_token="<unk>" if made.token_to_id("<unk>") is not None else None,
        chat_template=shape.template,
    )
    backend.save_pretrained(folder)
    return folder


def load_tokenizer(folder: Path, kind: str, shape: Shape) -> ChatTokenizer:
    return ChatTokenizer.load(write_tokenizer(folder, kind, shape))


def library_ids(tokenizer: ChatTokenizer, turns: Sequence[tuple[str, str]], *, is_prompt: bool) -> tuple[int, ...]:
    messages = [{"role": role, "content": content} for role, content in turns]
    made = tokenizer.hf_tokenizer.apply_chat_template(messages, add_generation_prompt=is_prompt, return_dict=False)
    return tuple(made)
