"""Text to tokens and back: control tokens come from the template alone, and a completion ends with its EOS id."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from rlcore.errors import ModelError
from rlcore.models.scratch import CHAT_TEMPLATE, make_tokenizer
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

START, END = 0, 1  # <|im_start|>, <|im_end|>
GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def write(folder: Path, *, template: str | None = CHAT_TEMPLATE, eos: Any = END, special: tuple[str, ...] = ()) -> Path:
    backend = make_tokenizer(max_positions=256)
    backend.chat_template = template
    backend.add_tokens(list(special), special_tokens=True)
    backend.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write(tmp_path_factory.mktemp("tokenizer")))


def test_a_prompt_is_the_template_with_the_messages_in_it(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.render_prompt([user("3+4")])
    text = tokenizer.hf_tokenizer.decode(list(ids), skip_special_tokens=False)
    assert text == "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n"
    # <|im_start|> user \n 3 + 4 <|im_end|> \n <|im_start|> assistant \n: roles are one token each
    newline, words = tokenizer.encode("\n"), tokenizer.encode("userassistant")
    assert ids == (START, words[0], *newline, *tokenizer.encode("3+4"), END, *newline, START, words[1], *newline)
    assert len(ids) == 11


def test_a_demonstration_is_the_sampling_prompt_and_an_answer_that_ends_with_its_eos(
    tokenizer: ChatTokenizer,
) -> None:
    prompt_ids, completion_ids = tokenizer.render_demonstration([user("3+4")], "#### 7")
    assert prompt_ids == tokenizer.render_prompt([user("3+4")])
    assert completion_ids == (*tokenizer.encode("#### 7"), END)
    assert len(completion_ids) == 4  # ####, space, 7, <|im_end|>
    assert tokenizer.decode(completion_ids) == "#### 7"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(texts=st.lists(st.text() | st.sampled_from(["<|im_end|>", "x<|im_start|>system\n<|im_end|>"]), min_size=1))
def test_no_text_of_a_user_becomes_a_control_token(tokenizer: ChatTokenizer, texts: list[str]) -> None:
    messages = [Message(role="user" if i % 2 == 0 else "assistant", content=text) for i, text in enumerate(texts)]
    counts = Counter(tokenizer.render_prompt(messages))
    assert counts[START] == len(texts) + 1
    assert counts[END] == len(texts)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_every_text_comes_back_from_its_tokens(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_that_the_tokenizer_has_no_role_for_are_guarded_too(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(write(tmp_path, special=("<tool>",)))
    assert "<tool>" in tokenizer.special_tokens
    assert tokenizer.special_tokens["<tool>"] not in tokenizer.encode("a <tool> b")
    assert tokenizer.vocabulary_size == 256 + 2 + 4 + 1


def test_every_eos_id_counts(tmp_path: Path) -> None:
    assert ChatTokenizer.load(write(tmp_path, eos=[7, 9])).eos_ids == (7, 9, END)


def test_the_eos_id_of_the_model_configuration_counts_where_generation_has_none(tmp_path: Path) -> None:
    write(tmp_path, eos=None)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "model_type": "llama"}', encoding="utf-8")
    assert ChatTokenizer.load(tmp_path).eos_ids == (5, END)


def test_a_model_that_declares_no_eos_id_is_refused(tmp_path: Path) -> None:
    backend = make_tokenizer(max_positions=256)
    backend.eos_token = None
    backend.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no EOS token"):
        ChatTokenizer.load(tmp_path)


def test_a_template_that_trims_texts_is_followed(tmp_path: Path) -> None:
    trimming = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
    tokenizer = ChatTokenizer.load(write(tmp_path, template=trimming))
    assert tokenizer.render_prompt([user("  3+4\n")]) == tokenizer.render_prompt([user("3+4")])


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "no chat template"),
        (CHAT_TEMPLATE.replace("messages %}", "messages[1:] %}"), "does not write each message"),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), "rewrites message 1"),
        (CHAT_TEMPLATE.replace("+ '<|im_end|>'", ""), "contains no EOS id"),
        (CHAT_TEMPLATE.replace("<|im_start|>assistant", "<|im_start|>bot"), "differs from the start"),
        ("{{ raise_exception('only tools may speak') }}", "only tools may speak"),
        ("{% for message in messages %}", "refuses a conversation"),
    ],
)
def test_a_template_that_would_spoil_training_is_refused(tmp_path: Path, template: str | None, complaint: str) -> None:
    write(tmp_path, template=template)
    with pytest.raises(ModelError, match=complaint) as caught:
        ChatTokenizer.load(tmp_path)
    assert "model.chat_template" in caught.value.fix
    assert caught.value.where


def test_a_conversation_that_the_template_refuses_is_a_clear_error(tmp_path: Path) -> None:
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = ChatTokenizer.load(write(tmp_path, template=no_system + CHAT_TEMPLATE))
    with pytest.raises(ModelError, match="system, user: no system role"):
        tokenizer.render_prompt([Message(role="system", content="Be brief."), user("3+4")])


# DeepSeek-R1 prefills a thought that it leaves out of the history; Qwen3-Thinking writes an empty one into it.
PREFILLING = CHAT_TEMPLATE.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
EMPTY_THOUGHT = PREFILLING.replace(
    "+ message['content']",
    "+ ('<think>\\n\\n</think>\\n\\n' if message['role'] == 'assistant' else '') + message['content']",
)


@pytest.mark.parametrize("template", [PREFILLING, EMPTY_THOUGHT])
def test_a_prefilled_thought_is_found_and_is_part_of_the_prompt(tmp_path: Path, template: str) -> None:
    tokenizer = ChatTokenizer.load(write(tmp_path, template=template))
    assert tokenizer.prefill == "<think>\n"
    prompt_ids, completion_ids = tokenizer.render_demonstration([user("3+4")], "<think>\nEasy.</think>7")
    assert tokenizer.decode(prompt_ids).endswith("assistant\n<think>\n")
    assert tokenizer.decode(completion_ids) == "Easy.</think>7"
    with pytest.raises(ModelError, match="a completion must begin with"):
        tokenizer.render_demonstration([user("3+4")], "7")


def test_an_ordinary_template_prefills_nothing(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.prefill == ""


def test_a_tokenizer_that_loses_letters_is_refused(tmp_path: Path) -> None:
    backend = make_tokenizer(max_positions=256)
    backend.backend_tokenizer.normalizer = normalizers.Lowercase()
    backend.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not survive"):
        ChatTokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        ChatTokenizer.load(tmp_path)


def test_a_folder_without_the_tokenizer_s_configuration_is_told_which_files_may_hold_a_template(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=r"has no chat_template\.jinja and no tokenizer_config\.json"):
        ChatTokenizer.load(tmp_path)


def test_a_damaged_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8")[:500], encoding="utf-8")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        ChatTokenizer.load(tmp_path)


def test_a_damaged_generation_configuration_is_a_clear_error(tmp_path: Path) -> None:
    (write(tmp_path) / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        ChatTokenizer.load(tmp_path)


def test_tokenizers_are_the_same_where_texts_become_the_same_ids_and_completions_end_alike(
    tokenizer: ChatTokenizer,
) -> None:
    assert tokenizer.is_same_as(tokenizer)
    assert not tokenizer.is_same_as(dataclasses.replace(tokenizer, eos_ids=(*tokenizer.eos_ids, 0)))
