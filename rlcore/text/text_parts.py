"""Token ids of a text that a chat template and people have written by turns, encoded as one.

A tokenizer of the SentencePiece kind puts a blank before each text that it is given, and others join line ends: only
the whole text has the tokens that a model was trained on. What the template wrote holds control tokens; the same words
in what a person wrote are letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from rlcore.errors import ModelError

Author = Literal["template", "assistant", "other"]
Ids = tuple[int, ...]
_WORD = re.compile("think|thought|reason|answer|solution", re.IGNORECASE)  # a mark that rewards look for
_PRIVATE = 0xF0000  # the first character of a plane for private use


class Part(NamedTuple):
    """A piece of a text and whose it is; an assistant writes the marks of thoughts and answers as a template does."""

    text: str
    author: Author


@dataclass(frozen=True, kw_only=True, eq=False)
class PartEncoder:
    """A tokenizer for texts in parts.

    ``controls``: its control tokens, and the marks of thoughts and answers that it counts among them, text to id. The
    latter are words that rewards look for: they stay in what is decoded.
    """

    backend: PreTrainedTokenizerBase
    controls: Mapping[str, int]

    def encode(self, parts: Sequence[Part]) -> Ids:
        """Token ids of one text.

        Raises:
            ModelError: a control token came out of what a person wrote.
        """
        return self.encode_all([parts])[0]

    def encode_all(self, texts: Sequence[Sequence[Part]]) -> list[Ids]:
        """The same of many."""
        if not texts:
            return []
        wholes = ["".join([part.text for part in parts]) for parts in texts]
        found = self.backend(wholes, add_special_tokens=False, return_attention_mask=False).input_ids
        return [
            tuple(ids) if self._count(ids) == self._expected(parts) else self._marked(parts)
            for ids, parts in zip(found, texts, strict=True)
        ]

    def encode_after(self, before: Sequence[Part], after: Sequence[Part]) -> Ids:
        """Token ids of what goes on from a text whose tokens stand already.

        Raises:
            ModelError: the tokenizer cannot write it there.
        """
        start, whole = self.encode_all([before, [*before, *after]])
        if whole[: len(start)] == start:
            return whole[len(start) :]
        # Its beginning joins the last token so far: it gets tokens of its own.
        text = self.spell(whole)
        for head in ("", "\n", "."):
            apart, joined = self.encode_all([[Part(head, "other")], [Part(head, "other"), *after]])
            rest = joined[len(apart) :]
            if joined[: len(apart)] == apart and self.spell([*start, *rest]) == text:
                return rest
        raise ModelError(
            f"the tokenizer joins {''.join(part.text for part in after)[:40]!r} to what stands before it",
            where=str(self.backend.name_or_path),
            fix="begin that text with another character, or remove it from the data",
        )

    def spell(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens among them."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without control tokens."""
        return self.spell([number for number in ids if number not in self._hidden])

    def _expected(self, parts: Sequence[Part]) -> int:
        return sum(len(self._patterns[part.author].findall(part.text)) for part in parts)

    def _count(self, ids: Sequence[int]) -> int:
        return sum(map(self._numbers.__contains__, ids))

    def _marked(self, parts: Sequence[Part]) -> Ids:
        """The ids where a text has control words that are letters: those that are not have other names meanwhile."""
        whole = "".join([part.text for part in parts])
        mark = next(each for each in map(chr, count(_PRIVATE)) if each not in whole)
        if mark not in self._copies:
            self._copies[mark] = _renamed(self.backend, _names(self.controls, mark))
        names = _names(self.controls, mark)
        text = "".join(self._patterns[part.author].sub(lambda found: names[found.group()], part.text) for part in parts)
        ids = tuple(self._copies[mark].encode(text, add_special_tokens=False).ids)
        found, expected = self._count(ids), self._expected(parts)
        if found < expected:
            raise ModelError(
                f"the tokenizer reads {found} of the {expected} control tokens that the chat template writes in "
                f"{whole[-80:]!r}",
                where=str(self.backend.name_or_path),
                fix='let its control tokens be "normalized": false and "single_word": false in tokenizer.json',
            )
        if found > expected:
            controls = sorted(self._numbers.intersection(ids))
            raise ModelError(
                f"the tokenizer makes the control tokens {controls} of plain text: {whole[-80:]!r}",
                where=str(self.backend.name_or_path),
                fix="remove that text from the data, or use a tokenizer that can spell it",
            )
        return ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The control tokens alone, text to id."""
        return {token: number for token, number in self.controls.items() if not _WORD.search(token)}

    @cached_property
    def _copies(self) -> dict[str, Tokenizer]:
        return {}

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _patterns(self) -> dict[Author, re.Pattern[str]]:
        words = self.controls.keys() - self.special_tokens.keys()
        return {"template": _any_of(self.controls), "assistant": _any_of(words), "other": _any_of(())}


def control_tokens_of(backend: PreTrainedTokenizerBase) -> dict[str, int]:
    """The control tokens of a tokenizer and the marks that it counts among them, text to id."""
    named = dict(zip(backend.all_special_tokens, backend.all_special_ids, strict=True))
    return named | {token.content: number for number, token in backend.added_tokens_decoder.items() if token.special}


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _names(controls: Mapping[str, int], mark: str) -> dict[str, str]:
    return {token: f"{mark}{number}{mark}" for token, number in controls.items()}


def _renamed(backend: PreTrainedTokenizerBase, names: Mapping[str, str]) -> Tokenizer:
    """A copy of a tokenizer in which control tokens are called what nobody has written.

    Raises:
        ModelError: this kind of tokenizer cannot be copied so.
    """
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
    if "merges" in model:  # one that makes a control token of letters is left out
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _uncopied(backend: PreTrainedTokenizerBase, why: object) -> ModelError:
    return ModelError(
        f"a text holds a control token as text, and this tokenizer cannot spell it: {why}",
        where=str(backend.name_or_path),
        fix="remove that text from the data, or use a tokenizer that can spell it",
    )
