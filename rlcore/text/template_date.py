"""The date that a chat template writes: one day for all of a model's training, whenever its stages run.

Templates ask the clock for it (``strftime_now``). The day is recorded beside the tokenizer when a model is imported;
the template itself stays as it is.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from rlcore.errors import ModelError

KEY = "template_date"  # of tokenizer_config.json
UNRECORDED = date(2025, 1, 1)  # of a model that was never imported
_ASKED = "strftime_now"
_DIRECTIVE = re.compile(r"%-?[aAbBcdDeFgGhHIjklmMnprRStTuUVwWxXyYzZ]")


def writes_date(template: str) -> bool:
    """True if a chat template asks for the date."""
    return _ASKED in template


def recorded_date(backend: PreTrainedTokenizerBase) -> date | None:
    """The day that is recorded with a tokenizer.

    Raises:
        ModelError: what is recorded is no date.
    """
    text = backend.init_kwargs.get(KEY)
    try:
        return date.fromisoformat(text) if text else None
    except (TypeError, ValueError) as error:
        where = f"{backend.name_or_path}/tokenizer_config.json"
        raise ModelError(f"{KEY} is no date: {text!r}", where=where, fix="write it as 2026-11-25") from error


def record_date(backend: PreTrainedTokenizerBase, day: date) -> None:
    """Record the day that a tokenizer's template writes from now on."""
    backend.init_kwargs[KEY] = day.isoformat()


@lru_cache(maxsize=64)
def with_date(template: str, day: date) -> str:
    """A chat template that writes ``day`` where it asks for the date; one that does not ask is unchanged."""
    if not writes_date(template):
        return template
    midnight = datetime(day.year, day.month, day.day)
    directives = sorted(set(_DIRECTIVE.findall(template)))  # those without padding (%-d) come first
    filters = "".join(f" | replace({each!r}, {midnight.strftime(each)!a})" for each in directives)
    # The line end is the block's, as transformers renders, so that the template's own beginning is kept.
    return f"{{%- macro {_ASKED}(format) %}}{{{{ format{filters} | replace('%%', '%') }}}}{{% endmacro %}}\n{template}"
