"""Text of a chat template around tool output, as token ids that follow the turn with the call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rlcore.environments.base import CallFormat
from rlcore.errors import ConfigError, ModelError
from rlcore.text.chat_template import TEMPLATE_FIX, render_turns, template_pieces
from rlcore.text.text_parts import Ids, Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Role

# Placeholders between private-use characters, which no template contains.
_NAME, _OUTPUT = "\ue000f\ue001", "\ue000o\ue001"
_CALL_ID = "\ue000" + "0" * 7 + "\ue001"  # nine characters, as Mistral's template requires
_NO_ID = "000000000"
_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, kw_only=True)
class ToolOutputTemplate:
    """Texts of the template around a tool's output.

    Attributes:
        end: End of the assistant's turn, which the policy has sampled itself.
        quotes: True if the template writes the output as a JSON string.
    """

    tokenizer: ChatTokenizer
    end: str
    before: str
    after: str
    quotes: bool = False

    def reply(self, output: str, call_id: str) -> Ids:
        """Return the token ids after the turn with a call: tool output and the template around it.

        Raises:
            ModelError: The output contains a control token.
        """
        name = call_id if _ID.fullmatch(call_id) else _NO_ID  # other ids of the policy could inject template text
        shown = json.dumps(output, ensure_ascii=False)[1:-1] if self.quotes else output
        before, after = (Part(text.replace(_CALL_ID, name), "template") for text in (self.before, self.after))
        start = self.tokenizer.encode(self.end, "template")
        ids = self.tokenizer.encoder.encode([Part(self.end, "template"), before, Part(shown, "other"), after])
        return ids[len(start) :]


def make_tool_output_template(
    tokenizer: ChatTokenizer, role: Role, form: CallFormat, *, tools: str = ""
) -> ToolOutputTemplate:
    """Build the template of a message of ``role`` after a turn with a call; ``tools``: as the prompt declares them.

    Raises:
        ModelError: The template refuses such a conversation, or does not write the output.
    """
    if not form.is_of_model or role == "user":
        pieces = template_pieces(tokenizer.hf_tokenizer, ["user", "assistant", role], tools=tools)
        end, before = _split_at_eos(tokenizer, pieces[2])
        return ToolOutputTemplate(tokenizer=tokenizer, end=end, before=before, after=pieces[3])
    rendered = _rendered(tokenizer, _OUTPUT, tools)
    if rendered.count(_OUTPUT) != 1:
        where = str(tokenizer.hf_tokenizer.name_or_path)
        raise ModelError("the chat template does not write the output of a tool once", where=where, fix=TEMPLATE_FIX)
    before, _, after = rendered.partition(_OUTPUT)
    end, before = _split_at_eos(tokenizer, before)
    quotes = f'{_OUTPUT}\\"' in _rendered(tokenizer, f'{_OUTPUT}"', tools)
    return ToolOutputTemplate(tokenizer=tokenizer, end=end, before=before, after=after, quotes=quotes)


def writes_tools(tokenizer: ChatTokenizer, tools: str) -> bool:
    """Return True if the template writes tool declarations; ``tools`` has their schemas, as in :class:`Prompt`."""
    question = [{"role": "user", "content": "?"}]
    with_tools, without = (
        render_turns(tokenizer.hf_tokenizer, question, add_generation_prompt=True, tools=each) for each in (tools, "")
    )
    return with_tools != without


def refuse_control_tokens(tokenizer: ChatTokenizer, declared: str) -> None:
    """Reject control tokens in tool declarations: a server's description could end a turn and begin another.

    Raises:
        ConfigError: A description has a control token.
    """
    words = json.dumps(json.loads(declared), ensure_ascii=False) if declared else ""
    if held := [token for token in tokenizer.special_tokens if token and token in words]:
        raise ConfigError(
            f"the description of a tool has the control token {held[0]!r} of the model",
            where="sampling.episodes.environment",
            fix="remove it in the tool's definition, or at its server",
        )


def _rendered(tokenizer: ChatTokenizer, output: str, tools: str) -> str:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output, "name": _NAME, "tool_call_id": _CALL_ID},
    ]
    return render_turns(tokenizer.hf_tokenizer, turns, add_generation_prompt=True, tools=tools)


def _split_at_eos(tokenizer: ChatTokenizer, text: str) -> tuple[str, str]:
    marks = tokenizer.hf_tokenizer.convert_ids_to_tokens(list(tokenizer.eos_ids))
    position, mark = max((text.rfind(mark), mark) for mark in marks)
    return (mark, text[position + len(mark) :]) if position >= 0 else ("", text)
