"""Changes of a preset to an imported tokenizer: template defaults, template date, extra EOS ids.

All are stored in the checkpoint, so that every loader renders and stops as in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlcore.config.data import ModelConfig, tried
from rlcore.errors import ModelError
from rlcore.models.model_validation import require_template_ends
from rlcore.text.chat_template import record_date, recorded_date, writes_date
from rlcore.text.text_parts import control_tokens_of
from rlcore.text.tokenization import ChatTokenizer, read_eos_ids

_SHOWN = 12


def configure_tokenizer(backend: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Give a loaded tokenizer the template, its defaults and its date that a preset sets.

    Raises:
        ModelError: A template that does not end, is missing, or does not use what is set.
    """
    if config.chat_template:
        backend.chat_template = read_template(Path(config.chat_template))
    elif isinstance(backend.chat_template, dict):  # named templates: use the default one
        backend.chat_template = backend.get_chat_template()
    if config.chat_template_kwargs:
        backend.chat_template = set_template_defaults(backend.chat_template or "", config.chat_template_kwargs)
    if config.source != "scratch":
        require_template_ends(backend)
    pin_date(backend, config.template_date)


def write_tokenizer(backend: PreTrainedTokenizerBase, folder: Path, *, extra_eos: Sequence[str]) -> None:
    """Write the tokenizer and all EOS ids next to a model's configuration.

    Raises:
        ModelError: No EOS token, or an ordinary token in its place.
    """
    backend.save_pretrained(folder)
    extra = [control_token(backend, text) for text in extra_eos]
    eos_ids = list(dict.fromkeys([*extra, *read_eos_ids(folder, backend, optional=bool(extra))]))
    ids = {"eos_token_id": eos_ids, "pad_token_id": backend.pad_token_id}
    GenerationConfig(**ids, bos_token_id=backend.bos_token_id).save_pretrained(folder)


def set_template_defaults(template: str, arguments: Mapping[str, str | int | float | bool]) -> str:
    """Return a chat template with other defaults of its variables; renderers may still override them.

    Raises:
        ModelError: The template does not use one of the variables.
    """
    lines = []
    for name, value in arguments.items():
        if not re.search(rf"\b{name}\b", template):
            raise ModelError(
                f"the chat template does not use {name!r}",
                where=f"model.chat_template_kwargs.{name}",
                fix="use a variable of the model's chat template",
            )
        literal = str(value).lower() if isinstance(value, bool) else ascii(value)
        lines.append(f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif -%}}\n")
    return "".join(lines) + template


def pin_date(backend: PreTrainedTokenizerBase, day: str) -> None:
    """Record the date of a template that writes one: ``day``, else the recorded date, else today.

    Raises:
        ModelError: ``day`` is set, but the template writes no date.
    """
    if writes_date(str(backend.chat_template)):
        record_date(backend, date.fromisoformat(day) if day else recorded_date(backend) or date.today())
    elif day:
        raise ModelError("the chat template writes no date", where="model.template_date", fix="remove the key")


def read_template(path: Path) -> str:
    """Read the file of a chat template.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template cannot be read: {error}", where=tried(str(path))) from error


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Load the tokenizer of an external checkpoint.

    Raises:
        ModelError: The tokenizer or its chat template raised any exception.
    """
    try:
        return ChatTokenizer.load(folder)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the model's tokenizer cannot be used: {type(error).__name__}: {error}") from error


def control_token(backend: PreTrainedTokenizerBase, text: str) -> int:
    """Return the id of a text that is a single control token, which user text cannot contain.

    Raises:
        ModelError: The text is an ordinary token, or several tokens.
    """
    known = control_tokens_of(backend)
    if text in known:
        return known[text]
    ids = backend(text, add_special_tokens=False).input_ids
    what = "an ordinary token, which any text may contain" if len(ids) == 1 else f"{len(ids)} tokens of this tokenizer"
    raise ModelError(
        f"{text!r} cannot end a completion: it is {what}",
        where="model.extra_eos",
        fix=f"use control tokens; the tokenizer has {', '.join(sorted(known)[:_SHOWN]) or 'none'}",
    )
