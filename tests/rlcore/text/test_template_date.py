"""A template that asks for the date gets one day, whenever it is rendered."""

from __future__ import annotations

import json
from datetime import date, datetime, tzinfo
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rlcore.errors import ModelError
from rlcore.loop.native import chat_prompts
from rlcore.text.template_date import UNRECORDED, with_date, writes_date
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import SHAPES, write_tokenizer

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


def test_every_way_to_write_a_date_writes_the_day_that_is_given() -> None:
    text = rendered(with_date(ASKING, date(2026, 3, 5)))
    assert text == "Today: 05 Mar 2026 (March 05, 2026; Thursday; 5.3.26; 00:00) %d"


def test_a_template_is_otherwise_as_it_was() -> None:
    begins = "\n  x{{ strftime_now('') }}{{ messages[0].content }}\n"
    assert rendered(with_date(begins, date(2026, 3, 5))) == rendered(begins)
    assert not writes_date("{{ messages[0].content }}")
    assert with_date("{{ messages[0].content }}", date(2026, 3, 5)) == "{{ messages[0].content }}"


def test_a_folder_that_was_never_imported_has_one_day_too(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(write_tokenizer(tmp_path, "byte-level", SHAPES["Llama 3"]))
    assert f"Today Date: {UNRECORDED:%d %b %Y}" in tokenizer.spell(
        tokenizer.render_prompt([Message(role="user", content="7")])
    )


def test_the_library_has_the_same_prompts_on_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, "byte-level", SHAPES["Llama 3"])
    today = chat_prompts(ChatTokenizer.load(tmp_path), {"3+4": "7"})
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    assert chat_prompts(ChatTokenizer.load(tmp_path), {"3+4": "7"}) == today


def test_a_recorded_day_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "byte-level", SHAPES["Llama 3"]) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "template_date": "soon"}), "utf-8")
    with pytest.raises(ModelError, match="template_date is not a date: 'soon'"):
        ChatTokenizer.load(tmp_path)
