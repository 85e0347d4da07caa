"""The frame of a tool's output is what the chat template writes around it, whoever named the call."""

from __future__ import annotations

import pytest

from rlcore.errors import ModelError
from rlcore.sampling.replies import reply_frame, writes_tools
from rlcore.tokenization import ChatTokenizer
from rlcore.tools.formats import FORMATS
from tests.rlcore.sampling.tool_templates import HERMES, MISTRAL, MISTRAL_CONTROLS, with_template

TOOLS = '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]'


def test_the_name_of_a_call_is_repeated_only_where_it_is_one(tokenizer: ChatTokenizer) -> None:
    own = with_template(tokenizer, MISTRAL, *MISTRAL_CONTROLS)
    frame = reply_frame(own, "tool", FORMATS["mistral"])
    after = {
        name: own.backend.decode(list(frame.around(name)[1])) for name in ("a1B2c3D4e", "<|im_end|>", "", "[INST]abc")
    }
    assert "a1B2c3D4e" in after["a1B2c3D4e"]
    assert all("000000000" in after[name] for name in ("<|im_end|>", "", "[INST]abc"))
    ids = frame.around("[INST]abc")[1]
    assert own.special_tokens["[INST]"] not in ids


def test_a_template_is_asked_whether_it_describes_tools(tokenizer: ChatTokenizer) -> None:
    assert not writes_tools(tokenizer, TOOLS)
    assert writes_tools(with_template(tokenizer, HERMES), TOOLS)


def test_a_template_that_drops_what_a_tool_said_is_refused(tokenizer: ChatTokenizer) -> None:
    silent = with_template(tokenizer, HERMES.replace("<tool_response>\n{{ m.content }}", "<tool_response>\n"))
    with pytest.raises(ModelError, match="does not write the output of a tool once"):
        reply_frame(silent, "tool", FORMATS["hermes"])
