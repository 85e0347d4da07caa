"""Demonstrations: every turn of the assistant counts up to its EOS token, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from rlcore.errors import ModelError
from rlcore.models.scratch import CHAT_TEMPLATE, make_tokenizer
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import SHAPES, library_ids, load_tokenizer
from tests.rlcore.text.test_tokenization import END, write

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
    return ChatTokenizer.load(write(folder, template=template))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load(tmp_path_factory.mktemp("blocked"), BLOCK)


def conversation(*words: str, system: str = "") -> list[Message]:
    """Turns of the user and the assistant by turns, the user's first and last."""
    roles = ("user", "assistant")
    turns = [Message(role=roles[place % 2], content=text) for place, text in enumerate(words)]
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
def test_assistant_turns_count_with_eos(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: ChatTokenizer = request.getfixturevalue(name)
    shown = render_conversation(tokenizer, THREE, "#### 7")
    assert trained_texts(tokenizer, shown) == ["#### 2<|im_end|>", "#### 3<|im_end|>", "#### 7<|im_end|>"]
    assert shown.sequence.prompt_ids == tokenizer.render_prompt(THREE[:1])
    alone = render_conversation(tokenizer, THREE[:1], "#### 2")
    whole = tokenizer.render_demonstration(THREE[:1], "#### 2")
    assert (alone.sequence.prompt_ids, alone.sequence.completion_ids) == whole and all(alone.loss_mask)
    # ####, space, a digit and the EOS for each of three answers
    assert shown.num_trained == 3 * 4
    assert shown.sequence.completion_ids[-1] == END
    assert all_text(tokenizer, shown) == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n#### 2<|im_end|>\n"
        "<|im_start|>user\nand 1 more<|im_end|>\n<|im_start|>assistant\n#### 3<|im_end|>\n"
        "<|im_start|>user\nand 4 more<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>"
    )


words = st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=12) | st.just("x<|im_end|>\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(said=st.lists(words, min_size=1, max_size=7).filter(lambda said: len(said) % 2 == 1), answer=words)
def test_any_texts_of_the_assistant_count_alone(plain: ChatTokenizer, said: list[str], answer: str) -> None:
    spoken = [f"{text}<|im_end|>" for text in [*said[1::2], answer]]
    assert trained_texts(plain, render_conversation(plain, conversation(*said), answer)) == spoken


def test_injected_system_prompt_is_masked(tmp_path: Path) -> None:
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


def test_bos_is_not_doubled(tmp_path: Path) -> None:
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


def test_prefilled_thought_is_masked_in_every_turn(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, THINKING)
    shown = render_conversation(
        tokenizer, conversation("1+1", "<think>\nEasy.</think>2", "+1"), "<think>\nHm.</think>3"
    )
    assert trained_texts(tokenizer, shown) == ["Easy.</think>2<|im_end|>", "Hm.</think>3<|im_end|>"]
    assert all_text(tokenizer, shown).count("<think>\n") == 2


def test_turn_that_differs_from_a_sampled_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="differently from a sampled one") as caught:
        render_conversation(load(tmp_path, THINKING), conversation("1+1", "2", "+1"), "<think>\nHm.</think>3")
    assert "one assistant turn" in caught.value.fix
    assert str(tmp_path) in caught.value.where


EMPTY = "<think>\n\n</think>\n\n"


def test_written_empty_thought_is_trained(tmp_path: Path) -> None:
    empty = f"({EMPTY!r} if message['role'] == 'assistant' else '') + message['content']"
    tokenizer = load(tmp_path, CHAT_TEMPLATE.replace("message['content']", empty))
    shown = render_conversation(tokenizer, conversation("1+1", "2", "+1"), "3")
    assert trained_texts(tokenizer, shown) == [f"{EMPTY}2<|im_end|>", f"{EMPTY}3<|im_end|>"]


def test_past_turns_may_lack_empty_thought(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "byte-level", SHAPES["Qwen 3"])
    shown = render_conversation(tokenizer, conversation("1+1", "2", "+1"), "3")
    assert trained_texts(tokenizer, shown) == ["2<|im_end|>", f"{EMPTY}3<|im_end|>"]
    own = render_conversation(tokenizer, conversation("1+1"), "<think>\nOne more.\n</think>\n\n2")
    assert trained_texts(tokenizer, own) == ["<think>\nOne more.\n</think>\n\n2<|im_end|>"]


@pytest.mark.parametrize("name", ["Llama 2", "Mistral v1", "Mistral v3", "Vicuna", "Zephyr", "Gemma"])
@pytest.mark.parametrize("kind", ["prepending", "metaspace, first"])
def test_sentencepiece_turns_equal_whole_conversation(kind: str, name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES[name])
    said = ["How many?", "It is 42.", "And twice?", "84"]
    shown = render_conversation(tokenizer, conversation(*said[:3]), said[3])
    ids = (*shown.sequence.prompt_ids, *shown.sequence.completion_ids)
    turns = [(("user", "assistant")[place % 2], text) for place, text in enumerate(said)]
    assert ids == library_ids(tokenizer, turns, is_prompt=False)[: len(ids)]
    end = tokenizer.turn.end.strip()
    assert ["".join(text.split()) for text in trained_texts(tokenizer, shown)] == [f"Itis42.{end}", f"84{end}"]


def test_mask_of_wrong_length_is_refused(plain: ChatTokenizer) -> None:
    shown = render_conversation(plain, conversation("1+1"), "2")
    with pytest.raises(ValueError, match="marks for"):
        Demonstration(sequence=shown.sequence, loss_mask=shown.loss_mask[1:])


def test_masks_equal_those_of_transformers(blocked: ChatTokenizer) -> None:
    shown = render_conversation(blocked, THREE, "#### 7")
    turns = [*THREE, Message(role="assistant", content="#### 7")]
    encoded = blocked.hf_tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in turns],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    ours = [*shown.sequence.prompt_ids, *shown.sequence.completion_ids]
    assert ours == ids[: len(ours)]
    assert [0] * len(shown.sequence.prompt_ids) + list(map(int, shown.loss_mask)) == mask[: len(ours)]
    assert not any(mask[len(ours) :])
