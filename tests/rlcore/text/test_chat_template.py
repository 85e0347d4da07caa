from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.errors import ModelError
from rlcore.types import Message
from tests.chat_shapes import SHAPES, load_tokenizer

AROUND = {
    "ChatML": ("", "", "<|im_end|>"),
    "Mistral v1": ("", "", "</s>"),
    "Mistral v3": ("", " ", "</s>"),
    "Llama 2": ("", " ", " </s>"),
    "Vicuna": ("", " ", "</s>"),
    "harmony": ("", "<|channel|>final<|message|>", "<|return|>"),
    "Qwen 3": ("", "<think>\n\n</think>\n\n", "<|im_end|>"),
    "GLM": ("", "\n<think></think>\n", "<|user|>"),
    "DeepSeek R1": ("<think>\n", "", "</s>"),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_stands_between_the_generation_prompt_and_the_words_is_found(name: str, tmp_path: Path) -> None:
    turn = load_tokenizer(tmp_path, "prepending", SHAPES[name]).turn
    assert (turn.prefill, turn.opening, turn.end) == AROUND[name]


@pytest.mark.parametrize("name", ["ChatML", "Zephyr", "Gemma", "Phi 3"])
def test_a_template_without_a_generation_prompt_is_refused_with_the_line_that_it_lacks(
    name: str, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    head, _, tail = shape.template.rpartition("{% if add_generation_prompt %}")
    line = "{% if add_generation_prompt %}" + tail
    with pytest.raises(ModelError, match="has no generation prompt") as refused:
        load_tokenizer(tmp_path, "byte-level", replace(shape, template=head))
    assert f"append {line.replace(' }}', ' }}')}" in refused.value.fix
    load_tokenizer(tmp_path, "byte-level", replace(shape, template=head + line))


def test_a_turn_that_ends_with_an_undeclared_control_token_is_told_of_extra_eos(tmp_path: Path) -> None:
    shape = replace(SHAPES["ChatML"], controls=(*SHAPES["ChatML"].controls, "<|endoftext|>"), eos="<|endoftext|>")
    with pytest.raises(ModelError, match="contains no EOS id") as refused:
        load_tokenizer(tmp_path, "byte-level", shape)
    assert refused.value.fix.startswith('set model.extra_eos = ["<|im_end|>"]')


@pytest.mark.parametrize("name", ["Qwen 3", "DeepSeek R1"])
def test_a_thought_in_an_earlier_turn_is_named_and_not_the_last_message(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "byte-level", SHAPES[name])
    messages = [
        Message(role="user", content="How many?"),
        Message(role="assistant", content="<think>\nTwo and two.\n</think>\n\nFour."),
        Message(role="user", content="And twice?"),
    ]
    with pytest.raises(ModelError, match="rewrites message 2 \\(assistant\\): '<think>") as refused:
        tokenizer.render_prompt(messages)
    assert "leave the thoughts out of earlier turns" in refused.value.fix


@pytest.mark.parametrize("drawn", ["{{ ['Hi.', 'Hello.'] | random }}", "{{ lipsum(1) }}"])
def test_a_template_that_draws_by_chance_is_refused(drawn: str, tmp_path: Path) -> None:
    shape = SHAPES["ChatML"]
    with pytest.raises(ModelError, match="uses random functions"):
        load_tokenizer(tmp_path, "byte-level", replace(shape, template=drawn + shape.template))
