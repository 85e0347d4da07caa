"""What a chat template writes around the output of a tool, as token ids that follow the turn with the call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlcore.chat_template import TEMPLATE_FIX, render_turns, template_pieces
from rlcore.errors import ModelError
from rlcore.tokenization import ChatTokenizer
from rlcore.tools.formats import CallFormat
from rlcore.types import Role

# Between private-use characters, which no template writes by itself.
_NAME, _SAID = "\ue000f\ue001", "\ue000o\ue001"
_CALL_ID = "\ue000" + "0" * 7 + "\ue001"  # nine characters, as Mistral's template demands
_NO_ID = "000000000"
_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, kw_only=True)
class ReplyFrame:
    """Texts of the template around a tool's output; ``quotes``: it writes the output as a JSON string.

    ``before`` begins with the end of the assistant's turn, which the policy has written itself.
    """

    tokenizer: ChatTokenizer
    before: str
    after: str
    quotes: bool = False

    def around(self, call_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids before and after the output of the call that the policy named so."""
        name = call_id if _ID.fullmatch(call_id) else _NO_ID  # the policy's words never become the template's
        before, after = (
            self.tokenizer.encode_template(text.replace(_CALL_ID, name)) for text in (self.before, self.after)
        )
        ends = [place for place, number in enumerate(before) if number in self.tokenizer.eos_ids]
        return before[ends[-1] + 1 if ends else 0 :], after


def reply_frame(tokenizer: ChatTokenizer, role: Role, form: CallFormat, *, tools: str = "") -> ReplyFrame:
    """The frame of a message of ``role`` after a turn with a call; ``tools``: as the prompt declares them.

    Raises:
        ModelError: the template refuses such a conversation, or does not write the output.
    """
    if not form.is_own or role == "user":
        pieces = template_pieces(tokenizer.backend, ["user", "assistant", role], tools=tools)
        return ReplyFrame(tokenizer=tokenizer, before=_from_eos(tokenizer, pieces[2]), after=pieces[3])
    rendered = _rendered(tokenizer, _SAID, tools)
    if rendered.count(_SAID) != 1:
        where = str(tokenizer.backend.name_or_path)
        raise ModelError("the chat template does not write the output of a tool once", where=where, fix=TEMPLATE_FIX)
    before, _, after = rendered.partition(_SAID)
    quotes = f'{_SAID}\\"' in _rendered(tokenizer, f'{_SAID}"', tools)
    return ReplyFrame(tokenizer=tokenizer, before=_from_eos(tokenizer, before), after=after, quotes=quotes)


def writes_tools(tokenizer: ChatTokenizer, tools: str) -> bool:
    """Whether the template describes tools that it is given; ``tools``: their schemas, as in :class:`Prompt`."""
    question = [{"role": "user", "content": "?"}]
    with_tools, without = (
        render_turns(tokenizer.backend, question, add_generation_prompt=True, tools=each) for each in (tools, "")
    )
    return with_tools != without


def _rendered(tokenizer: ChatTokenizer, output: str, tools: str) -> str:
    """A conversation with one call and its output."""
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output, "name": _NAME, "tool_call_id": _CALL_ID},
    ]
    return render_turns(tokenizer.backend, turns, add_generation_prompt=True, tools=tools)


def _from_eos(tokenizer: ChatTokenizer, text: str) -> str:
    """A text from the last end of a turn on, which is that of the assistant's."""
    marks = [tokenizer.backend.convert_ids_to_tokens(number) for number in tokenizer.eos_ids]
    return text[max(0, *(text.rfind(mark) for mark in marks)) :]
