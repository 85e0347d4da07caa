"""A text in parts has the tokens of the whole, and what people wrote never becomes a control token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.errors import ModelError
from rlcore.text import text_parts
from rlcore.text.text_parts import Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import KINDS, SHAPES, Shape, library_ids, load_tokenizer, words_alone

BLANKS = st.sampled_from(["", " ", "  ", "\n", "\n\n", "\t", " \n "])
WORDS = st.sampled_from(
    ["a", "42", "(b)", "What is 12 + 30?", "naïve", "漢字 🙂", "- one\n- two", "it's", "]", "x = 7"]
)
TEXTS = st.lists(WORDS | BLANKS, min_size=1, max_size=5).map("".join).filter(str.strip)


@pytest.fixture(scope="module", params=[(kind, name) for kind in KINDS for name in SHAPES], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokenizer, Shape]:
    kind, name = request.param
    return load_tokenizer(tmp_path_factory.mktemp("made"), kind, SHAPES[name]), SHAPES[name]


def says_no_date(tokenizer: ChatTokenizer) -> bool:
    return "strftime_now" not in str(tokenizer.hf_tokenizer.chat_template)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=6)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1))
def test_a_prompt_has_the_tokens_that_the_library_gives_it(case: tuple[ChatTokenizer, Shape], texts: list[str]) -> None:
    tokenizer, _ = case
    turns = [(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)]
    ours = tokenizer.render_prompt([Message(role=role, content=text) for role, text in turns])  # type: ignore[arg-type]
    if says_no_date(tokenizer):
        assert ours == library_ids(tokenizer, turns, is_prompt=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=3)
@given(text=TEXTS, data=st.data())
def test_a_control_word_of_a_person_stays_text(
    case: tuple[ChatTokenizer, Shape], text: str, data: st.DataObject
) -> None:
    tokenizer, shape = case
    words = data.draw(st.lists(st.sampled_from([*shape.controls, text]), min_size=1, max_size=4))
    hostile = f"a{text.join(words)}b"
    plain, ids = (tokenizer.render_prompt([Message(role="user", content=each)]) for each in ("a", hostile))
    controls = frozenset(tokenizer.special_tokens.values())
    assert Counter(filter(controls.__contains__, ids)) == Counter(filter(controls.__contains__, plain))
    assert hostile in tokenizer.spell(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_leaves_control_words_without_a_name_or_costs_one_more_copy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a large tokenizer take seconds and tens of megabytes, and are kept."""
    copies, copy = [], text_parts._renamed
    monkeypatch.setattr(text_parts, "_renamed", lambda *args: copies.append(args) or copy(*args))
    shape = next(each for each in SHAPES.values() if each.controls)
    encoder = load_tokenizer(tmp_path, kind, shape).encoder
    private = "".join(map(chr, range(0xF0000, 0x110000)))
    for taken in (0, 1, 2, 300, len(private)):
        encoder.encode([Part(f"a{shape.controls[0]}b{private[:taken]}", "other")])
    assert len(copies) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_many_texts_has_the_tokens_that_it_has_alone(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES["ChatML"])
    tokenizer.hf_tokenizer.backend_tokenizer.enable_truncation(2)  # of a call before, or of the file
    tokenizer.hf_tokenizer.backend_tokenizer.enable_padding()
    texts = ["", " a", "What is 12 + 30?", "naïve 漢字 🙂", "- one\n\n- two ", "a<|im_end|>b"] * 5
    found = tokenizer.encoder.encode_all([[Part(text, "other")] for text in texts])
    assert found == [tokenizer.encode(text) for text in texts]


def test_a_private_character_in_a_text_makes_no_control_token(tmp_path: Path) -> None:
    """The names that control tokens have meanwhile are of such characters."""
    tokenizer = load_tokenizer(tmp_path, "byte-level", SHAPES["ChatML"])
    text = "\U000f00000\U000f0000 <|im_end|>\U000f00011\U000f0001"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special_tokens.values())


def test_what_joins_the_last_token_so_far_gets_tokens_of_its_own(tmp_path: Path) -> None:
    for kind in KINDS:
        tokenizer = load_tokenizer(tmp_path / kind, kind, SHAPES["Mistral v1"])
        prompt, answer = tokenizer.render_demonstration([Message(role="user", content="a, b?")], "(b)")
        assert prompt == tokenizer.render_prompt([Message(role="user", content="a, b?")])
        assert tokenizer.spell([*prompt, *answer]).endswith("[/INST](b)</s>")


@pytest.mark.parametrize(
    ("begin", "end"), [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<answer>", "</answer>")]
)
def test_a_mark_of_thoughts_or_answers_that_is_a_special_token_stays_in_the_text_that_rewards_see(
    begin: str, end: str, tmp_path: Path
) -> None:
    chatml = SHAPES["ChatML"]
    tokenizer = load_tokenizer(
        tmp_path, "byte-level", Shape(chatml.template, (*chatml.controls, begin, end), chatml.eos)
    )
    marks = {tokenizer.encoder.controls[each] for each in (begin, end)}
    prompt, answer = tokenizer.render_demonstration([Message(role="user", content=f"{begin}?")], f"{begin}Hm{end}7")
    assert tokenizer.decode(answer) == f"{begin}Hm{end}7"
    assert marks <= set(answer)
    assert not marks & set(prompt)  # a person's are text
    assert end not in tokenizer.special_tokens


def test_a_tokenizer_that_cannot_spell_a_text_refuses_it() -> None:
    encoder = words_alone()
    assert encoder.encode([Part("<end>", "template"), Part(" seven ", "other")]) == (3, 2)
    with pytest.raises(ModelError, match=r"reads plain text as the control tokens \[0\]: ' septillion'"):
        encoder.encode([Part(" septillion", "other")])
    with pytest.raises(
        ModelError, match=r"reads plain text as the control tokens \[0\]"
    ):  # it has no letters to spell that with
        encoder.encode([Part("<end>", "other")])


def test_no_texts_have_no_tokens(tmp_path: Path) -> None:
    encoder = load_tokenizer(tmp_path, "byte-level", SHAPES["ChatML"]).encoder
    assert encoder.encode_all([]) == []
    assert encoder.encode([Part("", "other")]) == ()
