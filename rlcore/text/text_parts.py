"""Token ids of a text that is written partly by a chat template and partly by people, encoded as one.

SentencePiece tokenizers prepend a blank to each text, and others merge line ends. Only the whole text has the tokens
that a model was trained on. Control tokens are recognized in the template's text only; in user text they are plain
characters.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.errors import ModelError

Author = Literal["template", "assistant", "other"]
Ids = tuple[int, ...]
_TAG = re.compile("think|thought|reason|answer|solution", re.IGNORECASE)  # tags that rewards look for
_PRIVATE = "\U000f0000"
_MANY = 16  # texts


class Part(NamedTuple):
    """A piece of text and its author. Assistants write thought and answer tags as templates do."""

    text: str
    author: Author


@dataclass(frozen=True, kw_only=True, eq=False)
class PartEncoder:
    """Tokenizer for texts in parts.

    ``controls``: control tokens by text, with the thought and answer tags that the tokenizer counts among them. The
    tags stay in decoded text, because rewards look for them.
    """

    backend: PreTrainedTokenizerBase
    controls: Mapping[str, int]

    def encode(self, parts: Sequence[Part]) -> Ids:
        """Return the token ids of one text.

        Raises:
            ModelError: User text yields a control token.
        """
        return self.encode_all([parts])[0]

    def encode_all(self, texts: Sequence[Sequence[Part]]) -> list[Ids]:
        """Return the token ids of many texts; see :meth:`encode`."""
        if not texts:
            return []
        found = self._ids_of(["".join([part.text for part in parts]) for parts in texts])
        return [
            tuple(ids) if self._count(ids) == self._expected(parts) else self._marked(parts)
            for ids, parts in zip(found, texts, strict=True)
        ]

    def _ids_of(self, wholes: list[str]) -> Sequence[Sequence[int]]:
        backend = self.backend
        is_plain = getattr(type(backend), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
        first = wholes[:1] if is_plain and len(wholes) >= _MANY else wholes
        found: Sequence[Sequence[int]] = backend(first, add_special_tokens=False, return_attention_mask=False).input_ids
        if first is wholes:
            return found
        # The call has set truncation and padding. Without offsets of the tokens, all take a fraction of its time.
        return [one.ids for one in backend.backend_tokenizer.encode_batch_fast(wholes, add_special_tokens=False)]

    def encode_after(self, before: Sequence[Part], after: Sequence[Part]) -> Ids:
        """Return the token ids of ``after`` as a continuation of ``before``.

        Raises:
            ModelError: The tokenizer merges ``after`` with ``before``.
        """
        start, whole = self.encode_all([before, [*before, *after]])
        if whole[: len(start)] == start:
            return whole[len(start) :]
        # The first characters merge with the last token: encode the text separately.
        text = self.spell(whole)
        for head in ("", "\n", "."):
            apart, joined = self.encode_all([[Part(head, "other")], [Part(head, "other"), *after]])
            rest = joined[len(apart) :]
            if joined[: len(apart)] == apart and self.spell([*start, *rest]) == text:
                return rest
        raise ModelError(
            f"the tokenizer merges {''.join(part.text for part in after)[:40]!r} with the text before it",
            where=str(self.backend.name_or_path),
            fix="begin that text with another character, or remove it from the data",
        )

    def spell(self, ids: Sequence[int]) -> str:
        """Decode token ids, including control tokens."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids without control tokens."""
        return self.spell([number for number in ids if number not in self._hidden])

    def _expected(self, parts: Sequence[Part]) -> int:
        return sum([len(self._patterns[part.author].findall(part.text)) for part in parts if self._words[part.author]])

    def _count(self, ids: Sequence[int]) -> int:
        return 0 if self._numbers.isdisjoint(ids) else sum(map(self._numbers.__contains__, ids))

    def _marked(self, parts: Sequence[Part]) -> Ids:
        """Return the ids of a text that spells control tokens: real control tokens get temporary names."""
        whole = "".join([part.text for part in parts])
        names, copied = self._copy
        text = "".join(self._patterns[part.author].sub(lambda found: names[found.group()], part.text) for part in parts)
        ids = tuple(copied.encode(text, add_special_tokens=False).ids)
        found, expected = self._count(ids), self._expected(parts)
        if found < expected:
            raise ModelError(
                f"the tokenizer reads {found} of the {expected} control tokens that the chat template writes in "
                f"{whole[-80:]!r}",
                where=str(self.backend.name_or_path),
                fix='set "normalized": false and "single_word": false for control tokens in tokenizer.json',
            )
        if found > expected:
            controls = sorted(self._numbers.intersection(ids))
            raise ModelError(
                f"the tokenizer reads plain text as the control tokens {controls}: {whole[-80:]!r}",
                where=str(self.backend.name_or_path),
                fix="remove that text from the data, or use a tokenizer that can spell it",
            )
        return ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Control tokens without tags, text to id."""
        return {token: number for token, number in self.controls.items() if not _TAG.search(token)}

    @cached_property
    def _copy(self) -> tuple[Mapping[str, str], Tokenizer]:
        mark = f"{_PRIVATE}{secrets.token_hex(16)}{_PRIVATE}"
        names = {token: f"{mark}{number}{_PRIVATE}" for token, number in self.controls.items()}
        return names, _renamed(self.backend, names)

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _patterns(self) -> dict[Author, re.Pattern[str]]:
        return {author: _any_of(words) for author, words in self._words.items()}

    @cached_property
    def _words(self) -> dict[Author, frozenset[str]]:
        controls = frozenset(self.controls)
        return {"template": controls, "assistant": controls - self.special_tokens.keys(), "other": frozenset()}


def control_tokens_of(backend: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the control tokens of a tokenizer, including tags that it counts among them, text to id."""
    named = dict(zip(backend.all_special_tokens, backend.all_special_ids, strict=True))
    return named | {token.content: number for number, token in backend.added_tokens_decoder.items() if token.special}


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _renamed(backend: PreTrainedTokenizerBase, names: Mapping[str, str]) -> Tokenizer:
    """Return a copy of a tokenizer whose control tokens have names that occur in no text."""
    try:
        document: dict[str, Any] = json.loads(backend.backend_tokenizer.to_str())
        document |= {"post_processor": None, "truncation": None, "padding": None}
        document["added_tokens"] = [
            {**token, "content": names.get(token["content"], token["content"])} for token in document["added_tokens"]
        ]
        _rename_vocabulary(document["model"], names)
        copied = Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise _uncopied(backend, error) from error
    if any(copied.token_to_id(name) != backend.convert_tokens_to_ids(token) for token, name in names.items()):
        raise _uncopied(backend, "its ids would change")
    return copied


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:  # merges that yield a control token are dropped
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _uncopied(backend: PreTrainedTokenizerBase, why: object) -> ModelError:
    return ModelError(
        f"a text contains a control token as plain text, which this tokenizer cannot encode: {why}",
        where=str(backend.name_or_path),
        fix="remove that text from the data, or use a tokenizer that can spell it",
    )
