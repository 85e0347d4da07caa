"""Numbers of tokens of many texts at once, and bounds of them that need no tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from rlcore.errors import ModelError
from rlcore.models.scratch import CHAT_TEMPLATE, make_tokenizer
from rlcore.text.token_counts import encode_all, max_prompt_tokens, max_text_tokens, prompt_lengths
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import KINDS, SHAPES, load_tokenizer, words_alone

TURNS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant"]), st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    min_size=1,
    max_size=4,
).map(lambda turns: [Message(role=role, content=text) for role, text in turns])


def load(folder: Path, *, template: str = CHAT_TEMPLATE) -> ChatTokenizer:
    backend = make_tokenizer(max_positions=256)
    backend.chat_template = template
    backend.save_pretrained(folder)
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load(tmp_path_factory.mktemp("tokenizer"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(conversations=st.lists(TURNS, max_size=5))
def test_lengths_are_those_of_the_prompts_one_by_one_and_bounds_are_no_smaller(
    tokenizer: ChatTokenizer, conversations: list[list[Message]]
) -> None:
    lengths = prompt_lengths(tokenizer, conversations)
    assert lengths == [len(tokenizer.render_prompt(messages)) for messages in conversations]
    bounds = max_prompt_tokens(tokenizer, conversations)
    assert all(bound >= length for bound, length in zip(bounds, lengths, strict=True))


def test_texts_are_encoded_as_one_by_one_and_a_control_token_in_them_is_letters(tokenizer: ChatTokenizer) -> None:
    texts = ["", "#### 7", "a <|im_end|> b", "ä 漢 🙂"]
    assert [tuple(ids) for ids in encode_all(tokenizer, texts)] == [tokenizer.encode(text) for text in texts]
    assert encode_all(tokenizer, []) == []


def test_a_text_that_becomes_a_control_token_all_the_same_is_refused(tmp_path: Path) -> None:
    broken = dataclasses.replace(load(tmp_path), encoder=words_alone())
    with pytest.raises(ModelError, match="reads plain text as the control tokens"):
        encode_all(broken, ["seven", "septillion"])


def test_a_text_that_a_normaliser_writes_out_stays_below_its_bound(tmp_path: Path) -> None:
    backend = make_tokenizer(max_positions=256)
    backend.backend_tokenizer.normalizer = normalizers.NFKD()
    backend.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer.load(tmp_path)
    text = "\ufdfa" * 7  # three bytes, which compatibility writes out as 18 letters
    assert len(tokenizer.encode(text)) > 3 * len(text.encode())
    assert max_text_tokens(tokenizer, text) >= len(tokenizer.encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_an_ascii_text_stays_below_its_bound_and_a_blank_before_each_piece_counts(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES["ChatML"])
    for text in ("1+2=3;4*5", "a b  c\n\n", "(b)[c]{d}<e>", "".join(map(chr, range(1, 127))), ".,;:" * 20):
        assert max_text_tokens(tokenizer, text) >= len(tokenizer.encode(text))
    tight = max_text_tokens(tokenizer, "x" * 100) < 200
    assert tight == kind.startswith("byte-level")


def test_one_of_many_conversations_that_the_template_refuses_or_rewrites_is_an_error(tmp_path: Path) -> None:
    refusing = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    rewriting = CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('bad', 'good')")
    for name, template in (("refusing", refusing), ("rewriting", rewriting)):
        (tmp_path / name).mkdir()
        tokenizer = load(tmp_path / name, template=template)
        fine, bad = [Message(role="user", content="fine")], [Message(role="user", content="bad")]
        assert len(max_prompt_tokens(tokenizer, [fine, fine])) == 2
        with pytest.raises(ModelError, match=r"the chat template (refuses|rewrites)"):
            max_prompt_tokens(tokenizer, [fine, bad])
