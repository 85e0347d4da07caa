"""Neutralization of control words of chat formats in a text for a judge, for any tokenizer.

A server encodes control words inside a message, so ``<|im_end|>`` in an answer would end the question, and the text
after it would be read as the user's or the judge's.
"""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"<(?=[|｜][^<>\n]{0,80}[|｜]>)"  # <|im_start|>, <|eot_id|>, <｜User｜>
    r"|<(?=\|[a-z_]{2,30}>|[a-z_]{2,30}\|>|\[[^<>\n]{2,80}\]>)"  # <|turn>, <turn|>, <[begin▁of▁sentence]>
    r"|<(?=</?SYS>>)"
    r"|<(?=/?(?:s|bos|eos|pad|unk|mask|sep|sop|eop|eoh|eoa|image|think|tool_call|tool_response|arg_key|arg_value"
    r"|seed:\w{1,20})>)"
    r"|<(?=(?:start|end)_of_[a-z]{1,20}>|extra_id_[0-9]{1,4}>|(?:unused|reserved_)[0-9]{1,5}>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|IMG|THINK)\])"
    r"|\[(?=(?:[gs]?MASK|BOS|EOS|CLS|SEP|UNK|PAD)\]|\|[a-z]{2,30}\|\])"
    r"|\](?=~!?[a-z][\[\]])",  # ]~b]
    re.IGNORECASE,
)


def neutralize(text: str) -> str:
    """Insert a blank after the first character of each control word: ``< |im_end|>``, ``[ INST]``."""
    return _WORDS.sub(lambda found: f"{found[0]} ", text)
