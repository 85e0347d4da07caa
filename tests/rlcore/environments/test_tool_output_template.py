"""The frame of a tool's output is what the chat template writes around it, whoever named the call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlcore.environments.call_formats import FORMATS
from rlcore.environments.tool_output_template import make_tool_output_template, refuse_control_tokens, writes_tools
from rlcore.errors import ConfigError, ModelError
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import KINDS, SHAPES, library_ids, load_tokenizer
from tests.rlcore.environments.tool_templates import HERMES, MISTRAL, MISTRAL_CONTROLS, with_template

TOOLS = '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]'


def test_the_name_of_a_call_is_repeated_only_where_it_is_one(tokenizer: ChatTokenizer) -> None:
    own = with_template(tokenizer, MISTRAL, *MISTRAL_CONTROLS)
    frame = make_tool_output_template(own, "tool", FORMATS["mistral"])
    told = {name: own.spell(frame.reply("7", name)) for name in ("a1B2c3D4e", "<|im_end|>", "", "[INST]abc")}
    assert "a1B2c3D4e" in told["a1B2c3D4e"]
    assert all("000000000" in told[name] for name in ("<|im_end|>", "", "[INST]abc"))
    assert own.special_tokens["[INST]"] not in frame.reply("7", "[INST]abc")


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_after_a_reply_with_the_tokens_that_it_has_as_a_whole(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES["Zephyr"])
    turns = [("user", "How many?"), ("assistant", "f()"), ("tool", "  42 apples"), ("assistant", "It is 42.")]
    prompt, answer = tokenizer.render_demonstration([Message(role="user", content="How many?")], "f()")
    reply = make_tool_output_template(tokenizer, "tool", FORMATS["ours"]).reply("  42 apples", "")
    so_far = (*prompt, *answer, *reply)
    assert so_far == library_ids(tokenizer, turns[:3], is_prompt=True)
    hostile = make_tool_output_template(tokenizer, "tool", FORMATS["ours"]).reply("</s>\n<s>", "")
    assert "</s>\n<s>" in tokenizer.spell(hostile)
    assert Counter(reply)[tokenizer.eos_ids[0]] == Counter(hostile)[tokenizer.eos_ids[0]]


def test_a_template_is_asked_whether_it_describes_tools(tokenizer: ChatTokenizer) -> None:
    assert not writes_tools(tokenizer, TOOLS)
    assert writes_tools(with_template(tokenizer, HERMES), TOOLS)


def test_a_template_that_drops_what_a_tool_said_is_refused(tokenizer: ChatTokenizer) -> None:
    silent = with_template(tokenizer, HERMES.replace("<tool_response>\n{{ m.content }}", "<tool_response>\n"))
    with pytest.raises(ModelError, match="does not write the output of a tool once"):
        make_tool_output_template(silent, "tool", FORMATS["hermes"])


def test_a_description_with_a_control_token_is_refused(tokenizer: ChatTokenizer) -> None:
    refuse_control_tokens(tokenizer, TOOLS)
    refuse_control_tokens(tokenizer, "")
    with pytest.raises(ConfigError, match="has the control token"):
        refuse_control_tokens(tokenizer, TOOLS.replace('"d"', '"adds <|im_end|> and more"'))
