"""Fixed date of a chat template, the same for all stages of a model's training.

Templates read the clock (``strftime_now``). The date is recorded in the tokenizer's configuration on import; the
template itself is unchanged.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from rlcore.errors import ModelError

KEY = "template_date"  # in tokenizer_config.json
UNRECORDED = date(2025, 1, 1)  # for models that were never imported
_CLOCK = "strftime_now"
_DIRECTIVE = re.compile(r"%-?[aAbBcdDeFgGhHIjklmMnprRStTuUVwWxXyYzZ]")


def writes_date(template: str) -> bool:
    """Return True if a chat template reads the clock."""
    return _CLOCK in template


def recorded_date(backend: PreTrainedTokenizerBase) -> date | None:
    """Return the date recorded with a tokenizer, if any.

    Raises:
        ModelError: The recorded text is not a date.
    """
    text = backend.init_kwargs.get(KEY)
    try:
        return date.fromisoformat(text) if text else None
    except (TypeError, ValueError) as error:
        where = f"{backend.name_or_path}/tokenizer_config.json"
        raise ModelError(f"{KEY} is not a date: {text!r}", where=where, fix="write it as 2026-11-25") from error


def record_date(backend: PreTrainedTokenizerBase, day: date) -> None:
    """Record the date that a tokenizer's template writes."""
    backend.init_kwargs[KEY] = day.isoformat()


@lru_cache(maxsize=64)
def with_date(template: str, day: date) -> str:
    """Return the chat template with the clock replaced by ``day``; unchanged if it does not read the clock."""
    if not writes_date(template):
        return template
    midnight = datetime(day.year, day.month, day.day)
    directives = sorted(set(_DIRECTIVE.findall(template)))  # those without padding (%-d) come first
    filters = "".join(f" | replace({each!r}, {midnight.strftime(each)!a})" for each in directives)
    # transformers trims the newline after a block, so the template's own first line is unchanged.
    return f"{{%- macro {_CLOCK}(format) %}}{{{{ format{filters} | replace('%%', '%') }}}}{{% endmacro %}}\n{template}"
