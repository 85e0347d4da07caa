from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlcore.errors import ModelError
from rlcore.text.text_parts import Ids, Part, PartEncoder
from rlcore.text.tokenization import ChatTokenizer, require_same_tokens
from rlcore.types import Message
from tests.chat_shapes import KINDS, SHAPES, library_ids, load_tokenizer, write_tokenizer

CONVERSATIONS = [
    [("user", "What is 12 + 30?")],
    [("user", " x = 7\n")],
    [("system", "Be brief."), ("user", "How many?")],
    [("user", "How many?"), ("assistant", "(b) seven"), ("user", "And  twice?\n")],
]


class Apart(PartEncoder):
    """Encodes each part by itself."""

    def encode_all(self, texts: list[list[Part]]) -> list[Ids]:  # type: ignore[override]
        return [sum((super(Apart, self).encode_all([[part]])[0] for part in parts), ()) for parts in texts]


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "Llama 3"])
@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_are_as_the_template_writes_them(kind: str, name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES[name])
    for turns in CONVERSATIONS:
        if turns[0][0] == "system" and name.startswith("Mistral"):  # has none
            continue
        messages = [Message(role=role, content=text) for role, text in turns]  # type: ignore[arg-type]
        for said in ("It is 42.", "<think>\nHm\n</think>\n\n7"):
            prompt, answer = tokenizer.render_demonstration(messages, tokenizer.prefill + said)
            assert tokenizer.decode(answer).strip().endswith(said)
            if name != "DeepSeek R1":  # leaves thoughts out of what was said
                ids = (*prompt, *answer)
                whole = [*turns, ("assistant", said), ("user", "And?")][: None if name == "GLM" else -1]
                assert ids == library_ids(tokenizer, whole, is_prompt=False)[: len(ids)]


@pytest.mark.parametrize("kind", ["prepending", "metaspace, always"])
def test_texts_encoded_apart_are_refused_with_the_first_token_that_differs(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES["Zephyr"])
    apart = dataclasses.replace(
        tokenizer, encoder=Apart(backend=tokenizer.hf_tokenizer, controls=tokenizer.encoder.controls)
    )
    with pytest.raises(ModelError, match="the roles user differ from apply_chat_template") as refused:
        require_same_tokens(apart)
    assert "token 7 is ['▁What'], expected ['Wh']" in refused.value.what
    assert "model.chat_template" in refused.value.fix


@pytest.mark.parametrize("name", ["Zephyr", "Mistral v1", "Llama 2"])
def test_control_tokens_that_the_tokenizer_does_not_read_are_refused(name: str, tmp_path: Path) -> None:
    """The normaliser writes ▁ before such a token, and looks for it with ▁: behind a word there is none."""
    path = write_tokenizer(tmp_path, "prepending", SHAPES[name]) / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"normalized": false', '"normalized": true'), "utf-8")
    with pytest.raises(ModelError, match=r"reads \d of the \d control tokens that the chat template writes") as refused:
        ChatTokenizer.load(tmp_path)
    assert "tokenizer.json" in refused.value.fix


def test_other_tokens_are_refused_where_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.text.tokenization.PartEncoder", Apart)
    with pytest.raises(ModelError, match="differ from apply_chat_template"):
        load_tokenizer(tmp_path, "prepending", SHAPES["Vicuna"])
