"""Chat templates: generation prompts, dates, texts that stay as they are, and tokens of the whole conversation."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime, tzinfo
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rlcore.errors import ModelError
from rlcore.loop.native import chat_prompts
from rlcore.text.chat_template import with_date, writes_date
from rlcore.text.text_parts import Ids, Part, PartEncoder
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import SHAPES, load_tokenizer, write_tokenizer

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
def test_prefill_opening_and_end_of_turn(name: str, tmp_path: Path) -> None:
    turn = load_tokenizer(tmp_path, "prepending", SHAPES[name]).turn
    assert (turn.prefill, turn.opening, turn.end) == AROUND[name]


@pytest.mark.parametrize("name", ["ChatML", "Zephyr", "Gemma", "Phi 3"])
def test_missing_generation_prompt_is_refused_with_fix(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    head, _, tail = shape.template.rpartition("{% if add_generation_prompt %}")
    line = "{% if add_generation_prompt %}" + tail
    with pytest.raises(ModelError, match="has no generation prompt") as refused:
        load_tokenizer(tmp_path, "byte-level", replace(shape, template=head))
    assert f"append {line.replace(' }}', ' }}')}" in refused.value.fix
    load_tokenizer(tmp_path, "byte-level", replace(shape, template=head + line))


def test_undeclared_end_of_turn_suggests_extra_eos(tmp_path: Path) -> None:
    shape = replace(SHAPES["ChatML"], controls=(*SHAPES["ChatML"].controls, "<|endoftext|>"), eos="<|endoftext|>")
    with pytest.raises(ModelError, match="contains no EOS id") as refused:
        load_tokenizer(tmp_path, "byte-level", shape)
    assert refused.value.fix.startswith('set model.extra_eos = ["<|im_end|>"]')


@pytest.mark.parametrize("name", ["Qwen 3", "DeepSeek R1"])
def test_thought_in_earlier_turn_is_named(name: str, tmp_path: Path) -> None:
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
def test_random_template_is_refused(drawn: str, tmp_path: Path) -> None:
    shape = SHAPES["ChatML"]
    with pytest.raises(ModelError, match="uses random functions"):
        load_tokenizer(tmp_path, "byte-level", replace(shape, template=drawn + shape.template))


class Apart(PartEncoder):
    """Encodes each part by itself."""

    def encode_all(self, texts: list[list[Part]]) -> list[Ids]:  # type: ignore[override]
        return [sum((super(Apart, self).encode_all([[part]])[0] for part in parts), ()) for parts in texts]


@pytest.mark.parametrize("kind", ["prepending", "metaspace, always"])
def test_parts_encoded_separately_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.text.tokenization.PartEncoder", Apart)
    with pytest.raises(ModelError, match="the roles user differ from apply_chat_template") as refused:
        load_tokenizer(tmp_path, kind, SHAPES["Zephyr"])
    assert "token 7 is ['▁What'], expected ['Wh']" in refused.value.what
    assert "model.chat_template" in refused.value.fix


@pytest.mark.parametrize("name", ["Zephyr", "Mistral v1", "Llama 2"])
def test_unreadable_control_tokens_are_refused(name: str, tmp_path: Path) -> None:
    """The normaliser writes ▁ before such a token, and looks for it with ▁: behind a word there is none."""
    path = write_tokenizer(tmp_path, "prepending", SHAPES[name]) / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"normalized": false', '"normalized": true'), "utf-8")
    with pytest.raises(ModelError, match=r"reads \d of the \d control tokens that the chat template writes") as refused:
        ChatTokenizer.load(tmp_path)
    assert "tokenizer.json" in refused.value.fix


ASKING = (
    "\n  {%- if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}"
    "{% macro long() %}{{ strftime_now('%B %d, %Y; %A; %-d.%-m.%y; %H:%M') }}{% endmacro %}"
    "Today: {{ day }} ({{ long() }}) {{ messages[0].content }}"
)


class Later(datetime):
    """The clock of another day."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Later:
        return cls(2031, 2, 3, tzinfo=tz)


def rendered(template: str) -> str:
    ((text,), _) = render_jinja_template([[{"role": "user", "content": "%d"}]], chat_template=template)
    return str(text)


def test_every_date_format_writes_given_day() -> None:
    text = rendered(with_date(ASKING, date(2026, 3, 5)))
    assert text == "Today: 05 Mar 2026 (March 05, 2026; Thursday; 5.3.26; 00:00) %d"


def test_template_is_otherwise_unchanged() -> None:
    begins = "\n  x{{ strftime_now('') }}{{ messages[0].content }}\n"
    assert rendered(with_date(begins, date(2026, 3, 5))) == rendered(begins)
    assert not writes_date("{{ messages[0].content }}")
    assert with_date("{{ messages[0].content }}", date(2026, 3, 5)) == "{{ messages[0].content }}"


def test_prompts_do_not_depend_on_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, "byte-level", SHAPES["Llama 3"])
    today = chat_prompts(ChatTokenizer.load(tmp_path), {"3+4": "7"})
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    assert chat_prompts(ChatTokenizer.load(tmp_path), {"3+4": "7"}) == today


def test_invalid_template_date_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "byte-level", SHAPES["Llama 3"]) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "template_date": "soon"}), "utf-8")
    with pytest.raises(ModelError, match="template_date is not a date: 'soon'"):
        ChatTokenizer.load(tmp_path)
