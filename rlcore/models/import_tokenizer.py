"""What a preset changes of the tokenizer that it imports: arguments and date of its template, further EOS ids.

All become a part of the checkpoint, so that whoever loads it renders and stops as in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlcore.config.data import tried
from rlcore.errors import ModelError
from rlcore.text.template_date import record_date, recorded_date, writes_date
from rlcore.text.text_parts import control_tokens_of
from rlcore.text.tokenization import ChatTokenizer

_SHOWN = 12


def set_template_defaults(template: str, arguments: Mapping[str, str | int | float | bool]) -> str:
    """A chat template with other defaults of its variables; who renders it may still give them other values.

    Raises:
        ModelError: the template does not use one of them.
    """
    lines = []
    for name, value in arguments.items():
        if not re.search(rf"\b{name}\b", template):
            raise ModelError(
                f"the chat template does not use {name!r}",
                where=f"model.chat_template_kwargs.{name}",
                fix="look for the name in the model's chat template",
            )
        literal = str(value).lower() if isinstance(value, bool) else ascii(value)
        lines.append(f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif -%}}\n")
    return "".join(lines) + template


def pin_date(backend: PreTrainedTokenizerBase, day: str) -> None:
    """Record the day that a chat template writes, where it asks for one: ``day``, else what is recorded, else today.

    Raises:
        ModelError: a day is named, and the template asks for none.
    """
    if writes_date(str(backend.chat_template)):
        record_date(backend, date.fromisoformat(day) if day else recorded_date(backend) or date.today())
    elif day:
        raise ModelError("the chat template does not ask for the date", where="model.template_date", fix="leave it out")


def read_template(path: Path) -> str:
    """The text of a chat template's file.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template cannot be read: {error}", where=tried(str(path))) from error


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a checkpoint that somebody else made.

    Raises:
        ModelError: whatever it is that it or its chat template does.
    """
    try:
        return ChatTokenizer.load(folder)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the model's tokenizer cannot be used: {type(error).__name__}: {error}") from error


def control_token(backend: PreTrainedTokenizerBase, text: str) -> int:
    """The id of a text that is one control token, so that no text of a user holds it.

    Raises:
        ModelError: it is an ordinary token, or several.
    """
    known = control_tokens_of(backend)
    if text in known:
        return known[text]
    ids = backend(text, add_special_tokens=False).input_ids
    what = "an ordinary token, which any text may hold" if len(ids) == 1 else f"{len(ids)} tokens of this tokenizer"
    raise ModelError(
        f"{text!r} cannot end a completion: it is {what}",
        where="model.extra_eos",
        fix=f"name control tokens; the tokenizer has {', '.join(sorted(known)[:_SHOWN]) or 'none'}",
    )
